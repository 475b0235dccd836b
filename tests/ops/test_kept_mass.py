"""Kept mass: the sampled share of dense attention's mass, against the whole matrix in float64."""

import functools

import jax
import numpy as np
import pytest

from reformax.ops import dense, lsh, moba
from reformax.ops.softmax.kept_mass import N_QUERIES, kept_mass, sampled_positions
from tests.ops import inputs, oracle
from tests.ops.rows import ROWS, Shape, except_self, over, visible

CHOOSING = [row for row in ROWS if row.op().chooses_keys and row.counts is not None]


@functools.partial(jax.jit, static_argnames=("op", "causal"))
def measure(op, x, **call):
    plan = inputs.plan(op, x, rng=jax.random.key(3), train=True, **call)
    extras = dict(extra_projections=x.extra_projections)
    return plan, kept_mass(op, x.params, x.q, x.k, x.v, plan=plan, **call, **extras)


def expected(row, options, x, plan, shape, causal, segment_ids):
    """The share of every query and head, `[B, T, N]`; NaN where dense attention sees nothing."""
    dense_sees = visible(shape, causal, segment_ids)
    if x.k is None:
        dense_sees = except_self(dense_sees, attend_self_if_alone=False)
    q, k = (None if y is None else np.asarray(y, np.float64) for y in (x.q, x.k))
    mass = oracle.attention_weights(q, k, dense_sees)
    kept = (mass * (row.counts(options, plan, shape, causal, segment_ids) > 0)).sum(axis=-1)
    return np.where(mass.sum(axis=-1) > 0, kept, np.nan).swapaxes(1, 2)


@over(CHOOSING)
@pytest.mark.parametrize("packed", [False, True])
def test_the_share_is_that_of_the_whole_matrix(row, packed):
    op, causal, length = row.op(), row.causal(), 37
    x = inputs.draw(op, length=length, d_v=16, seed=1)._replace(params=inputs.draw(op).params)
    ids = np.r_[[1] * 20, [2] * 12, [0] * 5][None].repeat(2, 0).astype(np.int32)
    ids = row.segment_ids(ids) if packed else None
    plan, found = measure(op, x, segment_ids=ids, causal=causal)
    shape = Shape(2, length, length, 2)
    at = sampled_positions(length, 16)
    want = expected(row, row.first, x, plan, shape, causal, ids)[:, at]
    assert len(at) == 16 and found.shape == (*want.shape, 2)
    np.testing.assert_array_equal(found[..., 1], ~np.isnan(want))
    np.testing.assert_allclose(found[..., 0], np.nan_to_num(want), atol=2e-6)
    assert np.nanmin(want) < 0.95  # or any mask would do


@pytest.mark.slow
def test_heads_of_queries_that_share_keys_are_measured_alone():
    op = moba.moba(block_size=4, top_k=2)
    x = inputs.draw(op, length=24, n_heads=4, n_kv_heads=2, d_v=8)
    _, found = measure(op, x, segment_ids=None, causal=True)
    alone = x._replace(k=x.k.repeat(2, axis=2), v=x.v.repeat(2, axis=2))
    np.testing.assert_allclose(found, measure(op, alone, segment_ids=None, causal=True)[1])
    assert len({float(y) for y in found[0, -1, :, 0]}) == 4


@pytest.mark.parametrize("learnt", [False, True])
def test_heads_of_values_that_share_queries_and_keys_are_measured_alone(learnt):
    op = moba.moba(block_size=4, top_k=2, scale_by_length=0.4, learn_scale_by_length=learnt)
    x = inputs.draw(op, length=24, n_heads=4, d_v=8)
    factors = np.float32([0.4, 0.6])
    x = x._replace(q=x.q[:, :, ::2], k=x.k[:, :, ::2])
    alone = x._replace(q=x.q.repeat(2, axis=2), k=x.k.repeat(2, axis=2))
    if learnt:
        x = x._replace(params={"length_factor": factors})
        alone = alone._replace(params={"length_factor": factors.repeat(2)})
    found, want = (measure(op, y, segment_ids=None, causal=True)[1] for y in (x, alone))
    np.testing.assert_allclose(found, want, atol=1e-6)


def test_all_is_kept_where_one_chunk_has_all_keys():
    op = lsh.lsh(chunk_len=64)
    _, found = measure(op, inputs.draw(op, length=40, d_v=8), segment_ids=None, causal=True)
    np.testing.assert_allclose(found, 1.0, atol=1e-6)


@pytest.mark.parametrize("length", [1, 7, 64, 65, 65_536, 1_048_576])
def test_positions_are_spread_and_on_no_grid(length):
    at = sampled_positions(length, min(N_QUERIES, length))
    assert len(at) == min(N_QUERIES, length) and at[0] >= 0 and at[-1] < length
    assert np.diff(at).max(initial=0) <= 2 * length / len(at)
    if length > 1_000:
        assert len(set(at % 64)) > 20 and abs((at % 512).mean() / 512 - 0.5) < 0.1


def test_an_op_that_chooses_no_keys_is_refused():
    op = dense.dense()
    x = inputs.draw(op)
    with pytest.raises(NotImplementedError, match=r"op is dense\(\): it chooses no keys"):
        kept_mass(op, (), x.q, x.k, x.v, plan=(), segment_ids=None, causal=True)
