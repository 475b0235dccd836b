"""Reversible stacks: their gradients, the inputs that they rebuild, their memory and their size."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax import layers
from reformax.layers import reversible
from reformax.ops import dense, local, lsh
from reformax.ops.calls.dispatch import INTERPRETED
from tests.helpers import assert_trees_close, default_jit
from tests.layers import plain

KERNEL = "pallas" if jax.default_backend() == "gpu" else INTERPRETED
RNG = jax.random.PRNGKey(3)
LSH = [lsh.lsh(chunk_len=4, n_hashes=2)]


def streams(length, d_model=8, batch=2):
    rng = np.random.default_rng(0)
    return rng.normal(size=(2, batch, length, d_model)).astype(np.float32)


def stack_and_params(cycle, n_layers, x1, **options):
    stack = layers.ReversibleStack(cycle, n_layers, **options)
    return stack, plain.init(stack, x1.shape, x1.shape)


@functools.cache
def by_plain_autodiff(n_slots):
    """The expected results of a stack of four layers, from a loop over its layers."""
    cycle, inputs = plain.blocks(), streams(13)[: 2 if n_slots is None else 1]
    stack = layers.ReversibleStack(cycle, 4, n_slots=n_slots)
    params = plain.init(stack, *(x.shape for x in inputs))
    segment_ids, weights = plain.some_segments(2, 13), inputs[:, ::-1]
    run = functools.partial(plain.slotted, n_slots=n_slots) if n_slots else plain.reversible

    def loss(params, *x):
        out = jax.tree.leaves(run(cycle, 4, params, *x, segment_ids, RNG))
        return sum(jnp.sum(w * y) for w, y in zip(weights, out, strict=True)), out

    gradient = jax.value_and_grad(loss, tuple(range(1 + len(inputs))), has_aux=True)
    return (params, *inputs), segment_ids, weights, gradient(params, *inputs)


# Four sublayers a cycle, so that a queue of three slots turns from one repeat to the next.
@pytest.mark.parametrize("n_slots", [None, 3])
@pytest.mark.parametrize(
    "exact, ff_chunk_size, options",
    [
        (False, 0, {}),
        (False, 5, dict(scan_layers=False)),
        (True, 0, dict(scan_layers=False, keep_ff_outputs=True)),
        (True, 5, {}),
        (False, 5, dict(keep_ff_outputs=True)),
    ],
)
def test_gradients_are_plain_autodiffs(exact, ff_chunk_size, options, n_slots, monkeypatch):
    """Gradients of weights and of all streams, with dropout, LSH plans, and segments."""
    # Rounding to the grid is a step function: a program that differs in the last bit now and then
    # rounds to another multiple. Without the rounding the two can be compared.
    monkeypatch.setattr(reversible, "to_grid", lambda x: x)
    inputs, segment_ids, weights, want = by_plain_autodiff(n_slots)
    cycle = plain.blocks(ff_chunk_size=ff_chunk_size)
    options = options | dict(exact=exact, n_slots=n_slots, masked=True)
    stack = layers.ReversibleStack(cycle, 4, **options)

    def loss(params, *x):
        out = jax.tree.leaves(stack.apply(params, *x, segment_ids, rng=RNG))
        return sum(jnp.sum(w * y) for w, y in zip(weights, out, strict=True)), out

    of = tuple(range(len(inputs)))
    got = jax.jit(jax.value_and_grad(loss, of, has_aux=True))(*inputs)
    assert_trees_close(got, want)
    assert all(np.any(g) for g in jax.tree.leaves(jax.device_get(got[1])))


@pytest.mark.slow
@pytest.mark.parametrize(
    "ff_chunk_size, keep_ff_outputs",
    [(0, True), (5, False)],
)
def test_kernels_of_norms_and_feed_forward_layers_change_no_gradient(
    ff_chunk_size, keep_ff_outputs, monkeypatch
):
    x1, x2 = streams(13)
    block = plain.blocks([local.local(chunk_len=4)], ff_chunk_size=ff_chunk_size)[0]
    by_kernel = layers.FeedForward(12, 0.1, 0.1, chunk_size=ff_chunk_size, impl=KERNEL)

    def gradient(cycle, norm):
        stack, params = stack_and_params(cycle, 1, x1, keep_ff_outputs=keep_ff_outputs)
        monkeypatch.setattr(stack, "_norm", norm)

        def loss(params, x1, x2):
            out = stack.apply(params, x1, x2, rng=RNG)
            return sum(jnp.sum(jnp.sin(y)) for y in out), out

        return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(params, x1, x2)

    got = gradient([block._replace(feed_forward=by_kernel)], layers.LayerNorm(impl=KERNEL))
    assert_trees_close(got, gradient([block], layers.LayerNorm()))


class Witness(layers.ReversibleStack):
    """Returns the inputs that its backward pass rebuilds instead of their gradient."""

    def _backward(self, residuals, gradient):
        rebuilt, d_params, _, d_memory = super()._backward(residuals, gradient)
        return rebuilt, d_params, rebuilt, d_memory


def bits_that_differ(got, want):
    return sum(
        np.count_nonzero(np.asarray(x).view(np.uint32) != np.asarray(y).view(np.uint32))
        for x, y in zip(got, want, strict=True)
    )


@functools.cache
def rebuilt(dtype, exact, ff_chunk_size=0, n_layers=24, **options):
    """`(inputs, as rebuild says, as jax.grad sees)` of many layers over an odd length."""
    x1, x2 = streams(19, batch=1)
    cycle = plain.blocks(LSH, ff_chunk_size=ff_chunk_size)
    stack = Witness(cycle, n_layers, dtype=dtype, exact=exact, **options)
    params = plain.init(stack, x1.shape, x1.shape)

    # Exactness depends on what the compiler fuses, so this is optimised as in use.
    jit = default_jit if exact else jax.jit

    @jit
    def rebuild(params, x1, x2):
        return stack.rebuild(params, x1, x2, rng=RNG)

    @jit
    def gradient(params, x1, x2):
        def loss(params, x1, x2):
            return sum(jnp.sum(jnp.sin(y)) for y in stack.apply(params, x1, x2, rng=RNG))

        return jax.grad(loss, (0, 1, 2))(params, x1, x2)

    _, *seen = gradient(params, x1, x2)
    return *rebuild(params, x1, x2), seen


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, ff_chunk_size, options",
    [
        ("float32", 0, {}),
        ("bfloat16", 0, {}),
        ("bfloat16", 8, {}),
        ("bfloat16", 8, dict(n_layers=2, scan_layers=False, keep_ff_outputs=True)),
    ],
)
def test_exact_rebuilds_the_inputs_bit_for_bit(dtype, ff_chunk_size, options):
    inputs, again, seen = rebuilt(dtype, True, ff_chunk_size, **options)
    for x, given in zip(inputs, streams(19, batch=1), strict=True):
        np.testing.assert_allclose(x, given, atol=reversible.GRID / 2, rtol=0)
    assert bits_that_differ(again, inputs) == 0
    assert bits_that_differ(seen, inputs) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, rate",
    [
        (dict(n_layers=2, keep_ff_outputs=True), 0.1),
        (dict(n_layers=4, keep_ff_outputs=True, scan_layers=False), 0.1),
        (dict(n_layers=4, keep_ff_outputs=True, ff_chunk_size=24), 0.0),
        (dict(n_layers=4, keep_ff_outputs=True, dtype="bfloat16"), 0.1),
        (dict(n_layers=2), 0.0),
        (dict(n_layers=2, keep_ff_outputs=True, cross=True), 0.1),
        (dict(n_layers=2, scan_layers=False, cross=True, dtype="bfloat16"), 0.1),
    ],
)
def test_exact_of_many_seeds(options, rate):
    """A cycle of two layers, wide enough for the compiler to fuse what it pleases."""
    options = dict(options)
    ff_chunk_size, cross = options.pop("ff_chunk_size", 0), options.pop("cross", False)
    cycle = plain.blocks(d_head=16, d_ff=64, rate=rate, ff_chunk_size=ff_chunk_size)
    if cross:
        crossing = layers.CrossAttention(dense.dense(), n_heads=2, d_qk=16, d_v=16, masked=True)
        cycle = [block._replace(cross_attention=crossing) for block in cycle]
    stack = layers.ReversibleStack(cycle, exact=True, masked=cross, **options)
    params = plain.init(stack, (1, 64, 32), (1, 64, 32))
    ones = np.ones((1, 64), np.int32)

    @default_jit
    def rebuild(x1, x2, memory, rng):
        return stack.rebuild(params, x1, x2, *((ones, memory, ones) if cross else ()), rng=rng)

    for seed in range(8):
        inputs = np.random.default_rng(seed).normal(size=(3, 1, 64, 32)).astype(np.float32)
        inputs, again = rebuild(*inputs, jax.random.PRNGKey(seed))
        assert bits_that_differ(again, inputs) == 0


@pytest.mark.slow
def test_otherwise_the_inputs_drift():
    inputs, again, seen = rebuilt("float32", False)
    for x, given in zip(inputs, streams(19, batch=1), strict=True):
        np.testing.assert_array_equal(x, given)
    for drifted in (again, seen):
        assert bits_that_differ(drifted, inputs) > 100
        error = max(np.abs(x - y).max() for x, y in zip(drifted, inputs, strict=True))
        assert 1e-6 < error < 1e-2


def test_the_grid():
    x = np.array([0.3, -0.3, 1e-5, 4095.9999, -7.0, 0.0], np.float32)
    y, vjp = jax.vjp(jax.jit(reversible.to_grid), x)
    multiples = np.asarray(y, np.float64) * 4096
    np.testing.assert_array_equal(multiples, np.round(multiples))
    np.testing.assert_array_equal(multiples, np.round(np.asarray(x, np.float64) * 4096))
    np.testing.assert_array_equal(vjp(x)[0], x)
    assert np.isnan(reversible.to_grid(jnp.float32(np.nan)))


LENGTH, D_MODEL = 2048, 64


def lowered_gradient(n_layers, **options):
    """The lowered gradient of a stack, which is never run."""
    cycle = plain.blocks([local.local(chunk_len=64)], d_head=D_MODEL // 2, d_ff=4 * D_MODEL)
    stack = layers.ReversibleStack(cycle, n_layers, **options)
    x = [jax.ShapeDtypeStruct((1, LENGTH, D_MODEL), jnp.float32)] * stack.n_streams
    params = jax.eval_shape(lambda: stack.init_params(RNG, *(y.shape for y in x)))

    def loss(params, *x):
        return sum(jnp.sum(y) for y in jax.tree.leaves(stack.apply(params, *x, rng=RNG)))

    return jax.jit(jax.grad(loss, tuple(range(1 + len(x))))).lower(params, *x)


@pytest.mark.parametrize("options", [{}, dict(exact=True), dict(n_slots=5)], ids=str)
def test_neither_memory_nor_the_program_grows_with_depth(options):
    """Temporary memory: without parameters and gradients, which are arguments and outputs."""
    shallow, deep = (lowered_gradient(n, **options) for n in (2, 12))
    n_lines, n_more = (len(x.as_text().splitlines()) for x in (shallow, deep))
    assert n_lines > 100
    assert abs(n_more - n_lines) <= 0.01 * n_lines
    shallow, deep = (x.compile().memory_analysis().temp_size_in_bytes for x in (shallow, deep))
    assert shallow > LENGTH * D_MODEL * 4
    assert deep <= 1.1 * shallow


# `layers/test_feed_forward.py` has the memory of both passes in chunks.
@pytest.mark.slow
def test_chunks_of_the_feed_forward_layer_cost_memory_only():
    """No array of its hidden layer in either pass, and not one product more."""
    length, d_ff = 1024, 256

    def compiled(ff_chunk_size):
        cycle = plain.blocks([local.local(chunk_len=16)], d_ff=d_ff, ff_chunk_size=ff_chunk_size)
        stack = layers.ReversibleStack(cycle, 2)
        shape = (1, length, 8)
        params = jax.eval_shape(lambda: stack.init_params(RNG, shape, shape))
        x = jax.ShapeDtypeStruct(shape, jnp.float32)

        def loss(params, x1, x2):
            return sum(jnp.sum(y) for y in stack.apply(params, x1, x2, rng=RNG))

        return jax.jit(jax.grad(loss)).lower(params, x, x)

    whole, chunked = (compiled(n).as_text() for n in (0, 128))
    assert f"1x{length}x{d_ff}" in whole
    assert f"1x{length}x{d_ff}" not in chunked
    assert f"1x128x{d_ff}" in chunked
    assert whole.count("dot_general") == chunked.count("dot_general") > 10


def test_each_layer_draws_its_own_dropout():
    cycle, (x1, x2) = plain.blocks([dense.dense()]), streams(5)
    stack, params = stack_and_params(cycle, 2, x1)
    same_weights = jax.tree.map(lambda w: jnp.broadcast_to(w[:1], w.shape), params)
    apply = jax.jit(stack.apply)
    one, again, other = (
        apply(same_weights, x1, x2, rng=jax.random.PRNGKey(seed)) for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(one, again)
    assert not np.allclose(one, other)


def test_cannot_repeat_part_of_a_cycle():
    with pytest.raises(ValueError, match="n_layers is 3: expected a multiple of the 2 blocks"):
        layers.ReversibleStack(plain.blocks(), 3)
    with pytest.raises(ValueError, match="n_layers is 0"):
        layers.ReversibleStack(plain.blocks(), 0)
    with pytest.raises(ValueError, match="blocks is empty: give at least one"):
        layers.ReversibleStack([], 2)
