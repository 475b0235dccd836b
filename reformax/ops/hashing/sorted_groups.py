"""Sorts queries and keys into groups, and lists the tiles with a query and a key of one group.

A group is all positions of the same hash bucket and segment, of any number. Both orders are by
(group, position), so that the keys of a tile of queries have consecutive slots: from the first slot
of its first query's group to the last key that its last query may see (Pagliardini et al. 2023,
sec. 3.2). Other tiles are not visited.

Letters besides those of `reformax.ops.base`: X examples with their heads, B N of them; I tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from reformax.declared import Unsupported
from reformax.ops.hashing.sorting import sort_by_bucket, take_last
from reformax.ops.masking.masks import segment_numbers
from reformax.ops.masking.visibility import CAUSAL, Side, is_token
from reformax.ops.softmax import tiles


class SortedSequence(NamedTuple):
    """A sequence sorted by (group, position), with padding, group 0, in front."""

    position: Int[Array, "*d T"]  # of each slot
    group: Int[Array, "*d T"]  # of each slot

    def folded(self) -> SortedSequence:
        """The order with all axes but the last merged, [X, T]."""
        return SortedSequence(*(x.reshape(-1, x.shape[-1]) for x in self))


def sort(
    buckets: Int[Array, "B N T"], n_buckets: int, segment_ids: Int[Array, "B T"] | None
) -> SortedSequence:
    """The order by group, a bucket of a segment.

    Raises:
      NotImplementedError: groups of segments and buckets do not fit in int32.
    """
    group, n_groups, length = buckets + 1, n_buckets, buckets.shape[-1]
    if segment_ids is not None:
        n_groups = n_buckets * length
        if n_groups >= 2**31 - 1:
            raise Unsupported(
                f"n_buckets is {n_buckets} with segments of {length:,} tokens: expected a product "
                "below 2**31"
            )
        group = group + (segment_numbers(segment_ids) * n_buckets)[:, None]
        group = jnp.where(is_token(segment_ids)[:, None], group, 0)
    position = sort_by_bucket(group[:, :, None], n_groups + 1, None, 0).query_positions[:, :, 0]
    return SortedSequence(position, take_last(group, position))


def rank(
    x: SortedSequence, group: Int[Array, "*d I"], position: Int[Array, "*d I"] | int
) -> Int[Array, "*d I"]:
    """The number of slots of an order that are at or before (group, position)."""
    length = x.group.shape[-1]
    found = jnp.zeros_like(group)
    for step in (2**i for i in reversed(range(length.bit_length()))):
        slot = jnp.minimum(found + step, length) - 1
        of_slot = take_last(x.group, slot)
        before = (of_slot == group) & (take_last(x.position, slot) <= position)
        before = (before | (of_slot < group)) & (found + step <= length)
        found = jnp.where(before, found + step, found)
    return found


def sees_no_key(
    queries: SortedSequence, keys: SortedSequence | None, causal: bool
) -> Bool[Array, "*d T"]:
    """Whether the query of each slot sees no key.

    Args:
      queries: the order of the queries.
      keys: the order of the keys; None: queries are the keys, and none sees itself.
    """
    if keys is None:
        same = queries.group[..., 1:] == queries.group[..., :-1]
        none = ((0, 0),) * (same.ndim - 1)
        before = jnp.pad(same, (*none, (1, 0)))
        return ~before if causal else ~(before | jnp.pad(same, (*none, (0, 1))))
    first = rank(keys, queries.group, -1)
    slot = jnp.minimum(first, keys.group.shape[-1] - 1)
    seen = (first == slot) & (take_last(keys.group, slot) == queries.group)
    if causal:
        seen = seen & CAUSAL.sees(Side(queries.position), Side(take_last(keys.position, slot)))
    return ~seen


def visits(
    sizes: tuple[int, int], causal: bool, queries: SortedSequence, keys: SortedSequence
) -> tiles.TilePlan:
    """The tiles with a query and a key of one group, by example and head.

    Args:
      sizes: the numbers of queries and of keys of a tile.
      queries, keys: the orders, [X, T].
    """
    query_size, key_size = sizes
    length = keys.group.shape[-1]

    def ends(x: SortedSequence, size: int) -> tuple[SortedSequence, SortedSequence]:
        """The first slot of each tile that is not padding, and the last slot."""
        first = jnp.arange(0, x.group.shape[-1], size)
        last = jnp.minimum(first + size, x.group.shape[-1]) - 1
        first, last = (SortedSequence(x.position[:, i], x.group[:, i]) for i in (first, last))
        padding = first.group == 0
        first = SortedSequence(jnp.where(padding, 0, first.position), jnp.maximum(first.group, 1))
        return first, last

    def tiles_between(other: SortedSequence, size: int, first, last) -> tiles.Visits:
        """The tiles of the other side, from after `first` to `last`, each (group, position)."""
        start, stop = rank(other, *first), rank(other, *last)
        stop = jnp.where(stop > start, -(-stop // size), 0)
        return tiles.Visits(start // size, stop)

    first, last = ends(queries, query_size)
    newest = last.position if causal else length
    by_query = tiles_between(keys, key_size, (first.group, -1), (last.group, newest))
    first, last = ends(keys, key_size)
    oldest = first.position - 1 if causal else -1
    by_key = tiles_between(queries, query_size, (first.group, oldest), (last.group, length))
    return jax.tree.map(lambda x: x.astype(jnp.int32), tiles.TilePlan(by_query, by_key))
