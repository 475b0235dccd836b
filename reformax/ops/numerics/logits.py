"""How products of queries and keys become logits: one value for array code and for kernels."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from reformax.ops.numerics.precision import product


class Logits(NamedTuple):
    """The static part of logits. Array operations take theirs from `of`."""

    scale: float | None = None  # the factor of the products; None divides them by sqrt(H)
    # A bound c of the scaled products x, which become `c tanh(x / c)`; None: no bound.
    soft_cap: float | None = None

    def of(
        self,
        axes: str,
        queries: Float[Array, ...],
        keys: Float[Array, ...],
        bias: Float[Array, ...] | None = None,
    ) -> Float[Array, ...]:
        """The logits of queries and keys, float32 or wider.

        Args:
          axes: the equation of the product, whose sum is over the size H of heads.
          queries, keys: the keys are rounded to the dtype of the queries.
          bias: added to the logits.
        """
        products = product(axes, queries, keys, queries.dtype)
        logits = self.capped(self.scaled(products, queries.shape[-1]))
        return logits if bias is None else logits + bias.astype(logits.dtype)

    def scaled(self, products: Float[Array, "*d"], size: int) -> Float[Array, "*d"]:
        """Products of vectors of `size`, or the gradient of them, times the scale."""
        return products / math.sqrt(size) if self.scale is None else products * self.scale

    def capped(self, logits: Float[Array, "*d"], unit: float = 1.0) -> Float[Array, "*d"]:
        """The logits within the cap.

        Args:
          logits: scaled products, times `unit`.
          unit: 1, or in kernels `sqrt(H)`: their exponents scale the products.
        """
        if self.soft_cap is None:
            return logits
        cap = self.soft_cap * unit
        return cap * jnp.tanh(logits * (1 / cap))

    def before_cap(
        self, d_logits: Float[Array, "*d"], logits: Float[Array, "*d"], unit: float = 1.0
    ) -> Float[Array, "*d"]:
        """The gradient of what `capped` took, given that of its result, the logits.

        A gradient of 0 stays 0, whatever the logit of a hidden key.
        """
        if self.soft_cap is None:
            return d_logits
        slope = 1 - (logits * (1 / (self.soft_cap * unit))) ** 2
        return jnp.where(d_logits == 0, 0.0, d_logits * slope)

    def for_size(self, size: int) -> Logits:
        """These logits for heads of `size`, with the scale as a number."""
        return self if self.scale is not None else self._replace(scale=1 / math.sqrt(size))


PLAIN = Logits()
