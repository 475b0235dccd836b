"""Masked softmax, at once or accumulated over parts of the keys (online softmax)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

# Smaller sums of weights count as zero, because their square underflows. A gradient divides by it.
LEAST_SUM = 1e-18


def lowest(dtype: Any) -> float:
    """The initial maximum of a row's logits.

    It is finite, because the difference of two infinities is NaN. The logit of a hidden key is
    minus infinity.
    """
    return float(jnp.finfo(dtype).min)


class Softmax(NamedTuple):
    """The softmax of rows over the keys that they have seen so far.

    Attributes:
      acc: `sum_j exp(s_j - row_max) v_j`.
      row_max: the largest logit `s_j`.
      row_sum: `sum_j exp(s_j - row_max)`.
    """

    acc: Float[Array, "*rows V"]
    row_max: Float[Array, "*rows"]
    row_sum: Float[Array, "*rows"]

    @classmethod
    def empty(cls, rows: tuple[int, ...], d_v: int, dtype: Any) -> Softmax:
        """The state of rows that have seen no key, in `dtype`."""
        zeros = jnp.zeros(rows, dtype)
        return cls(jnp.zeros((*rows, d_v), dtype), jnp.full(rows, lowest(dtype), dtype), zeros)


def largest(
    logits: Float[Array, "*d"], mask: Bool[Array, "*#d"], axis: int | tuple[int, ...]
) -> Float[Array, "*#d"]:
    """The largest visible logit of each row. It cancels out, so its gradient is set to 0."""
    row_max = jnp.max(logits, axis=axis, keepdims=True, where=mask, initial=lowest(logits.dtype))
    return jax.lax.stop_gradient(row_max)


def masked_exp(
    logits: Float[Array, "*d"], mask: Bool[Array, "*#d"], row_max: Float[Array, "*#d"]
) -> Float[Array, "*d"]:
    """The weights of a softmax before the division: `exp(logit - row_max)`, 0 where hidden."""
    below = jnp.where(mask, logits - row_max, 0.0)
    # XLA may compute a logit twice, in two ways. One of 1e30 may then far exceed its own maximum.
    below -= jax.lax.stop_gradient(jnp.maximum(below, 0.0))
    return jnp.where(mask, jnp.exp(below), 0.0)


def nonzero(row_sum: Float[Array, "*d"]) -> Float[Array, "*d"]:
    """`row_sum`, or 1 where it is 0: the division of such a row leaves zeros."""
    return jnp.where(row_sum == 0.0, 1.0, row_sum)


def masked_softmax(logits: Float[Array, "*d"], mask: Bool[Array, "*#d"]) -> Float[Array, "*d"]:
    """The weights of each row over its visible keys; zeros for a row that sees none."""
    weights = masked_exp(logits, mask, largest(logits, mask, axis=-1))
    weights = weights / nonzero(weights.sum(axis=-1, keepdims=True))
    # The gradient of a hidden weight is a product with a hidden value, which may overflow.
    return jnp.where(mask, weights, 0.0)
