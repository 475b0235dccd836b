"""What the kernels of attention share."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

# A hidden score, and the maximum of a row that saw none: exp2 of their difference is 0.
HIDDEN, LOWEST = -1e30, -1e29
LOG2_E = math.log2(math.e)


def power_of_two(n: int) -> int:
    """The width of a tile that holds rows of `n`."""
    return max(16, 1 << (n - 1).bit_length())


def product(
    a: Float[Array, "I J"], b: Float[Array, "J K"], transpose_b: bool = False
) -> Float[Array, "I K"]:
    """The product of two tiles, summed in float32."""
    dims = (((1,), (1 if transpose_b else 0,)), ((), ()))
    return lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)
