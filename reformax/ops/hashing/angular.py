"""Angular hashing: vectors at a small angle share a bucket (Andoni et al. 2015).

A vector is projected on random directions and their opposites. Its bucket is the index of the
largest projection (Reformer, sec. 2).
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray

from reformax.declared import SettingError, shown
from reformax.ops.calls.dispatch import compute_by
from reformax.ops.calls.obstacles import kernel_obstacles
from reformax.ops.sharding.shard import Shard, all_heads, of_heads

MAX_BUCKETS_UNFACTORED = 128
# A factor needs half as many random directions, in memory for every head and hash.
MAX_FACTOR = 2**16


def bucket_factors(n_buckets: int | Sequence[int]) -> tuple[int, ...]:
    """The factors of `n_buckets`; `SettingError` unless they are even numbers in range."""
    try:
        sizes = n_buckets if isinstance(n_buckets, Sequence) else (n_buckets,)
        factors = tuple(operator.index(size) for size in sizes)
    except TypeError:
        factors = ()
    wrong = any(f < 2 or f % 2 or f > MAX_FACTOR for f in factors)
    if not factors or wrong or math.prod(factors) >= 2**31:
        raise SettingError(
            f"n_buckets is {shown(n_buckets)}: expected 'auto', or even numbers from 2 to "
            f"{MAX_FACTOR:,} with a product below 2**31"
        )
    return factors


def auto_buckets(length: int, chunk_len: int) -> tuple[int, ...]:
    """The factors of the number of buckets for a length: about two buckets a chunk."""
    n_buckets = 2 * max(1, -(-length // chunk_len))
    if n_buckets <= MAX_BUCKETS_UNFACTORED:
        return (n_buckets,)
    first = 2 ** math.ceil(math.log2(n_buckets) / 2)
    return (first, 2 * max(1, n_buckets // (2 * first)))


class AngularHashing(NamedTuple):
    """The number of buckets and the rotations."""

    # Even factors of the number of buckets; None: about two buckets a chunk.
    factors: tuple[int, ...] | None
    chunk_len: int  # the length of a chunk
    rotations: Float[ArrayLike, "N H R F"] | None  # the rotations; None draws them from an rng

    @classmethod
    def of(
        cls,
        n_buckets: int | Sequence[int] | str,
        chunk_len: int,
        rotations: Float[ArrayLike, "N H R F"] | None = None,
    ) -> Self:
        """The hashing of an op's options; `SettingError` for a wrong `n_buckets`."""
        factors = None if n_buckets == "auto" else bucket_factors(n_buckets)
        return cls(factors, chunk_len, rotations)

    def factors_for(self, length: int) -> tuple[int, ...]:
        """The factors of the number of buckets for a length."""
        return self.factors or auto_buckets(length, self.chunk_len)

    def rotations_for(
        self,
        vectors: Float[Array, "B T N H"],
        length: int,
        n_hashes: int,
        rng: PRNGKeyArray | None,
        shard: Shard | None = None,
    ) -> Float[Array, "N H R F"]:
        """The rotations of the first `n_hashes` hashes, given or drawn.

        Raises:
          ValueError: the vectors need given rotations of another shape.
        """
        factors, n_heads = self.factors_for(length), vectors.shape[2]
        if self.rotations is None:
            return draw_rotations(vectors, factors, n_hashes, rng, shard)
        given = jnp.asarray(self.rotations, jnp.float32)[:, :, :n_hashes]
        shape = all_heads(shard, n_heads), vectors.shape[3], n_hashes, sum(factors) // 2
        if given.shape != shape:
            raise ValueError(
                f"rotations have shape {given.shape}: expected {shape}, [heads, head size, hashes, "
                "half the sum of the factors of n_buckets]"
            )
        return of_heads(given, shard, n_heads)


def draw_rotations(
    vectors: Float[Array, "B T N H"],
    factors: Sequence[int],
    n_hashes: int,
    rng: PRNGKeyArray,
    shard: Shard | None = None,
) -> Float[Array, "N H R F"]:
    """Random directions for each head and hash: half as many as buckets of each factor."""
    n_heads, size = vectors.shape[2:]
    shape = all_heads(shard, n_heads), size, n_hashes, sum(factors) // 2
    return of_heads(jax.random.normal(rng, shape, jnp.float32), shard, n_heads)


def hash_by(
    rotations: Float[Array, "N H R F"],
    vectors: Float[Array, "B T N H"],
    factors: Sequence[int],
    impl: str,
) -> Int[Array, "B N R T"]:
    """Angular hashes: the argmax over [x R; -x R] for a rotation R (Reformer, sec. 2).

    Each head and each hash has its own rotations, which are the same for all examples. They are
    rounded to the dtype of `vectors`.

    Args:
      rotations: from `draw_rotations`.
      vectors: the vectors to hash; only their directions matter.
      factors: even bucket counts; bucket = sum_i hash_i * prod(factors before i).
      impl: the op's. "xla" runs everywhere; "pallas" is a kernel for NVIDIA GPUs of Ampere or later
        and heads of 256 or less. "auto" takes the kernel on such a GPU for more than one position.

    Raises:
      NotImplementedError: an `impl` that cannot compute the call.
    """

    def in_kernels(interpret: bool) -> Int[Array, "B N R T"]:
        from reformax.ops.kernels.triton import angular_hash

        return angular_hash.hash_vectors(vectors, rotations, factors, interpret)

    obstacles = kernel_obstacles(vectors, None, None)
    in_arrays = functools.partial(_hash_in_arrays, rotations, vectors, factors)
    return compute_by(impl, in_arrays, pallas=(obstacles, in_kernels), pays=vectors.shape[1] > 1)


def _hash_in_arrays(
    rotations: Float[Array, "N H R F"], vectors: Float[Array, "B T N H"], factors: Sequence[int]
) -> Int[Array, "B N R T"]:
    """`hash_by` in array operations."""
    rotations = rotations.astype(vectors.dtype).astype(jnp.float32)

    def one_hash(rotation: Float[Array, "N H F"]) -> Int[Array, "B N T"]:
        rotated = jnp.einsum("nhf,btnh->bnft", rotation, vectors.astype(jnp.float32))
        bucket, start, scale = 0, 0, 1
        for factor in factors:
            # The argmax of [half; -half] by comparisons: XLA's own is ten times slower on a CPU.
            half = rotated[..., start : start + factor // 2, :]
            most = jnp.maximum(half.max(axis=-2, keepdims=True), -half.min(axis=-2, keepdims=True))
            index = jnp.arange(factor // 2, dtype=jnp.int32)[:, None]
            opposite = jnp.where(half == -most, index + factor // 2, factor - 1)
            bucket = bucket + scale * jnp.where(half == most, index, opposite).min(axis=-2)
            start, scale = start + factor // 2, scale * factor
        return bucket

    # Hash by hash, because the products with all rotations would be the largest array of the plan.
    map_hashes = (
        jax.vmap(one_hash) if vectors.shape[1] == 1 else functools.partial(lax.map, one_hash)
    )
    return jnp.moveaxis(map_hashes(jnp.moveaxis(rotations, 2, 0)), 0, 2)
