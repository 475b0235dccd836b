"""DeepSeek sparse attention: an indexer scores all keys, and a query sees the best of them.

DeepSeek-AI 2025 ("DeepSeek-V3.2-Exp: Boosting Long-Context Efficiency with DeepSeek Sparse
Attention", sec. 1.1). Several index heads, each with queries and a weight, and one key for all
heads, give the score of position s for position t (eq. 1):

    I_ts = sum_j w_tj ReLU(q_tj . k_s)

All attention heads of a query attend to the `top_k` positions with the highest scores (eq. 2). The
choice has no gradient. The indexer learns from the attention: its loss is the divergence of its
softmax over the chosen positions from the mean of all heads' weights (eq. 4). Only the indexer gets
a gradient from that loss, and it gets none from the model's loss.

The indexer reads the layer's queries and keys of all heads instead of the layer's input, because a
plan is made of queries and keys. Time is T^2 for the scores, with one small product instead of N,
and less with an indexer that scores `candidates` alone. The attention takes `T top_k`, or T^2 where
that is less. Memory is `T top_k`.

Letters besides those of `reformax.ops.base`: J index heads of size D, K positions that a query
sees, Q queries of a chunk.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from reformax.declared import SettingError, Size, Unsupported
from reformax.ops.base import AttentionOp, options
from reformax.ops.calls.call import Call
from reformax.ops.calls.dims import Dims
from reformax.ops.calls.dispatch import KERNELS, choose_impl, compute_by
from reformax.ops.calls.heads import repeat_heads
from reformax.ops.calls.obstacles import (
    MAX_GROUP,
    KernelObstacles,
    group_obstacles,
    kernel_obstacles,
)
from reformax.ops.decoding.cache import KeyValues, add_to_ring, attend_to, fill_ring
from reformax.ops.decoding.reading import add_all_to_ring, attend_to_chosen
from reformax.ops.indexing.blocks import in_parts, newest_block
from reformax.ops.indexing.gathered import KeyReader, KeysOfQueries, gathers
from reformax.ops.indexing.indexer import Indexer
from reformax.ops.indexing.indexer_decoding import IndexerCache
from reformax.ops.indexing.learning import (
    clipped,
    divergence,
    index_queries,
    init_queries,
    no_queries,
)
from reformax.ops.indexing.op_functions import MEASURED, IndexedChoice
from reformax.ops.indexing.scores import Indexed, IndexQueries
from reformax.ops.masking.masks import ids_or_ones
from reformax.ops.masking.visibility import Side
from reformax.ops.numerics.auxiliary_loss import with_loss
from reformax.ops.numerics.logits import PLAIN
from reformax.ops.numerics.precision import product
from reformax.ops.numerics.query_chunks import by_chunks, join_chunks, positions
from reformax.ops.sharding import queries as sharding
from reformax.ops.softmax.dropout import dropped_factors, seed_at
from reformax.ops.softmax.online import masked_softmax, nonzero


@options
class dsa(IndexedChoice, AttentionOp):
    """Attention to the positions with the indexer's highest scores, the same for all heads.

    It is dense attention where `top_k` is at least the length. The indexer's loss is then that of
    the paper's dense warm-up (eq. 3).

    Weights: `query [N, H, J, D]`, `key [N, H, D]` and `weight [N, H, J]`, to whose products 1 is
    added, and `candidates`, those of candidates that learn. Initially, index head j projects the
    queries of the attention heads n with `n mod J = j` by the same random matrix as their keys.
    Scores then resemble the sum of these heads' products.

    Args:
      top_k: K: positions that a query sees; 2,048 in the paper's sec. 2.1.
      n_index_heads: J.
      d_index: D: the size of an index head.
      index_loss: the factor of the indexer's loss, which is added to the model's loss: a mean over
        the positions of all devices, and of micro-batches the mean. With 0 the indexer does not
        learn. Adam is invariant to the factor.
      report_loss: whether a step of training reports the indexer's loss as `index_loss`, the mean
        over layers and over up to 256 queries of a row, spread evenly. It has a weight of that
        name, a `Meter`, which `reformax.flax` refuses.
      indexer: how keys are scored and which ones are, see `reformax.ops.indexing.indexer.Indexer`.
      reuse: whether it sees the keys that the last `dsa` without `reuse` before it in the cycle of
        layers chose (IndexCache, arXiv 2603.12201). It then has no indexer, no weights and no loss:
        leave `top_k` and the options of the indexer and its loss out, or give that layer's.
      impl: `"xla"` runs everywhere, in array operations. `"pallas"` is kernels for NVIDIA GPUs of
        Ampere or later, heads of 256 or less and index heads of 128 or less. They read each query's
        keys by its list, or all keys where that takes less time: then at most 2^36 pairs of tokens,
        which take a bit of memory each. `"auto"` takes them where they compute the same function.
        Array operations find candidates, which kernels score. Kernels choose for no `group`
        without candidates, and leave `n_local` keys out of causal calls alone.

    Raises:
      ValueError: a size below 1, a factor below 0, an unknown `impl`.
      NotImplementedError: at the call, when `"pallas"` is asked for what it cannot do.
    """

    top_k: Size = 2048
    indexer: Indexer = Indexer()
    impl: str = "auto"

    shards = ("queries",)
    chooses_keys = True
    _of_choice = "top_k", "n_index_heads", "d_index", "index_loss", "indexer"
    _grouped = True
    _impls = KERNELS

    @property
    def plan_needs(self):
        return "rng" if self.indexer.draws and not self.reuse else "inputs"

    @property
    def causality(self):
        return "only" if self.indexer.block_size > 1 else "either"

    def newest_choice(self, cache: DsaCache) -> Int[Array, "B K"] | tuple[()]:
        return () if self.reuse else cache.chosen

    def _check(self) -> None:
        super()._check()
        if self.indexer.n_local >= self.top_k:
            n_local, top_k = self.indexer.n_local, self.top_k
            raise SettingError(f"n_local is {n_local} and top_k {top_k}: expected it below top_k")
        if self.indexer.block_size > self.top_k:
            block_size, top_k = self.indexer.block_size, self.top_k
            raise SettingError(
                f"block_size is {block_size} and top_k {top_k}: expected at most top_k positions"
            )

    def _obstacles(
        self, call: Call, q: Array, k: Array, v: Array | None, n_bits: int = 0
    ) -> KernelObstacles:
        """The obstacles of the kernels: of those that choose where `v` is None, or attend."""
        above = self._above(n_bits)
        above["score"] = None if self.indexer.score == "relu" else self.indexer.score
        if v is None:
            above |= self.indexer.kernel_obstacles(call.causal)
        reads_whole = self.indexer.block_size > 1 or (v is None and self.indexer.candidates)
        above["divided_by"] = sharding.axis_of(call.shard) if reads_whole else None
        return kernel_obstacles(q, k, v, PLAIN if v is None else call.logits, **above)

    def _init(self, rng: PRNGKeyArray, dims: Dims) -> dict[str, Any]:
        if self.reuse:
            return {}
        rng, rng_weight = jax.random.split(rng)
        sizes = dims.n_heads, dims.d_qk, self.d_index
        key = jax.random.normal(rng, sizes) / math.sqrt(self.d_index)
        found = self._meter() | init_queries(rng_weight, key, self.n_index_heads) | {"key": key}
        if self.indexer.learns:
            rng = jax.random.fold_in(rng, 1)
            found["candidates"] = self.indexer.candidates.init(rng, self.d_index)
        return found

    def _index_queries(self, params, q: Float[Array, "B T N H"], position=None) -> IndexQueries:
        position = positions(q.shape[1]) if position is None else position
        if self.reuse:
            return no_queries(q)
        queries, weights = index_queries(params, q)
        return IndexQueries(self.indexer.scored(queries, position), weights)

    def _index_keys(self, params, k: Float[Array, "B T G H"], position=None) -> Array:
        position = positions(k.shape[1]) if position is None else position
        if self.reuse:
            return no_queries(k).queries[:, :, 0]
        if self.indexer.block_size > 1:  # whose means are scored
            return _projected_keys(params, k)
        return self.indexer.scored(_projected_keys(params, k)[:, :, None], position)[:, :, 0]

    def _of_candidates(self, params) -> Any:
        """The weights of the indexer's candidates."""
        return params["candidates"] if self.indexer.learns else ()

    def _plan(self, call, params, q, k) -> Int[Array, "B T K"]:
        """The positions that each query sees; the kernel returns them in order."""
        self._check_chooses()
        position = sharding.query_positions(call.shard, q.shape[1])
        keys = self._index_keys(params, k, position)
        keys, segment_ids = sharding.of_all(call.shard, (keys, call.segment_ids))
        n = keys.shape[1]
        n_local = self.indexer.n_local_keys(call.causal, n)
        if n_local >= self.top_k:
            raise Unsupported(
                f"n_local is {self.indexer.n_local}, {n_local} keys of both sides where a call is "
                f"not causal, and top_k {self.top_k}: expected fewer local keys"
            )
        queries = self._index_queries(params, q, position)
        queries, keys = lax.stop_gradient((queries, keys))
        settings = self.top_k, call.causal, call.length or n, call.rng
        impl = choose_impl(self.impl, pallas=self._obstacles(call, q, k, None))
        indexed = Indexed(queries, keys, lax.stop_gradient(self._of_candidates(params)))
        return self.indexer.choose(indexed, segment_ids, *settings, impl, call.shard)

    # Attention.

    def _apply(self, call, params, q, k, v, plan) -> Float[Array, "B T N V"]:
        position = sharding.query_positions(call.shard, q.shape[1])
        index = self._index_queries(params, q, position)
        gathered = k, v, self._index_keys(params, k, position), call.segment_ids
        k, v, index_keys, segment_ids = sharding.of_all(call.shard, gathered)
        ids = ids_or_ones(segment_ids, k)
        if self.indexer.block_size > 1 and not self.reuse:  # a position has the score of its block
            of_blocks, _ = self.indexer.block_keys(index_keys, ids)
            index_keys = jnp.repeat(of_blocks, self.indexer.block_size, axis=1)[:, : k.shape[1]]
        query_ids = sharding.of_shard(call.shard, ids, q.shape[1])
        factor = self._factor(call, query_ids, index_keys.dtype)

        arrays = q, k, v, index, index_keys, factor, plan, ids
        in_arrays, in_kernels = (
            functools.partial(f, call, *arrays) for f in (self._in_arrays, self._in_kernels)
        )
        by_list, n_listed = self.indexer.block_size > 1 or None, plan.shape[2]
        n_bits = self._n_bits(q, k, n_listed, k.shape[1], self._hides_later(call), by_list)
        obstacles = self._obstacles(call, q, k, v, n_bits)
        out = compute_by(self.impl, in_arrays, pallas=(obstacles, in_kernels))
        if self.indexer.learns and not self.reuse:
            indexed = Indexed(index, index_keys, self._of_candidates(params))
            loss = self.indexer.candidates_loss(indexed, segment_ids, call.causal, call.shard)
            out = with_loss(out, self.index_loss * loss)
        if not self.report_loss:
            return out
        measured = self._some_losses(call, q, k, v, index, index_keys, plan, ids)
        return self._reported(call, params, out, *measured)

    def _in_kernels(
        self, call: Call, q, k, v, index, index_keys, factor, plan, ids, interpret: bool
    ) -> Float[Array, "B T N V"]:
        from reformax.ops.kernels.triton import chosen_keys as kernel

        query_ids = sharding.of_shard(call.shard, ids, q.shape[1])
        masks = (None, None) if call.segment_ids is None else (query_ids, ids)
        by_blocks, learner = self.indexer.block_size > 1, None
        if self._learns:
            learnt = in_parts(plan, self.indexer.block_size)[0] if by_blocks else plan
            arrays = kernel.IndexerArrays(*index, index_keys)
            learner = kernel.ChoiceLearner(arrays, factor, learnt)
        if by_blocks:
            return self._blocks_in_kernels(call, q, k, v, learner, plan, masks[1], interpret)
        causal = self._hides_later(call)
        by_list = kernel.reads_lists(plan.shape[2], k.shape[1], q, k, causal)
        group = q.shape[2] // k.shape[2]
        sizes = kernel.listed.ListedSizes(group, call.dropout, call.logits, causal)
        seed = seed_at(call.seed, sharding.first_query(call.shard, q.shape[1]), 0)
        return kernel.attend(sizes, by_list, interpret, q, k, v, learner, plan, *masks, seed)

    def _hides_later(self, call: Call) -> bool:
        """Whether kernels of the attention hide later keys, of queries that begin at position 0.

        Of a shard's queries the plan alone says what they see.
        """
        return call.causal and sharding.axis_of(call.shard) is None

    def _blocks_in_kernels(
        self, call: Call, q, k, v, learner, plan, ids, interpret: bool
    ) -> Float[Array, "B T N V"]:
        """Chosen blocks and a query's own one, as two parts of one softmax."""
        from reformax.ops.kernels.triton import compressed as kernel
        from reformax.ops.kernels.triton.nsa import n_rows

        group, size = q.shape[2] // k.shape[2], self.indexer.block_size
        chosen, own = in_parts(plan, size)
        blocks = chosen[..., ::size] // size
        by_block = group_obstacles(q, k, v).chip is None and group <= MAX_GROUP
        common = dict(group=group, dropout=call.dropout, logits=call.logits)
        sizes = kernel.block_sizes(size, blocks.shape[2], n_rows(q), by_block, **common)
        lists = own, blocks if by_block else chosen
        near, far = (kernel.Part(k, v, ids, x) for x in lists)
        return kernel.attend(sizes, interpret, q, near, far, None, learner, ids, call.seed)[0]

    def _in_arrays(
        self, call: Call, q, k, v, index, index_keys, factor, plan, ids
    ) -> Float[Array, "B T N V"]:
        """The attention and the indexer's loss in array operations."""
        (length, n_heads), n_seen = q.shape[1:3], k.shape[1]
        keys = *repeat_heads(q, k, v), ids, index_keys
        of_keys = KeyReader(call, self.indexer.score, 1, *keys).best_for(plan.shape[2])

        @jax.checkpoint  # the gradient computes the logits again instead of keeping them
        def attend(q, chosen, query_ids, position, *index):
            query = Side(position[..., None], query_ids[..., None])
            x = of_keys(q, chosen, query, IndexQueries(*index))
            return self._attend_to_keys(call, x, position)

        position = sharding.query_positions(call.shard, length)
        query_ids = sharding.of_shard(call.shard, ids, length)
        arrays = q, plan, query_ids, position, *index
        n_each = n_heads + self.n_index_heads + 1
        if gathers(plan.shape[2], n_seen):
            n_seen = plan.shape[2]
            n_each += n_heads * (q.shape[3] + v.shape[3]) + self.d_index
        out, losses = by_chunks(attend, n_each * n_seen, *arrays)
        return with_loss(join_chunks(out, length).astype(v.dtype), factor * losses.sum())

    def _attend_to_keys(
        self, call: Call, x: KeysOfQueries, position
    ) -> tuple[Float[Array, "B Q N V"], Float[Array, "B Q"]]:
        """The output of a chunk of queries, which have a key head each, and their divergences."""
        weights = masked_softmax(x.logits, x.mask[:, None])
        dropped = dropped_factors(
            call, weights.shape[:2], position[:, None, :, None], x.key[:, None]
        )
        dropped = weights if dropped is None else weights * dropped.astype(weights.dtype)
        mean_weights, learnt = lax.stop_gradient(weights).mean(axis=1), x.mask
        if (size := self.indexer.block_size) > 1:  # what is seen in any case has no score
            block = x.key // size
            learnt &= block <= newest_block(position, size)[..., None]
            mean_weights = jnp.where(learnt, mean_weights, 0)
            mean_weights /= nonzero(mean_weights.sum(axis=-1, keepdims=True))
        found = x.scores / math.sqrt(self.n_index_heads * self.d_index)
        out = product(x.axes, dropped, x.values, x.values.dtype)
        return out, divergence(found, mean_weights, learnt)

    def _some_losses(
        self, call: Call, q, k, v, index, index_keys, plan, ids
    ) -> tuple[Float[Array, "C B Q"], Int[Array, "B Q"]]:
        """The divergences of some queries, which are reported, and the queries' ids."""
        length = q.shape[1]
        k, v = repeat_heads(q, k, v)
        position = sharding.query_positions(call.shard, length)
        arrays = sharding.of_shard(call.shard, ids, length), q, plan, position, *index
        query_ids, *some = sharding.spread(call.shard, MEASURED, *lax.stop_gradient(arrays))
        keys = lax.stop_gradient((k, v[..., :1], ids, index_keys))
        reader, call = KeyReader(call, self.indexer.score, 1, *keys), call.but(seed=None)

        def divergence_of(query_ids, q, chosen, position, *index):
            query = Side(position[..., None], query_ids[..., None])
            x = reader.of_chosen(q, chosen, query, IndexQueries(*index))
            return self._attend_to_keys(call, x, position)[1]

        n_each = q.shape[2] * (q.shape[3] + 2) + self.n_index_heads + 2 * self.d_index
        return by_chunks(divergence_of, n_each * plan.shape[2], query_ids, *some), query_ids

    def _init_cache(self, call, params, q, k, v, plan) -> DsaCache:
        memory = fill_ring(k, v, call.lengths, call.length)
        if self.reuse:
            return DsaCache(memory, (), ())
        index = self._index_queries(params, q), self._index_keys(params, k)
        index = Indexed(*index, self._of_candidates(params))
        settings = self.top_k, call.lengths, call.length, call.rng
        none = (len(k), self.indexer.n_chosen(self.top_k, True, call.length))
        none = jnp.full(none, -1, jnp.int32)
        return DsaCache(memory, self.indexer.start(index, *settings), none)

    # Generation reads whole prompts where it can: kernels choose for them.
    reads_ahead = False

    @property
    def divides_cache(self) -> bool:
        return self.reuse or self.indexer.reads_pieces

    def cache_axes(self, cache: DsaCache) -> DsaCache:
        if self.reuse:
            return DsaCache(2, (), ())
        return DsaCache(2, IndexerCache(1, (), ()), None)

    def _read_on(self, call, params, q, k, v, cache: DsaCache):
        if not self.divides_cache:
            return super()._read_on(call, params, q, k, v, cache)
        axis, lengths = sharding.axis_of(call.shard), call.lengths
        memory = add_all_to_ring(cache.memory, k, v, call.position, lengths, axis)
        if self.reuse:
            chosen, cache = call.chosen, DsaCache(memory, (), ())
        else:
            at = call.position[:, None] + positions(q.shape[1])
            new = Indexed(self._index_queries(params, q, at), self._index_keys(params, k, at))
            rows = call.position, lengths
            chosen, index = self.indexer.read_on(cache.index, new, *rows, self.top_k, axis)
            last = jnp.maximum(lengths - 1, 0)[:, None, None]
            newest = jnp.take_along_axis(chosen, last, axis=1)[:, 0]
            newest = jnp.where(lengths[:, None] > 0, newest, cache.chosen)
            cache = DsaCache(memory, index, newest)
        out = attend_to_chosen(call, q, memory, chosen, axis)
        return out, cache, () if self.reuse else chosen

    def _step(self, call, params, q, k, v, cache: DsaCache):
        if call.shard is not None:
            chosen = None if call.chosen is None else call.chosen[:, None]
            call = call.but(lengths=jnp.ones_like(call.position), chosen=chosen)
            return self._read_on(call, params, q, k, v, cache)[:2]
        at = call.position[:, None]
        memory = add_to_ring(cache.memory, k, v, call.position)
        if self.reuse:
            cache = DsaCache(memory, (), ())
            chosen = call.chosen
        else:
            new = self._index_queries(params, q, at), self._index_keys(params, k, at)
            new = Indexed(*new, self._of_candidates(params))
            chosen, index = self.indexer.step(cache.index, new, call.position, self.top_k)
            cache = DsaCache(memory, index, chosen)
        chosen = chosen[:, None]  # [B, 1, K]
        seen = memory.at(jnp.maximum(chosen, 0))
        return attend_to(call, q, *seen, chosen >= 0, self.impl), cache


def _projected_keys(params, k: Float[Array, "B T G H"]) -> Float[Array, "B T D"]:
    k = clipped(k)
    weight = params["key"].astype(k.dtype)
    # The query heads of a key head read the same key.
    weight = weight.reshape(k.shape[2], -1, *weight.shape[1:]).sum(axis=1)
    return jnp.einsum("btgh,ghd->btd", k, weight)


# Decoding. C is the capacity.


class DsaCache(NamedTuple):
    """All positions, the indexer's cache, and what the newest query of each row chose.

    The last two are () where a choice is reused.
    """

    memory: KeyValues
    index: IndexerCache | tuple[()]
    chosen: Int[Array, "B K"] | tuple[()]
