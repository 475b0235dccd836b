"""One softmax over keys of several kinds, such as those of a window and global ones.

Queries lie in blocks. Letters besides those of `reformax.ops.base`: C blocks of L queries, M keys
of a kind.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from reformax.ops.numerics.precision import product
from reformax.ops.softmax.dropout import dropout_mask
from reformax.ops.softmax.online import largest, masked_exp, nonzero


class KeysOfKind(NamedTuple):
    """The keys of one kind: their logits, values and mask for each block of queries."""

    logits: Float[Array, "B N C L M"]
    values: Float[Array, "B _ M N V"]  # for each block, or for all of them
    mask: Bool[Array, "#B #N C L M"]
    address: Int[Array, "#B _ M"]  # by which dropout is drawn


def attend_to_kinds(
    kinds: Sequence[KeysOfKind],
    query: Int[Array, "#B C L"],
    dropout: float,
    seed: Int[Array, 6] | None,
    heads: Int[Array, " N"],
) -> Float[Array, "B C L N V"]:
    """Attention to the keys of all kinds, in one softmax.

    Args:
      kinds: the keys.
      query: the position of each query.
      dropout: the rate at which weights are dropped.
      seed: `seed_words` of dropout.
      heads: the index of each head.
    """
    n_batch = len(kinds[0].logits)
    row_max = functools.reduce(jnp.maximum, [largest(x.logits, x.mask, axis=-1) for x in kinds])
    weights = [masked_exp(x.logits, x.mask, row_max) for x in kinds]
    row_sum = nonzero(sum(x.sum(axis=-1, keepdims=True) for x in weights))
    out = 0
    for each, weight in zip(kinds, weights, strict=True):
        # The gradient of a hidden weight is a product with a hidden value, which may overflow.
        weight = jnp.where(each.mask, weight / row_sum, 0)
        if dropout:
            example = jnp.arange(n_batch).reshape(-1, 1, 1, 1, 1)
            head = jnp.asarray(heads).reshape(1, -1, 1, 1, 1)
            of_weights = example, head, query[:, None, ..., None], each.address[:, None, :, None]
            weight = weight * dropout_mask(seed, dropout, *of_weights)
        values = each.values
        if values.shape[1] == 1:  # one product for all blocks
            out += product("bnclm,bmnv->bclnv", weight, values[:, 0], values.dtype)
        else:
            out += product("bnclm,bcmnv->bclnv", weight, values, values.dtype)
    return out


def scaled_logits(axes: str, queries: Array, keys: Array) -> Float[Array, "B N C L M"]:
    """The products of queries and keys, divided by sqrt(H)."""
    logits = product(axes, queries, keys, queries.dtype)
    return logits / math.sqrt(queries.shape[-1])
