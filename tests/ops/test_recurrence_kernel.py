"""The kernels of linear recurrences, interpreted, against a loop over positions in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from reformax.ops.calls.dispatch import INTERPRETED
from reformax.ops.kernels.triton import recurrence as kernel
from reformax.ops.kernels.triton.recurrence_chunk import NEAR
from reformax.ops.recurrence.chunks import RecurrenceInputs
from reformax.ops.recurrence.recurrence import recurrence
from tests.helpers import assert_trees_close, assert_trees_equal, with_gradients
from tests.ops.test_recurrence import KINDS, compare, draw, runs

SLOW = (
    "linear",
    "head",
    "delta",
    "feature",
    "feature delta",
)  # an interpreted kernel compiles slowly
PARTS = ("head", "feature", "delta")  # "gated delta" and "feature delta" have what these have
LENGTH = 150  # two chunks, and a third that is not full


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(x, marks=[pytest.mark.slow] * (x in SLOW)) for x in KINDS]
)
def test_the_loop_over_positions(kind):
    inputs = draw(kind, LENGTH, batch=1, size=5)
    compare(inputs, np.float32, 4e-6, runs(LENGTH, 1), impl=INTERPRETED)


@pytest.mark.slow
def test_without_segments_in_bfloat16():
    inputs = draw("gated delta", LENGTH, batch=1, dtype=jnp.bfloat16)
    compare(inputs, jnp.bfloat16, 2e-2, impl=INTERPRETED)


@pytest.mark.slow
def test_wide_values():
    """A state of two blocks, the second not full."""
    inputs = draw("feature", 70, batch=1, n_heads=1, size=16, d_v=65)
    compare(inputs, np.float32, 4e-6, runs(70, 1), impl=INTERPRETED)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, size", [("feature", 72), ("gated delta", 136), ("feature delta", 136)]
)
def test_blocks_of_features(kind, size):
    """The last block is not full; the gradient of beta sums over all of them."""
    inputs = draw(kind, 70, batch=1, n_heads=1, size=size, d_v=9)
    compare(inputs, np.float32, 4e-6, runs(70, 1), impl=INTERPRETED)


def test_blocks_of_decays_by_feature_are_traced():
    """The quick part of the case before: shapes of both passes."""
    inputs = draw("feature", 70, batch=1, n_heads=1, size=72, d_v=9, dtype=np.float32)
    inputs = RecurrenceInputs(*(None if x is None else jnp.asarray(x, jnp.float32) for x in inputs))
    run = with_gradients(functools.partial(recurrence, impl=INTERPRETED))
    out, gradients = jax.eval_shape(run, inputs.v, *inputs[:4])
    assert out.shape == inputs.v.shape
    assert [x.shape for x in gradients] == [x.shape for x in inputs[:4]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["feature", "feature delta"])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("packed", [False, True])
def test_chunks_whose_decays_are_near_and_far(kind, dtype, packed):
    """One product has a chunk's pairs, or one for each size of halves; some features forget all.

    In the second chunk the decays of 32 rows are about as far as one product holds.
    """
    length = 230
    inputs = draw(kind, length, batch=1, n_heads=1, least=-1.0, dtype=dtype)
    most = NEAR[jnp.dtype(dtype).name]
    factor = np.repeat([0.1, most / 10.6, 20.0, 1.0], 64)[:length, None]
    log_decay = inputs[3][0, :, 0] * factor
    log_decay[200:, 1:3] *= 40
    log_decay[[70, 140, 201], 1] = -np.inf
    inputs[3] = log_decay.astype(dtype).astype(np.float64)[None, :, None]
    tolerance = 4e-6 if dtype == np.float32 else 4e-2
    ids = runs(length, 1) if packed else None
    compare(inputs, dtype, tolerance, ids, impl=INTERPRETED)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(x, marks=[pytest.mark.slow] * (x != "gated delta")) for x in KINDS],
)
@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_unit_lengths_are_in_the_gradient(kind, packed):
    """Kernels' gradients of queries and keys before they are normalised, one of them zeros."""
    inputs = jax.tree.map(np.float32, draw(kind, 70, batch=1, size=5))
    inputs[0][0, 3, 1] = inputs[1][0, 9, 0] = 0
    inputs[1] = inputs[1] * np.float32(3)
    ids = runs(70, 1) if packed else None
    d_out = np.random.default_rng(3).normal(size=inputs[2].shape).astype(np.float32)
    got, want = (
        with_gradients(functools.partial(recurrence, segment_ids=ids, unit_length=True, impl=impl))(
            d_out, *inputs
        )
        for impl in (INTERPRETED, "xla")
    )
    assert_trees_close(got, want, 4e-6)


def test_what_the_gradient_keeps():
    """One array each of normalised queries and keys, of values, outputs and inverses."""
    q, k, v, log_decay, beta = jax.tree.map(np.float32, draw("gated delta", 70, batch=1))
    run = functools.partial(recurrence, unit_length=True, impl=INTERPRETED)
    kept = jax.eval_shape(lambda *x: jax.vjp(run, *x)[1], q, k, v, log_decay, beta)
    inverses = (1, 2, 128, 64)
    each = [q, k, v, v, log_decay, beta, log_decay[..., 0], beta[..., 0]]  # two factors of rows
    want = sorted([x.shape for x in each] + [inverses])
    assert sorted(x.shape for x in jax.tree.leaves(kept)) == want


@pytest.mark.slow
def test_decays_that_forget_all():
    inputs = draw("feature", 70, batch=1, least=-80.0)
    compare(inputs, np.float32, 1e-4, impl=INTERPRETED)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, packed", [("linear", False), ("head", True), ("feature", False), ("delta", False)]
)
def test_groups_of_chunks_are_one_sequence(kind, packed):
    """Five chunks in three groups of two, against one group; decays leave some of each state."""
    length = 300
    inputs = draw(kind, length, batch=1, n_heads=1, least=-0.02)
    inputs = RecurrenceInputs(*jax.tree.map(np.float32, inputs))
    ids = np.sort(runs(length, 1), axis=1) if packed else None
    d_out = np.random.default_rng(3).normal(size=inputs.v.shape).astype(np.float32)

    @functools.partial(jax.jit, static_argnums=0)
    def run(groups):
        options = dict(interpret=True, groups=groups)
        out, kept = kernel.forward(inputs, ids, keep=True, **options)
        return out[0], kernel.backward(inputs, ids, kept, d_out, **options)[0]

    assert_trees_close(run(3), run(1), 2e-6)


@pytest.mark.parametrize(
    "kind, packed, groups",
    [
        ("gated delta", True, 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("gated delta", True, 3), ("delta", False, 3), ("head", True, 3))
        ),
        pytest.param("linear", False, 1, marks=pytest.mark.slow),
    ],
)
def test_outputs_in_one_scan(kind, packed, groups, monkeypatch):
    """Programs that pass states on compute the outputs that a kernel of its own does."""
    length = 300 if groups > 1 else 150
    inputs = draw(kind, length, batch=1, n_heads=1, least=-0.02)
    inputs = RecurrenceInputs(*jax.tree.map(np.float32, inputs))
    ids = np.sort(runs(length, 1), axis=1) if packed else None
    initial = np.random.default_rng(3).normal(size=(1, 1, inputs.k.shape[3], inputs.v.shape[3]))
    initial = None if groups > 1 else initial.astype(np.float32)

    def run(fewest):
        monkeypatch.setattr(kernel, "LEAST_SCANNING", fewest)
        run = functools.partial(kernel.forward, interpret=True, groups=groups)
        jaxpr = str(jax.make_jaxpr(run)(inputs, ids, None, initial))
        assert ("recurrence_output" in jaxpr) == (fewest > 1)
        return jax.jit(run)(inputs, ids, None, initial)[0]

    assert_trees_close(run(1), run(100), 2e-6)


def test_segments_move_no_rows():
    """Kernels gather rows by the segments' order: nothing but ids is sorted or copied."""
    inputs = jax.tree.map(np.float32, draw("gated delta", 70, batch=1, n_heads=1))
    ids = runs(70, 1)

    def both(*inputs):
        run = functools.partial(recurrence, segment_ids=ids, impl=INTERPRETED)
        out, vjp = jax.vjp(run, *inputs)
        return vjp(out)

    moved = [
        (name, shape)
        for name, shape in _results(jax.make_jaxpr(both)(*inputs).jaxpr)
        if name in ("sort", "gather", "scatter")
    ]
    assert {name for name, _ in moved} == {"sort", "gather"}
    assert {shape for _, shape in moved} == {ids.shape}


def _results(jaxpr):
    """Primitives and the shapes of their results, but for those within kernels."""
    for each in jaxpr.eqns:
        yield from ((each.primitive.name, x.aval.shape) for x in each.outvars)
        if each.primitive.name != "pallas_call":
            for inner in jaxprs_in_params(each.params):
                yield from _results(inner)


@pytest.mark.slow
def test_what_a_segment_holds_stays_there():
    inputs = jax.tree.map(np.float32, draw("gated delta", 80, batch=1, n_heads=1))
    other = np.zeros((1, 80, 1, 1), bool)
    other[:, 20:67] = True
    ids = np.where(other, 2, 1)[..., 0, 0]
    run = with_gradients(functools.partial(recurrence, segment_ids=ids, impl=INTERPRETED))
    d_out = np.where(other, 0, np.ones_like(inputs[2]))
    out, gradients = run(d_out, *inputs)
    values = 1e3, 1.0, 1e37, -1e3, 1.0
    hidden = [np.where(other, np.float32(y), x) for x, y in zip(inputs, values, strict=True)]
    got, got_gradients = run(d_out, *hidden)
    assert_trees_equal(np.where(other, 0, got), np.where(other, 0, out))
    for x, y in zip(got_gradients, gradients, strict=True):
        assert np.array_equal(np.where(other, 0, x), np.where(other, 0, y))
