"""The indexer: which keys each query chooses, as one option of an op.

Letters besides those of `reformax.ops.base`: J index heads of size D, K keys that a query sees, L
of them by their distance, Q queries of a chunk, M candidates of a query.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from reformax import devices
from reformax.declared import Count, SettingError, Size, Unsupported
from reformax.ops.calls.dispatch import INTERPRETED
from reformax.ops.calls.options import Options, options
from reformax.ops.indexing.blocks import best_blocks, pooled_blocks, positions_of
from reformax.ops.indexing.candidates.base import Candidates, IndexedKeys, QueryChunk
from reformax.ops.indexing.candidates.best import best_candidates
from reformax.ops.indexing.indexer_decoding import IndexerDecoding
from reformax.ops.indexing.rule import ChoiceRule
from reformax.ops.indexing.scores import Indexed, IndexQueries, Score
from reformax.ops.indexing.streaming import best_keys
from reformax.ops.masking.masks import ids_or_ones
from reformax.ops.masking.visibility import Side, is_token
from reformax.ops.numerics.precision import IndexDtype, rounded
from reformax.ops.numerics.query_chunks import by_chunks, join_chunks, positions
from reformax.ops.numerics.rotary import rotary
from reformax.ops.sharding import queries as sharding
from reformax.ops.sharding.shard import Shard

# Numbers in memory of a chunk of queries whose candidates kernels score: the chunk fills a GPU.
SCORED_AT_A_TIME = 2**28
# Queries of a row from which candidates learn, spread evenly.
LEARNT_FROM = 256


@options
class Indexer(IndexerDecoding, Options):
    """How keys are scored, which keys are scored, and which ones a query sees without a score.

    A choice is deterministic: of equal scores the first position is chosen, and with "relu" many
    scores are exactly 0. No array holds the scores of all pairs.

    Args:
      score: "relu", the weighted sum of the ReLUs of the index heads' products, or "product", that
        of the products, as MiniMax's MSA and cuDNN's indexer have it.
      rotary: whether index queries and keys are rotated to their positions. They are made of the
        layer's queries and keys, which may be rotated already.
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
        """The options by which kernels cannot choose, for `obstacles.kernel_obstacles`."""
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
        impl: str = "xla",
        shard: Shard | None = None,
    ) -> Int[Array, "B T K"]:
        """The positions that each query sees, the chosen ones first; -1 is none.

        Args:
          x: the vectors, of one sequence; its queries may be a shard of it.
          segment_ids: of the keys.
          top_k: the most that a query sees.
          length: that settings depend on.
          rng: the source of hashes.
          impl: of `choose_impl`.
          shard: which queries there are.

        Raises:
          Unsupported: a group of queries is on several devices.
        """
        n_queries, n_tokens = x.queries.weights.shape[1], x.keys.shape[1]
        position = sharding.query_positions(shard, n_queries)
        ids = sharding.of_shard(shard, ids_or_ones(segment_ids, x.keys), n_queries)
        if self.block_size > 1:
            return self._choose_blocks(x, segment_ids, position, ids, top_k, impl)
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
        chosen = self._best(rule, n_best, keys, chunk, impl, shard)
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
        self, x: Indexed, segment_ids, position, ids, top_k: int, impl: str
    ) -> Array:
        keys, block_ids = self.block_keys(x.keys, ids_or_ones(segment_ids, x.keys))
        sizes = self.block_size, min(top_k // self.block_size, keys.shape[1])
        arrays, packed = (x.queries, keys, Side(position, ids), block_ids), segment_ids is not None
        found = best_blocks(self.score, self.dtype, *sizes, *arrays, impl, packed)
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
          shard: which queries there are. The mean is over those of all devices.
        """
        n_queries, length = x.queries.weights.shape[1], x.keys.shape[1]
        keys = IndexedKeys(x.keys, segment_ids, self.score, causal, length, None, x.params)
        position = sharding.query_positions(shard, n_queries)
        ids = sharding.of_shard(shard, keys.ids, n_queries)
        ids, *some = sharding.spread(shard, LEARNT_FROM, ids, *x.queries, position)

        @jax.checkpoint
        def losses(vectors, weights, position, ids):
            chunk = QueryChunk(IndexQueries(vectors, weights), position, ids)
            return self.candidates.losses(keys, chunk)

        n_seen = length * (2 * x.queries.queries.shape[2] + 4)
        total = by_chunks(losses, n_seen, *some, ids).sum()
        n_tokens = devices.sum_over(jnp.sum(is_token(ids)), sharding.token_axes_of(shard))
        return total / jnp.maximum(n_tokens, 1).astype(total.dtype)

    def _best(
        self,
        rule: ChoiceRule,
        n_best: int,
        keys: IndexedKeys,
        queries: QueryChunk,
        impl: str,
        shard: Shard | None,
    ) -> Int[Array, "B Q K"]:
        """The best keys of some queries, by scores of all keys or of candidates."""
        if self.candidates is not None:
            return self._best_candidates(rule, n_best, keys, queries, impl)
        if impl == "xla":
            arrays = queries.index, keys.keys, Side(queries.position, queries.ids), keys.ids
            return best_keys(self.score, rule, n_best, *arrays)[1]
        from reformax.ops.kernels.triton.indexer import choose_positions

        ids = (None, None) if keys.segment_ids is None else (queries.ids, keys.ids)
        arrays = *queries.index, keys.keys, *ids
        first = None
        if rule.n_local or sharding.axis_of(shard) is not None:
            # A query chooses what a query `n_local` positions before it sees.
            first = queries.position[0, 0] - rule.n_local
        interpret, sizes = impl == INTERPRETED, dict(dtype=self.dtype, first=first)
        return choose_positions(n_best, rule.causal, interpret, *arrays, **sizes)

    def _best_candidates(
        self,
        rule: ChoiceRule,
        n_best: int,
        keys: IndexedKeys,
        queries: QueryChunk,
        impl: str,
    ) -> Int[Array, "B Q K"]:
        """The best candidates of some queries, which are found for a chunk of queries at a time."""
        prepared, choose, of_all = self.candidates.prepare(keys), None, None
        in_arrays, interpret = impl == "xla", impl == INTERPRETED
        if not in_arrays:
            from reformax.ops.kernels.triton import candidate_scores as kernel

            if self.group == 1:
                of_all = self.candidates.of_all(prepared, keys, queries.index, interpret)
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
        n_each = n_searched + 4 + keys.keys.shape[2] if in_arrays else 8
        n_seen = self.candidates.n_numbers(keys, n_searched, n_each)
        arrays = *queries.index, queries.position, queries.ids
        arrays += () if of_all is None else (of_all,)
        at_a_time = None if in_arrays else SCORED_AT_A_TIME
        chosen = by_chunks(of_chunk, n_seen, *arrays, at_a_time=at_a_time)
        return join_chunks(chosen, queries.ids.shape[1])
