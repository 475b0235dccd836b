"""Dense softmax attention: every visible key, O(T * S) time (Vaswani et al. 2017, eq. 1)."""

from __future__ import annotations

import functools

import jax
from jaxtyping import Array, Float

from reformax.ops.base import AttentionOp, options
from reformax.ops.calls.dispatch import KERNELS, compute_by
from reformax.ops.calls.heads import repeat_heads
from reformax.ops.decoding.ring import RingDecoding
from reformax.ops.masking.masks import visibility
from reformax.ops.masking.padding import attend_to_tokens
from reformax.ops.softmax import block_kernels
from reformax.ops.softmax.learned_sinks import LearnedSinks
from reformax.ops.softmax.reference import reference_attention


@options
class dense(LearnedSinks, RingDecoding, AttentionOp):
    """Attention of each query to every visible key.

    Args:
      learned_sinks: whether each head has a learnt logit in its softmax's denominator, `sinks [N]`
        (`softmax.learned_sinks`). cuDNN has none.
      impl: `"xla"` runs everywhere. Its gradient computes the logits again, so that no T x S array
        is kept between the passes. `"cudnn"` is NVIDIA's fused kernel, for float16 and bfloat16
        without bias, dropout and segments, except for padding after rows, with `lengths`.
        `"pallas"` is the kernel of `flash.flash`, for what cuDNN lacks besides a bias. `"auto"`
        takes the first of cuDNN, Pallas and XLA that computes the call.

    Raises:
      ValueError: an unknown `impl`.
      NotImplementedError: at the call, when `"cudnn"` or `"pallas"` is asked for what it cannot do.
    """

    impl: str = "auto"

    cross = True
    bias = True
    shards = ("heads",)
    _grouped = True
    _hides_padding = True
    _takes_lengths = True
    _impls = ("cudnn", *KERNELS)

    def _apply(self, call, params, q, k, v, plan):
        call = self._with_sinks(call, params, q.shape[2])

        @jax.checkpoint
        def attend(bias, q, k, v) -> Float[Array, "B T N V"]:
            ids = call.segment_ids
            mask = visibility(q.shape[1], k.shape[1], causal=call.causal, segment_ids=ids)
            return reference_attention(q, k, v, mask, call.but(bias=bias))

        def in_arrays() -> Float[Array, "B T N V"]:
            arrays = q, *repeat_heads(q, k, v)
            return attend_to_tokens(functools.partial(attend, call.bias), *arrays, call.segment_ids)

        return compute_by(self.impl, in_arrays, **block_kernels.of_all_keys(call, q, k, v))
