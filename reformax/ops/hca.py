"""Heavily compressed attention: a window, and a summary of every earlier block of 128 positions.

DeepSeek-AI 2026 ("DeepSeek-V4", sec. 2.3.2). A summary is a gated sum over the positions of its
block (`ops.compressing.summaries`). A query has one softmax over the keys of its window, the
summaries of all complete blocks up to itself, and a learnt sink. Time is
`T^2 / block_size + T window`; memory is linear in T, and a cache holds `T / block_size` summaries.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from reformax.declared import Size, Width
from reformax.ops.base import AttentionOp, options
from reformax.ops.calls.heads import grouped
from reformax.ops.compressing.attention import last_position, merged, to_summaries
from reformax.ops.compressing.op_functions import Compressed
from reformax.ops.masking.masks import ids_or_ones
from reformax.ops.masking.visibility import CAUSAL, Side
from reformax.ops.numerics.query_chunks import by_chunks, join_chunks
from reformax.ops.sharding.queries import query_positions
from reformax.ops.softmax.online import Softmax


@options
class hca(Compressed, AttentionOp):
    """Causal attention to a window and to the summaries of all complete blocks, in one softmax.

    Blocks are at fixed positions of the row. In packed rows a summary is over the segment of its
    block's last position alone, which alone sees it. Segments are contiguous. The paper's model has
    one head of keys, which are values too: `n_kv_heads=1` and `share_kv=True` here, where the
    window still has the layer's keys and values.

    Weights and further projections: see `ops.compressing.op_functions.Compressed`.

    Args:
      block_size: L, m' of the paper: positions of a block.
      window: a position sees those less than `window` positions before it, at least `block_size`.
      learned_sinks: whether each head has a learnt logit in its softmax's denominator, `sinks [N]`
        (`softmax.learned_sinks`).
      share_kv: whether a summary is key and value at once.
      rotary_features: the first features of a head that the op rotates, of queries, of keys at
        their positions and of summaries at the first position of their block; with `share_kv` also
        of values, and of the output by the inverse. Layers with `use_rotary` refuse that. With 0
        the op rotates nothing, and a layer that rotates keys rotates what their summaries are of,
        but not what `share_kv` has.
      rotary_base: of these rotations, see `ops.numerics.rotary.RotaryAngles`.
      impl: `"xla"` runs everywhere, in array operations. `"pallas"` is kernels for NVIDIA GPUs of
        Ampere or later and heads of 128 or less. `"auto"` takes them where they compute the same
        function.

    Raises:
      ValueError: a size out of range, a window shorter than a block, an unknown `impl`.
      NotImplementedError: at the call, when `"pallas"` is asked for what it cannot do.
    """

    block_size: Width = 128
    window: Size = 128

    shards = ("key heads", "queries")

    def _attend_to_summaries(self, call, params, q, summaries, near, plan, plain_q, plain_k):
        length, n_blocks = q.shape[1], summaries.keys.shape[1]
        block = jnp.arange(n_blocks, dtype=jnp.int32)
        keys = Side(last_position(block, self.block_size)[None, None], summaries.ids[:, None])

        @jax.checkpoint  # the gradient computes the logits again instead of keeping them
        def attend(q, ids, position, *near):
            mask = CAUSAL.sees(Side(position[..., None], ids[..., None]), keys)[:, None, None]
            logits = call.logits.of("bqgmh,bcgh->bgmqc", q, summaries.keys)
            arrays = mask, "bgmqc,bcgv->bgmqv", summaries.values, block[None, None, None, None]
            far = to_summaries(call, logits, *arrays, position)
            return merged(call, Softmax(*near), far).output()

        q = grouped(q, summaries.keys.shape[2], 2)
        position = query_positions(call.shard, length)
        arrays = q, ids_or_ones(call.segment_ids, q), position, *near
        n_seen = q.shape[2] * q.shape[3] * (n_blocks + near.acc.shape[-1])
        return join_chunks(by_chunks(attend, n_seen, *arrays), length)

    def _choose_newest(self, call, params, q, k, summaries, index):
        last = last_position(jnp.arange(summaries.keys.shape[2]), self.block_size)
        seen = CAUSAL.sees(Side(call.position[:, None]), Side(last[None]))
        return summaries, seen, index
