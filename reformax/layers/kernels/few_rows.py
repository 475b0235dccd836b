"""`one_row` for several rows in 16 bits, as a Pallas kernel for NVIDIA GPUs (Triton).

XLA multiplies few rows well, but leaves bias, activation, residual and the cut into parts to more
kernels. A program of this kernel multiplies some rows of the transposed matrix with all rows of the
input on tensor cores. It is a single warp, because each of several would compute all of so small a
tile. It computes no norm, which all programs would repeat.

Letters as in `reformax.layers.matrices.affine`; R rows.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from reformax.layers.kernels.one_row import Ending, OneRowInputs, OneRowOptions, run
from reformax.ops.kernels.triton.common import load, tile_product, tile_side

# Outputs of a program, and the least rows of a tensor core's tile.
OUTPUTS, ROWS = 16, 8
# Columns of a tile, and the sums of a program. Sums do not wait for each other's products.
WIDTH, SUMS = 128, 4
STAGES = 4


def _kernel(inputs: OneRowInputs, outputs: list, *, options: OneRowOptions):
    (n_rows, size), n_out = inputs.x.shape, inputs.w.shape[0]
    row = jnp.arange(ROWS if n_rows <= ROWS else tile_side(n_rows), dtype=jnp.int32)[None]
    at = (pl.program_id(0) * OUTPUTS + jnp.arange(OUTPUTS, dtype=jnp.int32))[:, None]
    exists = (at < n_out) & (row < n_rows)
    ending = Ending.read(inputs, row, at, exists)

    def product(i) -> Float[Array, "E R"]:
        column = i * WIDTH + jnp.arange(WIDTH, dtype=jnp.int32)
        inside = column < size
        w = load(inputs.w.at[at, column[None]], (at < n_out) & inside[None], 0.0)
        x = load(inputs.x.at[row, column[:, None]], (row < n_rows) & inside[:, None], 0.0)
        return tile_product(w, x.astype(w.dtype))

    def add(i, sums):
        return [total + product(SUMS * i + j) for j, total in enumerate(sums)]

    zeros = [jnp.zeros(exists.shape, jnp.float32)] * SUMS
    sums = lax.fori_loop(0, pl.cdiv(size, SUMS * WIDTH), add, zeros)
    ending.store(sum(sums), outputs, inputs.w.dtype, options.activation)


def affine(options: OneRowOptions, inputs: OneRowInputs) -> list[Float[Array, "R _"]]:
    """`reformax.layers.matrices.affine` for all rows."""
    how = dict(num_warps=1, num_stages=STAGES, name="few_rows")
    return run(_kernel, options, inputs, grid=(pl.cdiv(len(inputs.w), OUTPUTS),), **how)
