"""Positive random features of bfloat16 vectors, as Pallas kernels for NVIDIA GPUs (Triton).

They compute `ops.recurrence.random_features.positive_features`. A program has all features of a
tile of vectors, and writes nothing but the features. Directions are sums of bfloat16 parts.

Letters as in `reformax.ops.base`; M is the number of features, R the vectors of a program.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float

from reformax.derivatives import CustomDerivatives
from reformax.ops.kernels.triton.common import (
    launch,
    load,
    matmul,
    name_of,
    tile_side,
    view_rows,
)
from reformax.ops.kernels.triton.recurrence_chunk import parts_of, to_float32

ROWS, WARPS = 64, 8
PARTS = 2  # of directions; their sum has a relative error of 2^-15


class FeatureArrays(NamedTuple):
    """The arrays that the kernels read."""

    x: Any  # [B, T, N, H]
    directions: Any  # [P, M, H], times H^(-1/4); P parts
    epsilon: Any  # [1]
    relative_to: Any  # [B, T, N] or None


class _FeatureTile(NamedTuple):
    """The vectors of a program of the grid (T / R, N, B), and the exponents of their features."""

    x: Float[Array, "R H"]
    index: tuple[Any, Any, Any]  # batch, positions, head
    exists: Any
    exponents: Float[Array, "R M"]  # minus infinity where no feature exists
    scale: Float[Array, " R"]  # the largest exponent of each vector

    def view(self, ref):
        return ref.at[self.index], self.exists


def _tile(read: FeatureArrays) -> _FeatureTile:
    """Reads vectors, and computes the exponents of their features."""
    head, batch = pl.program_id(1), pl.program_id(2)
    position = pl.program_id(0) * ROWS + jnp.arange(ROWS, dtype=jnp.int32)
    length, size = read.x.shape[1], read.x.shape[3]
    exists = position < length
    x = load(*view_rows(read.x, batch, position, head, tile_side(size), exists))
    square = jnp.sum(to_float32(x) ** 2, axis=1) * size**-0.5
    exponents = sum(
        matmul(x, _directions(read, part), transpose_b=True) for part in reversed(range(PARTS))
    )
    exponents = exponents - square[:, None] / 2
    inside = jnp.arange(exponents.shape[1], dtype=jnp.int32) < read.directions.shape[1]
    exponents = jnp.where(inside[None, :], exponents, -jnp.inf)
    scale = jnp.max(exponents, axis=1)
    return _FeatureTile(x, (batch, position, head), exists, exponents, scale)


def _directions(read: FeatureArrays, part: int) -> Float[Array, "M H"]:
    """A part of the directions, as a tile."""
    n, size = read.directions.shape[1:]
    number, column = (jnp.arange(tile_side(i), dtype=jnp.int32) for i in (n, size))
    inside = (number < n)[:, None] & (column < size)[None, :]
    return load(read.directions.at[part, number[:, None], column[None, :]], inside)


def _relative_to(read: FeatureArrays, tile: _FeatureTile):
    if read.relative_to is None:
        return tile.scale
    return load(*tile.view(read.relative_to))


def _view(ref, tile: _FeatureTile):
    batch, position, head = tile.index
    return view_rows(ref, batch, position, head, tile_side(ref.shape[3]), tile.exists)


def scales_kernel(read, scales) -> None:
    """The largest exponents, `[B, T, N]`."""
    tile = _tile(read)
    view, mask = tile.view(scales)
    pltriton.store(view, tile.scale, mask=mask)


def features_kernel(read, features) -> None:
    """`[B, T, N, M]`."""
    tile = _tile(read)
    reference = _relative_to(read, tile)
    offset = read.epsilon[0] * jnp.exp(tile.scale - reference)
    features_tile = jnp.exp(tile.exponents - reference[:, None]) + offset[:, None]
    view, mask = _view(features, tile)
    pltriton.store(view, features_tile.astype(features.dtype), mask=mask)


def gradient_kernel(read, d_features, dx) -> None:
    """The gradient of the vectors."""
    tile = _tile(read)
    reference = _relative_to(read, tile)
    number = jnp.arange(tile.exponents.shape[1], dtype=jnp.int32)
    d = to_float32(load(*_view(d_features, tile)))
    d_offset = jnp.sum(d, axis=1) * read.epsilon[0] * jnp.exp(tile.scale - reference)
    # The gradient of the maximum goes to the first of equal exponents.
    at_top = tile.exponents == tile.scale[:, None]
    first = jnp.min(jnp.where(at_top, number[None, :], len(number)), axis=1)
    d = d * jnp.exp(tile.exponents - reference[:, None])
    d = d + jnp.where(number[None, :] == first[:, None], d_offset[:, None], 0)
    d = d.astype(jnp.bfloat16)
    size = read.x.shape[3]
    of_directions = matmul(d, _directions(read, 0))
    dx_tile = (
        of_directions - to_float32(tile.x) * (jnp.sum(to_float32(d), axis=1) * size**-0.5)[:, None]
    )
    view, mask = _view(dx, tile)
    pltriton.store(view, dx_tile.astype(dx.dtype), mask=mask)


def _run(kernel, read: FeatureArrays, inputs, shape, interpret: bool):
    batch, length, n_heads, size = read.x.shape
    parts = jnp.stack(parts_of(read.directions * size**-0.25, PARTS))
    read = read._replace(directions=parts, epsilon=jnp.reshape(read.epsilon, 1))
    return launch(
        kernel,
        (read, *inputs),
        shape,
        grid=(pl.cdiv(length, ROWS), n_heads, batch),
        num_warps=WARPS,
        num_stages=2,
        interpret=interpret,
        name=f"random_{name_of(kernel)}",
    )


def scales(x: Float[Array, "B T N H"], directions: Float[Array, "M H"], interpret: bool) -> Array:
    """The largest exponent of each vector, `[B, T, N]`, without a gradient."""
    read = FeatureArrays(*jax.lax.stop_gradient((x, directions)), jnp.zeros(()), None)
    shape = jax.ShapeDtypeStruct(x.shape[:3], jnp.float32)
    return _run(scales_kernel, read, (), shape, interpret)


@functools.partial(CustomDerivatives, n_static=1)
def features(interpret: bool, read: FeatureArrays) -> Float[Array, "B T N M"]:
    """The features in the dtype of the vectors; only the vectors have a gradient."""
    shape = (*read.x.shape[:3], read.directions.shape[0])
    return _run(features_kernel, read, (), jax.ShapeDtypeStruct(shape, read.x.dtype), interpret)


def _backward(interpret: bool, read: FeatureArrays, d_features):
    shape = jax.ShapeDtypeStruct(read.x.shape, read.x.dtype)
    dx = _run(gradient_kernel, read, (d_features,), shape, interpret)
    others = jax.tree.map(jnp.zeros_like, read._replace(x=None))
    return (others._replace(x=dx),)


features.define(lambda interpret, read: (features(interpret, read), read), _backward)
