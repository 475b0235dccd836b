"""Hashed attention across two sequences: the slots of queries and keys, and what a query finds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.recall import NOISE, clustered_queries
from reformax.ops import asymmetric_lsh, dense, smyrf
from reformax.ops.calls.dispatch import INTERPRETED
from reformax.ops.hashing.alignment import aligned_orders
from reformax.ops.masking.masks import visibility
from reformax.ops.numerics.normalization import length_normalize
from reformax.ops.softmax.reference import reference_attention
from tests.helpers import assert_trees_close, with_gradients

KEY = jax.random.key(0)
HASHED = asymmetric_lsh.asymmetric_lsh, smyrf.smyrf
FACTORIES = pytest.mark.parametrize("factory", HASHED, ids=lambda f: f.__name__)


orders = jax.jit(aligned_orders, static_argnums=(3, 4))


def slots(order):
    """The slot of each query and of each key; padding behind them."""
    return (
        np.argsort(np.asarray(x), axis=-1) for x in (order.query_positions, order.key_positions)
    )


def numbers(shapes):
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def row(*numbers):
    return np.asarray(numbers)[None, None, None]


@pytest.mark.parametrize(
    "n_queries, n_keys, chunk_len, ratio",
    [(1, 30, 4, 1), (30, 1, 4, 3), (23, 40, 1, 1), (60, 20, 3, 3)],
)
@pytest.mark.parametrize("packed", [False, True])
def test_all_positions_stand_once_and_segments_apart(n_queries, n_keys, chunk_len, ratio, packed):
    rng = np.random.default_rng(n_keys)
    of_queries, of_keys = (rng.integers(0, 5, (2, 3, 2, n)) for n in (n_queries, n_keys))
    ids = [rng.integers(0, 4, (2, n)) for n in (n_queries, n_keys)]
    segment_ids = tuple(ids) if packed else None
    order = orders(of_queries, of_keys, segment_ids, chunk_len, ratio)
    n_slots = order.key_positions.shape[-1]
    assert n_slots % chunk_len == 0
    n_blocks = -(-n_queries // ratio)
    assert n_slots < (n_blocks + n_keys if packed else max(n_blocks, n_keys)) + chunk_len
    for x, n in (order.query_positions, n_slots * ratio), (order.key_positions, n_slots):
        np.testing.assert_array_equal(np.sort(x, axis=-1), np.broadcast_to(np.arange(n), x.shape))
    np.testing.assert_array_equal(np.argsort(order.key_positions), order.key_slots)
    of_query, of_key = slots(order)
    of_query = of_query // ratio
    for row, head, hash_index in np.ndindex(2, 3, 2) if packed else ():
        start = 0
        for segment in (1, 2, 3):
            is_query, is_key = (x[row] == segment for x in ids)
            if not is_key.any():
                continue
            queries = of_query[row, head, hash_index, :n_queries][is_query]
            keys = of_key[row, head, hash_index, :n_keys][is_key]
            size = max(-(-len(queries) // ratio), len(keys))
            for x in (queries, keys):
                assert ((start <= x) & (x < start + size)).all()
            start += size


def test_queries_stand_ahash_indexthe_keys_of_their_bucket():
    of_query, of_key = slots(orders(row(1, 3, 1, 1), row(0, 2, 2, 0, 1, 2, 3, 2), None, 4))
    np.testing.assert_array_equal(of_key[0, 0, 0], [0, 3, 4, 1, 2, 5, 7, 6])
    np.testing.assert_array_equal(of_query[0, 0, 0, :4], [1, 7, 2, 3])
    # Where there is no room, they are pushed aside; where there is no such key, they are between.
    of_query, _ = slots(orders(row(9, 9, -1, 9, 1), row(0, 1, 1, 2, 2, 2), None, 1))
    np.testing.assert_array_equal(of_query[0, 0, 0, :5], [3, 4, 0, 5, 2])


def test_a_query_stands_alone_where_it_stands_among_others():
    rng = np.random.default_rng(0)
    of_keys = rng.integers(0, 8, (1, 1, 1, 64))
    among, _ = slots(orders(row(*range(8)), of_keys, None, 8))
    for bucket in range(8):
        alone, of_key = slots(orders(row(bucket), of_keys, None, 8))
        assert alone[0, 0, 0, 0] == among[0, 0, 0, bucket]
        stands_there = np.argmax(of_key[0, 0, 0] == alone[0, 0, 0, 0])
        assert of_keys[0, 0, 0, stands_there] == bucket


def recall_across(attend, n_queries, n_keys, n_seeds=8):
    """The shares of full attention's weight, and of the keys, that `attend` shows a query.

    Queries and keys lie around the same centres.
    """
    names, mask = jnp.eye(n_keys)[None, :, None], visibility(n_queries, n_keys, causal=False)

    @jax.jit
    def shares(rng, names, mask):
        data_rng, hash_rng = jax.random.split(rng)
        x = clustered_queries(data_rng, n_queries + n_keys, NOISE)
        q, k = x[:, :n_queries], x[:, n_queries:]
        truth = reference_attention(q, length_normalize(k), names, mask)
        shown = attend(q, length_normalize(k), names, rng=hash_rng) > 0
        return jnp.sum(truth, where=shown) / n_queries, shown.mean()

    each = [shares(rng, names, mask) for rng in jax.random.split(KEY, n_seeds)]
    return np.mean(each, axis=0)


# `ops/test_recall.py` has the recall within a sequence.
@pytest.mark.slow
@FACTORIES
def test_across_sequences_it_finds_what_it_finds_within_one(factory):
    """With as many visible keys, whatever the number of queries."""
    attend, length = factory(chunk_len=16, n_hashes=2), 256
    weight, keys = recall_across(attend, length, length)
    assert weight > 1.3 * keys
    for n_queries, n_seeds in ((1, 100), (4 * length, 2)):
        found, seen = recall_across(attend, n_queries, length, n_seeds)
        assert abs(seen - keys) < 0.1 * keys
        assert found > 0.85 * weight, (n_queries, found, weight)


@FACTORIES
def test_across_sequences_no_position_is_a_query_s_own(factory):
    """A query whose segment has no key is zeros; padding holds NaN."""
    q, k, v = numbers([(1, 20, 2, 4)] * 3)
    of_query, of_key = (np.repeat([ids], 5, axis=1) for ids in ([1, 2, 3, 0], [1, 0, 1, 3]))
    k[of_key == 0] = v[of_key == 0] = q[of_query == 0] = np.nan
    attend = functools.partial(factory(chunk_len=4), segment_ids=(of_query, of_key), rng=KEY)
    out, gradients = with_gradients(attend)(np.ones(q.shape), q, k, v)
    assert not np.any(out[:, 5:10]) and not np.any(out[:, 15:])
    assert np.all(np.any(out[:, :5], axis=-1)) and np.all(np.any(out[:, 10:15], axis=-1))
    for x, ids in zip(map(np.asarray, gradients), (of_query, of_key, of_key), strict=True):
        assert np.isfinite(x).all() and not np.any(x[ids == 0])


@FACTORIES
def test_few_keys_are_all_seen(factory):
    q, k, v = numbers((2, n, 2, 4) for n in (70, 8, 8))
    np.testing.assert_allclose(
        factory(chunk_len=8)(q, k, v, rng=KEY), dense.dense()(q, k, v), atol=1e-6
    )


@pytest.mark.slow
@FACTORIES
def test_kernels_tell_more_chunks_apart_than_a_query_s_sequence_has(factory):
    q, k, v = numbers((1, n, 1, 4) for n in (2, 60, 60))
    options = dict(chunk_len=1, n_hashes=3, count_once=True)
    both = [factory(**options, impl=impl) for impl in ("xla", INTERPRETED)]
    want, got = jax.jit(lambda *x: [attend(*x, rng=KEY) for attend in both])(q, k, v)
    np.testing.assert_allclose(got, want, atol=1e-6)


# Both have one kernel: of every two sizes each has one packed and one not, the other the opposite.
WHOLE = [
    pytest.param(factory, *sizes, (i + j) % 2 == 1, id=f"{factory.__name__}-{sizes[0]}x{sizes[1]}")
    for i, factory in enumerate(HASHED)
    for j, sizes in enumerate([(128, 100), (130, 200), (64, 192), (384, 70)])
]


@pytest.mark.slow
@pytest.mark.parametrize("factory, n_queries, n_keys, packed", WHOLE)
def test_whole_tiles_of_the_kernels(factory, n_queries, n_keys, packed):
    """Which read without a mask where every slot has a position."""
    rng = np.random.default_rng(0)
    q, k, v, d_out = numbers((2, n, 2, 16) for n in (n_queries, n_keys, n_keys, n_queries))
    ids = tuple(jnp.asarray(rng.integers(0, 3, (2, n))) for n in (n_queries, n_keys))
    options = dict(rng=KEY, dropout=0.2, segment_ids=ids if packed else None)
    want, got = (
        with_gradients(functools.partial(factory(chunk_len=64, impl=impl), **options))(
            d_out, q, k, v
        )
        for impl in ("xla", INTERPRETED)
    )
    assert_trees_close(got, want, 1e-5)
