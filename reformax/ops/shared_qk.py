"""Shared-QK attention: keys are the length-normalised queries (Kitaev et al. 2020, sec. 2).

One projection makes queries and keys, so that locality-sensitive hashing can put a query and the
keys it needs into one bucket. A position would then always prefer itself. It therefore attends to
itself only if it sees nothing else.

Keys have the length sqrt(H). Logits, which are divided by sqrt(H) as everywhere, are then products
of queries with vectors of length 1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from reformax.ops.base import AttentionOp, options
from reformax.ops.calls.dispatch import KERNELS, compute_by
from reformax.ops.calls.obstacles import kernel_obstacles
from reformax.ops.decoding.ring import RingDecoding
from reformax.ops.masking.masks import except_self, visibility
from reformax.ops.numerics.normalization import length_normalize
from reformax.ops.softmax import block_kernels
from reformax.ops.softmax.cudnn import cudnn_attention, cudnn_obstacle
from reformax.ops.softmax.reference import reference_attention


@options
class shared_qk(RingDecoding, AttentionOp):
    """Dense attention with shared queries and keys, which LSH attention approximates.

    It takes O(T^2) time.

    Args:
      attend_self_if_alone: whether a position that sees nothing else attends to itself. False makes
        its output zeros.
      impl: `"xla"` runs everywhere, with all T^2 logits in memory. Its gradient computes them
        again. `"cudnn"` is NVIDIA's fused kernel, for causal attention under the conditions of
        `dense.dense`. `"pallas"` is the kernel of flash attention, for NVIDIA GPUs of Ampere or
        later and heads of 256 or less. `"auto"` takes the first of cuDNN, Pallas and XLA that
        computes the call.

    Raises:
      ValueError: an unknown `impl`.
      NotImplementedError: at the call, when an `impl` is asked for what it cannot do.
    """

    attend_self_if_alone: bool = True
    impl: str = "auto"

    shared_qk = True
    shards = ("heads",)
    _takes_lengths = True
    _impls = ("cudnn", *KERNELS)

    def _apply(self, call, params, q, k, v, plan):
        ids, causal = call.segment_ids, call.causal
        obstacle = cudnn_obstacle(call, q, q, v) if causal else "causal=False"

        def in_cudnn() -> Float[Array, "B T N V"]:
            return _to_those_before(q, v, self.attend_self_if_alone, call.lengths)

        def in_kernels(interpret: bool) -> Float[Array, "B T N V"]:
            arrays = q, length_normalize(q), v
            return block_kernels.attend_to_others(
                call, interpret, *arrays, self.attend_self_if_alone
            )

        @jax.checkpoint
        def attend(q, v) -> Float[Array, "B T N V"]:
            mask = visibility(q.shape[1], q.shape[1], causal=causal, segment_ids=ids)
            mask = except_self(mask, self.attend_self_if_alone)
            return reference_attention(q, length_normalize(q), v, mask, call)

        obstacles = kernel_obstacles(q, None, v, call.logits)
        others = dict(pallas=(obstacles, in_kernels), cudnn=(obstacle, in_cudnn))
        return compute_by(self.impl, lambda: attend(q, v), **others)


def _to_those_before(
    q: Float[Array, "B T N H"],
    v: Float[Array, "B T N H"],
    attend_self_if_alone: bool,
    lengths: Int[Array, " B"] | None = None,
) -> Float[Array, "B T N H"]:
    """Attention of each position to those before it; the first position has none.

    It is causal attention with the queries moved by one position. `lengths` are as in
    `cudnn_attention`; the first position of a row without a token is padding, as its caller knows.
    """
    first = v[:, :1] if attend_self_if_alone else jnp.zeros_like(v[:, :1])
    if q.shape[1] == 1:
        return first
    keys = length_normalize(q)
    lengths = None if lengths is None else jnp.maximum(lengths - 1, 0)
    rest = cudnn_attention(q[:, 1:], keys[:, :-1], v[:, :-1], causal=True, lengths=lengths)
    return jnp.concatenate([first, rest], axis=1)
