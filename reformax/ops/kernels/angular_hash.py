"""Angular hashing as a Pallas kernel for NVIDIA GPUs (Triton).

The products with the rotations, of which there are hundreds for each number hashed, stay on the
chip: vectors are read once and buckets written once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

# Vectors of a program, and directions it compares at a time.
ROWS, DIRECTIONS = 128, 64


def _kernel(x_ref, rotations_ref, bucket_ref, *, factors: Sequence[int], rows: int):
    batch, head = pl.program_id(2), pl.program_id(1)
    _, length, _, size = x_ref.shape
    n_rounds = rotations_ref.shape[1]
    row = pl.program_id(0) * rows + jnp.arange(rows, dtype=jnp.int32)
    padded = max(16, 1 << (size - 1).bit_length())
    feature = jnp.arange(padded, dtype=jnp.int32)
    exists = row < length
    x = pltriton.load(
        x_ref.at[batch, row[:, None], head, feature[None, :]],
        mask=exists[:, None] & (feature < size)[None, :],
        other=0.0,
    )
    for round_ in range(n_rounds):
        bucket, start, scale = jnp.zeros((rows,), jnp.int32), 0, 1
        for factor in factors:
            half = factor // 2
            high = low = jnp.zeros((rows,), jnp.float32)  # the largest, and the least, so far
            high_at = low_at = jnp.zeros((rows,), jnp.int32)
            width = min(DIRECTIONS, max(16, 1 << (half - 1).bit_length()))
            for first in range(0, half, width):
                index = first + jnp.arange(width, dtype=jnp.int32)
                rotation = pltriton.load(
                    rotations_ref.at[
                        head, jnp.int32(round_), feature[:, None], start + index[None, :]
                    ],
                    mask=(feature < size)[:, None] & (index < half)[None, :],
                    other=0.0,
                )
                product = lax.dot_general(
                    x, rotation, (((1,), (0,)), ((), ())),
                    preferred_element_type=jnp.float32,
                )  # fmt: skip
                real = (index < half)[None, :]
                up = jnp.where(real, product, -jnp.inf)
                down = jnp.where(real, product, jnp.inf)
                top, bottom = jnp.max(up, axis=1), jnp.min(down, axis=1)
                far = jnp.int32(factor)
                top_at = jnp.min(jnp.where(up == top[:, None], index[None, :], far), axis=1)
                bottom_at = jnp.min(jnp.where(down == bottom[:, None], index[None, :], far), axis=1)
                if first:
                    top_at = jnp.where(top > high, top_at, high_at)
                    bottom_at = jnp.where(bottom < low, bottom_at, low_at)
                    top, bottom = jnp.maximum(top, high), jnp.minimum(bottom, low)
                high, low, high_at, low_at = top, bottom, top_at, bottom_at
            bucket = bucket + scale * jnp.where(high >= -low, high_at, low_at + half)
            start, scale = start + half, scale * factor
        pltriton.store(bucket_ref.at[batch, head, jnp.int32(round_), row], bucket, mask=exists)


def hash_vectors(
    vectors: Float[Array, "B T N H"],
    rotations: Float[Array, "N H R F"],
    factors: Sequence[int],
    interpret: bool = False,
) -> Int[Array, "B N R T"]:
    """The buckets that `ops.angular_hash.hash_vectors` gives, products in the dtype of `vectors`.

    Args:
      vectors: what to hash.
      rotations: the directions, half of each factor's one after the other.
      factors: even bucket counts.
      interpret: whether to run the kernel anywhere, slowly.
    """
    batch, length, n_heads, _ = vectors.shape
    n_rounds = rotations.shape[2]
    rows = min(ROWS, max(16, 1 << (length - 1).bit_length()))
    return pl.pallas_call(
        functools.partial(_kernel, factors=tuple(factors), rows=rows),
        grid=(pl.cdiv(length, rows), n_heads, batch),
        out_shape=jax.ShapeDtypeStruct((batch, n_heads, n_rounds, length), jnp.int32),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="angular_hash",
    )(vectors, jnp.swapaxes(rotations, 1, 2).astype(vectors.dtype))
