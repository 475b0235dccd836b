"""Trax loads quickly, without TensorFlow, and nobody else notices; a `Layer` is a Trax layer."""

import gzip
import importlib.machinery
import importlib.util
import itertools
import pickle
import subprocess
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.layers import _trax, base
from reformax.layers._trax import signature, tl
from reformax.layers.base import Layer
from tests.helpers import assert_trees_equal

HAS_TENSORFLOW = importlib.util.find_spec("tensorflow") is not None
needs_tensorflow = pytest.mark.skipif(not HAS_TENSORFLOW, reason="TensorFlow is not installed")

WITHOUT_TENSORFLOW = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0].startswith("tensorflow"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""

LOADED = """
def loaded(*names):
    return sorted(name for name in sys.modules if name.partition(".")[0] in names)
"""


def run(program: str, *arguments) -> None:
    """Runs a program in a fresh interpreter and fails with what it wrote if it fails."""
    command = [sys.executable, "-c", f"import sys\n{LOADED}\n{program}", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_python_s_warnings_of_trax_s_source_are_hidden_and_no_others():
    """As Python compiles it where no bytecode of it is kept."""
    loader = importlib.util.find_spec("trax.layers.combinators").loader
    path = loader.get_filename()
    plain = importlib.machinery.SourceFileLoader("a_user_s_module", path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader.source_to_code(loader.get_data(path), path)
        with pytest.raises(SyntaxError, match='"is not" with '):
            plain.source_to_code(loader.get_data(path), path)


@pytest.mark.slow
@needs_tensorflow
def test_layers_leave_an_installed_tensorflow_alone(tmp_path):
    run(
        """
import inspect
stack, import_ = inspect.stack, __import__
import reformax.layers
from reformax.layers._trax import ShapeDtype, tl
import trax
assert not loaded("tensorflow", "tensorflow_datasets")
assert "trax.data" not in sys.modules and "trax.fastmath.tf" not in sys.modules
assert inspect.stack is stack and __import__ is import_

layer = tl.Dense(3)
layer.init(ShapeDtype((2, 4)))
assert not hasattr(trax.shapes.tf, "__wrapped__")
assert "tensorflow" not in sys.modules  # nor is it loaded to compare shapes
layer.save_to_file(sys.argv[1] + "/layer.pkl.gz")

import tensorflow as tf
assert tf.__spec__.origin.endswith("tensorflow/__init__.py")
assert tf.constant(1).numpy() == 1
shape = ShapeDtype(tf.TensorShape([2, 3]), tf.int32)
assert shape.shape == (2, 3) and shape.dtype.__name__ == "int32"
assert trax.shapes.tf.compat.v1.Summary is tf.compat.v1.Summary

from trax import models
assert trax.models is models and models.ReformerLM
assert trax.supervised.training.Loop
with trax.fastmath.use_backend("tensorflow-numpy"):
    assert isinstance(trax.fastmath.numpy.ones(2), tf.Tensor)
assert trax.lr.multifactor  # a name that only the package's own __init__ makes
assert trax.AsKeras
assert trax.layers is tl
""",
        tmp_path,
    )


@pytest.mark.slow
@needs_tensorflow
def test_a_trax_that_was_imported_first_is_used_as_it_is():
    run("""
import inspect
inspect.stack = lambda: [(sys._getframe(1),), (sys._getframe(2),)]  # saves this test 10 s
import trax
modules = {name: sys.modules[name] for name in loaded("trax", "tensorflow", "tensorflow_datasets")}
path = list(sys.meta_path)
import reformax.layers
from reformax.layers._trax import tl
assert sys.meta_path == path
assert all(sys.modules[name] is module for name, module in modules.items())
assert type(trax) is type(sys) and tl is trax.layers
assert trax.shapes.tf is modules["tensorflow"]
""")


def test_without_tensorflow(tmp_path):
    run(
        WITHOUT_TENSORFLOW
        + """
import reformax.layers
from reformax.layers._trax import ShapeDtype, tl
import trax
from trax.models.reformer.reformer import ReformerLM
assert callable(trax.models.ReformerLM) and callable(ReformerLM)
assert not loaded("tensorflow", "tensorflow_datasets")

layer, path = tl.Dense(3), sys.argv[1] + "/layer.pkl.gz"
layer.init(ShapeDtype((2, 4)))
for _ in range(2):  # the second replaces a file
    layer.save_to_file(path, input_signature=ShapeDtype((2, 4)))
copy = tl.Dense(3)
copy.init_from_file(path)
assert (copy.weights[0] == layer.weights[0]).all()

def error_of(expression):
    try:
        eval(expression)
    except Exception as error:
        return type(error).__mro__, str(error)

for expression in ("trax.supervised", "trax.lr", "trax.shapes.tf.int32", "trax.shapes.tf.v1"):
    types, message = error_of(expression)
    assert ModuleNotFoundError in types, expression
    assert "which is not installed: pip install tensorflow" in message, message
    assert "\\n" not in message
assert AttributeError in error_of("trax.__version__")[0]
assert error_of("__import__('tensorflow')")[1] == "No module named 'tensorflow'"
""",
        tmp_path,
    )


@pytest.fixture
def without_trax(monkeypatch):
    """What layers have of Trax, and their base class, where Trax is not installed."""

    def anew(module):
        spec = importlib.util.spec_from_file_location(module.__name__, module.__file__)
        found = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, module.__name__, found)
        spec.loader.exec_module(found)
        return vars(found)

    monkeypatch.setitem(sys.modules, "trax", None)  # its import fails
    return types.SimpleNamespace(**anew(_trax) | anew(base))


def test_without_trax_a_layer_is_its_two_functions(without_trax):
    class Scale(without_trax.Layer):
        def __init__(self, start: float = 1.0):
            super().__init__(n_out=2)
            self._start = start

        def init_params(self, rng, shape):
            return {"w": jnp.full(shape, self._start)}

        def apply(self, params, x, rng=None):
            return params["w"] * x, x

    layer = Scale(3.0)
    assert repr(layer) == "Scale_out2(start=3.0)" and (layer.n_in, layer.n_out) == (1, 2)
    assert layer.apply(layer.init_params(None, ()), 2.0) == (6.0, 2.0)
    install = r"pip install 'reformax\[trax\]'"
    with pytest.raises(ModuleNotFoundError, match=f"^a call of Scale needs trax, .*: {install}$"):
        layer(2.0)
    with pytest.raises(AttributeError, match=f"no attribute 'weights', .* {install}$"):
        layer.weights  # noqa: B018


@pytest.mark.parametrize(
    "use, name",
    [
        (lambda module: module.tl.Serial, "reformax.layers.tl.Serial"),
        (lambda module: module.trax.models, "trax.models"),
        (lambda module: module.signature(1), "trax.shapes"),
    ],
)
def test_a_use_of_trax_says_how_to_install_it(use, name, without_trax):
    install = r"pip install 'reformax\[trax\]'"
    with pytest.raises(ModuleNotFoundError, match=f"^{name} needs trax, .*: {install}$"):
        use(without_trax)


def test_assert_shape_names_the_line_that_made_a_layer():
    message = tl.AssertFunction("ab->ab", tl.Relu()).sublayers[0]._message
    assert message.startswith(f"Defined at {__file__}:")


class Affine(Layer):
    """y = scale * x + shift. The names are not in alphabetical order and the shapes are the same,
    so that a mix-up cannot pass."""

    def __init__(self, start: float = 1.0, mode: str = "train", name: str | None = None):
        super().__init__(name=name)
        self._start = start
        self._mode = mode

    def init_params(self, rng, shape):
        return {"shift": jax.random.normal(rng, shape[-1:]), "scale": jnp.full(shape[-1:], 3.0)}

    def apply(self, params, x, rng=None):
        return params["scale"] * x * self._start + params["shift"]


class Mix(Layer):
    """Two inputs, two outputs, and one of them random."""

    def __init__(self):
        super().__init__(n_in=2, n_out=2)

    def init_params(self, rng, left, right):
        return {"w": jnp.ones((left[-1], right[-1]))}

    def apply(self, params, left, right, rng=None):
        return left @ params["w"], right + jax.random.normal(rng, right.shape)


def test_a_layer_in_serial():
    x = jnp.arange(8.0).reshape(2, 4)
    model = tl.Serial(Affine(), tl.Relu(), Affine(2.0))
    model.init(signature(x), rng=jax.random.PRNGKey(0))
    first, _, second = model.weights
    expected = second["scale"] * jax.nn.relu(first["scale"] * x + first["shift"]) * 2
    np.testing.assert_allclose(model(x), expected + second["shift"], rtol=1e-6)

    def total(weights):
        return model.pure_fn(x, weights, model.state, jax.random.PRNGKey(0))[0].sum()

    gradients = jax.jit(jax.grad(total))(model.weights)
    assert jax.tree.structure(gradients) == jax.tree.structure(model.weights)
    np.testing.assert_allclose(gradients[2]["shift"], 2.0)


def test_a_layer_of_several_inputs_and_outputs():
    left, right = jnp.ones((2, 3)), jnp.zeros((2, 5))
    layer = Mix()
    layer.init(signature((left, right)))
    assert layer.weights["w"].shape == (3, 5)
    assert [s.shape for s in layer.output_signature(signature((left, right)))] == [(2, 5), (2, 5)]
    rng = jax.random.PRNGKey(4)
    out = layer((left, right), rng=rng)
    expected = layer.apply(layer.weights, left, right, rng=rng)
    np.testing.assert_array_equal(out[0], 3.0)
    np.testing.assert_array_equal(out[1], expected[1])


@pytest.mark.slow
def test_weights_of_a_file_come_back_to_their_names(tmp_path):
    x = signature(jnp.ones((2, 4)))
    model, copy = (tl.Serial(Affine(), tl.Dense(4), Affine()) for _ in range(2))
    model.init(x, rng=jax.random.PRNGKey(0))
    path = str(tmp_path / "model.pkl.gz")
    model.save_to_file(path, input_signature=x)
    with gzip.open(path) as file:
        assert len(pickle.load(file)["flat_weights"]) == 6
    copy.init_from_file(path)
    assert_trees_equal(copy.weights, model.weights)


def test_an_error_names_the_line_that_made_the_layer():
    layer = Affine()
    with pytest.raises(tl.LayerError, match=r"layer created in file .*/test_trax_import\.py"):
        layer(jnp.ones(3))  # without weights


def test_repr_shows_what_is_not_at_its_default():
    assert repr(Affine()) == "Affine()"
    assert repr(Affine(0.5, mode="eval")) == "Affine(start=0.5, mode='eval')"
    assert repr(Mix()) == "Mix_in2_out2()"


@pytest.mark.slow
@needs_tensorflow
@pytest.mark.skipif(
    jax.device_count() > 1, reason="Trax calls jax.device_put_replicated, which JAX removed"
)
def test_a_layer_in_traxs_training_loop():
    from trax import optimizers
    from trax.supervised import training

    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(8, 4)).astype(np.float32) for _ in range(2))
    batches = itertools.repeat((x, y, np.ones_like(y)))
    task = training.TrainTask(batches, tl.L2Loss(), optimizers.SGD(0.5))
    evaluation = training.EvalTask(batches, [tl.L2Loss()])
    model = tl.Serial(Affine())
    model.init(signature(x), rng=jax.random.PRNGKey(0))
    expected = model.weights

    def loss(weights):
        return jnp.mean(jnp.square(Affine().apply(weights[0], x) - y))

    for _ in range(2):
        step = jax.grad(loss)(expected)
        expected = jax.tree.map(lambda w, g: w - 0.5 * g, expected, step)
    loop = training.Loop(model, task, eval_tasks=[evaluation])
    loop.run(2)
    assert loop.step == 2
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        loop.model.weights,
        expected,
    )
