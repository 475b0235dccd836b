"""FlashAttention: exact attention in tiles, without the T x S matrix (Dao et al. 2022).

The forward pass walks through tiles of logits with a running maximum and sum. Of each row it keeps
the output and these two, from which the backward pass computes the logits again (algorithms 1, 2
and 4). The two are separate, because their log-sum-exp would round the sum away where logits
are large. The dropout mask is a function of each weight's address, so it is the same in both passes
and in any tiling.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
from jaxtyping import Array, Float

from reformax.declared import Scale, Size
from reformax.ops.base import AttentionOp, options
from reformax.ops.calls.call import Call
from reformax.ops.calls.dispatch import INTERPRETED, KERNELS, choose_impl, compute_by
from reformax.ops.calls.heads import repeat_heads
from reformax.ops.calls.obstacles import kernel_obstacles
from reformax.ops.decoding.ring import RingDecoding
from reformax.ops.masking.masks import segment_pair
from reformax.ops.masking.padding import attend_to_tokens
from reformax.ops.numerics.logits import Logits
from reformax.ops.softmax import block_kernels, ring, tiles
from reformax.ops.softmax.block_lists import BlockInputs, FullLayout
from reformax.ops.softmax.learned_sinks import LearnedSinks


@options
class flash(LearnedSinks, RingDecoding, AttentionOp):
    """Attention of each query to every visible key, in memory linear in the length.

    Args:
      query_block_size: queries in a tile of `impl="xla"`; None is a size that suits the backend.
      key_block_size: keys in a tile, likewise.
      scale: the factor of the products of queries and keys; None is `1 / sqrt(H)`.
      learned_sinks: whether each head has a learnt logit in its softmax's denominator, `sinks [N]`
        (`softmax.learned_sinks`). cuDNN has none, nor has a sequence in shards.
      impl: `"xla"` runs everywhere, in array operations. `"cudnn"` is NVIDIA's kernel, for float16
        and bfloat16 without bias, dropout and segments, except for padding after rows, with
        `lengths`. `"pallas"` is the kernel of block-sparse attention with every block, for NVIDIA
        GPUs of Ampere or later and heads of 256 or less, without bias and `scale`. It skips tiles
        that segments hide, and masks none within a segment. `"auto"` takes the first of cuDNN,
        Pallas and XLA that computes the call.

    Raises:
      ValueError: a size below 1, a scale out of range, an unknown `impl`.
      NotImplementedError: at the call, when `"cudnn"` or `"pallas"` is asked for what it cannot do.
    """

    query_block_size: Size | None = None
    key_block_size: Size | None = None
    scale: Scale | None = None
    impl: str = "auto"

    cross = True
    bias = True
    _grouped = True
    _hides_padding = True
    _takes_lengths = True
    _impls = ("cudnn", *KERNELS)

    @property
    def shards(self) -> tuple[str, ...]:
        return ("heads",) if self.impl == "cudnn" or self.learned_sinks else ("heads", "sequence")

    def _apply(self, call, params, q, k, v, plan):
        call = self._with_sinks(call, params, q.shape[2])
        block_sizes = self.query_block_size, self.key_block_size
        causal, dropout, shard, seed = call.causal, call.dropout, call.shard, call.seed
        ids = segment_pair(call.segment_ids)
        if shard is not None and shard.axis is not None:
            obstacles = kernel_obstacles(q, k, v, call.logits)
            impl = choose_impl(self.impl, pallas=obstacles)
            pieces = _FlashPieces(block_sizes, call.logits, dropout, impl)
            return ring.attend(pieces, causal, q, k, v, ids, shard.axis, seed)

        def in_arrays() -> Float[Array, "B T N V"]:
            arrays = q, *repeat_heads(q, k, v)
            tiling = _tiling(block_sizes, call, q, k)
            every = tiles.every_tile(tiling, q.shape[1], k.shape[1])

            def attend(q, k, v):
                x = tiles.inputs(call, q, k, v)
                return tiles.attend(tiles.forward, tiling, x, every)

            return attend_to_tokens(attend, *arrays, call.segment_ids)

        return compute_by(self.impl, in_arrays, **block_kernels.of_all_keys(call, q, k, v))


def _tiling(block_sizes, call: Call, q, k) -> tiles.Tiling:
    return tiles.tiling_of(call, q, k, *(size or default_block_size(q) for size in block_sizes))


class _FlashPieces(NamedTuple):
    """Attention of some queries to some keys, as `ring.PartialAttention` says."""

    block_sizes: tuple[int | None, int | None]
    logits: Logits
    dropout: float
    impl: str

    def forward(self, causal, q, k, v, segment_ids, seed):
        x = BlockInputs(q, *repeat_heads(q, k, v), *segment_ids, seed)
        if self.impl != "xla":
            kernels, layout = block_kernels.kernels(), self._layout(causal, x)
            return kernels.forward(layout, x, interpret=self.impl == INTERPRETED)
        tiling, every = self._tiles(causal, x)
        return tuple(tiles.forward(tiling, x, every.by_query))

    def backward(self, causal, q, k, v, segment_ids, seed, results, d_out):
        (k, v), of_groups = jax.vjp(lambda k, v: repeat_heads(q, k, v), k, v)
        x = BlockInputs(q, k, v, *segment_ids, seed)
        if self.impl != "xla":
            kernels, layout = block_kernels.kernels(), self._layout(causal, x)
            interpret = self.impl == INTERPRETED
            dq, *of_keys = kernels.backward(layout, x, results, d_out, interpret=interpret)
        else:
            tiling, every = self._tiles(causal, x)
            found = tiles.backward(tiling, x, every.by_key, tiles.TiledResults(*results), d_out)
            dq, *of_keys = found[:3]
        return dq, *of_groups(tuple(of_keys))

    def _layout(self, causal: bool, x: BlockInputs) -> FullLayout:
        return FullLayout(x.q.shape[1], x.k.shape[1], causal, self.dropout, self.logits)

    def _tiles(self, causal: bool, x: BlockInputs) -> tuple[tiles.Tiling, tiles.TilePlan]:
        call = Call(causal=causal, logits=self.logits, dropout=self.dropout)
        tiling = _tiling(self.block_sizes, call, x.q, x.k)
        return tiling, tiles.every_tile(tiling, x.q.shape[1], x.k.shape[1])


def default_block_size(q: Float[Array, "B T N H"]) -> int:
    """The number of queries, and of keys, in a tile.

    A CPU's tile fits its cache. A GPU's tile, of all heads, is large enough to pay for the start of
    its kernels, and small enough that tiles take no more memory than the inputs.
    """
    n_batch, length, n_heads, _ = q.shape
    if jax.default_backend() == "cpu":
        size = min(max(length // 8, 128), 512)
    else:
        size = min(math.isqrt(tiles.LOGITS_AT_A_TIME // (n_batch * n_heads)), length // 32)
        size = min(max(size, 256), 2048)
    return 2 ** size.bit_length() // 2
