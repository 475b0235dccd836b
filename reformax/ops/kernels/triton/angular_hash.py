"""Angular hashing as a Pallas kernel for NVIDIA GPUs (Triton).

The products with the rotations, hundreds for each number hashed, stay on the chip. Vectors are read
once and buckets written once.
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

from reformax.ops.kernels.triton.common import launch, load, matmul, power_of_two

# Vectors of a program, and directions that it compares at a time.
ROWS, DIRECTIONS = 128, 64


class _Extremes(NamedTuple):
    """The largest and the smallest product of each vector, and the directions that have them."""

    high: Array
    argmax: Array
    low: Array
    argmin: Array

    def with_more(self, more: _Extremes) -> _Extremes:
        """Those of these directions and of `more`, whose numbers are larger."""
        return _Extremes(
            jnp.maximum(self.high, more.high),
            jnp.where(more.high > self.high, more.argmax, self.argmax),
            jnp.minimum(self.low, more.low),
            jnp.where(more.low < self.low, more.argmin, self.argmin),
        )


def _extremes(products: Array, index: Array, half: int) -> _Extremes:
    """The extremes of products with the directions `index`, of which `half` exist."""
    real = (index < half)[None, :]
    up, down = jnp.where(real, products, -jnp.inf), jnp.where(real, products, jnp.inf)
    high, low = jnp.max(up, axis=1), jnp.min(down, axis=1)
    none = jnp.int32(half - 1)  # NaN at padding equals nothing; any bucket will do
    argmax = jnp.min(jnp.where(up == high[:, None], index[None, :], none), axis=1)
    argmin = jnp.min(jnp.where(down == low[:, None], index[None, :], none), axis=1)
    return _Extremes(high, argmax, low, argmin)


def _kernel(x_ref, rotations_ref, bucket_ref, *, factors: Sequence[int], rows: int):
    batch, head = pl.program_id(2), pl.program_id(1)
    _, length, _, size = x_ref.shape
    row = pl.program_id(0) * rows + jnp.arange(rows, dtype=jnp.int32)
    feature = jnp.arange(power_of_two(size), dtype=jnp.int32)
    exists = row < length
    x = load(
        x_ref.at[batch, row[:, None], head, feature[None, :]],
        exists[:, None] & (feature < size)[None, :],
        0.0,
    )

    def best(hash_index, start: int, half: int) -> _Extremes:
        """Among `half` directions of a hash, from `start` on; `DIRECTIONS` at a time."""
        width = min(DIRECTIONS, power_of_two(half))

        def among(first) -> _Extremes:
            index = first + jnp.arange(width, dtype=jnp.int32)
            rotation = load(
                rotations_ref.at[head, hash_index, feature[:, None], start + index[None, :]],
                (feature < size)[:, None] & (index < half)[None, :],
                0.0,
            )
            return _extremes(matmul(x, rotation), index, half)

        found = among(jnp.int32(0))
        if half <= width:
            return found
        rest = -(-half // width)
        return _loop(1, rest, lambda i, found: found.with_more(among(i * width)), found)

    def one_hash(hash_index, _):
        bucket, start, scale = jnp.zeros((rows,), jnp.int32), 0, 1
        for factor in factors:
            half = factor // 2
            found = best(hash_index, start, half)
            along = found.high >= -found.low
            bucket = bucket + scale * jnp.where(along, found.argmax, found.argmin + half)
            start, scale = start + half, scale * factor
        pltriton.store(bucket_ref.at[batch, head, hash_index, row], bucket, mask=exists)

    # A loop, so that the compiled program is that of one hash.
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
      vectors: what to hash.
      rotations: the directions of each head and hash, half of each factor's after another.
      factors: even bucket counts.
      interpret: whether to run the kernel anywhere, slowly.
    """
    batch, length, n_heads, _ = vectors.shape
    n_hashes = rotations.shape[2]
    rows = min(ROWS, power_of_two(length))
    return launch(
        functools.partial(_kernel, factors=tuple(factors), rows=rows),
        (vectors, jnp.swapaxes(rotations, 1, 2).astype(vectors.dtype)),
        jax.ShapeDtypeStruct((batch, n_heads, n_hashes, length), jnp.int32),
        grid=(pl.cdiv(length, rows), n_heads, batch),
        num_warps=4,
        num_stages=2,
        interpret=interpret,
        name="angular_hash",
    )
