"""Native sparse attention: the selected blocks, dense branches, grouped heads, memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.ops import dense, nsa
from reformax.ops.base import Dims
from reformax.ops.calls.dispatch import INTERPRETED
from reformax.ops.kernels.triton import nsa_selection
from tests.helpers import assert_trees_close, with_gradients
from tests.ops import native_sparse
from tests.ops.inputs import Inputs
from tests.ops.rows import Shape, visible

SIZES = dict(compress_len=8, compress_stride=4, block_size=8, n_selected=5, window=6)
MEANS = SIZES | dict(compression="mean", independent_kv=False)


def numbers(length, *heads, seed=0):
    """Arrays `[B, T, N, H]`, one for each number of heads."""
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(2, length, n, 8)).astype(np.float32) for n in heads]


def selected(q, k, ids, t):
    """The blocks of a key head's queries, `[M, H]`, at position t, by eq. 8-12 in float64."""
    size, stride, length = 8, 4, 8
    first, query_block = np.flatnonzero(ids == ids[t])[0] // size, t // size
    starts = [c for c in range(0, t - length + 2, stride) if (ids[c : c + length] == ids[t]).all()]
    score = {j: 0.0 for j in range(first, query_block + 1)}
    if starts:
        keys = np.stack([k[c : c + length].mean(axis=0) for c in starts]).astype(np.float64)
        logits = q.astype(np.float64) @ keys.T / np.sqrt(8)
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        p = (p / p.sum(axis=1, keepdims=True)).sum(axis=0)
        for c, weight in zip(starts, p, strict=True):
            for position in range(c, c + length, stride):  # the strides of the summary
                score[position // size] += weight
    always = [j for j in (query_block, first, query_block - 1) if j in score]
    others = sorted((j for j in score if j not in always), key=lambda j: (-score[j], j))
    return list(dict.fromkeys(always + others))[:5]


@pytest.mark.parametrize("impl", ["xla", INTERPRETED])
@pytest.mark.parametrize("packed", [False, True])
def test_a_group_selects_the_blocks_of_the_largest_weights(packed, impl):
    q, k = numbers(75, 4, 2)
    ids = np.repeat([1, 2, 1, 3], [18, 30, 6, 21]) if packed else np.ones(75, int)
    segment_ids = ids[None].repeat(2, 0) if packed else None
    masks = dict(segment_ids=segment_ids, causal=True, rng=None, train=True)
    op = nsa.nsa(**MEANS, impl=impl)
    plan = np.asarray(jax.jit(lambda q, k: op.plan((), q, k, **masks))(q, k))
    assert plan.shape == (2, 2, 75, 5)
    for b, g, t in np.ndindex(plan.shape[:3]):
        want = selected(q[b, t, 2 * g : 2 * g + 2], k[b, :, g], ids, t)
        assert want[0] == t // 8
        assert set(plan[b, g, t]) - {-1} == set(want)


# Heads, and sizes with padded tiles, summaries over three blocks, or several chunks of queries.
SELECTIONS = [
    ((6, 2), (8, 4, 12, 4), jnp.float32, 2**30, {}),
    ((6, 2), (8, 4, 12, 4), jnp.float32, 2**30, {"soft_cap": 0.3}),
    ((3, 3), (16, 4, 4, 9), jnp.bfloat16, 2**15, {}),
]


@pytest.mark.parametrize("heads, sizes, dtype, at_a_time, options", SELECTIONS)
def test_kernels_select_what_array_operations_do(
    heads, sizes, dtype, at_a_time, options, monkeypatch
):
    monkeypatch.setattr(nsa_selection, "MAX_SCORE_BYTES", at_a_time)
    names = "compress_len", "compress_stride", "block_size", "n_selected"
    options = MEANS | options | dict(zip(names, sizes, strict=True))
    q, k = (2 * x.astype(dtype) for x in numbers(269, *heads))
    masks = dict(segment_ids=None, causal=True, rng=None, train=True)
    got, want = (
        jax.jit(lambda q, k, impl=impl: nsa.nsa(**options, impl=impl).plan((), q, k, **masks))(q, k)
        for impl in (INTERPRETED, "xla")
    )
    same = np.sort(got, axis=-1) == np.sort(want, axis=-1)
    assert same.all(axis=-1).mean() > 0.999
    assert (np.diff(np.where(got < 0, 999, got), axis=-1)[got[..., 1:] >= 0] > 0).all()


GATES = {
    "compressed": (1e9, -1e9, -1e9),
    "selected": (-1e9, 1e9, -1e9),
    "window": (-1e9, -1e9, 1e9),
}


@pytest.mark.slow  # the equations have each branch too
@pytest.mark.parametrize("branch", GATES)
def test_each_branch_alone_can_be_dense(branch):
    """Summaries of one position, all blocks, a window of the whole sequence."""
    q, k, v, d_out = numbers(30, 4, 2, 2, 4)
    op = nsa.nsa(
        **MEANS | dict(compress_len=1, compress_stride=1, block_size=4, n_selected=8, window=30)
    )
    extra_projections = {"gate": jnp.broadcast_to(jnp.array(GATES[branch]), (2, 30, 4, 3))}
    got = with_gradients(lambda *x: op(*x, causal=True, extra_projections=extra_projections))(
        d_out, q, k, v
    )
    want = with_gradients(lambda *x: dense.dense()(*x, causal=True))(d_out, q, k, v)
    assert_trees_close(got, want, 1e-5)


def test_grouped_heads_are_those_of_the_equations():
    """Four query heads and two key heads, with separate projections of each branch."""
    op, length = nsa.nsa(**SIZES), 37
    dims = Dims(4, 8, 8, length, 2)
    q, k, v, d_out = numbers(length, 4, 2, 2, 4)
    rng = np.random.default_rng(1)
    extra_projections = {
        name: rng.normal(size=(2, length, x.n_heads, x.size)).astype(np.float32)
        for name, x in op.extra_projections(dims).items()
    }
    assert extra_projections["window_k"].shape == (2, length, 2, 8)
    x = Inputs(q, k, v, extra_projections, op.init(jax.random.key(0), dims))
    segment_ids = np.repeat([[1, 2, 0]], [20, 12, 5], axis=1).repeat(2, axis=0)
    masks = dict(segment_ids=jnp.asarray(segment_ids), causal=True)
    mask, keep = (
        visible(Shape(2, length, length, 4), True, segment_ids),
        np.ones((2, 4, length, 99)),
    )

    @jax.jit
    def both(x, d_out):
        plan = op.plan(x.params, x.q, x.k, **masks, rng=None, train=True)

        def ours(x):
            options = masks | dict(plan=plan, dropout=0.0, rng=None)
            return op.apply(
                x.params, x.q, x.k, x.v, **options, extra_projections=x.extra_projections
            )

        def reference(x):
            return native_sparse.nsa(SIZES, x.params, plan, x[:3], x.extra_projections, mask, keep)

        return [(out, vjp(d_out)) for out, vjp in (jax.vjp(f, x) for f in (ours, reference))]

    assert_trees_close(*both(x, d_out), 1e-5)


@pytest.mark.slow
def test_memory_is_linear_in_the_length():
    op = nsa.nsa(compression="mean", independent_kv=False)

    def used(length):
        x = jax.ShapeDtypeStruct((1, length, 1, 64), jnp.float32)
        gate = jax.ShapeDtypeStruct((1, length, 1, 3), jnp.float32)
        run = with_gradients(lambda *x: op(*x[:3], causal=True, extra_projections={"gate": x[3]}))
        return run.lower(x, x, x, x, gate).compile().memory_analysis().temp_size_in_bytes

    slopes = np.diff([used(2**n) for n in (15, 16, 17)]) / [2**15, 2**16]
    assert slopes[1] < 1.1 * slopes[0]
    # Mostly the window's logits of 2 * 512 keys for all queries, and their gradient.
    assert slopes[1] < 64 * 4 * 70
