"""Attention to the tiles of a layout in kernels, for all ops that have one."""

from __future__ import annotations

from types import ModuleType

import jax.numpy as jnp
from jaxtyping import Array, Float

from reformax.ops.calls.call import Call
from reformax.ops.calls.heads import repeat_heads
from reformax.ops.masking.masks import segment_pair
from reformax.ops.masking.padding import tokens_only
from reformax.ops.masking.visibility import is_token
from reformax.ops.softmax.block_lists import BlockInputs, FullLayout
from reformax.ops.softmax.dropout import dropped_self_values


def kernels() -> ModuleType:
    """The kernels of a layout's attention: `forward`, `backward`, and `attend` with both.

    `attend(layout, interpret, x, sinks=None)` is attention and each row's sum of weights, which has
    no gradient. With `sinks`, gradients of padding's outputs must be zeros.
    """
    from reformax.ops.kernels.triton import block_sparse

    return block_sparse


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
    ids = segment_pair(call.segment_ids)
    x = BlockInputs(q, *repeat_heads(q, k, v), *ids, call.seed)
    out = kernels().attend(layout, interpret, x, sinks=call.sinks)[0]
    # Its gradient at padding, which may be anything, is not part of that of the sinks.
    return out if call.sinks is None or ids[0] is None else tokens_only(out, ids[0])


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
    x = BlockInputs(q, k, v, *segment_pair(ids), call.seed)
    out, row_sum = kernels().attend(layout, interpret, x)
    if not attend_self_if_alone:
        return out
    alone = jnp.swapaxes(row_sum == 0, 1, 2)[..., None]
    if ids is not None:  # padding does not see itself either
        alone = alone & is_token(ids)[..., None, None]
    return jnp.where(alone, dropped_self_values(v, call.dropout, call.seed), out)
