"""Layer normalisation of a sum as Pallas kernels for NVIDIA GPUs (Triton): one pass over the rows.

Both passes wait for memory, and in array operations XLA goes over the rows twice or three times.
A program has a row in registers while it sums it up and writes it out. The backward pass adds the
two inputs again in place of reading a sum that was kept, and each program takes some neighbouring
rows, whose sums for the gradients of scale and bias it leaves in a row of its own. Where the sum is
read elsewhere too, as by a residual connection, the gradient from there is added in the same pass.

Letters as in `reformax.layers.layer_norm`, R rows and P programs of the backward pass.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float

from reformax.ops.kernels.common import power_of_two

# As many as a GPU runs at once, several times over; and numbers of a row to each of its warps.
N_PROGRAMS = 1024
PER_WARP = 1024


class Inputs(NamedTuple):
    """What is normalised, and by what."""

    x: Float[Array, "R D"]
    y: Float[Array, "R D"] | None  # what is added to `x`
    scale: Float[Array, " D"]
    bias: Float[Array, " D"]


class How(NamedTuple):
    """The static part of a call.

    Attributes:
      epsilon: added to the variance.
      dtypes: of the outputs.
      pass_on: whether `x` is returned too, so that the gradient of what else reads it is added
        in the backward pass.
      interpret: whether to run anywhere, slowly.
    """

    epsilon: float
    dtypes: tuple[Any, ...]
    pass_on: bool = False
    interpret: bool = False


class _Rows(NamedTuple):
    """How a program reads and writes rows of D numbers."""

    size: int  # D
    epsilon: float

    @property
    def _column(self) -> Array:
        return jnp.arange(power_of_two(self.size), dtype=jnp.int32)

    @property
    def _mask(self) -> Array | None:
        return None if power_of_two(self.size) == self.size else self._column < self.size

    def load(self, ref, *row) -> Array:
        at = ref.at[(*row, self._column)]
        other = {} if self._mask is None else dict(mask=self._mask, other=0.0)
        return pltriton.load(at, **other).astype(jnp.float32)

    def store(self, ref, value: Array, row) -> None:
        pltriton.store(ref.at[row, self._column], value.astype(ref.dtype), mask=self._mask)

    def mean(self, x: Array) -> Array:
        return jnp.sum(x) * (1.0 / self.size)

    def normalised(self, inputs: Inputs, row) -> tuple[Array, Array]:
        """The row less its mean, of unit variance; and what it was multiplied by."""
        x = self.load(inputs.x, row)
        x = x if inputs.y is None else x + self.load(inputs.y, row)
        x = x - self.mean(x)
        x = x if self._mask is None else jnp.where(self._mask, x, 0.0)
        factor = lax.rsqrt(self.mean(x * x) + self.epsilon)
        return x * factor, factor


def _forward_kernel(inputs: Inputs, *outputs: Any, rows: _Rows):
    row = pl.program_id(0)
    x, _ = rows.normalised(inputs, row)
    out = x * rows.load(inputs.scale) + rows.load(inputs.bias)
    for ref in outputs:
        rows.store(ref, out, row)


def _backward_kernel(inputs: Inputs, d_outputs: tuple, d_sum, d_inputs, sums, *, rows: _Rows):
    n_rows, n_programs = inputs.x.shape[0], sums[0].shape[0]
    program = pl.program_id(0)
    per_program = pl.cdiv(n_rows, n_programs)
    first = program * per_program
    scale = rows.load(inputs.scale)

    def differentiate(row, sums):
        d_scale, d_bias = sums
        x, factor = rows.normalised(inputs, row)
        d_out = sum(rows.load(ref, row) for ref in d_outputs)
        d = d_out * scale
        d = (d - rows.mean(d) - x * rows.mean(d * x)) * factor
        d = d if d_sum is None else d + rows.load(d_sum, row)
        for ref in d_inputs:
            rows.store(ref, d, row)
        return d_scale + d_out * x, d_bias + d_out

    last = jnp.minimum(first + per_program, n_rows)
    found = lax.fori_loop(first, last, differentiate, (jnp.zeros_like(scale),) * 2)
    for ref, value in zip(sums, found, strict=True):
        rows.store(ref, value, program)


def _launch(
    kernel, inputs: Inputs, others, shapes, grid: int, epsilon: float, interpret: bool, aliases=None
):
    size = inputs.x.shape[1]
    return pl.pallas_call(
        functools.partial(kernel, rows=_Rows(size, epsilon)),
        grid=(grid,),
        out_shape=shapes,
        input_output_aliases=aliases or {},
        compiler_params=pltriton.CompilerParams(
            num_warps=min(max(power_of_two(size) // PER_WARP, 1), 8), num_stages=1
        ),
        interpret=interpret,
        name="layer_norm" + kernel.__name__.removesuffix("_kernel"),
    )(inputs, *others)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def normalize(
    how: How, inputs: Inputs
) -> tuple[tuple[Float[Array, "R D"], ...], Float[Array, "R D"] | None]:
    """The layer norm of `x + y` in each of the dtypes; and `x`, or None unless `how.pass_on`."""
    return _normalize_forward(how, inputs)[0]


def _normalize_forward(how, inputs):
    outputs = forward(inputs, how.dtypes, how.epsilon, how.interpret)
    return (outputs, inputs.x if how.pass_on else None), inputs


def _normalize_backward(how, inputs, d_outputs):
    return (backward(inputs, *d_outputs, how.epsilon, how.interpret),)


normalize.defvjp(_normalize_forward, _normalize_backward)


def forward(
    inputs: Inputs, dtypes: tuple[Any, ...], epsilon: float, interpret: bool = False
) -> tuple[Float[Array, "R D"], ...]:
    """The layer norm of `x + y`, in each of the dtypes."""
    shapes = tuple(jax.ShapeDtypeStruct(inputs.x.shape, dtype) for dtype in dtypes)
    return _launch(_forward_kernel, inputs, (), shapes, len(inputs.x), epsilon, interpret)


def backward(
    inputs: Inputs,
    d_outputs: tuple[Float[Array, "R D"], ...],
    d_sum: Float[Array, "R D"] | None,
    epsilon: float,
    interpret: bool = False,
) -> Inputs:
    """The gradients of what `forward` took, given those of what it returned.

    `d_sum` is the gradient of `x + y` from elsewhere, in the dtype of `x`; None is 0.
    """
    n_rows, size = inputs.x.shape
    added = [x for x in (inputs.x, inputs.y) if x is not None]
    n_programs = min(n_rows, N_PROGRAMS)
    part = jax.ShapeDtypeStruct((n_programs, size), jnp.float32)
    shapes = (tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in added), (part, part))
    others = d_outputs, d_sum
    # `d_x`, the first output, takes the place of `d_sum`, the last input.
    aliases = {} if d_sum is None else {len(jax.tree.leaves((inputs, others))) - 1: 0}
    (d_x, *d_y), sums = _launch(
        _backward_kernel, inputs, others, shapes, n_programs, epsilon, interpret, aliases
    )
    d_scale, d_bias = (
        jnp.sum(x, axis=0).astype(like.dtype)
        for x, like in zip(sums, (inputs.scale, inputs.bias), strict=True)
    )
    return Inputs(d_x, d_y[0] if d_y else None, d_scale, d_bias)
