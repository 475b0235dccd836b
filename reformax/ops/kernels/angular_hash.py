"""Angular hashing as a Pallas kernel for NVIDIA GPUs (Triton).

The products with the rotations, hundreds for each number hashed, stay on the chip. Vectors are read
once and buckets written once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from reformax.ops.kernels.common import launch, load, power_of_two, product

# Vectors of a program, and directions that it compares at a time.
ROWS, DIRECTIONS = 128, 64


def _kernel(x_ref, rotations_ref, bucket_ref, *, factors: Sequence[int], rows: int):
    batch, head = pl.program_id(2), pl.program_id(1)
    _, length, _, size = x_ref.shape
    n_rounds = rotations_ref.shape[1]
    row = pl.program_id(0) * rows + jnp.arange(rows, dtype=jnp.int32)
    feature = jnp.arange(power_of_two(size), dtype=jnp.int32)
    exists = row < length
    x = load(
        x_ref.at[batch, row[:, None], head, feature[None, :]],
        exists[:, None] & (feature < size)[None, :],
        0.0,
    )
    for round_ in range(n_rounds):
        bucket, start, scale = jnp.zeros((rows,), jnp.int32), 0, 1
        for factor in factors:
            half = factor // 2
            # The largest and the least product so far, and the directions that have them.
            high = low = jnp.zeros((rows,), jnp.float32)
            argmax = argmin = jnp.zeros((rows,), jnp.int32)
            width = min(DIRECTIONS, power_of_two(half))
            for first in range(0, half, width):
                index = first + jnp.arange(width, dtype=jnp.int32)
                rotation = load(
                    rotations_ref.at[
                        head, jnp.int32(round_), feature[:, None], start + index[None, :]
                    ],
                    (feature < size)[:, None] & (index < half)[None, :],
                    0.0,
                )
                products = product(x, rotation)
                real = (index < half)[None, :]
                up = jnp.where(real, products, -jnp.inf)
                down = jnp.where(real, products, jnp.inf)
                top, bottom = jnp.max(up, axis=1), jnp.min(down, axis=1)
                none = jnp.int32(half - 1)  # of NaN, which equals nothing: a bucket like another
                top_index = jnp.min(jnp.where(up == top[:, None], index[None, :], none), axis=1)
                bottom_index = jnp.min(
                    jnp.where(down == bottom[:, None], index[None, :], none), axis=1
                )
                if first:
                    top_index = jnp.where(top > high, top_index, argmax)
                    bottom_index = jnp.where(bottom < low, bottom_index, argmin)
                    top, bottom = jnp.maximum(top, high), jnp.minimum(bottom, low)
                high, low, argmax, argmin = top, bottom, top_index, bottom_index
            bucket = bucket + scale * jnp.where(high >= -low, argmax, argmin + half)
            start, scale = start + half, scale * factor
        pltriton.store(bucket_ref.at[batch, head, jnp.int32(round_), row], bucket, mask=exists)


def hash_vectors(
    vectors: Float[Array, "B T N H"],
    rotations: Float[Array, "N H R F"],
    factors: Sequence[int],
    interpret: bool = False,
) -> Int[Array, "B N R T"]:
    """The buckets of `ops.parts.hashing.hash_by`, from products in the dtype of `vectors`.

    Args:
      vectors: what to hash.
      rotations: for each head and round the directions, half of each factor's after another.
      factors: even bucket counts.
      interpret: whether to run the kernel anywhere, slowly.
    """
    batch, length, n_heads, _ = vectors.shape
    n_rounds = rotations.shape[2]
    rows = min(ROWS, power_of_two(length))
    return launch(
        functools.partial(_kernel, factors=tuple(factors), rows=rows),
        (vectors, jnp.swapaxes(rotations, 1, 2).astype(vectors.dtype)),
        jax.ShapeDtypeStruct((batch, n_heads, n_rounds, length), jnp.int32),
        grid=(pl.cdiv(length, rows), n_heads, batch),
        num_warps=4,
        num_stages=2,
        interpret=interpret,
        name="angular_hash",
    )
