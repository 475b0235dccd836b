"""Candidates in the clusters whose centres have the highest scores.

Letters as in `base.py`, and those of `by_code.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from reformax.declared import Size
from reformax.ops.calls.options import options
from reformax.ops.indexing.candidates.base import Candidates, IndexedKeys, QueryChunk
from reformax.ops.indexing.candidates.by_code import (
    SortedKeys,
    nearest_of_code,
    newest_of_code,
    sorted_by_code,
)
from reformax.ops.indexing.scores import scores
from reformax.ops.masking.contiguous import ends_of_segment
from reformax.ops.masking.visibility import CAUSAL, Side, Visibility
from reformax.ops.numerics.best import best_of
from reformax.ops.numerics.query_chunks import by_chunks, join_chunks


@options
class Clustered(Candidates):
    """The keys of the clusters whose centres have the highest scores.

    Every `stride`-th key is a centre, as it is: means of clusters, such as those of k-means, would
    hold later tokens. A key belongs to the nearest centre up to itself in its segment; those before
    the first centre of their segment are a cluster that all its queries search. Of a cluster the
    candidates are the nearest before the query, in a call that is not causal also after it.

    Args:
      stride: positions from a centre to the next.
      n_clusters: clusters that a query searches.
      n_nearest: keys of a cluster.

    Time is `2 T^2 / stride` products of small vectors, and `T n_clusters n_nearest` scores.
    """

    stride: Size = 128
    n_clusters: Size = 8
    n_nearest: Size = 256

    def prepare(self, x: IndexedKeys) -> ClusteredKeys:
        n_centres = -(-x.keys.shape[1] // self.stride)
        by_centre = sorted_by_code(self._codes(x)[:, None, None], n_centres, x)
        return ClusteredKeys(by_centre, ends_of_segment(x.ids)[0] // self.stride)

    def _codes(self, x: IndexedKeys) -> Int[Array, "B S"]:
        """The number of each key's centre."""
        length, (centres, of_centre) = x.keys.shape[1], self._centres(x)
        firsts = ends_of_segment(x.ids)[0] // self.stride

        def nearest(keys, position, ids, first):
            key = Side(position[..., None], ids[..., None])
            found = best_of(_nearness(keys, centres), self._rule(x).sees(key, of_centre), 1)[..., 0]
            return jnp.where(found < 0, first, found)

        n_seen = 3 * centres.shape[1]
        arrays = x.token_keys, jnp.arange(length, dtype=jnp.int32)[None], x.ids, firsts
        return join_chunks(by_chunks(nearest, n_seen, *arrays), length)

    def _rule(self, x: IndexedKeys) -> Visibility:
        """Which centres a key, or a query, has."""
        return Visibility(x.causal)

    def _centres(self, x: IndexedKeys) -> tuple[Float[Array, "B C D"], Side]:
        centres = x.token_keys[:, :: self.stride]
        position = jnp.arange(centres.shape[1], dtype=jnp.int32) * self.stride
        return centres, Side(position[None, None], x.ids[:, None, :: self.stride])

    def _searched(self, x: IndexedKeys, queries: QueryChunk) -> Int[Array, "B K 1 Q"]:
        """The clusters that the queries search; -1 is none."""
        centres, of_centre = self._centres(x)
        query = Side(queries.position[..., None], queries.ids[..., None])
        found = scores(x.score, queries.index, centres)
        allowed = self._rule(x).sees(query, of_centre)
        best = best_of(found, allowed, min(self.n_clusters, centres.shape[1]))
        return jnp.moveaxis(best, 2, 1)[:, :, None]

    def n_numbers(self, x: IndexedKeys, n_searched: int, n_each: int) -> int:
        n_centres = -(-x.keys.shape[1] // self.stride)
        n_nearest = min(self.n_nearest, x.keys.shape[1])
        n_clusters = min(self.n_clusters, n_centres) + 1
        return n_centres * (n_searched + 2) + n_clusters * n_nearest * n_each

    def of(self, prepared: ClusteredKeys, x: IndexedKeys, queries: QueryChunk):
        own = prepared.firsts[:, queries.position[0]][:, None, None]
        codes = jnp.concatenate([self._searched(x, queries), own], axis=1)
        return nearest_of_code(prepared.sorted, x, codes, queries, self.n_nearest)

    def start(self, x: IndexedKeys) -> Int[Array, "B C"]:
        return self._codes(x)

    def advance(self, state, x: IndexedKeys, key, position) -> Int[Array, "B C"]:
        centres, of_centre = self._centres(x)
        allowed = CAUSAL.sees(Side(position[:, None, None]), Side(of_centre.position))
        code = best_of(_nearness(key, centres), allowed, 1)[:, 0, 0]
        return state.at[jnp.arange(len(position)), position].set(code)

    def of_newest(self, state, x: IndexedKeys, queries: QueryChunk) -> Int[Array, "B 1 M"]:
        codes = self._searched(x, queries)
        codes = jnp.concatenate([codes, jnp.zeros_like(codes[:, :1])], axis=1)  # the first cluster
        return newest_of_code(state[:, None], codes, queries, self.n_nearest)


class ClusteredKeys(NamedTuple):
    """The keys in the order of clusters, and the cluster of each position's segment's first one."""

    sorted: SortedKeys
    firsts: Int[Array, "B S"]


def _nearness(keys: Float[Array, "B Q D"], centres: Float[Array, "B C D"]) -> Array:
    """A score that falls with the distance from a key to a centre, `[B, Q, C]`."""
    half_squares = jnp.einsum("bcd,bcd->bc", centres, centres)[:, None] / 2
    return jnp.einsum("bqd,bcd->bqc", keys, centres) - half_squares
