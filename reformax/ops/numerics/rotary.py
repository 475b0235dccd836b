"""Rotary positions of a line, for modules that have no layers of Trax."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from reformax.ops.numerics.precision import accum_dtype


def rotated(
    x: Float[Array, "B T N H"], position: Int[Array, "#B T"], base: float = 10_000.0
) -> Float[Array, "B T N H"]:
    """Pairs of features, i and i + H // 2, rotated by angles that grow with the position.

    Su et al. 2021, eq. 34; `reformax.layers.rotary` rotates alike.
    """
    half = x.shape[-1] // 2
    frequency = base ** (-jnp.arange(half) / half)
    angle = jnp.multiply.outer(position.astype(frequency.dtype), frequency)[..., None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    y = x.astype(accum_dtype(x.dtype))
    a, b, rest = y[..., :half], y[..., half : 2 * half], y[..., 2 * half :]
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)
    return turned.astype(x.dtype)
