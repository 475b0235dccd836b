"""How the matrices of decoding lie in memory."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float


def turned(w: Float[Array, "I J"]) -> Float[Array, "I J"]:
    """`w` as it is kept between steps, and what is kept as `w`: on a GPU its transpose.

    There XLA multiplies a single row by reading rows of the transpose to their sums; along columns
    it would write every product to memory first. A CPU multiplies several rows faster as they are.
    """
    return w.T if jax.default_backend() == "gpu" else w
