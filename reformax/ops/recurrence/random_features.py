"""Positive random features of vectors, whose products are `exp(x . y)` on average.

Choromanski et al. 2020 ("Rethinking Attention with Performers", lemma 1): for normally distributed
w, the mean of `exp(w . x - |x|^2 / 2) exp(w . y - |y|^2 / 2)` is `exp(x . y)`. All features are
positive, so their sum is not near 0 by chance.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from reformax.ops.numerics.precision import accum_dtype


class PositiveFeatures(NamedTuple):
    """Features of vectors, `x e^scale`. The largest of each vector's `x` is about 1."""

    x: Float[Array, "B T N M"]
    scale: Float[Array, "B T N 1"]


def orthogonal_directions(rng: PRNGKeyArray, n: int, size: int) -> Float[Array, "M H"]:
    """n normally distributed vectors, orthogonal within each `size` consecutive ones (sec. 2.4).

    Each has its direction from a random rotation and its length from another normal vector. Its
    marginal distribution is therefore normal.
    """
    rng_direction, rng_length = jax.random.split(rng)
    blocks = jax.random.orthogonal(rng_direction, size, (-(-n // size),), jnp.float32)
    lengths = jnp.linalg.norm(jax.random.normal(rng_length, (n, size), jnp.float32), axis=-1)
    return blocks.reshape(-1, size)[:n] * lengths[:, None]


def positive_features(
    x: Float[Array, "B T N H"], directions: Float[Array, "M H"], epsilon: float | Float[Array, ""]
) -> PositiveFeatures:
    """`exp(w . x - |x|^2 / 2)` for each direction w, in float32.

    The exponents are relative to the largest one of their vector, so that a position's features
    do not depend on other positions.

    Args:
      x: scaled vectors.
      directions: from `orthogonal_directions`.
      epsilon: added to the features, in units of the largest one. No product of two is then 0.
    """
    dtype: Any = accum_dtype(x.dtype)
    x = x.astype(dtype)
    exponents = jnp.einsum(
        "btnh,mh->btnm", x, directions.astype(dtype), precision=jax.lax.Precision.HIGHEST
    )
    exponents = exponents - jnp.sum(x**2, axis=-1, keepdims=True) / 2
    # By index: the gradient needs the largest, and a number computed twice may differ from itself.
    largest = jnp.argmax(jax.lax.stop_gradient(exponents), axis=-1, keepdims=True)
    index = jax.lax.broadcasted_iota(largest.dtype, exponents.shape, exponents.ndim - 1)
    scale = jnp.sum(jnp.where(index == largest, exponents, 0), axis=-1, keepdims=True)
    features = jnp.exp(exponents - scale) + jnp.asarray(epsilon, dtype)
    return PositiveFeatures(features, scale)
