"""Attention to the tiles of a layout in kernels, for all ops that have one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType

import jax.numpy as jnp
from jaxtyping import Array, Float

from reformax.ops.calls.call import Call
from reformax.ops.calls.heads import repeat_heads
from reformax.ops.calls.obstacles import KernelObstacles, kernel_obstacles
from reformax.ops.masking.padding import tokens_only
from reformax.ops.masking.visibility import is_token
from reformax.ops.softmax.block_lists import BlockInputs, FullLayout
from reformax.ops.softmax.cudnn import cudnn_attention, cudnn_obstacle
from reformax.ops.softmax.dropout import dropped_self_values


def kernels() -> ModuleType:
    """The kernels of a layout's attention: `forward`, `backward`, and `attend` with both.

    `attend(layout, interpret, x, sinks=None)` is attention and each row's sum of weights, which has
    no gradient. With `sinks`, gradients of padding's outputs must be zeros.
    """
    from reformax.ops.kernels.triton import block_sparse

    return block_sparse


def of_all_keys(
    call: Call, q: Float[Array, "B T N H"], k: Float[Array, "B S G H"], v: Float[Array, "B S G V"]
) -> dict[str, tuple[str | KernelObstacles | None, Callable[..., Float[Array, "B T N V"]]]]:
    """`cudnn` and `pallas` of `dispatch.compute_by`, of attention to every visible key."""

    def in_cudnn() -> Float[Array, "B T N V"]:
        scale, lengths = call.logits.scale, call.lengths
        return cudnn_attention(q, k, v, causal=call.causal, scale=scale, lengths=lengths)

    by_blocks = functools.partial(attend_to_all, call, q=q, k=k, v=v)
    bias_shape = None if call.bias is None else call.bias.shape
    return {
        "cudnn": (cudnn_obstacle(call, q, k, v), in_cudnn),
        "pallas": (kernel_obstacles(q, k, v, call.logits, bias=bias_shape), by_blocks),
    }


def attend_to_all(
    call: Call,
    interpret: bool,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S G H"],
    v: Float[Array, "B S G V"],
) -> Float[Array, "B T N V"]:
    """Attention to every key that the call's masks leave visible.

    Args:
      call: of the op, without a bias.
    """
    layout = FullLayout(q.shape[1], k.shape[1], call.causal, call.dropout, call.logits)
    x = BlockInputs.of(call, q, *repeat_heads(q, k, v))
    out, ids = kernels().attend(layout, interpret, x, sinks=call.sinks)[0], x.query_segment_ids
    # Its gradient at padding, which may be anything, is not part of that of the sinks.
    return out if call.sinks is None or ids is None else tokens_only(out, ids)


def attend_to_others(
    call: Call,
    interpret: bool,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T N H"],
    v: Float[Array, "B T N V"],
    attend_self_if_alone: bool,
) -> Float[Array, "B T N V"]:
    """`attend_to_all` without each position itself.

    With `attend_self_if_alone`, a token that sees no other has its own value.
    """
    sizes = q.shape[1], q.shape[1]
    layout = FullLayout(*sizes, call.causal, call.dropout, call.logits, exclude_self=True)
    ids = call.segment_ids
    out, row_sum = kernels().attend(layout, interpret, BlockInputs.of(call, q, k, v))
    if not attend_self_if_alone:
        return out
    alone = jnp.swapaxes(row_sum == 0, 1, 2)[..., None]
    if ids is not None:  # padding does not see itself either
        alone = alone & is_token(ids)[..., None, None]
    return jnp.where(alone, dropped_self_values(v, call.dropout, call.seed), out)
