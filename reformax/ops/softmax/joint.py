"""One softmax over keys of several kinds, such as a window's and some that all queries see.

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

from reformax.ops.numerics.finite import is_finite
from reformax.ops.numerics.precision import product
from reformax.ops.softmax.dropout import dropout_mask
from reformax.ops.softmax.online import largest, masked_exp, nonzero


class Keys(NamedTuple):
    """The keys of one kind, as the blocks of queries see them."""

    logits: Float[Array, "B N C L M"]
    values: Float[Array, "B _ M N V"]  # of each block, or one for all
    mask: Bool[Array, "#B #N C L M"]
    finite: Bool[Array, "#B #N _ _ M"]
    address: Int[Array, "#B _ M"]  # of dropout


def attend_to_kinds(
    kinds: Sequence[Keys],
    q: Float[Array, "B C L N H"],
    query: Int[Array, "#B C L"],
    dropout: float,
    seed: Int[Array, 6] | None,
    heads: Int[Array, " N"],
) -> Float[Array, "B C L N V"]:
    """The softmax over all kinds. A row that sees what is not finite is NaN, without a gradient.

    Args:
      kinds: the keys.
      q: the queries.
      query: the position of each query.
      dropout: the rate at which weights are dropped.
      seed: of dropout.
      heads: the number of each head.
    """
    n_batch = len(q)
    tops = [
        largest(jnp.where(each.finite, each.logits, jnp.nan), each.mask, axis=-1) for each in kinds
    ]
    row_max = functools.reduce(jnp.maximum, tops)
    whole = jnp.isfinite(row_max)
    weights = [masked_exp(x.logits, x.mask & whole, jnp.where(whole, row_max, 0)) for x in kinds]
    row_sum = nonzero(sum(x.sum(axis=-1, keepdims=True) for x in weights))
    out = 0
    for each, weight in zip(kinds, weights, strict=True):
        # The gradient of a hidden weight, a product with what is hidden, may overflow.
        weight = jnp.where(each.mask & whole, weight / row_sum, 0)
        if dropout:
            example = jnp.arange(n_batch).reshape(-1, 1, 1, 1, 1)
            head = jnp.asarray(heads).reshape(1, -1, 1, 1, 1)
            of_weights = example, head, query[:, None, ..., None], each.address[:, None, :, None]
            weight = weight * dropout_mask(seed, dropout, *of_weights)
        values = each.values
        if values.shape[1] == 1:  # one product of all blocks
            out += product("bnclm,bmnv->bclnv", weight, values[:, 0], values.dtype)
        else:
            out += product("bnclm,bcmnv->bclnv", weight, values, values.dtype)
    out = jnp.where(jnp.moveaxis(whole, 1, 3), out, jnp.nan)
    return jnp.where(is_finite(q), out, jnp.nan)


def scaled_logits(axes: str, queries: Array, keys: Array) -> Float[Array, "B N C L M"]:
    """Products of queries and keys, divided by sqrt(H)."""
    logits = product(axes, queries, keys, queries.dtype)
    return logits / math.sqrt(queries.shape[-1])
