"""Decoding with an indexer: the choice of each row's newest query, from a cache of index keys.

Letters as in `indexing.indexer`; C is the capacity.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from reformax.ops.decoding.reading import held_by, put_all
from reformax.ops.indexing.blocks import best_of_newest, positions_of
from reformax.ops.indexing.candidates.base import IndexedKeys, QueryChunk
from reformax.ops.indexing.candidates.best import best_candidates
from reformax.ops.indexing.rule import ChoiceRule
from reformax.ops.indexing.scores import Indexed, IndexQueries, scores
from reformax.ops.indexing.streaming import best_keys, best_over
from reformax.ops.masking.masks import tokens_before
from reformax.ops.masking.visibility import Side
from reformax.ops.numerics.best import best_of
from reformax.ops.numerics.query_chunks import by_chunks, join_chunks, positions


class IndexerCache(NamedTuple):
    """The index keys, the state of the candidates, and the choice of each row's newest leader."""

    keys: Float[Array, "B C D"]
    candidates: Any
    chosen: Int[Array, "B K"] | tuple[()]


class IndexerDecoding:
    """The functions of an `Indexer` for decoding."""

    def start(
        self, x: Indexed, top_k: int, lengths: Int[Array, " B"], capacity: int, rng
    ) -> IndexerCache:
        """The cache after the first `lengths` positions of each row."""
        n_free = capacity - x.keys.shape[1]
        exists = tokens_before(lengths, x.keys.shape[1])
        keys = jnp.where(exists[..., None], x.keys, 0)
        keys = jnp.pad(keys, ((0, 0), (0, n_free), (0, 0)))
        ids = jnp.pad(exists.astype(jnp.int32), ((0, 0), (0, n_free)))
        indexed = IndexedKeys(keys, ids, self.score, True, capacity, rng, x.params)
        candidates = () if self.candidates is None else self.candidates.start(indexed)
        cache = IndexerCache(keys, candidates, ())
        if self.group == 1:
            return cache
        leader = jnp.maximum(lengths - 1, 0) // self.group * self.group
        queries = jax.tree.map(lambda y: jax.vmap(lambda y, i: y[i][None])(y, leader), x.queries)
        x = x._replace(queries=queries)
        return cache._replace(chosen=self._choose_newest(cache, x, leader, top_k))

    def step(
        self, cache: IndexerCache, x: Indexed, position: Int[Array, " B"], top_k: int
    ) -> tuple[Int[Array, "B K"], IndexerCache]:
        """The positions that one more query of each row sees; -1 is none. And the cache with it.

        Args:
          cache: from `start` or the step before.
          top_k: as in `choose`.
        """
        keys = cache.keys.at[jnp.arange(len(position)), position].set(x.keys[:, 0])
        candidates = cache.candidates
        if self.candidates is not None:
            new = self._indexed(keys, x), x.keys, position
            candidates = self.candidates.advance(candidates, *new)
        cache = IndexerCache(keys, candidates, cache.chosen)
        if self.group == 1:
            chosen = self._choose_newest(cache, x, position, top_k)
        else:
            leads = position % self.group == 0

            def choose(chosen):
                new = self._choose_newest(cache, x, position, top_k)
                return jnp.where(leads[:, None], new, chosen)

            chosen = lax.cond(leads.any(), choose, lambda chosen: chosen, cache.chosen)
            cache = cache._replace(chosen=chosen)
        n_local = self.n_local_keys(True, keys.shape[1])
        if n_local:
            chosen = jnp.where(position[:, None] - chosen < n_local, -1, chosen)
            local = ChoiceRule(True, n_local).local_keys(position[:, None], keys.shape[1])
            chosen = jnp.concatenate([chosen, local[:, 0]], axis=-1)
        return chosen, cache

    @property
    def reads_pieces(self) -> bool:
        """Whether it has `read_on`: each query chooses among all keys."""
        return self.candidates is None and self.group == 1 and self.block_size == 1

    def read_on(
        self,
        cache: IndexerCache,
        x: Indexed,
        position: Int[Array, " B"],
        lengths: Int[Array, " B"],
        top_k: int,
        axis: str | None,
    ) -> tuple[Int[Array, "B T K"], IndexerCache]:
        """`step` for several queries of each row at once.

        Args:
          cache: from `start`, `step` or the call before.
          position: the number of the first of them.
          lengths: the number of them before a row's padding.
          top_k: as in `choose`.
          axis: the mesh axis that divides the cache, as in `decoding.reading`; None: it is whole.
        """
        keys = put_all(cache.keys[:, None], x.keys[:, :, None], position, lengths, axis)[:, 0]
        every = held_by(axis)
        capacity, ids = keys.shape[1] * every[1], jnp.ones(keys.shape[:2], jnp.int32)
        n_local = self.n_local_keys(True, capacity)
        rule, n_best = ChoiceRule(True, n_local), min(top_k - n_local, capacity)

        def choose(queries, weights, at):
            side = Side(at, jnp.ones(at.shape, jnp.int32))
            arrays = IndexQueries(queries, weights), keys, side, ids
            best, chosen = best_keys(self.score, rule, n_best, *arrays, every)
            return chosen if axis is None else best_over(axis, best, chosen)

        at = position[:, None] + positions(x.keys.shape[1])
        chosen = by_chunks(choose, 4 * n_best * every[1], *x.queries, at)
        chosen = join_chunks(chosen, at.shape[1])
        if n_local:
            chosen = jnp.concatenate([chosen, rule.local_keys(at, capacity)], axis=-1)
        return chosen, cache._replace(keys=keys)

    def _indexed(self, keys: Float[Array, "B C D"], x: Indexed) -> IndexedKeys:
        """The cache's keys: causality hides those that are not there yet."""
        return IndexedKeys(keys, None, self.score, True, keys.shape[1], None, x.params)

    def _choose_newest(
        self, cache: IndexerCache, x: Indexed, position: Int[Array, " B"], top_k: int
    ) -> Int[Array, "B K"]:
        """The choice of one query of each row."""
        capacity = cache.keys.shape[1]
        if self.block_size > 1:
            keys, _ = self.block_keys(cache.keys, jnp.ones(cache.keys.shape[:2], jnp.int32))
            sizes = self.block_size, min(top_k // self.block_size, keys.shape[1])
            found = best_of_newest(self.score, *sizes, x.queries, keys, position)
            return positions_of(found[:, None], position[:, None], self.block_size)[:, 0]
        n_local = self.n_local_keys(True, capacity)
        rule = ChoiceRule(True, n_local, self.group)
        n_best = min(top_k - n_local, capacity)
        keys = self._indexed(cache.keys, x)
        chunk = QueryChunk(x.queries, position[:, None], keys.ids[:, :1])
        if self.candidates is None:
            key = Side(jnp.arange(capacity, dtype=jnp.int32)[None, None])
            allowed = rule.allows(Side(position[:, None, None]), key)
            return best_of(scores(self.score, x.queries, cache.keys), allowed, n_best)[:, 0]
        found = self.candidates.of_newest(cache.candidates, keys, chunk)
        found = self.candidates.in_order(found)
        return best_candidates(rule, n_best, keys, chunk, found)[:, 0]
