"""Hashes queries and keys so that pairs with large products have close hashes.

The asymmetric transformations of Smyrf (Daras et al. 2020, "SMYRF: Efficient Attention using
Asymmetric Clustering", sec. 3.1):

    F(q) = [q; 0; sqrt(M - |q|^2)]    G(k) = [k; sqrt(M - |k|^2); 0]    M = max |q|^2 + max |k|^2

All transformed vectors have the same length, and `|F(q) - G(k)|^2 = 2 M - 2 q . k`. A hash is the
product with a random direction. It is a sum of two parts: that of the vector, which a cache can
hold, and that of the added number, which depends on M.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from reformax.ops.hashing.centring import centred
from reformax.ops.masking.masks import SegmentIds, segment_numbers, segment_pair
from reformax.ops.masking.visibility import is_token
from reformax.ops.numerics.precision import product
from reformax.ops.sharding.shard import Shard, all_heads, of_heads

# The number of bits of a hash, the highest bits of a product. Bits above them can number the rows.
HASH_BITS = 20
N_CODES = 2**HASH_BITS


def draw_directions(
    n_heads: int, size: int, n_hashes: int, rng: PRNGKeyArray, shard: Shard | None = None
) -> Float[Array, "N H+2 R"]:
    """Random directions for transformed vectors, for each head and hash."""
    shape = all_heads(shard, n_heads), size + 2, n_hashes
    return of_heads(jax.random.normal(rng, shape, jnp.float32), shard, n_heads)


def squared_lengths(x: Float[Array, "B T N H"]) -> Float[Array, "B N T"]:
    """The squared length of each vector."""
    return jnp.swapaxes(jnp.sum(x.astype(jnp.float32) ** 2, axis=-1), 1, 2)


def on_directions(
    x: Float[Array, "B T N H"], directions: Float[Array, "N H+2 R"]
) -> Float[Array, "B N R T"]:
    """The vectors' part of the products with each direction, summed in float32.

    Directions are rounded to the dtype of the vectors.
    """
    return product("nhr,btnh->bnrt", directions[:, :-2], x, x.dtype)


def hashes(
    part: Float[Array, "B N R T"],
    squares: Float[Array, "B N T"],
    most: Float[Array, "B N #T"],
    last: Float[Array, "N R"],
) -> Int[Array, "B N R T"]:
    """The products of transformed vectors with directions, as integers of the same order.

    `sqrt(M)` times the direction's last number, a constant of the segment, is subtracted, because
    floating-point numbers are dense near 0. A hash is from 0 to `N_CODES - 1`.

    Args:
      part: from `on_directions`.
      squares: the vectors' squared lengths.
      most: M.
      last: the directions' factor of `sqrt(M - |x|^2)`.
    """
    rest = jnp.sqrt(jnp.maximum(most - squares, 0)) - jnp.sqrt(most)
    products = part + last[None, :, :, None] * rest[:, :, None]
    return _highest_bits(products)


def _highest_bits(x: Float[Array, "*d"]) -> Int[Array, "*d"]:
    """The `HASH_BITS` highest bits of float32 numbers, as integers in the order of the numbers."""
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    # The bits of negative numbers descend.
    bits = jnp.where(bits < 0, bits ^ jnp.iinfo(jnp.int32).max, bits)
    return (bits >> (32 - HASH_BITS)) + N_CODES // 2


def lengths(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T N H"],
    segment_ids: Int[Array, "B T"] | None,
    one_segment: bool = False,
) -> tuple[list[Float[Array, "B N T"]], Float[Array, "B N #T"]]:
    """The squared lengths of queries and of keys, and M of each segment.

    With `one_segment` ids mark padding alone.
    """
    squares = [squared_lengths(x) for x in (q, k)]
    if one_segment and segment_ids is not None:
        real = is_token(segment_ids)[:, None]
        return squares, sum(largest_of_segment(jnp.where(real, x, 0), None) for x in squares)
    return squares, sum(largest_of_segment(x, segment_ids) for x in squares)


def cosines(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S N H"],
    directions: Float[Array, "N H+2 R"],
    segment_ids: SegmentIds | None,
    one_segment: bool = False,
) -> tuple[Float[Array, "B N R T"], Float[Array, "B N R S"]]:
    """The products with directions of unit queries, and of unit keys minus their mean.

    They replace the transformations where queries and keys are two sequences. A query's hash then
    does not depend on M of its sequence, and has the scale of its keys' hashes.
    """
    vectors = q, centred(k, segment_pair(segment_ids)[1], False, one_segment)
    of_queries, of_keys = (on_directions(_unit(x), directions) for x in vectors)
    return of_queries, of_keys


def _unit(x: Float[Array, "*d H"]) -> Float[Array, "*d H"]:
    """Unit vectors, rounded to the dtype of `x`."""
    long = x.astype(jnp.float32)
    return (long * lax.rsqrt(jnp.sum(long**2, axis=-1, keepdims=True) + 1e-12)).astype(x.dtype)


def largest_of_segment(
    squares: Float[Array, "B N T"], segment_ids: Int[Array, "B T"] | None
) -> Float[Array, "B N #T"]:
    """The largest number in each position's segment."""
    if segment_ids is None:
        return squares.max(axis=-1, keepdims=True)

    def of_row(x: Float[Array, "N T"], number: Int[Array, " T"]) -> Float[Array, "N T"]:
        return jax.ops.segment_max(x.T, number, num_segments=len(number))[number].T

    return jax.vmap(of_row)(squares, segment_numbers(segment_ids))
