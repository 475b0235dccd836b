"""Rounding to FP8 as a Pallas kernel for NVIDIA GPUs (Triton): one pass over the numbers.

An FP8 product reads both operands along the axis that it sums over, so activations and gradients of
outputs are needed by rows and, for the gradient of weights, by columns. A program rounds a tile,
writes it both ways, and writes the tile's largest number. As array operations the largest number
takes another pass.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float

from reformax.ops.kernels.triton.common import launch, load

# Rows and columns of a tile, and warps.
ROWS, COLUMNS, WARPS = 64, 128, 8


class RoundingOptions(NamedTuple):
    """The static part of a call.

    Attributes:
      dtype: the FP8 format.
      rows: whether the rounded rows are returned.
      columns: whether the rounded columns are returned, as rows.
      interpret: whether to run anywhere, slowly.
    """

    dtype: Any
    rows: bool
    columns: bool
    interpret: bool = False


class Rounded(NamedTuple):
    """The results; what was not asked for is None."""

    rows: Float[Array, "R C"] | None
    columns: Float[Array, "C R"] | None
    largest: Float[Array, "P Q"]  # of each tile's finite numbers, by magnitude


def rounded(x: Float[Array, "R C"], scale: Float[Array, 1], options: RoundingOptions) -> Rounded:
    """`x * scale` rounded, and the largest finite numbers of `x`.

    What is beyond the format's range becomes its end. What is not finite becomes NaN.
    """
    n_rows, n_columns = x.shape
    grid = pl.cdiv(n_rows, ROWS), pl.cdiv(n_columns, COLUMNS)

    def wanted(shape: tuple[int, int], asked: bool) -> Any:
        return jax.ShapeDtypeStruct(shape, options.dtype) if asked else None

    shapes = Rounded(
        wanted((n_rows, n_columns), options.rows),
        wanted((n_columns, n_rows), options.columns),
        jax.ShapeDtypeStruct(grid, jnp.float32),
    )
    return launch(
        functools.partial(_kernel, options=options),
        (x, scale),
        shapes,
        grid=grid,
        num_warps=WARPS,
        num_stages=1,
        interpret=options.interpret,
        name="round_to_float8",
    )


def _kernel(x_ref, scale_ref, rows_ref, columns_ref, largest_ref, *, options: RoundingOptions):
    n_rows, n_columns = x_ref.shape
    i, j = pl.program_id(0), pl.program_id(1)
    row = i * ROWS + jnp.arange(ROWS, dtype=jnp.int32)
    column = j * COLUMNS + jnp.arange(COLUMNS, dtype=jnp.int32)
    mask = None
    if n_rows % ROWS or n_columns % COLUMNS:
        mask = (row < n_rows)[:, None] & (column < n_columns)[None]
    x = load(x_ref.at[row[:, None], column[None]], mask, 0.0).astype(jnp.float32)
    values = to_float8(x, scale_ref[0], options.dtype)
    if options.rows:
        pltriton.store(rows_ref.at[row[:, None], column[None]], values, mask=mask)
    if options.columns:
        turned = None if mask is None else mask.T
        pltriton.store(columns_ref.at[column[:, None], row[None]], values.T, mask=turned)
    largest_ref[i, j] = largest(x)


def to_float8(x: Float[Array, "I J"], scale: Array, dtype: Any) -> Float[Array, "I J"]:
    """A tile of float32 times its scale, rounded."""
    end = float(jnp.finfo(dtype).max)
    values = jnp.minimum(jnp.maximum(x * scale, -end), end)
    return jnp.where(jnp.abs(x) < jnp.inf, values, jnp.nan).astype(dtype)


def largest(x: Float[Array, "I J"]) -> Float[Array, ""]:
    """The largest finite magnitude of a tile of float32."""
    size = jnp.abs(x)
    return jnp.max(jnp.where(size < jnp.inf, size, 0.0))
