"""One softmax over keys of several kinds, such as those of a window and global ones.

Queries lie in blocks. Letters besides those of `reformax.ops.base`: C blocks of L queries, M keys
of a kind.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from reformax.ops.calls.call import Call
from reformax.ops.softmax.dropout import dropped_factors
from reformax.ops.softmax.online import Softmax, softmax_over


class FarKeys(NamedTuple):
    """Keys that are at no position of the sequence, and which of them exist.

    Dropout is drawn by their numbers (`dropout.far_address`).
    """

    keys: Float[Array, "B G N H"]
    values: Float[Array, "B G N V"]
    exists: Bool[Array, "B G"]


class KeysOfKind(NamedTuple):
    """The keys of one kind: their logits, values and mask for each block of queries."""

    logits: Float[Array, "B N C L M"]
    values: Float[Array, "B _ M N V"]  # for each block, or for all of them
    mask: Bool[Array, "#B #N C L M"]
    address: Int[Array, "#B _ M"]  # by which dropout is drawn


def attend_to_kinds(
    call: Call, kinds: Sequence[KeysOfKind], query: Int[Array, "#B C L"], heads: Int[Array, " N"]
) -> Float[Array, "B C L N V"]:
    """Attention to the keys of all kinds, in one softmax.

    Args:
      call: of the op, which says what is dropped.
      kinds: the keys.
      query: the position of each query.
      heads: the index of each head.
    """

    def of_kind(each: KeysOfKind) -> Softmax:
        of_weights = query[:, None, ..., None], each.address[:, None, :, None]
        dropped = dropped_factors(call, each.logits.shape[:2], *of_weights, heads)
        values = each.values
        axes = "bnclm,bcmnv->bnclv"
        if values.shape[1] == 1:  # one product for all blocks
            axes, values = "bnclm,bmnv->bnclv", values[:, 0]
        return softmax_over(each.logits, each.mask, axes, values, dropped)

    return jnp.moveaxis(functools.reduce(Softmax.merge, map(of_kind, kinds)).output(), 1, 3)
