"""Norm, product, activation and sum of one row, as a Pallas kernel for NVIDIA GPUs (Triton).

The launches of small kernels and the reading of matrices take most of a decoding step's time. A
program of this kernel computes the input's norm, which all programs do alike. It multiplies the
input with some rows of the transposed matrix, and adds bias, activation and a residual. The output
may come in parts, so that other kernels read it without copies.

Letters as in `reformax.layers.matrices.affine`; R rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float

from reformax.layers.kernels.layer_norm import NormRows
from reformax.ops.kernels.triton.common import launch, load, power_of_two

# Numbers of the matrix that a program holds, 32 for each of its threads.
TILE, WARPS = 8192, 8


class OneRowInputs(NamedTuple):
    """The arrays that a program reads."""

    x: Float[Array, "R D"]
    added: Float[Array, "R E"] | None
    w: Float[Array, "E D"]
    b: Float[Array, " E"] | None
    norm: dict[str, Float[Array, " D"]] | None  # scale, and of a layer norm bias


class OneRowOptions(NamedTuple):
    """The static part of a call.

    Attributes:
      epsilon: of the norm.
      activation: the nonlinearity; None: none.
      sizes: of the outputs.
      interpret: whether to run anywhere, slowly.
    """

    epsilon: float | None
    activation: Callable[[Array], Array] | None
    sizes: tuple[int, ...]
    interpret: bool = False


def _kernel(inputs: OneRowInputs, outputs: list, *, options: OneRowOptions):
    row, (n_out, size) = pl.program_id(1), inputs.w.shape
    n, width = _tile(size)
    at = pl.program_id(0) * n + jnp.arange(n, dtype=jnp.int32)
    column = jnp.arange(width, dtype=jnp.int32)
    exists = at < n_out
    mask = exists[:, None] & (column < size)[None]
    w = load(inputs.w.at[at[:, None], column[None]], mask, 0.0).astype(jnp.float32)
    bias = None if inputs.norm is None else inputs.norm.get("bias")
    rows = NormRows(size, options.epsilon, bias is not None)
    x = rows.load(inputs.x, row)
    if inputs.norm is not None:
        x = rows.norm(x, inputs.norm["scale"], bias)
    x = x.astype(inputs.w.dtype).astype(jnp.float32)
    out = jnp.sum(w * x[None], axis=1)
    if inputs.b is not None:
        out = out + load(inputs.b.at[at], exists, 0.0).astype(jnp.float32)
    if options.activation is not None:
        out = options.activation(out)
    out = out.astype(inputs.w.dtype)
    if inputs.added is not None:
        out = load(inputs.added.at[row, at], exists, 0.0) + out.astype(inputs.added.dtype)
    start = 0
    for ref in outputs:
        end = start + ref.shape[1]
        pltriton.store(ref.at[row, at - start], out, mask=(at >= start) & (at < end))
        start = end


def _tile(size: int) -> tuple[int, int]:
    """Rows and columns of the matrix that a program holds."""
    width = power_of_two(size)
    return max(2, TILE // width), width


def affine(options: OneRowOptions, inputs: OneRowInputs) -> list[Float[Array, "R _"]]:
    """`reformax.layers.matrices.affine` for each row."""
    n_out, size = inputs.w.shape
    dtype = inputs.w.dtype if inputs.added is None else inputs.added.dtype
    shapes = [jax.ShapeDtypeStruct((len(inputs.x), part), dtype) for part in options.sizes]
    (parts,) = launch(
        functools.partial(_kernel, options=options),
        (inputs,),
        (shapes,),
        grid=(pl.cdiv(n_out, _tile(size)[0]), len(inputs.x)),
        num_warps=WARPS,
        num_stages=1,
        interpret=options.interpret,
        name="one_row",
    )
    return parts
