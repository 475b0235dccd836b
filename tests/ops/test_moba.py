"""Mixture of block attention: the chosen blocks, and linear memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.ops import dense, moba
from reformax.ops.calls.dispatch import INTERPRETED
from tests.helpers import assert_trees_close, with_gradients

SIZE, TOP_K = 4, 3


def numbers(length, seed=0):
    return np.random.default_rng(seed).normal(size=(3, 2, length, 2, 8)).astype(np.float32)


def best(q, k, position, blocks):
    """The `blocks` whose mean keys, float64, have the largest products with a query."""
    means = [np.mean(k[block], axis=0, dtype=np.float64) for block in blocks]
    order = np.argsort([-(mean @ q[position].astype(np.float64)) for mean in means])
    return order[: TOP_K - 1]


IMPLS = pytest.mark.parametrize("impl", ["xla", INTERPRETED])


@IMPLS
def test_a_query_chooses_the_blocks_of_the_best_mean_keys(impl):
    q, k, _ = numbers(27)
    plan = jax.jit(lambda q, k: plan_of(q, k, None, impl))(q, k)
    for b, t, n in np.ndindex(q.shape[:3]):
        blocks = [slice(i * SIZE, (i + 1) * SIZE) for i in range(t // SIZE)]
        want = best(q[b, :, n], k[b, :, n], t, blocks)
        assert set(np.asarray(plan[b, n, t])) - {-1} == set(want)


def test_kernels_choose_blocks_of_infinite_keys_where_array_operations_do():
    """By the sign of a query's product with them, where there are other blocks."""
    q, k, _ = numbers(27)
    k[:, 6, :, 2] = np.inf
    got, want = (np.asarray(plan_of(q, k, None, impl)) for impl in (INTERPRETED, "xla"))
    got, want = (np.sort(x[:, :, 3 * SIZE :]) for x in (got, want))
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(
        (got == 6 // SIZE).any(axis=-1), np.moveaxis(q, 1, 2)[..., 3 * SIZE :, 2] > 0
    )


def plan_of(q, k, segment_ids, impl="xla"):
    op = moba.moba(block_size=SIZE, top_k=TOP_K, impl=impl)
    return op.plan((), q, k, segment_ids=segment_ids, causal=True, rng=None, train=True)


@IMPLS
def test_a_query_chooses_among_the_blocks_whose_segment_is_its_own(impl):
    """By the mean over its segment, and not among blocks of padding or of ended segments."""
    ids = np.repeat([1, 2, 0, 2, 3], [6, 9, 5, 4, 3])
    q, k, _ = numbers(len(ids))
    plan = jax.jit(lambda *x: plan_of(*x, impl))(q, k, ids[None].repeat(2, 0))
    position = np.arange(len(ids))
    for b, t, n in np.ndindex(q.shape[:3]):
        of_segment = [
            np.flatnonzero((position // SIZE == i) & (ids == ids[t])) for i in range(t // SIZE)
        ]
        last = [ids[: (i + 1) * SIZE][SIZE * i :] for i in range(t // SIZE)]
        allowed = [i for i, x in enumerate(last) if ids[t] and x.any() and x[x > 0][-1] == ids[t]]
        found = best(q[b, :, n], k[b, :, n], t, [of_segment[i] for i in allowed])
        assert set(np.asarray(plan[b, n, t])) - {-1} == {allowed[i] for i in found}


def test_bfloat16_chooses_by_means_of_float32():
    """A product with a mean in three parts is exact to float32, so almost all choices agree."""
    q, k, _ = np.random.default_rng(0).normal(size=(3, 2, 300, 2, 8)).astype(jnp.bfloat16)
    one, other = jax.jit(lambda *x: [plan_of(*x, None, impl) for impl in ("xla", INTERPRETED)])(
        q, k
    )
    one, other = np.sort(one), np.sort(other)
    assert np.mean(one != other) < 1e-3


@pytest.mark.slow  # a `top_k` of 50 is among the oracle's options
def test_with_all_blocks_it_is_dense():
    q, k, v = numbers(30)
    d_out = numbers(30, seed=1)[0]
    got, want = (
        with_gradients(lambda *x, op=op: op(*x, causal=True))(d_out, q, k, v)
        for op in (moba.moba(block_size=SIZE, top_k=8), dense.dense())
    )
    assert_trees_close(got, want, 1e-5)


@pytest.mark.slow
def test_memory_is_linear_in_the_length():
    op = moba.moba(block_size=64)

    def used(length):
        x = jax.ShapeDtypeStruct((1, length, 1, 64), jnp.float32)
        run = with_gradients(lambda *x: op(*x, causal=True))
        return run.lower(x, x, x, x).compile().memory_analysis().temp_size_in_bytes

    slopes = np.diff([used(2**n) for n in (12, 13, 14)]) / [2**12, 2**13]
    assert slopes[1] < 1.1 * slopes[0]
    # Keys, values and queries of each of three blocks, their gradients, and temporary arrays.
    assert slopes[1] < 64 * 4 * 40
