"""Layer norm or RMSNorm of a sum as Pallas kernels for NVIDIA GPUs (Triton): a pass over the rows.

Memory bounds both passes, and as array operations XLA reads the rows two or three times. A program
of these kernels holds a row in registers while it sums it up and writes it out. The backward pass
adds the two inputs again, so that no sum is kept. Each of its programs takes some neighbouring rows
and writes their sums, for the gradients of scale and bias, to one row. A residual connection also
reads the sum of the inputs. The forward pass then writes the sum, and the backward pass reads it
instead of the inputs and adds the gradient from its other readers. A sublayer's last bias is added
here too, and not by the sublayer, because its gradient is one more sum of rows that the backward
pass holds.

Letters as in `reformax.layers.layer_norm`; R rows, P programs of the backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float

from reformax.ops.kernels.triton.common import launch, load, tile_side
from reformax.ops.numerics.first_order import first_order

# Programs of the backward pass, several times as many as a GPU runs at once; and numbers of a row
# for each warp.
N_PROGRAMS = 1024
PER_WARP = 1024


class LayerNormInputs(NamedTuple):
    """The arrays that both passes read."""

    x: Float[Array, "R D"]
    y: Float[Array, "R D"] | None  # what is added to `x`
    scale: Float[Array, " D"]
    bias: Float[Array, " D"] | None  # None: the norm is RMSNorm, which subtracts no mean either
    y_bias: Float[Array, " D"] | None = None  # what is added to each row of `y`


class LayerNormOptions(NamedTuple):
    """The static part of a call.

    Attributes:
      epsilon: what is added to the variance.
      dtypes: the dtype of each output.
      pass_on: whether the sum is returned too. The backward pass then adds the gradient of what
        else reads it.
      interpret: whether to run anywhere, slowly.
    """

    epsilon: float
    dtypes: tuple[Any, ...]
    pass_on: bool = False
    interpret: bool = False


class NormRows(NamedTuple):
    """Rows of D numbers, as a program reads and writes them."""

    size: int  # D
    epsilon: float
    centred: bool = True  # whether the norm subtracts the mean

    @property
    def _column(self) -> Array:
        return jnp.arange(tile_side(self.size), dtype=jnp.int32)

    @property
    def _mask(self) -> Array | None:
        return None if tile_side(self.size) == self.size else self._column < self.size

    def load(self, ref, *row) -> Array:
        """A row of a matrix, or a vector, in float32, zeros after the end."""
        return load(ref.at[(*row, self._column)], self._mask, 0.0).astype(jnp.float32)

    def store(self, ref, value: Array, *row) -> None:
        """Writes a row."""
        pltriton.store(ref.at[(*row, self._column)], value.astype(ref.dtype), mask=self._mask)

    def mean(self, x: Array) -> Array:
        """The mean of a row."""
        return jnp.sum(x) * (1.0 / self.size)

    def added(self, inputs: LayerNormInputs, row) -> Array:
        """The row of `x + y + y_bias`, which `x` already is where there is no `y`."""
        x = self.load(inputs.x, row)
        if inputs.y is None:
            return x
        x += self.load(inputs.y, row)
        return x if inputs.y_bias is None else x + self.load(inputs.y_bias)

    def normalised(self, x: Array) -> tuple[Array, Array]:
        """A row less its mean, if that is subtracted, of unit mean square; and the factor."""
        if self.centred:
            x = x - self.mean(x)
            x = x if self._mask is None else jnp.where(self._mask, x, 0.0)
        factor = lax.rsqrt(self.mean(x * x) + self.epsilon)
        return x * factor, factor

    def norm(self, x: Array, scale, bias) -> Array:
        """The norm of a row, by references to its weights."""
        out = self.normalised(x)[0] * self.load(scale)
        return out if bias is None else out + self.load(bias)


def _forward_kernel(inputs: LayerNormInputs, outputs: tuple, total, *, rows: NormRows):
    row = pl.program_id(0)
    x = rows.added(inputs, row)
    if total is not None:
        rows.store(total, x, row)
    out = rows.norm(x, inputs.scale, inputs.bias)
    for ref in outputs:
        rows.store(ref, out, row)


def _backward_kernel(
    inputs: LayerNormInputs, d_outputs: tuple, d_sum, d_inputs, sums, *, rows: NormRows
):
    n_rows, (n_sums, n_programs, _) = inputs.x.shape[0], sums.shape
    program = pl.program_id(0)
    per_program = pl.cdiv(n_rows, n_programs)
    first = program * per_program
    scale = rows.load(inputs.scale)

    def differentiate(row, found):
        x, factor = rows.normalised(rows.added(inputs, row))
        d_out = sum(rows.load(ref, row) for ref in d_outputs)
        d = d_out * scale
        along = x * rows.mean(d * x)
        d = (d - rows.mean(d) - along if rows.centred else d - along) * factor
        d = d if d_sum is None else d + rows.load(d_sum, row)
        for ref in d_inputs:
            rows.store(ref, d, row)
        of_weights = d_out * x, d_out, d
        given = (y for y, w in zip(of_weights, weights_of(inputs), strict=True) if w is not None)
        return tuple(total + y for total, y in zip(found, given, strict=True))

    last = jnp.minimum(first + per_program, n_rows)
    found = lax.fori_loop(first, last, differentiate, (jnp.zeros_like(scale),) * n_sums)
    for i, value in enumerate(found):
        rows.store(sums, value, i, program)


def weights_of(inputs: LayerNormInputs) -> tuple[Any, Any, Any]:
    """Those inputs that are one row for all: each has a sum over rows for its gradient."""
    return inputs.scale, inputs.bias, inputs.y_bias


def _launch(
    kernel,
    inputs: LayerNormInputs,
    others,
    shapes,
    grid: int,
    epsilon: float,
    interpret: bool,
    aliases=None,
):
    size = inputs.x.shape[1]
    return launch(
        functools.partial(kernel, rows=NormRows(size, epsilon, inputs.bias is not None)),
        (inputs, *others),
        shapes,
        grid=(grid,),
        num_warps=min(max(tile_side(size) // PER_WARP, 1), 8),
        num_stages=1,
        interpret=interpret,
        name="layer_norm" + kernel.__name__.removesuffix("_kernel"),
        aliases=aliases,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def normalize(
    options: LayerNormOptions, inputs: LayerNormInputs
) -> tuple[tuple[Float[Array, "R D"], ...], Float[Array, "R D"] | None]:
    """The layer norm of `x + y + y_bias` in each of the dtypes, and the sum if `options.pass_on`.

    The sum has the dtype of `x`.
    """
    return _normalize_forward(options, inputs)[0]


def _normalize_forward(options, inputs):
    inputs = first_order(inputs)
    outputs, total = forward(inputs, options)
    # The dtypes of what was added, in arrays.
    added = [jnp.zeros(0, x.dtype) for x in (inputs.x, inputs.y) if x is not None]
    if total is not None:
        inputs = inputs._replace(x=total, y=None)
    return (outputs, total), (inputs, added)


def _normalize_backward(options, residuals, d_outputs):
    (inputs, added), d_outputs = first_order((residuals, d_outputs))
    dtypes = [x.dtype for x in added]
    return (backward(inputs, *d_outputs, options.epsilon, options.interpret, dtypes),)


normalize.defvjp(_normalize_forward, _normalize_backward)


def forward(
    inputs: LayerNormInputs, options: LayerNormOptions
) -> tuple[tuple[Float[Array, "R D"], ...], Float[Array, "R D"] | None]:
    """The layer norm of the sum, in each of the dtypes, and the sum if `options.pass_on`."""
    shapes = tuple(jax.ShapeDtypeStruct(inputs.x.shape, dtype) for dtype in options.dtypes)
    makes_sum = options.pass_on and inputs.y is not None
    total = jax.ShapeDtypeStruct(inputs.x.shape, inputs.x.dtype) if makes_sum else None
    outputs, total = _launch(
        *(_forward_kernel, inputs, (), (shapes, total), len(inputs.x)),
        *(options.epsilon, options.interpret),
    )
    return outputs, total if makes_sum or not options.pass_on else inputs.x


def backward(
    inputs: LayerNormInputs,
    d_outputs: tuple[Float[Array, "R D"], ...],
    d_sum: Float[Array, "R D"] | None,
    epsilon: float,
    interpret: bool,
    dtypes: Sequence[Any],
) -> LayerNormInputs:
    """The gradients of what `forward` took, given those of what it returned.

    Args:
      inputs: those of `forward`, or the sum as `x` without `y`.
      d_outputs: of the norms.
      d_sum: the gradient of the sum from elsewhere, in the dtype of `x`; None is 0.
      epsilon, interpret: of the options.
      dtypes: of the arrays that were added.
    """
    n_rows, size = inputs.x.shape
    n_programs = min(n_rows, N_PROGRAMS)
    weights = [w for w in weights_of(inputs) if w is not None]
    parts = jax.ShapeDtypeStruct((len(weights), n_programs, size), jnp.float32)
    like_x = tuple(jax.ShapeDtypeStruct(inputs.x.shape, x) for x in dtypes)
    shapes = like_x, parts
    others = d_outputs, d_sum
    # `d_x`, the first output, overwrites `d_sum`, the last input.
    aliases = {} if d_sum is None else {len(jax.tree.leaves((inputs, others))) - 1: 0}
    (d_x, *d_y), sums = _launch(
        _backward_kernel, inputs, others, shapes, n_programs, epsilon, interpret, aliases
    )
    both = zip(jnp.sum(sums, axis=1), weights, strict=True)
    found = iter([total.astype(like.dtype) for total, like in both])
    of_weights = (None if w is None else next(found) for w in weights_of(inputs))
    return LayerNormInputs(d_x, d_y[0] if d_y else None, *of_weights)
