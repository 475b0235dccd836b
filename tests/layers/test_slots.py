"""Reversible stacks with slots: their gradients, the inputs that they rebuild, their memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax import layers
from reformax.layers import coupling, reversible
from reformax.ops import local, lsh
from tests.helpers import assert_trees_close, default_jit
from tests.layers import plain

RNG = jax.random.PRNGKey(3)
LSH = [lsh.lsh(chunk_len=4, n_hashes=2)]
# Four sublayers a cycle, so that the queue of slots turns from one repeat to the next.
N_SLOTS = 3


def stream(length=13, d_model=8, batch=2):
    return np.random.default_rng(0).normal(size=(batch, length, d_model)).astype(np.float32)


@functools.cache
def by_plain_autodiff():
    """The expected results of a stack of four layers, from a loop over its layers."""
    cycle, x = plain.blocks(), stream()
    params = plain.init(layers.ReversibleStack(cycle, 4, n_slots=N_SLOTS), x.shape)
    segment_ids = plain.some_segments(*x.shape[:2])
    weights = x[::-1]

    def loss(params, x):
        out = plain.slotted(cycle, 4, params, x, segment_ids, RNG, N_SLOTS)
        return jnp.sum(weights * out), out

    gradient = jax.value_and_grad(loss, (0, 1), has_aux=True)
    return (params, x), segment_ids, weights, gradient(params, x)


@pytest.mark.slow
@pytest.mark.parametrize(
    "ff_chunk_size, options",
    [
        (5, dict(keep_ff_outputs=True)),
        (0, {}),
        (0, dict(exact=True, scan_layers=False)),
        (5, dict(exact=True, keep_ff_outputs=True)),
        (5, dict(scan_layers=False)),
    ],
)
def test_gradients_are_plain_autodiffs(ff_chunk_size, options, monkeypatch):
    """Gradients of weights and of the stream, with dropout, LSH plans, and segments."""
    # As in the tests of two streams: without the rounding the two can be compared.
    monkeypatch.setattr(reversible, "to_grid", lambda x: x)
    inputs, segment_ids, weights, want = by_plain_autodiff()
    cycle = plain.blocks(ff_chunk_size=ff_chunk_size)
    stack = layers.ReversibleStack(cycle, 4, n_slots=N_SLOTS, masked=True, **options)

    def loss(params, x):
        out = stack.apply(params, x, segment_ids, rng=RNG)
        return jnp.sum(weights * out), out

    got = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(*inputs)
    assert_trees_close(got, want)
    assert all(np.any(g) for g in jax.tree.leaves(got[1]))


def test_two_slots_are_two_streams(monkeypatch):
    """`(x - s_2, x - s_1)`, from the same start."""
    monkeypatch.setattr(reversible, "to_grid", lambda x: x)
    cycle, x = plain.blocks([local.local(chunk_len=4)]), stream()
    slots, streams = (layers.ReversibleStack(cycle, 2, n_slots=n) for n in (2, None))
    params = plain.init(slots, x.shape)
    a, b = jax.jit(streams.apply)(params, x, x, rng=RNG)
    np.testing.assert_allclose(jax.jit(slots.apply)(params, x, rng=RNG), a + b - x, atol=1e-5)


@pytest.mark.parametrize(
    "dtype, options",
    [
        ("float32", {}),
        ("bfloat16", dict(exact=True, n_layers=24)),
        ("float32", dict(exact=True, keep_ff_outputs=True)),
    ],
)
def test_the_inputs_are_rebuilt(dtype, options):
    """Bit for bit if exact; otherwise except where a sublayer rounds to another multiple."""
    x = stream(19, batch=1)
    options = dict(n_layers=6, n_slots=5, dtype=dtype) | options
    stack = layers.ReversibleStack(plain.blocks(LSH), **options)
    params = plain.init(stack, x.shape)
    # Exactness depends on what the compiler fuses, so this is optimised as in use.
    jit = default_jit if stack.exact else jax.jit
    run = jit(lambda params, x: stack.rebuild(params, x, rng=RNG))
    (got, *slots), rebuilt = run(params, x)
    np.testing.assert_allclose(got, x, atol=reversible.GRID / 2, rtol=0)
    assert len(slots) == 5 and not any(np.any(slot) for slot in slots)
    error = max(np.abs(a - b).max() for a, b in zip(rebuilt, (got, *slots), strict=True))
    assert error <= (0 if stack.exact else 8 * reversible.GRID)


@pytest.mark.slow
def test_memory_and_program_do_not_grow_with_depth():
    """But for the slots, which the depth does not number."""

    def lowered(n_layers, n_slots, length=2048, d_model=64):
        op = lsh.lsh(chunk_len=64, n_hashes=2)
        cycle = plain.blocks([op], d_head=d_model // 2, d_ff=4 * d_model)
        stack = layers.ReversibleStack(cycle, n_layers, n_slots=n_slots)
        x = jax.ShapeDtypeStruct((1, length, d_model), jnp.float32)
        params = jax.eval_shape(lambda: stack.init_params(RNG, x.shape))

        def loss(params, x):
            return jnp.sum(stack.apply(params, x, rng=RNG))

        return jax.jit(jax.grad(loss, (0, 1))).lower(params, x)

    shallow, deep = lowered(5, 5), lowered(15, 5)
    lines = [len(program.as_text().splitlines()) for program in (shallow, deep)]
    assert abs(lines[0] - lines[1]) <= 0.01 * lines[0]
    memory = [p.compile().memory_analysis().temp_size_in_bytes for p in (shallow, deep)]
    assert memory[1] <= 1.1 * memory[0]


def test_layers_that_see_far_share_no_slot():
    """Where there are enough slots; of more layers, neighbours have different ones."""
    blocks = plain.blocks([local.local(), local.local(), LSH[0], local.local()])
    for n_layers in (4, 8, 12):
        layers.ReversibleStack(blocks, n_layers, n_slots=6)
    for n_layers, n_slots, enough in ((12, 4, 5), (8, 2, 3), (24, 6, 7)):
        with pytest.raises(ValueError, match=rf"^n_slots is {n_slots}: .*; set n_slots={enough}$"):
            layers.ReversibleStack(blocks, n_layers, n_slots=n_slots)
        layers.ReversibleStack(blocks, n_layers, n_slots=enough)
    layers.ReversibleStack(plain.blocks([local.local()]), 4, n_slots=2)
    with pytest.raises(ValueError, match="^n_slots is 1: expected at least 2"):
        layers.ReversibleStack(blocks, 4, n_slots=1)
    with pytest.raises(ValueError, match="^remat_policy is 'all', keep_ff_outputs is True"):
        layers.ReversibleStack(blocks, 4, remat_policy="all", keep_ff_outputs=True)


@pytest.mark.parametrize(
    "indices, n_slots, shared",
    [([0, 2, 4], 6, False), ([0, 6], 6, True), ([0, 2, 4, 6], 3, False), ([0, 2, 4], 2, True)],
)
def test_which_sublayers_share_a_slot(indices, n_slots, shared):
    assert coupling.share_a_slot(indices, n_slots) == shared
