"""Keys sorted by a code, which is the bucket of a hash or a cluster, and those near a query.

Letters besides those of `base.py`: R codes of each key, J codes of a query for each of them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from reformax.ops.hashing.sorting import padding_last, sort_by_bucket
from reformax.ops.indexing.candidates.base import IndexedKeys, QueryChunk
from reformax.ops.masking.visibility import CAUSAL, Side
from reformax.ops.numerics.best import best_of


class SortedKeys(NamedTuple):
    """The positions in the order (segment, code, position), and codes and segments in that order.

    A query's candidates follow each other, and so do their codes. Padding has the last segment.
    """

    order: Int[Array, "B R S"]
    codes: Int[Array, "B R S"]
    ids: Int[Array, "B R S"]


def sorted_by_code(codes: Int[Array, "B 1 R S"], n_codes: int, x: IndexedKeys) -> SortedKeys:
    """Sorts the keys by their codes, which are from 0 to `n_codes - 1`."""
    order = sort_by_bucket(codes, n_codes, x.segment_ids, 0).query_positions[:, 0]
    ids = jnp.broadcast_to(padding_last(x.ids)[:, None], order.shape)
    return SortedKeys(order, *(jnp.take_along_axis(y, order, axis=-1) for y in (codes[:, 0], ids)))


def nearest_of_code(
    prepared: SortedKeys,
    x: IndexedKeys,
    codes: Int[Array, "B J R Q"],
    queries: QueryChunk,
    n_nearest: int,
) -> Int[Array, "B Q M"]:
    """The nearest keys of each code; -1 is none."""
    n_keys = x.keys.shape[1]
    n = min(n_nearest, n_keys)
    n_before = _sorted_before(prepared, x, codes, queries)
    first = n_before - (n if x.causal else n // 2)
    slot = first[..., None] + jnp.arange(n, dtype=jnp.int32)[None, None, None, None]
    exists, slot = (slot >= 0) & (slot < n_keys), jnp.clip(slot, 0, n_keys - 1)

    def of_hash(x: Int[Array, "B R S"], at: Int[Array, "B J R Q M"]) -> Array:
        take = jax.vmap(jax.vmap(lambda x, at: x[at], in_axes=(0, 1), out_axes=1))
        return take(x, at)

    exists &= of_hash(prepared.codes, slot) == codes[..., None]
    position = jnp.where(exists, of_hash(prepared.order, slot), -1)
    return jnp.moveaxis(position, 3, 1).reshape(*queries.ids.shape, -1)


def newest_of_code(
    held: Int[Array, "B R C"], codes: Int[Array, "B J R 1"], queries: QueryChunk, n_nearest: int
) -> Int[Array, "B 1 M"]:
    """The newest keys of each code that the newest query searches; -1 is none."""
    position = jnp.arange(held.shape[2], dtype=jnp.int32)[None, None, None]
    so_far = CAUSAL.sees(Side(queries.position[:, None, None]), Side(position))
    same = (held[:, None] == codes) & so_far  # [B, J, R, C]
    nearest = jnp.broadcast_to(position.astype(jnp.float32), same.shape)
    found = best_of(nearest, same, min(n_nearest, same.shape[-1]))
    return found.reshape(len(found), 1, -1)


def _sorted_before(
    prepared: SortedKeys, x: IndexedKeys, codes: Int[Array, "B J R Q"], queries: QueryChunk
) -> Int[Array, "B J R Q"]:
    """How many keys come before a query's next key in the order (segment, bucket, position).

    By bisection: a chunk of queries reads the order log S times.
    """
    n_keys = x.keys.shape[1]

    def count(sorted_ids, sorted_codes, order, query_ids, codes):  # [S], [S], [S], [Q], [Q]
        def halve(_, bounds):
            low, high = bounds
            middle = (low + high) // 2
            at = jnp.minimum(middle, n_keys - 1)
            one, other = sorted_ids[at], query_ids
            two, second = sorted_codes[at], codes
            third = order[at] <= queries.position[0]
            before = (one < other) | ((one == other) & ((two < second) | ((two == second) & third)))
            before &= middle < n_keys
            return jnp.where(before, middle + 1, low), jnp.where(before, high, middle)

        bounds = jnp.zeros_like(codes), jnp.full_like(codes, n_keys)
        return lax.fori_loop(0, n_keys.bit_length(), halve, bounds)[0]

    by_hash = jax.vmap(count, in_axes=(0, 0, 0, None, 0))
    by_head = jax.vmap(by_hash, in_axes=(None, None, None, None, 0))
    sorted_keys = prepared.ids, prepared.codes, prepared.order
    return jax.vmap(by_head)(*sorted_keys, padding_last(queries.ids), codes)
