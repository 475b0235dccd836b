"""The choice of the best few by their scores."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

# Up to so many are found by repeated maxima, more by `lax.top_k`, which sorts.
MAX_REPEATED_MAX = 4
# Scores of the blocks that a query always sees: its own, the first, the one before its own.
OWN_BLOCK, FIRST_BLOCK, PREVIOUS_BLOCK = 4e30, 3e30, 2e30


def with_nan_highest(scores: Float[Array, "*d"]) -> Float[Array, "*d"]:
    """NaN of either sign becomes infinity: a query sees the key or block, and its output is NaN."""
    return jnp.where(jnp.isnan(scores), jnp.inf, scores)


def best_of(
    scores: Float[Array, "*rows J"], allowed: Bool[Array, "*#rows J"], n_best: int
) -> Int[Array, "*rows K"]:
    """The indices of the highest scores among the `allowed` ones, the highest first; -1 is none.

    Of equal scores the first is chosen. NaN is as high as infinity.
    """
    scores = jnp.where(allowed, with_nan_highest(scores), -jnp.inf)
    if n_best > MAX_REPEATED_MAX:
        best, index = lax.top_k(scores, n_best)
        return jnp.where(best > -jnp.inf, index, -1)
    number = lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
    chosen = [number[..., :0]]
    for _ in range(n_best):  # sorting takes longer than a few loops over a row
        best = scores.max(axis=-1, keepdims=True)
        first = jnp.where(scores == best, number, scores.shape[-1]).min(axis=-1, keepdims=True)
        chosen.append(jnp.where(best > -jnp.inf, first, -1))
        scores = jnp.where(number == first, -jnp.inf, scores)
    return jnp.concatenate(chosen, axis=-1)


def taken(x: Array, best: Int[Array, "*rows K"], none: float = -1) -> Array:
    """The entries of `x [*rows, J]` at the indices of `best_of`; `none` for -1."""
    found = jnp.take_along_axis(x, jnp.maximum(best, 0), axis=-1)
    return jnp.where(best < 0, none, found)
