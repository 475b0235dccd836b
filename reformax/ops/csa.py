"""Compressed sparse attention: a window, and the best summaries of 4 positions by an indexer.

DeepSeek-AI 2026 ("DeepSeek-V4", sec. 2.3.1). A summary is a gated sum over the positions of its
block and of the block before (`ops.compressing.summaries`). An indexer has summaries of its own,
one small key each, and the score of summary c for position t is

    I_tc = sum_j w_tj ReLU(q_tj . k_c)

A query has one softmax over the keys of its window, the `top_k` best summaries of complete blocks
up to itself, and a learnt sink. As in `ops.dsa`, the choice has no gradient, the indexer reads the
layer's queries and keys, and it learns from the attention alone: by the divergence of its softmax
over the chosen summaries from the mean of all heads' weights of them, in the softmax that has the
window and the sinks too.

Time is `T^2 / block_size` small products, and `T (top_k + window)` for the attention; memory is
`T top_k`. A cache holds `T / block_size` summaries and as many index keys.

Letters besides those of `reformax.ops.base`: J index heads of size D, C summaries, of which a query
sees K, Q queries of a chunk.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from reformax.declared import SettingError, Size, Width
from reformax.ops.base import AttentionOp, options
from reformax.ops.calls.call import Call
from reformax.ops.calls.dims import Dims
from reformax.ops.calls.dispatch import choose_impl
from reformax.ops.calls.heads import grouped
from reformax.ops.calls.obstacles import KernelObstacles
from reformax.ops.compressing.attention import Blocks, Summaries, in_kernels, merged, to_summaries
from reformax.ops.compressing.op_functions import Compressed, CompressedCache
from reformax.ops.compressing.summaries import (
    Series,
    init_weights,
    newest_summary,
    summarize_shards,
)
from reformax.ops.decoding.cache import KeyValues, add_to_ring, fill_ring
from reformax.ops.indexing.blocks import best_blocks, best_of_newest
from reformax.ops.indexing.gathered import KeyReader, KeysOfQueries, gathers
from reformax.ops.indexing.learning import (
    clipped,
    divergence,
    index_queries,
    init_queries,
    no_queries,
)
from reformax.ops.indexing.op_functions import MEASURED, IndexedChoice
from reformax.ops.indexing.scores import IndexQueries
from reformax.ops.masking.masks import ids_or_ones
from reformax.ops.masking.visibility import Side
from reformax.ops.numerics.auxiliary_loss import with_loss
from reformax.ops.numerics.precision import IndexDtype, rounded
from reformax.ops.numerics.query_chunks import by_chunks, in_blocks, join_chunks, positions
from reformax.ops.sharding import queries as sharding
from reformax.ops.softmax.online import Softmax, masked_exp, masked_softmax, nonzero


@options
class csa(IndexedChoice, Compressed, AttentionOp):
    """Causal attention to a window and to the best summaries, the same for all heads.

    Blocks, segments and the heads of the paper's model are as in `hca.hca`. With `top_k` of all
    summaries nothing is chosen.

    Weights and further projections: see `ops.compressing.op_functions.Compressed`; and of the
    indexer as `index`, `query [N, H, J, D]`, `weight [N, H, J]`, to whose products 1 is added,
    `key` and `gate [G, H, 2, D]`, `positions [L, 2, D]` and `norm [D]`.

    Args:
      block_size: L, m of the paper: positions between summaries, each of which is over twice as
        many.
      top_k: K: summaries that a query sees.
      window: a position sees those less than `window` positions before it, at least `block_size`.
      n_index_heads: J; the paper has 64.
      d_index: D: the size of an index head; the paper has 128.
      index_dtype: what index queries and keys are rounded to, as `dtype` of
        `indexing.indexer.Indexer`.
      index_loss: the factor of the indexer's loss, as in `dsa.dsa`.
      report_loss: whether a step of training reports that loss as `index_loss`, as in `dsa.dsa`,
        but in array operations the mean over all positions.
      learned_sinks, share_kv, rotary_base: as in `hca.hca`.
      reuse: whether it sees the summaries of the numbers that the last `csa` without `reuse`, and
        of this `block_size`, before it in the cycle of layers chose. It then has no indexer and no
        loss: leave `top_k` and the options of the indexer and its loss out, or give that layer's.
      rotary_features: as in `hca.hca`; the first features of index heads too.
      impl: as in `hca.hca`, with index heads of 128 or less. Where kernels visit all summaries
        instead of lists, at most 2^36 pairs of a position and a summary take a bit of memory each.

    Raises:
      ValueError: a size out of range, a window shorter than a block, an unknown `impl`.
      NotImplementedError: at the call, when `"pallas"` is asked for what it cannot do.
    """

    block_size: Width = 4
    top_k: Size = 512
    window: Size = 128
    index_dtype: IndexDtype = "float32"

    shards = ("queries",)
    n_series = 2
    _of_choice = "top_k", "n_index_heads", "d_index", "index_dtype", "index_loss"

    def may_reuse(self, other: AttentionOp) -> bool:
        return super().may_reuse(other) and other.block_size == self.block_size

    def newest_choice(self, cache: CompressedCache) -> Int[Array, "B K"] | tuple[()]:
        return () if self.reuse else cache.index.chosen

    def _check(self) -> None:
        super()._check()
        if self.rotary_features > self.d_index and not self.reuse:
            raise SettingError(
                f"rotary_features is {self.rotary_features} and d_index {self.d_index}: expected "
                "at most as many, because the indexer rotates as many"
            )

    def _init(self, rng: PRNGKeyArray, dims: Dims) -> dict[str, Any]:
        """Index keys begin as means of keys by a random matrix, which index queries have too."""
        if self.reuse:
            return super()._init(rng, dims)
        rng, rng_key, rng_weight = jax.random.split(rng, 3)
        n_kv, size = dims.key_heads, (dims.d_qk, self.d_index)
        key = jax.random.normal(rng_key, (n_kv, *size)) / math.sqrt(self.d_index)
        of_queries = jnp.repeat(key, dims.n_heads // n_kv, axis=0)
        index = init_queries(rng_weight, of_queries, self.n_index_heads)
        index |= init_weights(self.block_size, self.n_series, self.d_index)
        both = jnp.repeat(key[:, :, None], self.n_series, axis=2)
        index |= {"key": both, "gate": jnp.zeros_like(both)}
        return super()._init(rng, dims) | self._meter() | {"index": index}

    def _obstacles(
        self, call: Call, q: Array, k: Array, v: Array | None, plan: Array | None = None
    ) -> KernelObstacles:
        """The obstacles of the attention's kernels: where there are none, kernels also choose."""
        n_blocks = -(-k.shape[1] // self.block_size)
        n_listed = min(self.top_k, n_blocks) if plan is None else plan.shape[2]
        above = self._above(self._n_bits(q, k, n_listed, n_blocks))
        return super()._obstacles(call, q, k, v, **above)

    # The choice.

    def _index_series(self, params, k: Float[Array, "B T G H"]) -> Series:
        """The series that the indexer's summaries sum."""
        k = clipped(k)
        each = (params["index"][x].astype(k.dtype) for x in ("key", "gate"))
        return Series(*(jnp.einsum("btgh,ghsd->btsd", k, x) for x in each))

    def _index(self, call, params, q, k, ids) -> tuple[IndexQueries, Float[Array, "B C D"]]:
        """The indexer's queries, and its keys of all summaries, of which `ids` are all segments."""
        if self.reuse:
            none = no_queries(q)
            n_blocks, size = -(-ids.shape[1] // self.block_size), none.queries.shape[3]
            return none, jnp.zeros((len(k), n_blocks, size), none.queries.dtype)
        position = sharding.query_positions(call.shard, q.shape[1])
        queries, series = self._index_queries(params, q, position), self._index_series(params, k)
        return queries, self._index_keys(call, params, series, ids)

    def _index_keys(self, call, params, series: Series, ids) -> Float[Array, "B C D"]:
        keys = summarize_shards(params["index"], series, ids, self.block_size, call.shard)
        return self._scored(keys, positions(keys.shape[1]) * self.block_size)[:, :, 0]

    def _index_queries(self, params, q, position) -> IndexQueries:
        queries, weights = index_queries(params["index"], q)
        return IndexQueries(self._scored(queries, position), weights)

    def _scored(self, x: Float[Array, "B T J D"], position) -> Array:
        """Index queries or keys as they are scored: rotated to their positions, and rounded."""
        return rounded(self._rotated(x, position), self.index_dtype)

    def _plan(self, call, params, q, k) -> Int[Array, "B T K"]:
        """The summaries that each query sees; the kernel returns them in order. -1 is none."""
        self._check_chooses()
        query_ids, length = ids_or_ones(call.segment_ids, q), q.shape[1]
        ids = sharding.of_all(call.shard, query_ids)
        queries, keys = lax.stop_gradient(self._index(call, params, q, k, ids))
        of_blocks = in_blocks(ids, self.block_size)[:, :, -1]
        side = Side(sharding.query_positions(call.shard, length), query_ids)
        sizes = "relu", self.index_dtype, self.block_size, min(self.top_k, keys.shape[1])
        arrays, packed = (queries, keys, side, of_blocks), call.segment_ids is not None
        impl = choose_impl(self.impl, pallas=self._obstacles(call, q, k, None))
        return best_blocks(*sizes, *arrays, impl, packed)

    # Attention.

    def _attend_to_summaries(self, call, params, q, summaries, near, plan, plain_q, plain_k):
        query_ids, length = ids_or_ones(call.segment_ids, q), q.shape[1]
        ids = sharding.of_all(call.shard, query_ids)
        index, index_keys = self._index(call, params, plain_q, plain_k, ids)
        n_seen, n_chosen = index_keys.shape[1], plan.shape[2]
        of_keys = self._reader(call, summaries, index_keys).best_for(n_chosen)

        @jax.checkpoint  # the gradient computes the logits again instead of keeping them
        def attend(q, ids, position, plan, acc, row_max, row_sum, *index):
            x = of_keys(q, plan, Side(position[..., None], ids[..., None]), IndexQueries(*index))
            mask, block = (y[:, None, None] for y in (x.mask, x.key))
            far = to_summaries(call, x.logits, mask, x.axes, x.values, block, position)
            whole = merged(call, Softmax(acc, row_max, row_sum), far)
            return whole.output(), self._divergence(x, far, whole)

        q = grouped(q, summaries.keys.shape[2], 2)
        position = sharding.query_positions(call.shard, length)
        arrays = q, query_ids, position, plan, *near, *index
        n_each = q.shape[2] * q.shape[3] + self.n_index_heads + 1
        if gathers(n_chosen, n_seen):
            n_seen = n_chosen
            n_each += q.shape[2] * (q.shape[-1] + near.acc.shape[-1]) + self.d_index
        out, losses = by_chunks(attend, n_each * n_seen, *arrays)
        loss = self._factor(call, query_ids, losses.dtype) * losses.sum()
        out = with_loss(join_chunks(out, length), loss)
        return self._reported(call, params, out, losses, query_ids) if self.report_loss else out

    def _reader(self, call: Call, summaries: Summaries, index_keys) -> KeyReader:
        return KeyReader(call, "relu", self.block_size, *summaries, index_keys)

    def _in_kernels(
        self, call: Call, params, q, k, v, summaries, plan, plain_q, plain_k, interpret
    ) -> Float[Array, "B T N V"]:
        from reformax.ops.kernels.triton.chosen_keys import ChoiceLearner
        from reformax.ops.kernels.triton.indexer_gradient import IndexerArrays

        ids, learner = ids_or_ones(call.segment_ids, q), None
        index, index_keys = self._index(call, params, plain_q, plain_k, ids)
        if self._learns:
            arrays = IndexerArrays(*index, index_keys)
            learner = ChoiceLearner(arrays, self._factor(call, ids, index_keys.dtype), plan)
        sizes = self.window, Blocks(self.block_size)
        out, *sums = in_kernels(call, interpret, q, k, v, summaries, *sizes, plan, learner)
        if not self.report_loss:
            return out
        measured = self._some_losses(call, q, summaries, index, index_keys, plan, ids, sums)
        return self._reported(call, params, out, *measured)

    def _some_losses(
        self, call: Call, q, summaries, index, index_keys, plan, ids, sums
    ) -> tuple[Float[Array, "C B Q"], Int[Array, "B Q"]]:
        """The divergences of some queries, whose softmax has `sums`, and the queries' ids."""
        n_kv = summaries.keys.shape[2]
        of_rows = (jnp.moveaxis(x, 1, 2).reshape(*q.shape[:2], n_kv, -1) for x in sums)
        arrays = ids, grouped(q, n_kv, 2), plan, positions(q.shape[1]), *index, *of_rows
        query_ids, *some = sharding.spread(call.shard, MEASURED, *lax.stop_gradient(arrays))
        reader = self._reader(call, *lax.stop_gradient((summaries, index_keys)))

        def divergence_of(query_ids, q, chosen, position, vectors, weights, *sums):
            query = Side(position[..., None], query_ids[..., None])
            x = reader.of_chosen(q, chosen, query, IndexQueries(vectors, weights))
            row_max, row_sum = (jnp.moveaxis(y, 1, 3)[..., None] for y in sums)
            weights = masked_exp(x.logits, x.mask[:, None, None], row_max) / nonzero(row_sum)
            return self._divergence_from(x, weights)

        n_each = q.shape[2] * 3 + 2 * n_kv * q.shape[3] + self.n_index_heads + 2 * self.d_index
        return by_chunks(divergence_of, n_each * plan.shape[2], query_ids, *some), query_ids

    def _divergence(self, x: KeysOfQueries, far: Softmax, whole: Softmax):
        """The indexer's divergence of each query, from the heads' weights of the summaries."""
        weights = masked_softmax(x.logits, x.mask[:, None, None])
        share = far.row_sum * jnp.exp(far.row_max - whole.row_max) / nonzero(whole.row_sum)
        share = jnp.moveaxis(share, 1, 3)[..., None]  # of the summaries in each head's softmax
        return self._divergence_from(x, weights * share)

    def _divergence_from(self, x: KeysOfQueries, weights: Float[Array, "B G M Q K"]):
        """`_divergence` from the summaries' weights in each head's whole softmax."""
        attention = lax.stop_gradient(weights).sum(axis=(1, 2))
        attention = attention / nonzero(attention.sum(axis=-1, keepdims=True))
        found = x.scores / math.sqrt(self.n_index_heads * self.d_index)
        return divergence(found, attention, x.mask)

    # Decoding.

    def _index_cache(self, call, params, k, ids) -> CsaIndex | tuple[()]:
        if self.reuse:
            return ()
        series = self._index_series(params, k)
        n_last = min(self.n_series * self.block_size, call.length)
        newest = fill_ring(*series, call.lengths, n_last)
        keys = self._held(call.length)(self._index_keys(call, params, series, ids))
        none = jnp.full((len(k), min(self.top_k, keys.shape[1])), -1, jnp.int32)
        return CsaIndex(newest, keys, none)

    def _choose_newest(self, call, params, q, k, summaries, index: CsaIndex | tuple[()]):
        index = () if self.reuse else self._with_newest(call, params, q, k, index)
        chosen = call.chosen if self.reuse else index.chosen
        return summaries.at(jnp.maximum(chosen, 0)[:, None]), chosen >= 0, index

    def _with_newest(self, call, params, q, k, index: CsaIndex) -> CsaIndex:
        """The index with the newest position, and its query's choice."""
        position, n_blocks = call.position, index.keys.shape[1]
        newest = add_to_ring(index.newest, *self._index_series(params, k), position)
        key = newest_summary(params["index"], newest, position, self.block_size)
        first = (position // self.block_size * self.block_size)[:, None]
        key = self._scored(key[:, None], first)[:, 0, 0]
        number = self._completed(position, n_blocks)
        keys = index.keys.at[jnp.arange(len(position)), number].set(key, mode="drop")
        queries = self._index_queries(params, q, position[:, None])
        sizes = self.block_size, min(self.top_k, n_blocks)
        chosen = best_of_newest("relu", *sizes, queries, keys, position)
        return CsaIndex(newest, keys, chosen)


class CsaIndex(NamedTuple):
    """The last series of the indexer, its keys of all summaries, and the newest query's choice."""

    newest: KeyValues
    keys: Float[Array, "B C D"]
    chosen: Int[Array, "B K"]
