"""Products with matrices: several of one array, what fits them, and how they lie for decoding."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
from jax import lax
from jaxtyping import Array, Float


def products(
    x: Float[Array, "*d D"], matrices: Sequence[Float[Array, "D _"]]
) -> list[Float[Array, "*d _"]]:
    """`x @ w` for each matrix; on a GPU products of their own in both passes.

    There XLA would make one product of some of them. It would then copy the output apart, and in
    the gradient the outputs' gradients together: more reads and writes than products apart have.
    """
    apart = jax.default_backend() == "gpu"
    return _apart(x, list(matrices)) if apart else [x @ w for w in matrices]


# Between the passes `x` is kept, and not its copies, which are made again.
@functools.partial(jax.checkpoint, prevent_cse=False)
def _apart(x, matrices):
    return [own @ w for own, w in zip(_copies(x, len(matrices)), matrices, strict=True)]


def _copies(x: Array, n: int) -> list[Array]:
    """`x` `n` times, which the compiler does not know to be one."""
    copies = [x]
    for _ in range(n - 1):
        copies.append(lax.optimization_barrier(copies[-1]))
    return copies


def turned(w: Float[Array, "I J"]) -> Float[Array, "I J"]:
    """`w` as it is kept between steps, and what is kept as `w`: on a GPU its transpose.

    There XLA multiplies a single row by reading rows of the transpose to their sums; along columns
    it would write every product to memory first. A CPU multiplies several rows faster as they are.
    """
    return w.T if jax.default_backend() == "gpu" else w


def check_input(x: Array, d_model: int) -> None:
    """Raises `ValueError` unless `x` is `[B, T, d_model]`."""
    if x.ndim != 3 or x.shape[2] != d_model:
        raise ValueError(f"x has shape {x.shape}: expected [batch, length, {d_model}]")
