"""The hidden layer of a feed-forward layer as Pallas kernels for NVIDIA GPUs (Triton).

They compute `dropout(activation(pre + bias))` in half precision, and its gradient, in one pass over
the numbers each. As array operations they take longer: XLA keeps the gradient in float32 in order
to sum it up for the bias, and GELU's tanh takes longer than reading the numbers. The kernels use
the GPU's tanh instruction, whose error of 2^-11 is below the rounding of the result.

The gradient of the next weights needs the hidden layer again. The backward pass makes it: it has
read `pre`, and has the activation and the dropout mask at hand. It writes over what it reads.

Hashing for dropout would be half of the forward pass's arithmetic, so one hash serves two columns.

Letters as in `reformax.layers.feed_forward`; R rows are the positions of all sequences.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from reformax.layers import float8
from reformax.layers.dropout import APART, feature_bits, multiplier
from reformax.layers.matrices import relu_squared
from reformax.ops.kernels.triton.common import launch, load
from reformax.ops.numerics.first_order import first_order

# Rows and columns of a tile, and warps. A program has two tiles, whose columns are `APART` apart.
FORWARD, BACKWARD = (16, 256, 8), (32, 128, 8)


class FeedForwardInputs(NamedTuple):
    """The arrays that both passes read."""

    pre: Float[Array, "R F"]
    bias: Float[Array, " F"]
    seed: Int[Array, 6] | None  # of dropout; None: there is none
    start: Int[Array, 1]  # the position of each sequence's first row


class FeedForwardOptions(NamedTuple):
    """The static part of a call.

    Attributes:
      activation: one of `ACTIVATIONS`.
      length: C, the rows of a sequence.
      rate: the dropout rate.
      float8: whether the product multiplies FP8 numbers.
      interpret: whether to run anywhere, slowly.
    """

    activation: Callable
    length: int
    rate: float
    float8: bool = False
    interpret: bool = False


class _FeedForwardTile(NamedTuple):
    """A tile of a program, and how it reads and writes it."""

    rows: int
    columns: int
    length: int  # rows of a sequence
    rate: float  # of dropout
    shape: tuple[int, int]  # [R, F]
    right: bool = False  # whether it is the right one of a program's two

    @property
    def _row(self) -> Array:
        return pl.program_id(0) * self.rows + jnp.arange(self.rows, dtype=jnp.int32)

    @property
    def _column(self) -> Array:
        # From sums of multiples the compiler infers how many numbers it may read at once.
        first = pl.program_id(1) * (2 * APART) + pl.program_id(2) * self.columns
        return first + APART * self.right + jnp.arange(self.columns, dtype=jnp.int32)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Programs by rows, by pairs of `APART` columns, and by tiles within these."""
        pairs = pl.cdiv(self.shape[1], 2 * APART)
        return pl.cdiv(self.shape[0], self.rows), pairs, APART // self.columns

    def _mask(self, *sizes: int) -> Array | None:
        """The mask of what exists in a tile of these sizes, or in a row of it; None: everything."""
        masks = []
        if self.shape[0] % self.rows and len(sizes) == 2:
            masks.append(self._row[:, None] < self.shape[0])
        if self.shape[1] % (2 * APART):
            column = self._column < self.shape[1]
            masks.append(column[None] if len(sizes) == 2 else column)
        if not masks:
            return None
        return jnp.broadcast_to(functools.reduce(jnp.logical_and, masks), sizes)

    def _view(self, ref) -> Any:
        return ref.at[self._row[:, None], self._column[None]]

    def load(self, ref) -> Array:
        """The tile in float32, zeros after the end."""
        mask = self._mask(self.rows, self.columns)
        return load(self._view(ref), mask, 0.0).astype(jnp.float32)

    def load_bias(self, ref) -> Array:
        """The bias of the tile's columns, as a row of it."""
        mask = self._mask(self.columns)
        return load(ref.at[self._column], mask, 0.0).astype(jnp.float32)[None]

    def store(self, ref, value: Array) -> None:
        """Writes the tile."""
        mask = self._mask(self.rows, self.columns)
        pltriton.store(self._view(ref), value.astype(ref.dtype), mask=mask)

    def store_columns(self, ref, value: Array) -> None:
        """Writes the tile to the transpose of the matrix."""
        mask = self._mask(self.rows, self.columns)
        view = ref.at[self._column[:, None], self._row[None]]
        turned = None if mask is None else mask.T
        pltriton.store(view, value.T.astype(ref.dtype), mask=turned)

    def existing(self, value: Array) -> Array:
        """The tile with zeros behind the end."""
        mask = self._mask(self.rows, self.columns)
        return value if mask is None else jnp.where(mask, value, 0.0)

    def store_sum(self, ref, value: Array) -> None:
        """Writes the sum over the tile's rows to the tile's row of the output."""
        view = ref.at[pl.program_id(0), self._column]
        pltriton.store(view, jnp.sum(value, axis=0), mask=self._mask(self.columns))

    def pair(self, inputs: FeedForwardInputs) -> list[tuple[_FeedForwardTile, Array | float]]:
        """This tile and the one to its right, each with its dropout mask."""
        masks = 1.0, 1.0
        if inputs.seed is not None:
            row = self._row[:, None]
            sequence, position = row // self.length, row % self.length + inputs.start[0]
            seed = tuple(inputs.seed[i] for i in range(6))
            bits = feature_bits(seed, sequence, position, self._column[None])
            masks = multiplier(bits, self.rate), multiplier(bits << 16, self.rate)
        return list(zip((self, self._replace(right=True)), masks, strict=True))


def _gelu(x: Array, tanh: Callable) -> tuple[Array, Array]:
    """GELU by tanh (Hendrycks and Gimpel 2016, section 2), and its slope."""
    scale, cubic = math.sqrt(2 / math.pi), 0.044715
    t = tanh(scale * (x + cubic * x * x * x))
    inside = scale * (1 + 3 * cubic * x * x)
    return 0.5 * x * (1 + t), 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * inside


def _relu(x: Array, tanh: Callable) -> tuple[Array, Array]:
    del tanh
    return jnp.maximum(x, 0.0), jnp.where(x > 0.0, 1.0, 0.0)


def _relu_squared(x: Array, tanh: Callable) -> tuple[Array, Array]:
    del tanh
    positive = jnp.maximum(x, 0.0)
    return positive * positive, 2.0 * positive


# Activations that a kernel computes, each with its slope.
ACTIVATIONS: dict[Any, Callable] = {
    jax.nn.gelu: _gelu,
    jax.nn.relu: _relu,
    relu_squared: _relu_squared,
}


def _forward_kernel(
    inputs: FeedForwardInputs, hidden, *, tile: _FeedForwardTile, activation: Callable
):
    parts = tile.pair(inputs)
    # All reads come before all writes, because the compiler does not move one past the other.
    pre = [part.load(inputs.pre) + part.load_bias(inputs.bias) for part, _ in parts]
    for (part, dropped), x in zip(parts, pre, strict=True):
        part.store(hidden, activation(x)[0] * dropped)


def _backward_kernel(
    inputs: FeedForwardInputs,
    d_hidden,
    hidden,
    d_pre,
    sums,
    *,
    tile: _FeedForwardTile,
    activation: Callable,
):
    parts = tile.pair(inputs)
    read = [
        (part.load(inputs.pre) + part.load_bias(inputs.bias), part.load(d_hidden))
        for part, _ in parts
    ]
    for (part, dropped), (x, d_value) in zip(parts, read, strict=True):
        value, slope = activation(x)
        d = d_value * dropped * slope
        part.store(hidden, value * dropped)
        part.store(d_pre, d)
        part.store_sum(sums, d)


def launched(
    kernel,
    inputs: FeedForwardInputs,
    others,
    shapes,
    sizes,
    options: FeedForwardOptions,
    aliases=None,
) -> Any:
    """The outputs of a kernel, which reads `inputs` and `others`, by tiles of these sizes."""
    *sizes, num_warps = sizes
    tile = _FeedForwardTile(*sizes, options.length, options.rate, inputs.pre.shape)
    exact = options.interpret or inputs.pre.dtype == jnp.float32
    tanh = jnp.tanh if exact else pltriton.approx_tanh
    activation = functools.partial(ACTIVATIONS[options.activation], tanh=tanh)
    return launch(
        functools.partial(kernel, tile=tile, activation=activation),
        (inputs, *others),
        shapes,
        grid=tile.grid,
        num_warps=num_warps,
        num_stages=1,
        interpret=options.interpret,
        name="feed_forward" + kernel.__name__.removesuffix("_kernel"),
        aliases=aliases,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def project(
    options: FeedForwardOptions, inputs: FeedForwardInputs, w2: Float[Array, "F D"]
) -> Float[Array, "R D"]:
    """`hidden @ w2`; its gradient takes the hidden layer from the pass that needs `pre`."""
    hidden = forward(first_order(inputs), options)
    return _project_float8(hidden, w2)[0] if options.float8 else hidden @ w2


def _project_float8(hidden, w2):
    """The product, and the rounded matrix as the backward pass needs it."""
    float8.check_device()
    w = float8.quantize(w2, float8.E4M3, columns=True)
    out = float8.contract(float8.quantize(hidden, float8.E4M3), w, hidden.dtype)
    return out, w._replace(columns=None)


def _project_forward(options, inputs, w2):
    inputs, w2 = first_order((inputs, w2))
    hidden, like = forward(inputs, options), jnp.zeros(0, w2.dtype)
    if options.float8:
        out, w2 = _project_float8(hidden, w2)
        return out, (inputs, w2, like)
    return hidden @ w2, (inputs, w2, like)


def _project_backward(options, residuals, d_out):
    (inputs, w2, like), d_out = first_order((residuals, d_out))
    if options.float8:
        d = float8.quantize(d_out, float8.E5M2, columns=True)
        d_hidden = float8.contract(d, w2, d_out.dtype, of_rows=True)
    else:
        d_hidden = d_out @ w2.T
    hidden, d_pre, d_bias = backward(inputs, d_hidden, options)
    if options.float8:
        x = float8.quantize(hidden, float8.E4M3, rows=False, columns=True)
        d_w2 = float8.of_weights(x, d, like.dtype)
    else:
        d_w2 = (hidden.T @ d_out).astype(like.dtype)
    return FeedForwardInputs(d_pre, d_bias, None, None), d_w2


project.defvjp(_project_forward, _project_backward)


def forward(inputs: FeedForwardInputs, options: FeedForwardOptions) -> Float[Array, "R F"]:
    """The hidden layer, in the dtype of `pre`."""
    shape = jax.ShapeDtypeStruct(inputs.pre.shape, inputs.pre.dtype)
    return launched(_forward_kernel, inputs, (), shape, FORWARD, options)


def backward(
    inputs: FeedForwardInputs, d_hidden: Float[Array, "R F"], options: FeedForwardOptions
) -> tuple[Float[Array, "R F"], Float[Array, "R F"], Float[Array, " F"]]:
    """The hidden layer, and the gradients of `pre` and `bias`."""
    n_rows, size = inputs.pre.shape
    like = jax.ShapeDtypeStruct(inputs.pre.shape, inputs.pre.dtype)
    parts = jax.ShapeDtypeStruct((-(-n_rows // BACKWARD[0]), size), jnp.float32)
    shapes = like, like, parts
    # `hidden` overwrites `pre`, the first input, and `d_pre` overwrites `d_hidden`, the last.
    aliases = {0: 0, len(jax.tree.leaves(inputs)): 1}
    hidden, d_pre, sums = launched(
        _backward_kernel, inputs, (d_hidden,), shapes, BACKWARD, options, aliases
    )
    return hidden, d_pre, jnp.sum(sums, axis=0).astype(inputs.bias.dtype)
