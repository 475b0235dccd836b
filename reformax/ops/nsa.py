"""Native sparse attention: summaries of all blocks, the best blocks themselves, and a window.

Yuan et al. 2025 ("Native Sparse Attention: Hardware-Aligned and Natively Trainable Sparse
Attention"). A query attends in three branches, and gates weight their outputs (eq. 5):

    out_t = g_cmp Attn(q_t, K_cmp, V_cmp) + g_slc Attn(q_t, K_slc, V_slc) + g_win Attn(q_t, ...)

In the compressed branch, a key summarizes `compress_len` positions, and summaries start
`compress_stride` positions apart (eq. 7). The weights of this branch are the scores of blocks: a
block's score is the sum of the weights of the summaries that overlap it, once for each stride in
common (eq. 9), and over the query heads of a key head, which therefore read the same keys (eq. 10).
The selected branch attends to the positions of the best blocks (eq. 11-12), the third to a sliding
window (sec. 3.3.3).

Time is T^2 / compress_stride for the summaries and T (n_selected block_size + window) for the other
branches; memory is linear in T.

Letters besides those of `reformax.ops.base`: C summaries, J blocks of L positions, K blocks that a
query selects, M query heads of a key head, Q queries of a chunk, P positions of a summary.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from reformax.declared import Called, SettingError, Size, Width, check
from reformax.ops import local
from reformax.ops.base import AttentionOp, options
from reformax.ops.calls.call import Call
from reformax.ops.calls.dims import Dims, Projection
from reformax.ops.calls.dispatch import KERNELS, compute_by
from reformax.ops.calls.heads import grouped
from reformax.ops.calls.obstacles import MAX_GROUP, KernelObstacles, group_obstacles
from reformax.ops.compressing.overlapping import OverlappingSummaries, SummarySizes, init_weights
from reformax.ops.decoding.cache import KeyValues, add_to_ring, attend_to, fill_ring, seen_in_ring
from reformax.ops.masking.contiguous import first_of_segment
from reformax.ops.masking.masks import ids_or_ones, tokens_before
from reformax.ops.masking.padding import tokens_only
from reformax.ops.masking.visibility import CAUSAL, Side, Visibility
from reformax.ops.numerics.best import FIRST_BLOCK, OWN_BLOCK, PREVIOUS_BLOCK, best_of
from reformax.ops.numerics.precision import accum_dtype
from reformax.ops.numerics.query_chunks import (
    by_chunks,
    in_blocks,
    join_chunks,
    positions,
    positions_in,
)
from reformax.ops.softmax.dropout import dropped_factors
from reformax.ops.softmax.gathered import gather_rows
from reformax.ops.softmax.online import masked_softmax, softmax_over

# The largest sizes that the tiles of the kernels hold.
KERNELS_HOLD = {"heads_of_a_key_head": MAX_GROUP, "summaries_of_a_block": 64, "blocks": 2**15}


@options
class nsa(AttentionOp):
    """Causal attention to summaries, to the best blocks and to a window, in a gated sum.

    Summaries and blocks are at fixed positions of the row. In packed rows, no query sees a summary
    of several segments. A query selects from the blocks between the first token of its segment and
    itself. It always selects the block that it is in, the one before, and the segment's first one
    (sec. 4.1). The selected branch is dense attention where `n_selected` is at least the number of
    blocks.

    Weights, shared by all heads, and only with `compression="mlp"`: for keys and for values,
    `positions [P, H]`, `hidden [P, H, H]` and `out [H, H]`. Further projections: `gate [N, 3]`, of
    the compressed, the selected and the window's branch, through a sigmoid; with `independent_kv`
    also `selected_k`, `selected_v`, `window_k` and `window_v`, for the heads of keys.

    Args:
      compress_len: P, l of the paper: positions of a summary; 32 in sec. 4.1.
      compress_stride: d: positions between the starts of summaries; 16.
      block_size: L, l': positions of a block; 64.
      n_selected: K, n: blocks that a query selects, including those that it always selects; 16.
      window: w: a position sees those less than `window` positions before it; 512.
      compression: how a summary is computed. `"mean"` is the mean of its positions. `"mlp"` adds
        the output of a hidden layer over all features of the positions and their learnt embedding
        within the summary (sec. 3.3.1). With the mean, queries find blocks from the first step on.
      independent_kv: whether the selected branch and the window have separate projections of keys
        and values, as in sec. 3.3.3; if not, all branches read the same.
      impl: `"xla"` runs everywhere. `"pallas"` has kernels for NVIDIA GPUs of Ampere or later and
        heads of 128 or less. `"auto"` takes them where they compute the same function, and for the
        window what `local.local` takes.

    Raises:
      ValueError: a size out of range, or no multiple of `compress_stride`; an unknown `impl`.
      NotImplementedError: at the call, when `"pallas"` is asked for what it cannot do.
    """

    compress_len: Size = 32
    compress_stride: Width = 16
    block_size: Size = 64
    n_selected: Size = 16
    window: Size = 512
    compression: Annotated[str, Called("'mlp' or 'mean'")] = "mlp"
    independent_kv: bool = True
    impl: str = "auto"

    causality = "only"
    shards = ("key heads",)
    _grouped = True
    _impls = KERNELS

    def _check(self) -> None:
        names = "mlp", "mean"
        if self.compression not in names:
            raise SettingError(
                f"compression is {self.compression!r}: expected {' or '.join(map(repr, names))}"
            )
        if self.compression == "mlp":
            check("compress_len", self.compress_len, Width)
        for name in ("compress_len", "block_size"):
            if getattr(self, name) % self.compress_stride:
                raise SettingError(
                    f"{name} is {getattr(self, name)}: expected a multiple of compress_stride, "
                    f"{self.compress_stride}"
                )

    def _obstacles(self, call: Call, q: Array, k: Array, v: Array | None) -> KernelObstacles:
        """The obstacles of the kernels of the compressed and the selected branch."""
        shape = {
            "heads_of_a_key_head": q.shape[2] // k.shape[2],
            "summaries_of_a_block": self.block_size // self.compress_stride,
            "blocks": -(-q.shape[1] // self.block_size),
        }
        above = {name: n for name, n in shape.items() if n > KERNELS_HOLD[name]}
        return group_obstacles(q, k, v, call.logits, **above)

    def _within(self, length: int) -> nsa:
        """The op with sizes up to `length` that compute the same function."""
        stride = self.compress_stride
        block_size = min(self.block_size, -(-length // stride) * stride)
        span = self.compress_len
        if self.compression == "mean":  # the weights of "mlp" have the length of a summary
            span = min(span, (length // stride + 1) * stride)  # no summary is complete either
        return dataclasses.replace(self, compress_len=span, block_size=block_size)

    @property
    def _summaries(self) -> SummarySizes:
        return SummarySizes(self.compress_len, self.compress_stride)

    def extra_projections(self, dims: Dims) -> dict[str, Projection]:
        gate = {"gate": Projection(dims.n_heads, 3)}
        if not self.independent_kv:
            return gate
        keys = Projection(dims.key_heads, dims.d_qk, "key")
        values = Projection(dims.key_heads, dims.d_v)
        return gate | {
            f"{branch}_{name}": what
            for branch in ("selected", "window")
            for name, what in (("k", keys), ("v", values))
        }

    def _init(self, rng: PRNGKeyArray, dims: Dims) -> Any:
        if self.compression == "mean":
            return ()
        rngs = zip("kv", jax.random.split(rng), (dims.d_qk, dims.d_v), strict=True)
        return {name: init_weights(rng, self.compress_len, size) for name, rng, size in rngs}

    # Which blocks are selected.

    def _block_scores(self, weights: Float[Array, "*d C"], n_blocks: int) -> Float[Array, "*d J"]:
        """The score of each block, by the weights of summaries (eq. 9)."""
        stride = self.compress_stride
        per_summary, per_block = self.compress_len // stride, self.block_size // stride
        none = [(0, 0)] * (weights.ndim - 1)
        # The score of a stride is the sum of the weights of the summaries that contain it.
        n_strides = max(n_blocks * per_block, weights.shape[-1])
        at_strides = 0
        for i in range(per_summary):
            n_after = max(n_strides - weights.shape[-1] - i, 0)
            at_strides += jnp.pad(weights, [*none, (i, n_after)])[..., :n_strides]
        at_strides = at_strides[..., : n_blocks * per_block]
        return at_strides.reshape(*weights.shape[:-1], n_blocks, per_block).sum(axis=-1)

    def _best_blocks(
        self, scores: Float[Array, "*d J"], query_block: Int[Array, "*#d"], first: Int[Array, "*#d"]
    ) -> Int[Array, "*d K"]:
        """The blocks with the highest scores from `first` to `query_block`; -1 is none.

        The query's block comes first.
        """
        block = jnp.arange(scores.shape[-1], dtype=jnp.int32)
        block = block.reshape(*[1] * (scores.ndim - 1), -1)
        query_block, first = query_block[..., None], first[..., None]
        scores = jnp.where(block == query_block - 1, PREVIOUS_BLOCK, scores)
        scores = jnp.where(block == first, FIRST_BLOCK, scores)
        scores = jnp.where(block == query_block, OWN_BLOCK, scores)
        allowed = (block >= first) & (block <= query_block)
        return best_of(scores, allowed, min(self.n_selected, scores.shape[-1]))

    def _plan(self, call, params, q, k) -> Int[Array, "B G T K"]:
        """The blocks that each query selects."""
        segment_ids = call.segment_ids
        q, k, params = lax.stop_gradient((q, k, params))
        length = q.shape[1]
        fitted = self._within(length)
        ids = ids_or_ones(segment_ids, q)
        q, k = tokens_only(q, ids), tokens_only(k, ids)
        weights = dict(params).get("k")
        # The scores do not depend on values.
        both = {"k": weights, "v": weights}
        summaries = fitted._summaries.of(both, k, k[..., :1, :], ids)
        first_position = jnp.zeros_like(ids) if segment_ids is None else first_of_segment(ids)

        def in_kernels(interpret: bool) -> Int[Array, "B G T K"]:
            from reformax.ops.kernels.triton import nsa_selection as kernel

            first_block = first_position // fitted.block_size
            masks = () if segment_ids is None else (ids, summaries.ids, first_block)
            n_best = min(fitted.n_selected, -(-length // fitted.block_size))
            sizes = fitted.block_size, fitted.compress_stride, fitted.compress_len
            sizes = kernel.SelectionSizes(n_best, *sizes, q.shape[2] // k.shape[2], call.logits)
            return kernel.select(sizes, interpret, q, summaries.keys, *masks)

        def in_arrays() -> Int[Array, "B G T K"]:
            return fitted._select_in_arrays(call, q, summaries, ids, first_position)

        obstacles = fitted._obstacles(call, q, k, None)
        return compute_by(self.impl, in_arrays, pallas=(obstacles, in_kernels))

    def _select_in_arrays(
        self,
        call: Call,
        q,
        summaries: OverlappingSummaries,
        ids: Int[Array, "B T"],
        first_position: Int[Array, "B T"],
    ) -> Int[Array, "B G T K"]:
        """`_plan` in array operations, in chunks of queries."""
        length, n_kv = ids.shape[1], summaries.keys.shape[2]
        n_blocks = -(-length // self.block_size)

        def select(q, ids, position, first_position):  # [B, Q, G, M, H], [B, Q], [1, Q], [B, Q]
            mask = summaries.seen(ids, position)
            logits = call.logits.of("bqgmh,bcgh->bgmqc", q, summaries.keys)
            weights = masked_softmax(logits, mask[:, None, None]).sum(axis=2)
            scores = self._block_scores(weights, n_blocks)
            blocks = (x // self.block_size for x in (position, first_position))
            return self._best_blocks(scores, *(x[:, None] for x in blocks))

        n_seen = summaries.keys.shape[1] * q.shape[2]
        q = grouped(q, n_kv, 2)
        chosen = by_chunks(select, n_seen, q, ids, positions(length), first_position)
        return join_chunks(chosen, length, axis=2)

    # Attention.

    def _apply(self, call, params, q, k, v, plan) -> Float[Array, "B T N V"]:
        fitted, gates = self._within(q.shape[1]), call.extra_projections
        summaries = fitted._summaries.of(params, k, v, ids_or_ones(call.segment_ids, q))
        selected, window = fitted._branch_projections(k, v, gates)
        window_call = call.but(causal=True, extra_projections=None)
        sizes = dict(chunk_len=self.window, n_chunks_before=1, window=self.window)
        in_window = local.local(**sizes, impl=self.impl).attend(window_call, (), q, *window)
        arrays = summaries, q, *selected, plan
        in_arrays = functools.partial(fitted._in_arrays, call, *arrays)
        in_kernels = functools.partial(fitted._in_kernels, call, *arrays)
        obstacles = fitted._obstacles(call, q, k, v)
        others = compute_by(self.impl, in_arrays, pallas=(obstacles, in_kernels))
        return _gated((*others, in_window), gates["gate"]).astype(v.dtype)

    def _branch_projections(self, k, v, extra_projections) -> tuple[KeyValues, KeyValues]:
        """Keys and values of the selected branch and of the window."""
        if not self.independent_kv:
            return KeyValues(k, v), KeyValues(k, v)
        return tuple(
            KeyValues(extra_projections[f"{branch}_k"], extra_projections[f"{branch}_v"])
            for branch in ("selected", "window")
        )

    def _in_arrays(
        self, call: Call, summaries: OverlappingSummaries, q, k, v, plan
    ) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N V"]]:
        """The compressed and the selected branch in array operations, in chunks of queries."""
        n_batch, length, n_heads, _ = q.shape
        n_kv, size = k.shape[2], self.block_size
        ids = ids_or_ones(call.segment_ids, q)
        blocks = k, v, ids[:, :, None]
        blocks = [jnp.moveaxis(in_blocks(x, size), 3, 1) for x in blocks]  # [B, G or 1, J, L, ...]
        rows = n_batch, n_kv, n_heads // n_kv

        @jax.checkpoint  # the gradient computes the logits again instead of keeping them
        def attend(q, ids, position, chosen):  # [B, Q, G, M, H], [B, Q], [1, Q], [B, Q, G, K]
            query = position[:, None, None, :, None]
            mask = summaries.seen(ids, position)
            compressed = softmax_over(
                call.logits.of("bqgmh,bcgh->bgmqc", q, summaries.keys),
                mask[:, None, None],
                "bgmqc,bcgv->bgmqv",
                summaries.values,
                dropped_factors(call, rows, query, summaries.last[None, None, None]),
            )
            chosen = jnp.swapaxes(chosen, 1, 2)  # [B, G, Q, K]
            block = jnp.maximum(chosen, 0)
            keys, values, key_ids = (_blocks_at(x, block) for x in blocks)  # [B, G, Q, K L, ...]
            key = positions_in(chosen, size)
            of_query = Side(position[:, None, :, None], ids[:, None, :, None])
            mask = CAUSAL.sees(of_query, Side(key, key_ids, exists=key >= 0))
            selected = softmax_over(
                call.logits.of("bqgmh,bgqkh->bgmqk", q, keys),
                mask[:, :, None],
                "bgmqk,bgqkv->bgmqv",
                values,
                dropped_factors(call, rows, query, key[:, :, None]),
            )
            return tuple(jnp.moveaxis(x.output(), 3, 1) for x in (compressed, selected))

        n_keys = min(self.n_selected * size, length + size)
        n_seen = n_heads * (summaries.keys.shape[1] + n_keys) + n_kv * n_keys * (
            k.shape[3] + v.shape[3]
        )
        arrays = grouped(q, n_kv, 2), ids, positions(length), jnp.swapaxes(plan, 1, 2)
        branches = by_chunks(attend, n_seen, *arrays)
        return tuple(join_chunks(x, length).reshape(*q.shape[:3], v.shape[3]) for x in branches)

    def _in_kernels(
        self, call: Call, summaries: OverlappingSummaries, q, k, v, plan, interpret: bool
    ) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N V"]]:
        """The compressed and the selected branch in kernels."""
        from reformax.ops.kernels.triton import nsa as kernel
        from reformax.ops.kernels.triton.group_rows import GroupInputs

        group, size = q.shape[2] // k.shape[2], min(self.block_size, q.shape[1])
        common = group, call.dropout, kernel.n_rows(q), call.logits
        ids = call.segment_ids
        sizes = dict(stride=self.compress_stride, span=self.compress_len)
        sizes = kernel.NsaSizes(*common, **sizes)
        summary_ids = None if ids is None else summaries.ids
        x = GroupInputs(q, *summaries[:2], ids, summary_ids, call.seed)
        compressed = kernel.attend(sizes, interpret, x)
        sizes = kernel.NsaSizes(*common, block=size, n_selected=plan.shape[3])
        x = GroupInputs(q, k, v, ids, ids, call.seed, plan)
        return compressed, kernel.attend(sizes, interpret, x)

    def _init_cache(self, call, params, q, k, v, plan) -> NsaCache:
        lengths, capacity = call.lengths, call.length
        fitted = self._within(capacity)
        selected, window = fitted._branch_projections(k, v, call.extra_projections)
        exists = tokens_before(lengths, k.shape[1]).astype(jnp.int32)
        real = tokens_only(k, exists), tokens_only(v, exists)
        summaries = fitted._summaries.of(params, *real, exists)
        n = fitted._summaries.n(capacity)

        def padded(x):
            x = jnp.swapaxes(x, 1, 2)[:, :, :n]
            return jnp.pad(x, ((0, 0), (0, 0), (0, n - x.shape[2]), (0, 0)))

        return NsaCache(
            fill_ring(*selected, lengths, capacity),
            fill_ring(*window, lengths, min(fitted.window, capacity)),
            fill_ring(k, v, lengths, min(fitted.compress_len, capacity)),
            KeyValues(padded(summaries.keys), padded(summaries.values)),
        )

    def _step(self, call, params, q, k, v, cache: NsaCache):
        position, gates = call.position, call.extra_projections
        fitted = self._within(cache.selected.keys.shape[2])
        new_selected, new_window = fitted._branch_projections(k, v, gates)
        memory = add_to_ring(cache.selected, *new_selected, position)
        window = add_to_ring(cache.window, *new_window, position)
        newest = add_to_ring(cache.newest, k, v, position)
        summaries = fitted._summaries.with_newest(params, cache.summaries, newest, position)
        last = fitted._summaries.last(summaries.keys.shape[2])
        seen = CAUSAL.sees(Side(position[:, None]), Side(last))[:, None]
        near = Visibility(causal=True, window=fitted.window)
        window_mask = seen_in_ring(near, window, position)[:, None]
        key = fitted._selected_positions(call, q, summaries.keys, seen, memory.keys.shape[2])
        mask = CAUSAL.sees(Side(position[:, None, None]), Side(key, exists=key >= 0))
        chosen = memory.at(jnp.clip(key, 0, memory.keys.shape[2] - 1))
        mask = jnp.repeat(mask, q.shape[2] // memory.keys.shape[1], axis=1)
        branches = [
            attend_to(call, q, *keys_and_values, mask, fitted.impl)
            for keys_and_values, mask in ((summaries, seen), (chosen, mask), (window, window_mask))
        ]
        out = _gated(branches, gates["gate"]).astype(v.dtype)
        return out, NsaCache(memory, window, newest, summaries)

    def _selected_positions(
        self, call: Call, q, summaries: Float[Array, "B G C H"], seen, capacity: int
    ) -> Int[Array, "B G K*L"]:
        """The positions of the blocks that the newest query selects."""
        heads = grouped(q[:, 0], summaries.shape[1], 1)
        logits = call.logits.of("bgmh,bgch->bgmc", heads, summaries)
        weights = masked_softmax(logits, seen[:, None]).sum(axis=2)
        scores = self._block_scores(weights, -(-capacity // self.block_size))
        query_block = (call.position // self.block_size)[:, None]
        blocks = self._best_blocks(scores, query_block, jnp.zeros_like(query_block))
        return positions_in(blocks, self.block_size)


def _gated(branches, gate: Float[Array, "B T N 3"]) -> Float[Array, "B T N V"]:
    """The branches' outputs, each times its gate (eq. 5)."""
    dtype = accum_dtype(*(x.dtype for x in branches))
    gates = jax.nn.sigmoid(gate.astype(dtype))
    return sum(x.astype(dtype) * gates[..., i, None] for i, x in enumerate(branches))


def _blocks_at(x: Array, block: Int[Array, "B G Q K"]) -> Array:
    """Gathers blocks of `[B, G or 1, J, L, ...]`, concatenated: `[B, G, Q, K L, ...]`."""
    x = gather_rows(x, block)
    return x.reshape(*x.shape[:3], -1, *x.shape[5:])


# Decoding


class NsaCache(NamedTuple):
    """The branches' keys and values."""

    selected: KeyValues  # all positions, of the selected branch
    window: KeyValues  # the last positions, of the window
    newest: KeyValues  # the last positions, from which the next summary is computed
    summaries: KeyValues  # the summaries so far
