"""Dropout of attention weights, drawn by the address of a weight.

The address is the batch, the head, the query's position and the key's. Any tiling, any order and
both passes therefore see the same mask, and none of it is stored. A key that is at no position, a
summary for example, has a number instead (`far_address`).

Batch, head and query are mixed well, to an even word of their row. The key's position is mixed
briefly, to an odd word. The bits are the square of their sum: two instructions a weight besides the
key's word, which a thread computes once for its rows. The high bits depend on all bits of the sum
but the highest, which a square modulo 2^32 loses: rows have 2^30 different masks.
`tests/ops/test_dropout.py` tests rates, pairs, rows and columns, and ranks of the bits.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from reformax import devices
from reformax.ops.calls.call import Call
from reformax.ops.sharding.shard import Shard, row_axes_of


def _mix(x: Int[Array, "*d"]) -> Int[Array, "*d"]:
    """Mixes 32-bit words by a bijection. Each input bit flips each output bit half the time."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def seed_words(rng: PRNGKeyArray, n_rows: int, shard: Shard | None = None) -> Int[Array, 6]:
    """The seed of a dropout mask, as words of uint32, which a kernel can read.

    Two words are random. The others are the indices in the whole call of the arrays' first row,
    head, query and key, to which local addresses are added.

    Args:
      n_rows: the number of rows of the arrays.
      shard: where the arrays lie in the whole call.
    """
    first_row = devices.first_index(n_rows, row_axes_of(shard))
    shard = shard or Shard()
    first = first_row, shard.head, shard.position, shard.position
    first = jnp.stack([jnp.asarray(x, jnp.int32) for x in first]).astype(jnp.uint32)
    return jnp.concatenate([jax.random.bits(rng, (2,), jnp.uint32), first])


def seed_at(seed: Int[Array, 6] | None, query: Any, key: Any) -> Int[Array, 6] | None:
    """The seed of arrays whose first query and first key have these positions in the whole call."""
    if seed is None:
        return None
    first = jnp.stack([jnp.asarray(x, jnp.int32) for x in (query, key)]).astype(jnp.uint32)
    return jnp.concatenate([seed[:4], first])


def far_address(number: Int[Array, "*d"]) -> Int[Array, "*d"]:
    """The address of a key that is at no position, by its number: below those of all positions."""
    return -1 - number


def dropout_mask(
    seed: Int[Array, 6],
    rate: float,
    batch: Int[Array, "*d"],
    head: Int[Array, "*d"],
    query: Int[Array, "*d"],
    key: Int[Array, "*d"],
) -> Float[Array, "*d"]:
    """The factor of each weight: 0 where it is dropped, `1 / (1 - rate)` where it is kept.

    Args:
      seed: from `seed_words`.
      rate: the probability that a weight is dropped.
      batch, head, query, key: the weights' addresses, integers that broadcast.
    """
    query, key = (
        jnp.asarray(x).astype(jnp.uint32) + start for x, start in ((query, seed[4]), (key, seed[5]))
    )
    bits = dropout_bits(seed, batch, head, query, key)
    kept = bits >= np.uint32(min(round(rate * 2**32), 2**32 - 1))
    return jnp.where(kept, np.float32(1 / (1 - rate)), np.float32(0))


def dropped_factors(
    call: Call,
    rows: tuple[int, ...],
    query: Int[Array, "*#d"],
    key: Int[Array, "*#d"],
    heads: Int[Array, " N"] | None = None,
) -> Float[Array, "*d"] | None:
    """`dropout_mask` of a call's weights, whose first axes are `rows`; None without dropout.

    Args:
      rows: the numbers of examples and of heads, which may be several axes.
      query, key: positions, with as many axes as the weights.
      heads: the index of each head; None: 0, 1 and so on.
    """
    if call.seed is None:
        return None
    n_after = query.ndim - len(rows)
    heads = jnp.arange(math.prod(rows[1:]), dtype=jnp.int32) if heads is None else heads
    head = jnp.reshape(heads, (1, *rows[1:], *[1] * n_after))
    batch = jnp.arange(rows[0], dtype=jnp.int32).reshape(-1, *[1] * (query.ndim - 1))
    return dropout_mask(call.seed, call.dropout, batch, head, query, key)


def dropout_bits(
    seed: Int[Array, 6],
    batch: Int[Array, "*d"],
    head: Int[Array, "*d"],
    query: Int[Array, "*d"],
    key: Int[Array, "*d"],
) -> Int[Array, "*d"]:
    """32 bits of each address, of which the higher are random: the three lowest are always 001."""
    row = row_word(seed, batch, head, query) & ~np.uint32(1)
    column = jnp.asarray(key).astype(jnp.uint32) * np.uint32(0x9E3779B1) + _mix(seed[1])
    root = row + ((column ^ (column >> 15)) | np.uint32(1))
    return root * root


def row_word(
    seed: Int[Array, 6], batch: Int[Array, "*d"], head: Int[Array, "*d"], query: Int[Array, "*d"]
) -> Int[Array, "*d"]:
    """32 random bits of each row of weights."""
    batch, head, query = (jnp.asarray(x).astype(jnp.uint32) for x in (batch, head, query))
    return _mix(query ^ _mix(head + seed[3] ^ _mix(batch + seed[2] ^ seed[0])))


def full_dropout_mask(
    seed: Int[Array, 6], rate: float, shape: tuple[int, int, int, int]
) -> Float[Array, "B N T S"]:
    """The `dropout_mask` of every weight of a `[B, N, T, S]` attention matrix."""
    return dropout_mask(seed, rate, *jnp.ogrid[tuple(slice(n) for n in shape)])


def dropped_self_values(
    v: Float[Array, "B T N V"], rate: float, seed: Int[Array, 6] | None
) -> Float[Array, "B T N V"]:
    """The outputs of positions that see only themselves. `seed` is read if `rate` is above 0."""
    if rate == 0.0:
        return v
    batch, position, head = jnp.ogrid[tuple(slice(n) for n in v.shape[:3])]
    kept = dropout_mask(seed, rate, batch, head, position, position)
    return v * kept[..., None].astype(v.dtype)
