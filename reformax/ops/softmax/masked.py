"""Logits, and one softmax over a mask, in array operations and with any leading axes."""

from __future__ import annotations

import math

from jaxtyping import Array, Bool, Float

from reformax.ops.numerics.precision import product
from reformax.ops.softmax.online import Softmax, largest, masked_exp


def scaled_logits(
    axes: str,
    queries: Float[Array, ...],
    keys: Float[Array, ...],
    scale: float | None = None,
    bias: Float[Array, ...] | None = None,
) -> Float[Array, ...]:
    """The logits of queries and keys, float32 or wider: all array operations take theirs here.

    Args:
      axes: the equation of the product, whose sum is over the size H of heads.
      queries, keys: the keys are rounded to the dtype of the queries.
      scale: the factor of the products; None divides them by sqrt(H).
      bias: added to the logits.
    """
    logits = product(axes, queries, keys, queries.dtype)
    logits = logits / math.sqrt(queries.shape[-1]) if scale is None else logits * scale
    return logits if bias is None else logits + bias.astype(logits.dtype)


def softmax_over(
    logits: Float[Array, "*rows K"],
    mask: Bool[Array, "*#rows K"],
    axes: str,
    values: Float[Array, ...],
    dropped: Float[Array, "*#rows K"] | None = None,
) -> Softmax:
    """The softmax of rows over their visible keys.

    Args:
      logits: from `scaled_logits`.
      mask: which keys a row sees.
      axes: the equation of the product of weights and values, `*rows K` with these to `*rows V`.
      values: the keys' values.
      dropped: the factors of dropout; None without dropout.
    """
    row_max = largest(logits, mask, axis=-1)
    weights = masked_exp(logits, mask, row_max)
    row_sum = weights.sum(axis=-1)
    if dropped is not None:
        weights = weights * dropped.astype(weights.dtype)
    return Softmax(product(axes, weights, values, values.dtype), row_max[..., 0], row_sum)
