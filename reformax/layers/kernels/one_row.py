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
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Bool, Float, Int

from reformax.layers.kernels.layer_norm import NormRows
from reformax.ops.kernels.triton.common import launch, load, tile_side

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


class Ending(NamedTuple):
    """What follows the products of some rows with some outputs' columns.

    It is read before the products, and is on its way while they are computed.
    """

    row: Any
    at: Int[Array, "*d"]  # the outputs
    exists: Bool[Array, "*d"]
    b: Float[Array, "*d"] | None
    added: Float[Array, "*d"] | None

    @classmethod
    def read(cls, inputs: OneRowInputs, row: Any, at: Array, exists: Array) -> Self:
        b, added = inputs.b, inputs.added
        b = None if b is None else load(b.at[at], at < len(inputs.w), 0.0)
        added = None if added is None else load(added.at[row, at], exists, 0.0)
        return cls(row, at, exists, b, added)

    def store(self, products: Float[Array, "*d"], outputs: list, dtype: Any, activation) -> None:
        """Writes `added + activation(products + b)` to the parts of the output."""
        out = products if self.b is None else products + self.b.astype(jnp.float32)
        out = out if activation is None else activation(out)
        out = out.astype(dtype)
        out = out if self.added is None else self.added + out.astype(self.added.dtype)
        start = 0
        for ref in outputs:
            end = start + ref.shape[1]
            mask = self.exists & (self.at >= start) & (self.at < end)
            pltriton.store(ref.at[self.row, self.at - start], out, mask=mask)
            start = end


def _kernel(inputs: OneRowInputs, outputs: list, *, options: OneRowOptions):
    row, (n_out, size) = pl.program_id(1), inputs.w.shape
    n, width = _tile(size)
    at = pl.program_id(0) * n + jnp.arange(n, dtype=jnp.int32)
    column = jnp.arange(width, dtype=jnp.int32)
    exists = at < n_out
    mask = exists[:, None] & (column < size)[None]
    w = load(inputs.w.at[at[:, None], column[None]], mask, 0.0).astype(jnp.float32)
    ending = Ending.read(inputs, row, at, exists)
    bias = None if inputs.norm is None else inputs.norm.get("bias")
    rows = NormRows(size, options.epsilon, bias is not None)
    x = rows.load(inputs.x, row)
    if inputs.norm is not None:
        x = rows.norm(x, inputs.norm["scale"], bias)
    x = x.astype(inputs.w.dtype).astype(jnp.float32)
    out = jnp.sum(w * x[None], axis=1)
    ending.store(out, outputs, inputs.w.dtype, options.activation)


def _tile(size: int) -> tuple[int, int]:
    """Rows and columns of the matrix that a program holds."""
    width = tile_side(size)
    return max(2, TILE // width), width


def affine(options: OneRowOptions, inputs: OneRowInputs) -> list[Float[Array, "R _"]]:
    """`reformax.layers.matrices.affine` for each row."""
    n_out, size = inputs.w.shape
    grid = pl.cdiv(n_out, _tile(size)[0]), len(inputs.x)
    return run(_kernel, options, inputs, grid=grid, num_warps=WARPS, num_stages=1, name="one_row")


def run(
    kernel: Callable[..., None], options: OneRowOptions, inputs: OneRowInputs, **how: Any
) -> list[Float[Array, "R _"]]:
    """The parts of the output by a kernel; `how` are options of `launch`."""
    dtype = inputs.w.dtype if inputs.added is None else inputs.added.dtype
    shapes = [jax.ShapeDtypeStruct((len(inputs.x), part), dtype) for part in options.sizes]
    kernel = functools.partial(kernel, options=options)
    (parts,) = launch(kernel, (inputs,), (shapes,), interpret=options.interpret, **how)
    return parts
