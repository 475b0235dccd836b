"""One softmax over a mask, in array operations and with any leading axes."""

from __future__ import annotations

from jaxtyping import Array, Bool, Float

from reformax.ops.numerics.precision import product
from reformax.ops.softmax.online import Softmax, largest, masked_exp


def softmax_over(
    logits: Float[Array, "*rows K"],
    mask: Bool[Array, "*#rows K"],
    axes: str,
    values: Float[Array, ...],
    dropped: Float[Array, "*#rows K"] | None = None,
) -> Softmax:
    """The softmax of rows over their visible keys.

    Args:
      logits: from `numerics.logits.Logits`.
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
