"""The chunked recurrence against a loop over positions in NumPy float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.ops.recurrence.decay_products import inverse
from reformax.ops.recurrence.recurrence import advance, recurrence
from tests.helpers import assert_trees_close, with_gradients, with_x64
from tests.ops import recurrence_oracle

KINDS = ("linear", "head", "feature", "delta", "gated delta", "feature delta")
every_kind = pytest.mark.parametrize("kind", KINDS)


def draw(kind, length, *, batch=2, n_heads=2, size=4, d_v=3, dtype=np.float32, seed=0, least=-3.0):
    """`(q, k, v, log_decay, beta)` in float64, rounded to `dtype`; decays from e^least to 1."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.normal(size=(batch, length, n_heads, d)) for d in (size, size, d_v))
    log_decay = beta = None
    if "head" in kind or "gated" in kind or "feature" in kind:
        n = size if "feature" in kind else 1
        log_decay = least * rng.random((batch, length, n_heads, n)) ** 2
    if "delta" in kind:
        k = k / np.linalg.norm(k, axis=-1, keepdims=True)
        beta = 2 * rng.random((batch, length, n_heads, 1))
        beta[:, ::5] = 0  # its gradient is not
    inputs = q, k, v, log_decay, beta
    return [None if x is None else x.astype(dtype).astype(np.float64) for x in inputs]


def runs(length, batch=2, seed=0):
    """Ids in runs, one of them in two parts, 0 among them."""
    rng = np.random.default_rng(seed)
    ids = np.cumsum(rng.random((batch, length)) < 0.15, axis=1) % 5
    return ids.astype(np.int32)


def compare(inputs, dtype, tolerance, segment_ids=None, **options):
    d_out = np.random.default_rng(9).normal(size=inputs[2].shape)
    d_out = d_out.astype(dtype).astype(np.float64)
    run = with_gradients(functools.partial(recurrence, segment_ids=segment_ids, **options))
    got = run(d_out.astype(dtype), *jax.tree.map(lambda x: jnp.asarray(x, dtype), inputs))
    want = recurrence_oracle.recurrence(*inputs, segment_ids, d_out)
    assert_trees_close(got, want, tolerance)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(x, marks=[pytest.mark.slow] * (x in ("head", "delta"))) for x in KINDS],
)
def test_the_loop_over_positions(kind):
    compare(draw(kind, 29), np.float32, 2e-6, runs(29), chunk_len=4)


@pytest.mark.slow
@every_kind
@pytest.mark.parametrize(
    "length, chunk_len, packed",
    [(1, 64, False), (37, 7, False), (75, 32, True), (75, 1, True), (130, 64, False)],
)
def test_any_length_and_chunk(kind, length, chunk_len, packed):
    """Chunks of one position, more than sixteen of them, and one chunk that is not full."""
    segment_ids = runs(length) if packed else None
    compare(draw(kind, length), np.float32, 4e-6, segment_ids, chunk_len=chunk_len)


@pytest.mark.slow
@every_kind
def test_float64(kind):
    with with_x64():
        compare(draw(kind, 41, dtype=np.float64), np.float64, 1e-12, runs(41), chunk_len=8)


@pytest.mark.slow
@every_kind
def test_bfloat16(kind):
    inputs = draw(kind, 41, dtype=jnp.bfloat16)
    compare(inputs, jnp.bfloat16, 2e-2, runs(41), chunk_len=16)


@pytest.mark.parametrize("kind", ["head", "feature", "gated delta"])
@pytest.mark.slow
def test_decays_that_forget_all(kind):
    """Of e^-80 a position, of which `exp(-c)` overflows after two."""
    inputs = draw(kind, 70, least=-80.0)
    compare(inputs, np.float32, 1e-4, runs(70), chunk_len=64)
    inputs[3] = inputs[3] * 1e30
    out, gradients = with_gradients(recurrence)(
        np.ones_like(inputs[2], np.float32), *jax.tree.map(np.float32, inputs)
    )
    for x in jax.tree.leaves((out, gradients)):
        assert np.isfinite(x).all()


def test_the_inverse_of_equal_keys():
    """Where all products are 1, powers of M reach 1e18, and the inverse is 1 and -1."""
    below = np.tril(np.ones((64, 64), np.float32), -1)
    want = np.eye(64) - np.eye(64, k=-1)
    np.testing.assert_allclose(jax.jit(inverse)(below), want, atol=1e-6)


def test_without_forgetting_they_are_one():
    """Decays of 1 are none, by head or feature; orthonormal keys need no correction."""
    q, _, v, *_ = (None if x is None else np.float32(x) for x in draw("linear", 24, size=24))
    k = np.broadcast_to(np.eye(24, dtype=np.float32)[:, None], q.shape)
    run = jax.jit(functools.partial(recurrence, chunk_len=8))
    plain = run(q, k, v)
    ones, zeros = np.ones((*q.shape[:3], 1), np.float32), np.zeros_like(q)
    for others in ((zeros[..., :1],), (zeros,), (None, ones), (zeros[..., :1], ones)):
        np.testing.assert_allclose(run(q, k, v, *others), plain, atol=1e-5)
    # What is written with a rate of 0 is not written.
    assert not np.any(run(q, k, v, None, 0 * ones))


@pytest.mark.parametrize(
    "kind", [pytest.param(x, marks=[pytest.mark.slow] * (x != "gated delta")) for x in KINDS]
)
def test_a_step_is_the_next_position(kind):
    inputs = jax.tree.map(np.float32, draw(kind, 12))
    want = jax.jit(functools.partial(recurrence, chunk_len=4))(*inputs)

    @jax.jit
    def steps(inputs):
        def step(state, x):
            x = jax.tree.map(lambda a: a[:, None], x)
            out, state = advance(state, *x)
            return state, out[:, 0]

        by_position = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), inputs)
        return jnp.moveaxis(jax.lax.scan(step, jnp.zeros((2, 2, 4, 3)), by_position)[1], 0, 1)

    np.testing.assert_allclose(steps(inputs), want, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["feature", "gated delta"])
@pytest.mark.parametrize("gradient", [False, True])
def test_memory_is_linear_in_the_length(kind, gradient):
    """And of the order of the inputs': no state of a position, and no T x T array."""
    run = with_gradients(recurrence) if gradient else jax.jit(lambda _, *x: recurrence(*x))

    def used(length):
        inputs = jax.tree.map(np.float32, draw(kind, 2, batch=1, n_heads=1, size=64, d_v=64))
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((1, length, *x.shape[2:]), x.dtype), inputs
        )
        program = run.lower(shapes[2], *shapes).compile()
        return program.memory_analysis().temp_size_in_bytes

    lengths = (2**13, 2**15, 2**17)
    slopes = np.diff([used(n) for n in lengths]) / np.diff(lengths)
    np.testing.assert_allclose(slopes[0], slopes[1], rtol=0.1)
    one = 4 * 64  # an array of the inputs'
    assert slopes[1] < (40 if gradient else 20) * one


def test_the_gradient_has_no_second_derivative():
    q, k, v, *_ = jax.tree.map(np.float32, draw("linear", 5))

    def loss(q):
        return jnp.sum(recurrence(q, k, v) ** 2)

    with pytest.raises(NotImplementedError, match="second derivative"):
        jax.jit(jax.grad(lambda q: jnp.sum(jax.grad(loss)(q)))).lower(q)
