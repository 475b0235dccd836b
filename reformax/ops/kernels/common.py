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


def divided(
    d_out: Float[Array, "B T N V"], out: Float[Array, "B T N V"], total: Float[Array, "B N T"]
) -> tuple[Float[Array, "B T N V"], Float[Array, "B N T"], Float[Array, "B N T"] | None]:
    """What a backward pass reads of each row, given the sum of its softmax.

    Returns:
      `d_out` divided by the sum, for what P multiplies is then not; its product with the output,
      D_i = sum_j P_ij dP_ij = dO_i . O_i; and None. Float16 has no room for a `d_out` so divided:
      there both are undivided, and the third is what to multiply P by.
    """
    share = 1.0 / jnp.where(total == 0.0, 1.0, total)
    dtype, d_out = out.dtype, d_out.astype(jnp.float32)
    if dtype != jnp.float16:
        d_out, share = d_out * jnp.swapaxes(share, 1, 2)[..., None], None
    dot = jnp.swapaxes(jnp.sum(d_out * out.astype(jnp.float32), axis=-1), 1, 2)
    return d_out.astype(dtype), dot, share
