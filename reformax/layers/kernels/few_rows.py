"""`one_row` for several rows, as a Pallas kernel for NVIDIA GPUs (Triton).

A program multiplies all rows with its part of the matrix, which is then read once, on tensor cores.
These take 16 rows; those that do not exist are zeros.

Letters as in `reformax.layers.matrices.affine`; R rows.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float

from reformax.layers.kernels.one_row import OneRowInputs, OneRowOptions
from reformax.ops.kernels.triton.common import launch, load, power_of_two, tile_product

# Outputs of a program. Rows that have a norm or at most `WHOLE` numbers are one tile; of others,
# tiles of `STREAMED` numbers are on their way at once.
OUTPUTS, WHOLE, STREAMED = 16, 1024, 256
WARPS, STAGES = 8, 4


def _kernel(inputs: OneRowInputs, outputs: list, *, options: OneRowOptions):
    n_rows, (n_out, size) = inputs.x.shape[0], inputs.w.shape
    row = jnp.arange(power_of_two(n_rows), dtype=jnp.int32)[:, None]
    at = pl.program_id(0) * OUTPUTS + jnp.arange(OUTPUTS, dtype=jnp.int32)
    whole = inputs.norm is not None or size <= WHOLE
    width = power_of_two(size) if whole else STREAMED

    def product(i) -> Float[Array, "R n"]:
        column = (i * width + jnp.arange(width, dtype=jnp.int32))[None]
        inside = column < size
        w = load(inputs.w.at[at[:, None], column], (at < n_out)[:, None] & inside, 0.0)
        x = load(inputs.x.at[row, column], (row < n_rows) & inside, 0.0)
        if inputs.norm is not None:
            x = _norm(x.astype(jnp.float32), inputs, column, options.epsilon)
        return tile_product(x.astype(w.dtype), w, "11")

    if whole:
        out = product(0)
    else:
        zeros = jnp.zeros((len(row), OUTPUTS), jnp.float32)
        out = lax.fori_loop(0, pl.cdiv(size, width), lambda i, out: out + product(i), zeros)
    if inputs.b is not None:
        out = out + load(inputs.b.at[at], at < n_out, 0.0).astype(jnp.float32)[None]
    if options.activation is not None:
        out = options.activation(out)
    out, at = out.astype(inputs.w.dtype), at[None]
    if inputs.added is not None:
        exists = (row < n_rows) & (at < n_out)
        out = load(inputs.added.at[row, at], exists, 0.0) + out.astype(inputs.added.dtype)
    start = 0
    for ref in outputs:
        end = start + ref.shape[1]
        mask = (row < n_rows) & (at >= start) & (at < end)
        pltriton.store(ref.at[row, at - start], out, mask=mask)
        start = end


def _norm(x, inputs: OneRowInputs, column, epsilon: float) -> Float[Array, "R D"]:
    """The norms of rows, zeros from their end on, as `NormRows` computes that of one."""
    size, bias = inputs.w.shape[1], inputs.norm.get("bias")
    inside = column < size
    if bias is not None:
        mean = jnp.sum(x, axis=1) * (1.0 / size)
        x = jnp.where(inside, x - mean[:, None], 0.0)
    square = jnp.sum(x * x, axis=1) * (1.0 / size)
    x = x * lax.rsqrt(square + epsilon)[:, None]
    x = x * load(inputs.norm["scale"].at[column], inside, 0.0)
    return x if bias is None else x + load(bias.at[column], inside, 0.0)


def affine(options: OneRowOptions, inputs: OneRowInputs) -> list[Float[Array, "R _"]]:
    """`reformax.layers.matrices.affine` for all rows."""
    dtype = inputs.w.dtype if inputs.added is None else inputs.added.dtype
    shapes = [jax.ShapeDtypeStruct((len(inputs.x), part), dtype) for part in options.sizes]
    (parts,) = launch(
        functools.partial(_kernel, options=options),
        (inputs,),
        (shapes,),
        grid=(pl.cdiv(inputs.w.shape[0], OUTPUTS),),
        num_warps=WARPS,
        num_stages=STAGES,
        interpret=options.interpret,
        name="few_rows",
    )
    return parts
