"""The hidden layer of a feed-forward layer as Pallas kernels for NVIDIA GPUs (Triton).

`dropout(activation(pre + bias))` in half precision, and its gradient: one pass over the numbers
each. In array operations XLA keeps the gradient in float32, to sum it up for that of the bias, and
the tangent hyperbolic of GELU takes it longer than to read the numbers; here it is the chip's own,
whose error of 2^-11 is below the rounding of the result.

The backward pass makes the hidden layer again, which the gradient of the next weights needs: it has
read `pre` and has the activation and the mask of dropout at hand. It writes over what it reads.

The hash of dropout would be half of the forward pass's arithmetic: one serves two columns.

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

from reformax.layers.dropout import APART, multiplier
from reformax.ops.parts.dropout import dropout_bits

# Rows and columns of a tile, and warps. A program has two tiles, whose columns are `APART` apart.
FORWARD, BACKWARD = (16, 256, 8), (32, 128, 8)


class Inputs(NamedTuple):
    """What both passes read."""

    pre: Float[Array, "R F"]
    bias: Float[Array, " F"]
    words: Int[Array, 2] | None  # the source of dropout; None: there is none
    start: Int[Array, 1]  # the position of a sequence's first row


class How(NamedTuple):
    """The static part of a call.

    Attributes:
      activation: one of `ACTIVATIONS`.
      length: rows of a sequence, C.
      rate: of dropout.
      interpret: whether to run anywhere, slowly.
    """

    activation: Callable
    length: int
    rate: float
    interpret: bool = False


class _Tile(NamedTuple):
    """A tile of a program, and how it reads and writes it."""

    rows: int
    columns: int
    length: int  # rows of a sequence
    rate: float
    shape: tuple[int, int]
    right: bool = False  # of the two

    @property
    def _row(self) -> Array:
        return pl.program_id(0) * self.rows + jnp.arange(self.rows, dtype=jnp.int32)

    @property
    def _column(self) -> Array:
        # In sums of multiples, which show the compiler how many numbers it may read at once.
        first = pl.program_id(1) * (2 * APART) + pl.program_id(2) * self.columns
        return first + APART * self.right + jnp.arange(self.columns, dtype=jnp.int32)

    @property
    def grid(self) -> tuple[int, int, int]:
        pairs = pl.cdiv(self.shape[1], 2 * APART)
        return pl.cdiv(self.shape[0], self.rows), pairs, APART // self.columns

    def _at(self, *sizes: int) -> dict[str, Array]:
        """The mask of a tile that may reach behind the end."""
        masks = []
        if self.shape[0] % self.rows and len(sizes) == 2:
            masks.append(self._row[:, None] < self.shape[0])
        if self.shape[1] % (2 * APART):
            column = self._column < self.shape[1]
            masks.append(column[None] if len(sizes) == 2 else column)
        if not masks:
            return {}
        return dict(mask=jnp.broadcast_to(functools.reduce(jnp.logical_and, masks), sizes))

    def load(self, ref) -> Array:
        """The tile in float32, zeros behind the end."""
        mask = self._at(self.rows, self.columns)
        other = dict(other=0.0) if mask else {}
        at = ref.at[self._row[:, None], self._column[None]]
        return pltriton.load(at, **mask, **other).astype(jnp.float32)

    def load_bias(self, ref) -> Array:
        mask = self._at(self.columns)
        other = dict(other=0.0) if mask else {}
        return pltriton.load(ref.at[self._column], **mask, **other).astype(jnp.float32)[None]

    def store(self, ref, value: Array) -> None:
        at = ref.at[self._row[:, None], self._column[None]]
        mask = self._at(self.rows, self.columns)
        pltriton.store(at, value.astype(ref.dtype), **mask)

    def store_sum(self, ref, value: Array) -> None:
        """The sum over the tile's rows, to a row of its own."""
        at = ref.at[pl.program_id(0), self._column]
        pltriton.store(at, jnp.sum(value, axis=0), **self._at(self.columns))

    def pair(self, inputs: Inputs) -> list[tuple[_Tile, Array | float]]:
        """This tile and the right one, and what dropout multiplies each by."""
        keep = 1.0, 1.0
        if inputs.words is not None:
            row = self._row[:, None]
            sequence, position = row // self.length, row % self.length + inputs.start[0]
            words = inputs.words[0], inputs.words[1]
            nothing = jnp.zeros((), jnp.int32)
            bits = dropout_bits(words, sequence, nothing, position, self._column[None])
            keep = multiplier(bits, self.rate), multiplier(bits << 16, self.rate)
        return list(zip((self, self._replace(right=True)), keep, strict=True))


def _gelu(x: Array, tanh: Callable) -> tuple[Array, Array]:
    """GELU by the tangent hyperbolic (Hendrycks and Gimpel 2016, section 2), and its slope."""
    scale, cubic = math.sqrt(2 / math.pi), 0.044715
    t = tanh(scale * (x + cubic * x * x * x))
    inside = scale * (1 + 3 * cubic * x * x)
    return 0.5 * x * (1 + t), 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * inside


def _relu(x: Array, tanh: Callable) -> tuple[Array, Array]:
    del tanh
    return jnp.maximum(x, 0.0), jnp.where(x > 0.0, 1.0, 0.0)


# The activations that there are kernels of, with their slopes.
ACTIVATIONS: dict[Any, Callable] = {jax.nn.gelu: _gelu, jax.nn.relu: _relu}


def _forward_kernel(inputs: Inputs, hidden, *, tile: _Tile, activation: Callable):
    parts = tile.pair(inputs)
    # All reads before all writes: the compiler keeps them apart in the order that it finds.
    pre = [part.load(inputs.pre) + part.load_bias(inputs.bias) for part, _ in parts]
    for (part, keep), x in zip(parts, pre, strict=True):
        part.store(hidden, activation(x)[0] * keep)


def _backward_kernel(
    inputs: Inputs, d_hidden, hidden, d_pre, sums, *, tile: _Tile, activation: Callable
):
    parts = tile.pair(inputs)
    read = [
        (part.load(inputs.pre) + part.load_bias(inputs.bias), part.load(d_hidden))
        for part, _ in parts
    ]
    for (part, keep), (x, d_value) in zip(parts, read, strict=True):
        value, slope = activation(x)
        d = d_value * keep * slope
        part.store(hidden, value * keep)
        part.store(d_pre, d)
        part.store_sum(sums, d)


def _launch(kernel, inputs: Inputs, others, shapes, sizes, how: How, aliases=None) -> Any:
    *sizes, num_warps = sizes
    tile = _Tile(*sizes, how.length, how.rate, inputs.pre.shape)
    exact = how.interpret or inputs.pre.dtype == jnp.float32
    tanh = jnp.tanh if exact else pltriton.approx_tanh
    return pl.pallas_call(
        functools.partial(
            kernel,
            tile=tile,
            activation=functools.partial(ACTIVATIONS[how.activation], tanh=tanh),
        ),
        grid=tile.grid,
        out_shape=shapes,
        input_output_aliases=aliases or {},
        compiler_params=pltriton.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=how.interpret,
        name="feed_forward" + kernel.__name__.removesuffix("_kernel"),
    )(inputs, *others)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def project(how: How, inputs: Inputs, w2: Float[Array, "F D"]) -> Float[Array, "R D"]:
    """`hidden @ w2`; its gradient takes the hidden layer from the pass that needs `pre`."""
    return _project_forward(how, inputs, w2)[0]


def _project_forward(how, inputs, w2):
    return forward(inputs, how) @ w2, (inputs, w2)


def _project_backward(how, residuals, d_out):
    inputs, w2 = residuals
    hidden, d_pre, d_bias = backward(inputs, d_out @ w2.T, how)
    return Inputs(d_pre, d_bias, None, None), hidden.T @ d_out


project.defvjp(_project_forward, _project_backward)


def forward(inputs: Inputs, how: How) -> Float[Array, "R F"]:
    """The hidden layer, in the dtype of `pre`."""
    shape = jax.ShapeDtypeStruct(inputs.pre.shape, inputs.pre.dtype)
    return _launch(_forward_kernel, inputs, (), shape, FORWARD, how)


def backward(
    inputs: Inputs, d_hidden: Float[Array, "R F"], how: How
) -> tuple[Float[Array, "R F"], Float[Array, "R F"], Float[Array, " F"]]:
    """The hidden layer, and the gradients of `pre` and `bias`."""
    n_rows, size = inputs.pre.shape
    like = jax.ShapeDtypeStruct(inputs.pre.shape, inputs.pre.dtype)
    part = jax.ShapeDtypeStruct((-(-n_rows // BACKWARD[0]), size), jnp.float32)
    shapes = like, like, part
    # `hidden` takes the place of `pre`, the first input, and `d_pre` that of `d_hidden`, the last.
    aliases = {0: 0, len(jax.tree.leaves(inputs)): 1}
    hidden, d_pre, sums = _launch(
        _backward_kernel, inputs, (d_hidden,), shapes, BACKWARD, how, aliases
    )
    return hidden, d_pre, jnp.sum(sums, axis=0).astype(inputs.bias.dtype)
