"""Angular hashing as a Pallas kernel for NVIDIA GPUs (Triton).

The products with the rotations stay on the chip; there are hundreds for each bucket. The kernel
reads vectors once and writes buckets once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from reformax.ops.kernels.triton.common import launch, load, matmul, tile_side

# Vectors of a program, and directions of a step of its loop. Half of both where rows have more
# than 512 bytes: a chip's shared memory holds them.
ROWS, DIRECTIONS = 128, 64


class _Extremes(NamedTuple):
    """The largest and the smallest product of each vector, and the directions that have them."""

    high: Array
    argmax: Array
    low: Array
    argmin: Array

    def with_more(self, more: _Extremes) -> _Extremes:
        """The extremes of these directions and of `more`, which have larger indices."""
        return _Extremes(
            jnp.maximum(self.high, more.high),
            jnp.where(more.high > self.high, more.argmax, self.argmax),
            jnp.minimum(self.low, more.low),
            jnp.where(more.low < self.low, more.argmin, self.argmin),
        )


def _extremes(products: Array, index: Array, half: int) -> _Extremes:
    """The extremes of products with the directions `index`; those from `half` on do not exist."""
    exists = (index < half)[None, :]
    positive, negative = jnp.where(exists, products, -jnp.inf), jnp.where(exists, products, jnp.inf)
    high, low = jnp.max(positive, axis=1), jnp.min(negative, axis=1)
    fallback = jnp.int32(half - 1)  # for NaN at padding, which equals nothing; any bucket is right
    argmax = jnp.min(jnp.where(positive == high[:, None], index[None, :], fallback), axis=1)
    argmin = jnp.min(jnp.where(negative == low[:, None], index[None, :], fallback), axis=1)
    return _Extremes(high, argmax, low, argmin)


def bucket_of(
    x: Array,
    size: int,
    rotation: Callable[[Array, Array], Any],
    factors: Sequence[int],
    directions: int = DIRECTIONS,
) -> Array:
    """The bucket of each row of a tile.

    Args:
      x: the tile, zeros from column `size` on.
      size: H.
      rotation: `(feature, index) -> view`, a hash's rotations at an index of a direction.
      factors: the bucket counts.
      directions: the most that a step multiplies with.
    """
    feature = jnp.arange(x.shape[1], dtype=jnp.int32)[:, None]

    def best_of(start: int, half: int) -> _Extremes:
        """The extremes over `half` directions from `start`, a tile of them at a time."""
        width = min(directions, tile_side(half))

        def of_tile(first) -> _Extremes:
            index = first + jnp.arange(width, dtype=jnp.int32)
            exists = (feature < size) & (index < half)[None, :]
            rotations = load(rotation(feature, start + index[None, :]), exists, 0.0)
            return _extremes(matmul(x, rotations.astype(x.dtype)), index, half)

        found = of_tile(jnp.int32(0))
        if half <= width:
            return found
        n_tiles = -(-half // width)
        return _loop(1, n_tiles, lambda i, found: found.with_more(of_tile(i * width)), found)

    bucket, start, scale = jnp.zeros((x.shape[0],), jnp.int32), 0, 1
    for factor in factors:
        half = factor // 2
        found = best_of(start, half)
        positive = found.high >= -found.low
        bucket = bucket + scale * jnp.where(positive, found.argmax, found.argmin + half)
        start, scale = start + half, scale * factor
    return bucket


def _kernel(
    x_ref, rotations_ref, bucket_ref, *, factors: Sequence[int], rows: int, directions: int
):
    batch, head = pl.program_id(2), pl.program_id(1)
    _, length, _, size = x_ref.shape
    row = pl.program_id(0) * rows + jnp.arange(rows, dtype=jnp.int32)
    feature = jnp.arange(tile_side(size), dtype=jnp.int32)
    exists = row < length
    x = load(
        x_ref.at[batch, row[:, None], head, feature[None, :]],
        exists[:, None] & (feature < size)[None, :],
        0.0,
    )

    def one_hash(hash_index, _):
        def rotation(line, index):
            return rotations_ref.at[head, hash_index, line, index]

        bucket = bucket_of(x, size, rotation, factors, directions)
        pltriton.store(bucket_ref.at[batch, head, hash_index, row], bucket, mask=exists)

    # A loop keeps the compiled program as small as that of one hash.
    _loop(0, rotations_ref.shape[1], one_hash, None)


def _loop(first: int, stop: int, body: Callable, carry: Any) -> Any:
    return lax.fori_loop(np.int32(first), np.int32(stop), body, carry)


def hash_vectors(
    vectors: Float[Array, "B T N H"],
    rotations: Float[Array, "N H R F"],
    factors: Sequence[int],
    interpret: bool = False,
) -> Int[Array, "B N R T"]:
    """The buckets of `ops.hashing.angular.hash_by`, from products in the dtype of `vectors`.

    Args:
      rotations: the directions of each head and hash, half as many as each factor, concatenated.
      factors: even bucket counts.
    """
    batch, length, n_heads, size = vectors.shape
    n_hashes = rotations.shape[2]
    share = 2 if tile_side(size) * vectors.dtype.itemsize > 512 else 1
    rows = min(ROWS // share, tile_side(length))
    return launch(
        functools.partial(
            _kernel, factors=tuple(factors), rows=rows, directions=DIRECTIONS // share
        ),
        (vectors, jnp.swapaxes(rotations, 1, 2).astype(vectors.dtype)),
        jax.ShapeDtypeStruct((batch, n_heads, n_hashes, length), jnp.int32),
        grid=(pl.cdiv(length, rows), n_heads, batch),
        num_warps=4,
        num_stages=2,
        interpret=interpret,
        name="angular_hash",
    )
