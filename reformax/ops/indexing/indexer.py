"""The indexer: which keys each query chooses, as one option of an op.

Letters besides those of `reformax.ops.base`: J index heads of size D, K keys that a query sees, L
of them by their distance, Q queries of a chunk, M candidates of a query.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from reformax import devices
from reformax.declared import Count, SettingError, Size, Unsupported
from reformax.ops.calls.dispatch import Interpret
from reformax.ops.calls.options import Options, options
from reformax.ops.decoding.reading import put_all
from reformax.ops.indexing.blocks import best_blocks, best_of_newest, positions_of
from reformax.ops.indexing.candidates.base import (
    Candidates,
    IndexedKeys,
    QueryChunk,
)
from reformax.ops.indexing.pooling import pooled_blocks
from reformax.ops.indexing.rule import ChoiceRule
from reformax.ops.indexing.scores import (
    IndexQueries,
    Score,
    gathered,
    scores,
    scores_of_gathered,
)
from reformax.ops.indexing.streaming import best_keys, best_over
from reformax.ops.masking.masks import ids_or_ones
from reformax.ops.masking.visibility import Side, is_token
from reformax.ops.numerics.best import best_of
from reformax.ops.numerics.precision import IndexDtype, rounded
from reformax.ops.numerics.query_chunks import by_chunks, join_chunks, positions
from reformax.ops.numerics.rotary import rotary
from reformax.ops.sharding import queries as sharding
from reformax.ops.sharding.shard import Shard

# Numbers of a chunk of queries whose candidates kernels score: enough queries to fill a GPU.
SCORED_AT_A_TIME = 2**28
# Queries of a row from which candidates learn, spread evenly.
LEARNT_FROM = 256


class Indexed(NamedTuple):
    """The vectors of an indexer: its queries, and its keys `[B, S, D]`; weights of candidates."""

    queries: IndexQueries
    keys: Float[Array, "B S D"]
    params: Any = ()


@options
class Indexer(Options):
    """How keys are scored, which ones are, and which a query sees without a score.

    A choice is deterministic: of equal scores the first position is chosen, and with "relu" many
    scores are exactly 0. No array holds the scores of all pairs.

    Args:
      score: "relu", the weighted sum of the ReLUs of the index heads' products, or "product", that
        of the products, as MiniMax's MSA and cuDNN's indexer have it.
      rotary: whether index queries and keys have rotary positions of their own. The layer's have
        them already where its queries and keys do.
      n_local: a query always sees the keys less than `n_local` positions from it. They count for
        `top_k`.
      group: consecutive queries that share the choice of the first, their leader (PIVOT-Reuse,
        arXiv 2607.24593). Each sees, besides, its local keys, at least `group` of them, so that
        none is lost between it and the leader. A query of another segment than its leader's sees
        its local keys alone.
      candidates: `candidates.Pooled()`, `candidates.Clustered()`, `candidates.Hashed()` or
        `candidates.Coded()`; None: all keys are scored.
      block_size: L: keys are chosen in whole blocks of so many positions, at fixed positions of the
        row, as in Qwen's sparse attention (QSA). A block's index key is the mean of its keys of the
        segment of its last one, rotated as its first position. A query sees the best `top_k / L`
        complete blocks up to itself, and its own block so far where that is not complete. For
        causal calls; without `n_local`, `group` and `candidates`.
      dtype: what index queries and keys are rounded to. Products of bfloat16 numbers take a third
        of the time of float32's on tensor cores, and candidates a third of the reads. Sums are
        float32 for both, and a gradient is that of numbers that are not rounded.
    """

    score: Score = "relu"
    rotary: bool = False
    n_local: Count = 0
    group: Size = 1
    candidates: Candidates | None = None
    block_size: Size = 1
    dtype: IndexDtype = "float32"

    def __post_init__(self):
        super().__post_init__()
        if 1 < self.group > self.n_local:
            raise SettingError(
                f"group is {self.group} and n_local {self.n_local}: expected n_local of at least "
                "group, because a leader chooses no later keys"
            )

        others = self.n_local > 0 or self.group > 1 or self.candidates is not None
        if self.block_size > 1 and others:
            raise SettingError(
                f"block_size is {self.block_size}: expected no n_local, group and candidates with "
                "it, because whole blocks are chosen"
            )

    @property
    def draws(self) -> bool:
        """Whether it draws at random."""
        return self.candidates is not None and self.candidates.draws

    @property
    def learns(self) -> bool:
        """Whether its candidates have weights and a loss."""
        return self.candidates is not None and self.candidates.learns

    def kernel_obstacles(self, causal: bool) -> dict[str, Any]:
        """The options by which kernels cannot choose, for `dispatch.kernel_obstacles`."""
        if self.candidates is not None:
            return {}
        both_ways = self.n_local > 0 and not causal
        return {
            "group": self.group if self.group > 1 else None,
            "n_local": f"{self.n_local} in a call that is not causal" if both_ways else None,
        }

    def scored(self, x: Float[Array, "B T J D"], position: Int[Array, "B T"]) -> Array:
        """Index queries or keys as they are scored: rotated to their positions, and rounded."""
        return rounded(rotary(x, position) if self.rotary else x, self.dtype)

    def n_local_keys(self, causal: bool, length: int) -> int:
        """L for a length."""
        return min(self.n_local, length) if causal else max(2 * min(self.n_local, length) - 1, 0)

    def choose(
        self,
        x: Indexed,
        segment_ids: Int[Array, "B T"] | None,
        top_k: int,
        causal: bool,
        length: int,
        rng: PRNGKeyArray | None,
        interpret: Interpret = None,
        shard: Shard | None = None,
    ) -> Int[Array, "B T K"]:
        """The positions that each query sees, the chosen ones first; -1 is none.

        Args:
          x: the vectors, of one sequence; its queries may be a shard of it.
          segment_ids: of the keys.
          top_k: the most that a query sees.
          causal: whether later positions are hidden.
          length: that settings depend on.
          rng: the source of hashes.
          interpret: from `dispatch.choose_kernels`.
          shard: which queries there are.

        Raises:
          Unsupported: a group of queries is on several devices.
        """
        n_queries, n_tokens = x.queries.weights.shape[1], x.keys.shape[1]
        position = sharding.first_query(shard, n_queries) + positions(n_queries)
        ids = sharding.of_shard(shard, ids_or_ones(segment_ids, x.keys), n_queries)
        if self.block_size > 1:
            return self._choose_blocks(x, segment_ids, position, ids, top_k, interpret)
        if sharding.axis_of(shard) is not None and n_queries % self.group:
            raise Unsupported(
                f"group is {self.group} and a device has {n_queries} positions of each sequence, "
                "which it does not divide: use group=1, or another length or mesh axis context"
            )
        n_local = self.n_local_keys(causal, n_tokens)
        rule = ChoiceRule(causal, min(self.n_local, n_tokens), self.group)
        n_best = min(top_k - n_local, n_tokens)
        leaders = (x.queries.queries, x.queries.weights, position, ids)
        queries, weights, leader, leader_ids = (y[:, :: self.group] for y in leaders)
        chunk = QueryChunk(IndexQueries(queries, weights), leader, leader_ids)
        keys = IndexedKeys(x.keys, segment_ids, self.score, causal, length, rng, x.params)
        chosen = self._best(rule, n_best, keys, chunk, interpret, shard)
        chosen = jnp.repeat(chosen, self.group, axis=1)[:, :n_queries]
        if n_local == 0:
            return chosen
        local = rule.local_keys(position, n_tokens)
        if self.group > 1:  # the leader chose keys that are local to some of its followers
            distance = position[..., None] - chosen
            chosen = jnp.where(jnp.abs(distance) < rule.n_local, -1, chosen)
        local = jnp.broadcast_to(local, (*chosen.shape[:2], local.shape[2]))
        return jnp.concatenate([chosen, local], axis=-1)

    # Blocks. C is their number.

    def block_keys(
        self, keys: Float[Array, "B T D"], ids: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B C D"], Int[Array, "B C"]]:
        """The index keys of blocks, of keys as `scored` takes them, and their segments."""
        ids, means = pooled_blocks(keys[:, :, None], ids, self.block_size)
        first = positions(means.shape[1]) * self.block_size
        return self.scored(means, first)[:, :, 0], ids

    def _choose_blocks(
        self, x: Indexed, segment_ids, position, ids, top_k: int, interpret
    ) -> Array:
        keys, block_ids = self.block_keys(x.keys, ids_or_ones(segment_ids, x.keys))
        sizes = self.block_size, min(top_k // self.block_size, keys.shape[1])
        arrays, packed = (x.queries, keys, Side(position, ids), block_ids), segment_ids is not None
        found = best_blocks(self.score, self.dtype, *sizes, *arrays, interpret, packed)
        return positions_of(found, position, self.block_size)

    def n_chosen(self, top_k: int, causal: bool, length: int) -> int:
        """K, the positions of a choice, those that do not exist too."""
        if self.block_size > 1:
            n_blocks = min(top_k // self.block_size, -(-length // self.block_size))
            return (n_blocks + 1) * self.block_size - 1
        n_local = self.n_local_keys(causal, length)
        return min(top_k - n_local, length) + n_local

    def candidates_loss(
        self,
        x: Indexed,
        segment_ids: Int[Array, "B T"] | None,
        causal: bool,
        shard: Shard | None = None,
    ) -> Float[Array, ""]:
        """The mean loss by which candidates learn, over up to `LEARNT_FROM` queries of a row.

        Args:
          x: the vectors, and the candidates' weights; its queries may be a shard's.
          segment_ids: of the keys.
          causal: of the call.
          shard: which queries there are. The mean is over those of all devices.
        """
        n_queries, length = x.queries.weights.shape[1], x.keys.shape[1]
        keys = IndexedKeys(x.keys, segment_ids, self.score, causal, length, None, x.params)
        position = sharding.first_query(shard, n_queries) + positions(n_queries)
        ids = sharding.of_shard(shard, keys.ids, n_queries)
        ids, *some = sharding.spread(shard, LEARNT_FROM, ids, *x.queries, position)

        @jax.checkpoint
        def losses(vectors, weights, position, ids):
            chunk = QueryChunk(IndexQueries(vectors, weights), position, ids)
            return self.candidates.losses(keys, chunk)

        n_seen = length * (2 * x.queries.queries.shape[2] + 4)
        total = by_chunks(losses, n_seen, *some, ids).sum()
        n_tokens = devices.total(jnp.sum(is_token(ids)), sharding.token_axes_of(shard))
        return total / jnp.maximum(n_tokens, 1).astype(total.dtype)

    # Decoding. C is the capacity.

    def start(
        self, x: Indexed, top_k: int, lengths: Int[Array, " B"], capacity: int, rng
    ) -> IndexerCache:
        """The cache after the first `lengths` positions of each row."""
        n_free = capacity - x.keys.shape[1]
        exists = jnp.arange(x.keys.shape[1])[None] < lengths[:, None]
        keys = jnp.where(exists[..., None], x.keys, 0)
        keys = jnp.pad(keys, ((0, 0), (0, n_free), (0, 0)))
        ids = jnp.pad(exists.astype(jnp.int32), ((0, 0), (0, n_free)))
        indexed = IndexedKeys(keys, ids, self.score, True, capacity, rng, x.params)
        found = () if self.candidates is None else self.candidates.start(indexed)
        cache = IndexerCache(keys, found, ())
        if self.group == 1:
            return cache
        leader = jnp.maximum(lengths - 1, 0) // self.group * self.group
        queries = jax.tree.map(lambda y: jax.vmap(lambda y, i: y[i][None])(y, leader), x.queries)
        x = x._replace(queries=queries)
        return cache._replace(chosen=self._choose_newest(cache, x, leader, top_k))

    def step(
        self,
        cache: IndexerCache,
        x: Indexed,
        position: Int[Array, " B"],
        top_k: int,
    ) -> tuple[Int[Array, "B K"], IndexerCache]:
        """The positions that one more query of each row sees; -1 is none. And the cache with it.

        Args:
          cache: from `start` or the step before.
          x: the vectors of the new position.
          position: its number.
          top_k: as in `choose`.
        """
        keys = cache.keys.at[jnp.arange(len(position)), position].set(x.keys[:, 0])
        found = cache.found
        if self.candidates is not None:
            found = self.candidates.advance(found, self._held(keys, x), x.keys, position)
        cache = IndexerCache(keys, found, cache.chosen)
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
          x: the vectors of the new positions.
          position: the number of the first of them.
          lengths: the number of them before a row's padding.
          top_k: as in `choose`.
          axis: the mesh axis that divides the cache, as in `decoding.reading`; None: it is whole.
        """
        keys = put_all(cache.keys[:, None], x.keys[:, :, None], position, lengths, axis)[:, 0]
        every = (0, 1) if axis is None else (lax.axis_index(axis), lax.axis_size(axis))
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

    def _held(self, keys: Float[Array, "B C D"], x: Indexed) -> IndexedKeys:
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
        held = self._held(cache.keys, x)
        chunk = QueryChunk(x.queries, position[:, None], held.ids[:, :1])
        if self.candidates is None:
            key = Side(jnp.arange(capacity, dtype=jnp.int32)[None, None])
            allowed = rule.allows(Side(position[:, None, None]), key)
            return best_of(scores(self.score, x.queries, cache.keys), allowed, n_best)[:, 0]
        found = self.candidates.of_newest(cache.found, held, chunk)
        found = self.candidates.in_order(found)
        return best_candidates(rule, n_best, held, chunk, found)[:, 0]

    def _best(
        self,
        rule: ChoiceRule,
        n_best: int,
        keys: IndexedKeys,
        queries: QueryChunk,
        interpret: Interpret,
        shard: Shard | None,
    ) -> Int[Array, "B Q K"]:
        """The best keys of some queries, by scores of all keys or of candidates."""
        side = Side(queries.position, queries.ids)
        if self.candidates is None and interpret is not None:
            from reformax.ops.kernels.triton.indexer import choose_positions

            ids = (None, None) if keys.segment_ids is None else (queries.ids, keys.ids)
            arrays = *queries.index, keys.keys, *ids
            first = None
            if rule.n_local or sharding.axis_of(shard) is not None:
                # A query chooses what a query `n_local` positions before it sees.
                first = queries.position[0, 0] - rule.n_local
            sizes = dict(dtype=self.dtype, first=first)
            return choose_positions(n_best, rule.causal, interpret, *arrays, **sizes)
        if self.candidates is None:
            arrays = queries.index, keys.keys, side, keys.ids
            return best_keys(self.score, rule, n_best, *arrays)[1]
        prepared, choose, of_all = self.candidates.prepare(keys), None, None
        if interpret is not None and self.group == 1:
            of_all = self.candidates.of_all(prepared, keys, queries.index, interpret)
        if interpret is not None:
            from reformax.ops.kernels.triton import candidate_scores as kernel

            parts = kernel.parts_of(keys.keys[:, :, None], self.dtype)

            def choose(index: IndexQueries, found: Int[Array, "B Q M"]) -> Int[Array, "B Q K"]:
                queries = kernel.parts_of(index.queries, self.dtype)
                return kernel.choose(n_best, interpret, queries, index.weights, parts, found)

        def of_chunk(vectors, weights, position, ids, *found):
            chunk = QueryChunk(IndexQueries(vectors, weights), position, ids)
            found = found[0] if found else self.candidates.of(prepared, keys, chunk)
            found = self.candidates.in_order(found)
            return best_candidates(rule, n_best, keys, chunk, found, choose)

        n_searched = queries.index.queries.shape[2] if self.score == "relu" else 1
        # Of a candidate there are positions and codes, and in array operations its key and scores.
        n_each = 8 if interpret is not None else n_searched + 4 + keys.keys.shape[2]
        n_seen = self.candidates.n_numbers(keys, n_searched, n_each)
        arrays = *queries.index, queries.position, queries.ids
        arrays += () if of_all is None else (of_all,)
        at_a_time = None if interpret is None else SCORED_AT_A_TIME
        chosen = by_chunks(of_chunk, n_seen, *arrays, at_a_time=at_a_time)
        return join_chunks(chosen, queries.ids.shape[1])


class IndexerCache(NamedTuple):
    """The index keys, the state of the candidates, and the choice of each row's newest leader."""

    keys: Float[Array, "B C D"]
    found: Any
    chosen: Int[Array, "B K"] | tuple[()]


def best_candidates(
    rule: ChoiceRule,
    n_best: int,
    keys: IndexedKeys,
    queries: QueryChunk,
    position: Int[Array, "B Q M"],
    choose: Callable[[IndexQueries, Array], Array] | None = None,
) -> Int[Array, "B Q K"]:
    """The best of each query's candidates, by kernels that `choose` or in array operations.

    Their positions are in order, each once; -1 is none.
    """
    at = jnp.clip(position, 0, keys.keys.shape[1] - 1)
    exists = (position >= 0) & (position < keys.keys.shape[1])
    key = Side(position, gathered(keys.ids, at), exists=exists)
    query = Side(queries.position[..., None], queries.ids[..., None])
    allowed = rule.allows(query, key)
    if choose is not None:
        return choose(queries.index, jnp.where(allowed, position, -1))
    found = scores_of_gathered(keys.score, queries.index, gathered(keys.keys, at))
    best = best_of(found, allowed, min(n_best, found.shape[-1]))
    chosen = jnp.take_along_axis(position, jnp.maximum(best, 0), axis=-1)
    chosen = jnp.where(best < 0, -1, chosen)
    n_missing = n_best - chosen.shape[-1]
    return jnp.pad(chosen, ((0, 0), (0, 0), (0, n_missing)), constant_values=-1)
