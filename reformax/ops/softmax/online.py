"""Softmax over the keys that a row sees: at once, or part by part."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

# Less of a sum of weights that are no softmax's is none: its square, which a gradient is divided
# by, would be 0.
LEAST_SUM = 1e-18


def lowest(dtype: Any) -> float:
    """The largest logit of a row that has seen none.

    It is finite, because the difference of two infinities is NaN. A hidden key's logit is minus
    infinity.
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
        """The state of rows that have seen nothing; `dtype` is that of its numbers."""
        zeros = jnp.zeros(rows, dtype)
        return cls(jnp.zeros((*rows, d_v), dtype), jnp.full(rows, lowest(dtype), dtype), zeros)


def largest(
    logits: Float[Array, "*d"], mask: Bool[Array, "*#d"], axis: int | tuple[int, ...]
) -> Float[Array, "*#d"]:
    """The largest visible logit of each row. It cancels, so its gradient is 0."""
    row_max = jnp.max(logits, axis=axis, keepdims=True, where=mask, initial=lowest(logits.dtype))
    return jax.lax.stop_gradient(row_max)


def masked_exp(
    logits: Float[Array, "*d"], mask: Bool[Array, "*#d"], row_max: Float[Array, "*#d"]
) -> Float[Array, "*d"]:
    """The weights of a softmax before their division: `exp(logit - row_max)`, 0 where hidden."""
    below = jnp.where(mask, logits - row_max, 0.0)
    # XLA may compute a logit twice, in two ways: one of 1e30 may then lie far above itself.
    below -= jax.lax.stop_gradient(jnp.maximum(below, 0.0))
    return jnp.where(mask, jnp.exp(below), 0.0)


def nonzero(total: Float[Array, "*d"]) -> Float[Array, "*d"]:
    """`total`, or 1 for a row that has seen nothing, so that dividing by it leaves zeros."""
    return jnp.where(total == 0.0, 1.0, total)


def masked_softmax(logits: Float[Array, "*d"], mask: Bool[Array, "*#d"]) -> Float[Array, "*d"]:
    """The weights of each row over its visible keys; zeros for a row that sees none."""
    weights = masked_exp(logits, mask, largest(logits, mask, axis=-1))
    weights = weights / nonzero(weights.sum(axis=-1, keepdims=True))
    # The gradient of a hidden weight, a product with what is hidden, may overflow.
    return jnp.where(mask, weights, 0.0)
