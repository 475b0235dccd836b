"""Attention to every visible key by the kernels that dense and flash attention share."""

from __future__ import annotations

import functools
from collections.abc import Callable

from jaxtyping import Array, Float

from reformax.ops.calls.call import Call
from reformax.ops.calls.dispatch import KernelObstacles, kernel_obstacles
from reformax.ops.softmax import block_kernels
from reformax.ops.softmax.cudnn import cudnn_attention, cudnn_obstacle


def in_kernels(
    call: Call,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S G H"],
    v: Float[Array, "B S G V"],
) -> dict[str, tuple[str | KernelObstacles | None, Callable[..., Float[Array, "B T N V"]]]]:
    """`cudnn` and `pallas` of `dispatch.compute_by`."""

    def in_cudnn() -> Float[Array, "B T N V"]:
        scale, lengths = call.logits.scale, call.lengths
        return cudnn_attention(q, k, v, causal=call.causal, scale=scale, lengths=lengths)

    by_blocks = functools.partial(block_kernels.attend_to_all, call, q=q, k=k, v=v)
    bias_shape = None if call.bias is None else call.bias.shape
    return {
        "cudnn": (cudnn_obstacle(call, q, k, v), in_cudnn),
        "pallas": (kernel_obstacles(q, k, v, call.logits, bias=bias_shape), by_blocks),
    }
