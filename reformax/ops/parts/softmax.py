"""Softmax over the keys that a row sees: at once, or part by part."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

# The logit of a hidden key, and the largest of a row that has seen none. Minus infinity would make
# the difference of two of them NaN.
HIDDEN = -1e30


class Softmax(NamedTuple):
    """The softmax of rows over the keys that they have seen so far.

    Attributes:
      acc: `sum_j exp(s_j - top) v_j`.
      top: the largest logit `s_j`.
      total: `sum_j exp(s_j - top)`.
    """

    acc: Float[Array, "*rows V"]
    top: Float[Array, "*rows"]
    total: Float[Array, "*rows"]

    @classmethod
    def empty(cls, rows: tuple[int, ...], d_v: int) -> Softmax:
        """The state of rows that have seen nothing."""
        zeros = jnp.zeros(rows, jnp.float32)
        return cls(jnp.zeros((*rows, d_v), jnp.float32), jnp.full(rows, HIDDEN, jnp.float32), zeros)


def masked_exp(
    logits: Float[Array, "*d"], mask: Bool[Array, "*#d"], axis: int | tuple[int, ...]
) -> Float[Array, "*d"]:
    """The weights of a softmax before their division: `exp(logit - largest)`, 0 where hidden.

    The maximum is of visible logits only, so that a fully masked row stays finite. It cancels in
    the softmax, so its gradient is 0.
    """
    top = jnp.max(logits, axis=axis, keepdims=True, where=mask, initial=HIDDEN)
    top = jax.lax.stop_gradient(top)
    return jnp.where(mask, jnp.exp(jnp.where(mask, logits - top, 0.0)), 0.0)


def nonzero(total: Float[Array, "*d"]) -> Float[Array, "*d"]:
    """`total`, or 1 for a row that has seen nothing, so that dividing by it leaves zeros."""
    return jnp.where(total == 0.0, 1.0, total)
