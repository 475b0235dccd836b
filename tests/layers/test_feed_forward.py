"""The feed-forward layer, whole and in chunks of the sequence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax import layers
from reformax.layers.matrices import relu_squared
from reformax.ops.calls import this_gpu
from reformax.ops.calls.dispatch import INTERPRETED
from tests.helpers import assert_trees_close, lower_for_gpu, with_gradients
from tests.layers import plain

RNG = jax.random.PRNGKey(2)
KERNEL = "pallas" if jax.default_backend() == "gpu" else INTERPRETED


def numbers(length, d_model=6):
    return np.random.default_rng(0).normal(size=(2, length, d_model)).astype(np.float32)


@pytest.mark.parametrize(
    "activation, by_numpy",
    [(jnp.tanh, np.tanh), (jax.nn.relu, lambda x: np.maximum(x, 0))],
    ids=["tanh", "relu"],
)
@pytest.mark.parametrize("chunk_size", [0, 4])
def test_is_its_formula(chunk_size, activation, by_numpy):
    x = numbers(9)
    layer = layers.FeedForward(10, activation=activation, chunk_size=chunk_size)
    params = plain.init(layer, x.shape)
    w1, b1, w2, b2 = (np.asarray(params[name], np.float64) for name in ("w1", "b1", "w2", "b2"))
    want = by_numpy(x @ w1 + b1) @ w2 + b2
    np.testing.assert_allclose(layer.apply(params, x), want, atol=1e-5)


@pytest.mark.parametrize("length, chunk_size", [(1, 4), (8, 4), (13, 4), (5, 1), (3, 64)])
def test_chunks_change_neither_output_nor_gradients(length, chunk_size):
    x = numbers(length)
    params = plain.init(layers.FeedForward(10), x.shape)

    def run(chunk_size):
        layer = layers.FeedForward(10, 0.2, 0.3, chunk_size=chunk_size)
        return with_gradients(functools.partial(layer.apply, rng=RNG))(x[:, ::-1], params, x)

    assert_trees_close(run(chunk_size), run(0))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("chunk_size", [0, 4])
def test_a_gated_layer_is_its_formula(chunk_size, bias):
    x, options = numbers(9), dict(gated=True, bias=bias, activation=jax.nn.silu)
    layer = layers.FeedForward(10, chunk_size=chunk_size, **options)
    params = plain.init(layer, x.shape)
    assert params.keys() == {"w1", "w2", "w3"} | ({"b1", "b2", "b3"} if bias else set())
    p = {name: np.asarray(w, np.float64) for name, w in params.items()}
    first, other = (x @ p[f"w{i}"] + p.get(f"b{i}", 0) for i in (1, 3))
    want = (first / (1 + np.exp(-first)) * other) @ p["w2"] + p.get("b2", 0)
    np.testing.assert_allclose(layer.apply(params, x), want, atol=1e-5)
    step = layer.step(layer.for_decoding(params, "float32"), x)
    np.testing.assert_allclose(step, want, atol=1e-5)


def test_the_gradient_of_a_gated_layer_keeps_no_float32_of_its_width():
    x, layer = numbers(64).astype(jnp.bfloat16), layers.FeedForward(48, gated=True, bias=False)
    params = plain.init(layer, x.shape)
    _, vjp = jax.vjp(layer.apply, params, x)
    kept = [y for y in jax.tree.leaves(vjp) if y.shape[-1:] == (48,) and y.size >= 2 * 64 * 48]
    assert len(kept) <= 3 and all(y.dtype == jnp.bfloat16 for y in kept)


ACTIVATIONS = [jax.nn.gelu, jax.nn.relu, relu_squared]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=["gelu", "relu", "relu_squared"])
@pytest.mark.parametrize(
    "dtype, d_ff, rate, chunk_size",
    [
        ("float32", 16, 0.0, 0),
        ("float32", 775, 0.3, 8),
        ("bfloat16", 1024, 0.3, 0),
    ],
)
def test_the_kernel_is_the_same_function(dtype, d_ff, rate, chunk_size, activation, bias):
    """Rows and columns that tiles do not divide, and the same numbers dropped."""
    x = numbers(21).astype(dtype)
    weights = numbers(21)[:, ::-1]

    def output_and_gradients(impl):
        options = dict(activation=activation, chunk_size=chunk_size, impl=impl)
        layer = layers.FeedForward(d_ff, 0.0, rate, **options, bias=bias)
        params = plain.init(layer, x.shape)
        params |= {"b1": jnp.linspace(-1, 1, d_ff)} if bias else {}
        return with_gradients(functools.partial(layer.apply, rng=RNG))(weights, params, x)

    tolerance = 1e-5 if dtype == "float32" else 2e-2
    assert_trees_close(output_and_gradients(KERNEL), output_and_gradients("xla"), tolerance)


@pytest.mark.parametrize("d_ff, rate", [(512, 0.1), (1000, 0.0), (513, 0.1)])
def test_the_kernel_lowers_for_a_gpu(d_ff, rate, monkeypatch):
    monkeypatch.setattr(this_gpu, "obstacle", lambda: None)
    layer = layers.FeedForward(d_ff, 0.0, rate, impl="pallas")
    x = jax.ShapeDtypeStruct((2, 100, 16), jnp.bfloat16)
    params = plain.init(layer, x.shape)

    def loss(params, x):
        return jnp.sum(layer.apply(params, x, rng=RNG).astype(jnp.float32))

    text = lower_for_gpu(jax.value_and_grad(loss), params, x)
    assert "feed_forward_forward" in text
    (backward,) = [line for line in text.splitlines() if "feed_forward_backward" in line]
    assert backward.count("operand_index") == 2, "it does not write over what it reads"


def test_the_gradient_alone_runs_one_kernel():
    """A reversible layer that kept its output computes the hidden layer once."""
    layer = layers.FeedForward(16, 0.0, 0.1, impl=INTERPRETED)
    x = numbers(8)
    params = plain.init(layer, x.shape)

    def kernels(also_output):
        def gradient(params, x):
            out, vjp = jax.vjp(lambda *args: layer.apply(*args, rng=RNG), params, x)
            return vjp(x), out if also_output else None

        text = jax.jit(gradient).lower(params, x).compile().as_text()
        return {name for name in ("forward", "backward") if f"feed_forward_{name}" in text}

    assert kernels(also_output=False) == {"backward"}
    assert kernels(also_output=True) == {"forward", "backward"}


def test_gradients_are_those_of_the_formula():
    """The layer's own gradient of the second product is JAX's."""
    x = numbers(7)
    layer = layers.FeedForward(10)
    params = plain.init(layer, x.shape)

    def formula(params, x):
        return jax.nn.gelu(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]

    got, want = (with_gradients(f)(x[:, ::-1], params, x) for f in (layer.apply, formula))
    assert_trees_close(got, want)


def test_chunks_never_hold_the_hidden_layer():
    length, d_ff = 4096, 1024

    def memory(chunk_size):
        layer = layers.FeedForward(d_ff, 0.1, 0.1, chunk_size=chunk_size)
        shape = (1, length, 16)
        params = jax.eval_shape(lambda: layer.init_params(RNG, shape))
        x = jax.ShapeDtypeStruct(shape, jnp.float32)
        gradient = jax.jit(jax.grad(lambda *a: jnp.sum(layer.apply(*a, rng=RNG)), (0, 1)))
        return gradient.lower(params, x).compile().memory_analysis().temp_size_in_bytes

    hidden_layer = length * d_ff * 4
    assert memory(0) >= hidden_layer
    assert memory(128) < hidden_layer / 4


@pytest.mark.parametrize("chunk_size", [0, 16])
def test_dropout_on_the_hidden_layer_and_on_the_output(chunk_size):
    size, x = 64, np.zeros((2, 48, 64), np.float32)
    # The hidden layer is all ones, and each output the hidden layer's mean.
    params = {"w1": jnp.zeros((size, size)), "b1": jnp.ones(size)}
    params |= {"w2": jnp.full((size, size), 1 / size), "b2": jnp.zeros(size)}

    def apply(mode="train", rng=RNG, **rates):
        layer = layers.FeedForward(
            size, activation=lambda x: x, chunk_size=chunk_size, mode=mode, **rates
        )
        compiled = jax.jit(lambda params, x, rng: layer.apply(params, x, rng=rng))
        return np.asarray(compiled(params, x, rng))

    out = apply(dropout=0.25)
    np.testing.assert_allclose(np.unique(out), [0, 1 / 0.75], rtol=1e-6)
    assert np.mean(out == 0) == pytest.approx(0.25, abs=0.03)

    mean = apply(hidden_dropout=0.25)
    np.testing.assert_allclose(mean, mean[..., :1].repeat(size, axis=-1))
    assert mean.mean() == pytest.approx(1, abs=0.03)
    # The standard deviation of the mean of 64 numbers that are 0 or 1 / 0.75.
    assert mean[..., 0].std() == pytest.approx(np.sqrt(0.25 / 0.75 / 64), rel=0.3)
    chunks = mean[..., 0].reshape(6, 16)
    assert len(np.unique(chunks, axis=0)) == 6

    both = dict(dropout=0.25, hidden_dropout=0.25)
    np.testing.assert_array_equal(apply(**both), apply(**both))
    assert not np.array_equal(apply(**both), apply(**both, rng=jax.random.PRNGKey(0)))
    np.testing.assert_allclose(apply(**both, mode="eval", rng=None), 1)


@pytest.mark.parametrize("chunk_size", [0, 4])
def test_computes_in_the_dtype_of_its_input(chunk_size):
    x = numbers(9).astype(jnp.bfloat16)
    layer = layers.FeedForward(10, 0.1, 0.1, chunk_size=chunk_size)
    params = plain.init(layer, x.shape)
    apply = jax.jit(lambda x: layer.apply(params, x, rng=RNG))
    out, wide = apply(x), apply(x.astype(np.float32))
    assert (out.dtype, wide.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(out.astype(np.float32), wide, atol=3e-2 * np.abs(wide).max())


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(d_ff=0), "d_ff is 0: expected at least 1"),
        (dict(chunk_size=-1), "chunk_size is -1: expected at least 0"),
        (dict(dropout=1), "dropout is 1: expected a rate in [0, 1)"),
        (dict(hidden_dropout=-1), "hidden_dropout is -1: expected a rate in [0, 1)"),
        (
            dict(impl="triton"),
            "impl is 'triton': expected 'auto', 'xla' or 'pallas'",
        ),
        (
            dict(impl="pallas", activation=len),
            "impl is 'pallas' and activation <built-in function len>: expected jax.nn.gelu, "
            "jax.nn.relu or relu_squared, or impl='auto'",
        ),
        (
            dict(impl="pallas", gated=True),
            "impl is 'pallas' and gated is True, which no kernel computes: set impl='auto'",
        ),
        (dict(mode="predict"), "mode is 'predict': expected 'train' or 'eval'"),
    ],
    ids=str,
)
def test_errors(options, message):
    with pytest.raises(ValueError) as error:
        layers.FeedForward(**({"d_ff": 4} | options))
    assert str(error.value) == message


@pytest.mark.parametrize(
    "layer",
    [
        layers.FeedForward(4),
        layers.FeedForward(4, chunk_size=3),
        layers.LayerNorm(),
        layers.AxialPositionalEncoding((4, 4), (2, 4)),
    ],
)
@pytest.mark.parametrize("shape", [(2, 13, 4), (13, 5), (2, 13, 1)])
def test_an_input_of_another_size(layer, shape):
    params = plain.init(layer, (2, 13, 6))
    message = rf"^x has shape \({', '.join(map(str, shape))}\): expected \[.*, 6\]$"
    with pytest.raises(ValueError, match=message):
        layer.apply(params, np.zeros(shape, np.float32))


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there it runs")
@pytest.mark.parametrize(
    "layer", [layers.LayerNorm(impl="pallas"), layers.FeedForward(4, impl="pallas")]
)
def test_a_kernel_without_a_gpu_is_told(layer):
    x = numbers(3)
    with pytest.raises(NotImplementedError, match="impl='pallas' with the backend 'cpu': use impl"):
        layer.apply(plain.init(layer, x.shape), x)


@pytest.mark.parametrize("make", [layers.LayerNorm, functools.partial(layers.FeedForward, 4)])
def test_no_positions_are_no_error(make):
    layer, x = make(impl=INTERPRETED), numbers(0)
    assert layer.apply(plain.init(layer, (2, 3, 6)), x).shape == x.shape
