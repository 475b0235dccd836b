"""A feed-forward layer of FP8 products with delayed scales, whose hidden layer is FP8 in memory.

A delayed scale is known before the numbers are. So the kernels of the hidden layer round what they
compute while it is on the chip, and note its largest number: neither the hidden layer nor its
gradient is ever written in half precision. The backward pass writes the hidden layer by columns,
for the gradient of the next weights, and the gradient of what precedes it both ways.

Letters as in `kernels.feed_forward`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from reformax.layers import float8
from reformax.layers.dropout import APART
from reformax.layers.float8 import E4M3, E5M2, Quantized
from reformax.layers.kernels.feed_forward import (
    FORWARD,
    FeedForwardInputs,
    FeedForwardOptions,
    launched,
)
from reformax.layers.kernels.rounding import largest, to_float8
from reformax.ops.numerics.first_order import first_order

# Rows and columns of a tile, and warps: it is also written by columns.
BACKWARD = 64, 64, 8


class Weights(NamedTuple):
    """The matrices, and the values of their histories."""

    w1: Float[Array, "D F"]
    w2: Float[Array, "F D"]
    seen1: Float[Array, "3 S"]
    seen2: Float[Array, "3 S"]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def apply(
    options: FeedForwardOptions,
    x: Float[Array, "R D"],
    inputs: FeedForwardInputs,
    weights: Weights,
) -> Float[Array, "R D"]:
    """`dropout(activation(x @ w1 + bias)) @ w2`; `inputs.pre` is None."""
    return _output(options, x, inputs, weights, with_gradient=False)[0]


def _output(options, x, inputs, weights, with_gradient: bool):
    """The layer, and what it multiplied: `with_gradient` also as the backward pass reads it."""
    float8.check_device()
    x, inputs, weights = first_order((x, inputs, weights))
    of_x = float8.quantize(x, E4M3, weights.seen1[0], columns=with_gradient)
    pairs = (weights.w1, weights.seen1), (weights.w2, weights.seen2)
    w1, w2 = (
        float8.quantize(w, E4M3, seen[1], rows=with_gradient, columns=True) for w, seen in pairs
    )
    inputs = inputs._replace(pre=float8.contract(of_x, w1, x.dtype))
    hidden = _forward_hidden(inputs, weights, options)
    rounded = weights._replace(w1=w1, w2=w2)
    return float8.contract(hidden, w2, x.dtype), of_x, inputs, rounded, hidden


def _forward(options, x, inputs, weights):
    out, of_x, inputs, rounded, hidden = _output(options, x, inputs, weights, with_gradient=True)
    w1, w2 = (w._replace(columns=None) for w in (rounded.w1, rounded.w2))
    like = [jnp.zeros(0, w.dtype) for w in (weights.w1, weights.w2)]
    kept = rounded._replace(w1=w1, w2=w2)
    return out, (of_x._replace(rows=None), inputs, kept, hidden._replace(rows=None), like)


def _backward(options, residuals, d_out):
    (of_x, inputs, weights, hidden, like), d_out = first_order((residuals, d_out))
    w1, w2, seen1, seen2 = weights
    d = float8.quantize(d_out, E5M2, seen2[2], columns=True)
    d_hidden = float8.contract(d, w2, d_out.dtype, of_rows=True)
    hidden, d_pre, d_bias = _backward_hidden(inputs, d_hidden, hidden, seen1[2], options)
    d_x = float8.contract(d_pre, w1, d_out.dtype, of_rows=True)
    d_weights = Weights(
        float8.of_weights(of_x, d_pre, like[0].dtype),
        float8.of_weights(hidden, d, like[1].dtype),
        float8.change(seen1, of_x, w1, d_pre),
        float8.change(seen2, hidden, w2, d),
    )
    return d_x, FeedForwardInputs(None, d_bias, None, None), d_weights


apply.defvjp(_forward, _backward)


def _grid(inputs: FeedForwardInputs, sizes: tuple[int, int, int]) -> tuple[int, int, int]:
    n_rows, size = inputs.pre.shape
    return pl.cdiv(n_rows, sizes[0]), pl.cdiv(size, 2 * APART), APART // sizes[1]


def _forward_hidden(inputs: FeedForwardInputs, weights: Weights, options: Any) -> Quantized:
    """The hidden layer by rows."""
    scale = float8.delayed_scale(weights.seen2[0], E4M3)
    shapes = (
        jax.ShapeDtypeStruct(inputs.pre.shape, E4M3),
        jax.ShapeDtypeStruct(_grid(inputs, FORWARD), jnp.float32),
    )
    rows, found = launched(
        _forward_float8_kernel, inputs, (scale.reshape(1),), shapes, FORWARD, options
    )
    return Quantized(rows, None, scale, float8.over_shards(jnp.max(found)))


def _backward_hidden(
    inputs: FeedForwardInputs,
    d_hidden: Float[Array, "R F"],
    hidden: Quantized,
    seen: Float[Array, " S"],
    options: FeedForwardOptions,
) -> tuple[Quantized, Quantized, Float[Array, " F"]]:
    """The hidden layer by columns, and the gradients of `pre`, both ways, and of the bias."""
    (n_rows, size), grid = inputs.pre.shape, _grid(inputs, BACKWARD)
    scale = float8.delayed_scale(seen, E5M2)
    shapes = (
        jax.ShapeDtypeStruct((size, n_rows), E4M3),
        jax.ShapeDtypeStruct((n_rows, size), E5M2),
        jax.ShapeDtypeStruct((size, n_rows), E5M2),
        jax.ShapeDtypeStruct((grid[0], size), jnp.float32),
        jax.ShapeDtypeStruct(grid, jnp.float32),
    )
    scales = jnp.stack([hidden.scale, scale])
    columns, d_rows, d_columns, sums, found = launched(
        _backward_float8_kernel, inputs, (scales, d_hidden), shapes, BACKWARD, options
    )
    d_pre = Quantized(d_rows, d_columns, scale, float8.over_shards(jnp.max(found)))
    d_bias = jnp.sum(sums, axis=0).astype(inputs.bias.dtype)
    return hidden._replace(columns=columns), d_pre, d_bias


def _forward_float8_kernel(inputs, scale, hidden, found, *, tile, activation):
    parts, tops = tile.pair(inputs), []
    pre = [part.load(inputs.pre) + part.load_bias(inputs.bias) for part, _ in parts]
    for (part, dropped), x in zip(parts, pre, strict=True):
        value = part.existing(activation(x)[0] * dropped)
        part.store(hidden, to_float8(value, scale[0], E4M3))
        tops.append(largest(value))
    found[tuple(map(pl.program_id, range(3)))] = jnp.maximum(*tops)


def _backward_float8_kernel(
    inputs, scales, d_hidden, hidden, d_rows, d_columns, sums, found, *, tile, activation
):
    parts, tops = tile.pair(inputs), []
    read = [
        (part.load(inputs.pre) + part.load_bias(inputs.bias), part.load(d_hidden))
        for part, _ in parts
    ]
    for (part, dropped), (x, d_value) in zip(parts, read, strict=True):
        value, slope = activation(x)
        d = part.existing(d_value * dropped * slope)
        part.store_columns(hidden, to_float8(value * dropped, scales[0], E4M3))
        d_rounded = to_float8(d, scales[1], E5M2)
        part.store(d_rows, d_rounded)
        part.store_columns(d_columns, d_rounded)
        part.store_sum(sums, d)
        tops.append(largest(d))
    found[tuple(map(pl.program_id, range(3)))] = jnp.maximum(*tops)
