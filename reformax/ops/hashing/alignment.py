"""Sorts the queries of one sequence and the keys of another into aligned slots.

Each position has a code, such as its bucket or its hash. Both sequences are sorted by code, segment
by segment. A segment has as many slots as the longer of its two sides. The keys are spread evenly
over the slots. A query's slot is the middle of the slots of the keys with its code, or of the slots
that such keys would have. Queries of the same slot are spread around it, as near as possible. Empty
slots are padding. A query therefore finds its keys even if there are few queries, and sees the same
keys without the other queries.

Where queries are several times as many as keys, a slot of keys is several slots of queries: the
ratio. There are about `max(T, S)` slots, and up to `2 T + S` with segments, whose lengths may
differ.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from reformax.ops.masking.masks import SegmentIds, segment_numbers, segment_pair
from reformax.ops.masking.visibility import is_token
from reformax.ops.softmax.orders import Order, inverse_permutation

_MOST = jnp.iinfo(jnp.int32).max


class _Regions(NamedTuple):
    """The slots of the segment of each entry, arrays `[B, 1, 1, T + S]`, or a number for all."""

    ratio: int
    start: Array | int  # of keys
    size: Array | int
    n_queries: Array | int
    n_keys: Array | int
    queries_before: Array | int  # in earlier segments
    keys_before: Array | int

    def of_key(self, rank: Array) -> Array:
        """The slot of a segment's key by its rank. Each rank has another slot."""
        free = self.size - self.n_keys
        spacing = jnp.asarray(free, jnp.float32) / jnp.maximum(self.n_keys, 1)
        return self.start + rank + jnp.minimum((rank * spacing).astype(jnp.int32), free)


def aligned_orders(
    of_queries: Int[Array, "B N R T"] | Float[Array, "B N R T"],
    of_keys: Int[Array, "B N R S"] | Float[Array, "B N R S"],
    segment_ids: SegmentIds | None,
    chunk_len: int,
    ratio: int = 1,
) -> Order:
    """The orders of queries and of keys, padded to whole chunks.

    Args:
      of_queries: the code of each query in each hash.
      of_keys: the code of each key.
      segment_ids: ids of queries and of keys.
      chunk_len: slots of keys in a chunk.
      ratio: slots of queries to each slot of keys.
    """
    n_queries, n_keys = of_queries.shape[-1], of_keys.shape[-1]
    both = jnp.concatenate([of_queries, of_keys], axis=-1)
    entry = jnp.broadcast_to(jnp.arange(n_queries + n_keys, dtype=jnp.int32), both.shape)
    # Of equal codes the queries come first.
    if segment_ids is None:
        numbers = lax.sort((both, entry), num_keys=1, is_stable=True)
        n_slots = max(-(-n_queries // ratio), n_keys)
        regions = _Regions(ratio, 0, n_slots, n_queries, n_keys, 0, 0)
    else:
        ids = _ids(segment_ids)
        of_entry = jnp.broadcast_to(ids[:, None, None], both.shape)
        numbers = lax.sort((of_entry, both, entry), num_keys=2, is_stable=True)
        n_slots = -(-n_queries // ratio) + n_keys
        regions = _regions(ids, n_queries, ratio)
    *numbers, entry = numbers
    is_query = entry < n_queries
    slot = jnp.where(is_query, _of_queries(numbers, is_query, regions), _of_keys(is_query, regions))
    n_slots += -n_slots % chunk_len
    queries = _order(entry, slot, is_query, n_queries, n_slots * ratio)
    keys = _order(entry - n_queries, slot, ~is_query, n_keys, n_slots)
    return Order(queries, inverse_permutation(queries), keys, key_slots=inverse_permutation(keys))


def _ids(segment_ids: SegmentIds) -> Int[Array, "B T+S"]:
    """The ids to sort queries and keys by: padding, and queries without keys, are last."""
    of_query, of_key = segment_pair(segment_ids)
    ids = jnp.concatenate([of_query, of_key], axis=1)
    is_key = jnp.arange(ids.shape[1]) >= of_query.shape[1]

    def has_keys(number: Int[Array, " T+S"]) -> Bool[Array, " T+S"]:
        return jax.ops.segment_max(is_key, number, num_segments=len(number))[number]

    return jnp.where(is_token(ids) & jax.vmap(has_keys)(segment_numbers(ids)), ids, _MOST)


def _regions(ids: Int[Array, "B T+S"], n_queries: int, ratio: int) -> _Regions:
    """The regions of the segments, by entry in the order of the ids."""

    def of_row(number: Int[Array, " T+S"]) -> tuple[Array, ...]:
        is_query = jnp.arange(len(number)) < n_queries
        queries, keys = (
            jax.ops.segment_sum(x.astype(jnp.int32), number, num_segments=len(number))
            for x in (is_query, ~is_query)
        )
        size = jnp.maximum(-(-queries // ratio), keys)
        start, queries_before, keys_before = (jnp.cumsum(x) - x for x in (size, queries, keys))
        regions = start, size, queries, keys, queries_before, keys_before
        return tuple(x[jnp.sort(number)][None, None] for x in regions)

    return _Regions(ratio, *jax.vmap(of_row)(segment_numbers(ids)))


def _of_keys(is_query: Bool[Array, "B N R T+S"], regions: _Regions) -> Int[Array, "B N R T+S"]:
    """The slots of keys."""
    is_key = (~is_query).astype(jnp.int32)
    return regions.of_key(jnp.cumsum(is_key, axis=-1) - is_key - regions.keys_before)


def _of_queries(
    numbers: list[Array], is_query: Bool[Array, "B N R T+S"], regions: _Regions
) -> Int[Array, "B N R T+S"]:
    """The slots of queries."""
    axis = is_query.ndim - 1
    rank = jnp.cumsum(is_query.astype(jnp.int32), axis=axis) - is_query
    # The queries of a code are sorted before its keys.
    before = jnp.cumsum((~is_query).astype(jnp.int32), axis=axis)
    ends = jnp.zeros(is_query.shape[:-1] + (1,), bool)
    for x in numbers:
        ends = ends | jnp.pad(x[..., 1:] != x[..., :-1], ((0, 0),) * axis + ((0, 1),))
    up_to = lax.cummin(jnp.where(ends, before, before[..., -1:]), axis=axis, reverse=True)
    ratio = regions.ratio
    wanted = ratio * regions.of_key((before + up_to) // 2 - regions.keys_before) + ratio // 2
    # Leaves room for the queries before it in its segment, and for those after it.
    least = ratio * regions.start + rank - regions.queries_before
    wanted = jnp.clip(wanted, least, least + ratio * regions.size - regions.n_queries)
    # The middle of the nearest distinct slots to the right of the wanted slots and to the left.
    # Segments do not overlap, because their wanted slots do not.
    ahead = wanted - rank
    right = lax.cummax(jnp.where(is_query, ahead, -_MOST), axis=axis)
    left = lax.cummin(jnp.where(is_query, ahead, _MOST), axis=axis, reverse=True)
    return rank + (right + left) // 2


def _order(
    position: Int[Array, "B N R T+S"],
    slot: Int[Array, "B N R T+S"],
    included: Bool[Array, "B N R T+S"],
    n_positions: int,
    n_slots: int,
) -> Int[Array, "B N R P"]:
    """The position in each slot, of `included` entries. Others are padding, from `n_positions`."""
    slot = jnp.where(included, slot, n_slots)
    taken = jnp.full((*slot.shape[:-1], n_slots), -1, jnp.int32)
    taken = jnp.put_along_axis(taken, slot, position, axis=-1, inplace=False, mode="drop")
    free = taken < 0
    return jnp.where(free, n_positions - 1 + jnp.cumsum(free, axis=-1, dtype=jnp.int32), taken)
