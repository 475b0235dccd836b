"""Chunks in a circle, as in Trax and Hugging Face, and the rounding of their self score.

In Trax the first chunk of a hash's order sees the last chunk of the hash before, and the first
chunk of the first hash sees the last chunk of the last hash. Trax does not hide a position's own
key: it sets the score to -1e5, where float32 is coarse. Hugging Face's code does the same.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from reformax.ops.softmax.orders import ChunkSizes, Order

# The score of a position's own key in Trax and Hugging Face.
SELF_SCORE = -1e5


def in_a_circle(order: Order, chunks: ChunkSizes) -> Order:
    """The order with its hashes in a circle: the first follows the last.

    The last keys of the hash before precede a hash's first chunk. The first keys of the next hash
    follow its last chunk. A single hash follows itself.
    """
    chunk_len, n_chunks_before, n_chunks_after = chunks
    n_hashes, length = order.query_positions.shape[2:]
    before, after = n_chunks_before * chunk_len, n_chunks_after * chunk_len
    slot = np.arange(n_hashes)[:, None] * length + np.arange(-before, length + after)
    of_all = order.query_positions.reshape(*order.query_positions.shape[:2], -1)
    return order._replace(key_positions=of_all[:, :, slot % (n_hashes * length)])


def sequence_in_a_circle(n_batch: int, n_heads: int, length: int, chunks: ChunkSizes) -> Order:
    """The order of the sequence itself, in a circle."""
    position = jnp.arange(length, dtype=jnp.int32)
    position = jnp.broadcast_to(position, (n_batch, n_heads, 1, length))
    return in_a_circle(Order(position, position), chunks)


def self_weight(self_score: float, order: Order, chunks: ChunkSizes) -> Float[Array, "B N T"]:
    """The weight of a position's own value where it sees nothing else: 1, up to rounding.

    It is a softmax over the copies of the position's own key in the orders of all hashes. The
    logarithms of the number of copies in an order, and of the number of hashes, are added to
    `self_score`. Near -1e5, float32 rounds the added number to a multiple of 1/128.
    """
    chunk_len, n_chunks_before, n_chunks_after = chunks
    score = jnp.float32(self_score)
    copies = jnp.ones(order.query_positions.shape, jnp.float32)
    if order.key_positions is not None:
        keys = order.key_positions
        query_chunk = jnp.take_along_axis(order.with_slots().query_slots, keys, axis=-1)
        query_chunk = query_chunk // chunk_len
        chunk = jnp.arange(keys.shape[-1]) // chunk_len - n_chunks_before
        distance = chunk - query_chunk
        seen = (distance >= -n_chunks_before) & (distance <= n_chunks_after)
        index = np.ogrid[tuple(slice(n) for n in keys.shape[:-1])]
        copies = jnp.zeros_like(copies).at[*(i[..., None] for i in index), keys].add(seen)
    # The barriers keep XLA from simplifying away the rounding.
    logits = jax.lax.optimization_barrier(score + jnp.log(copies))
    row_max = logits.max(axis=2, keepdims=True)
    lse = jnp.log(jnp.sum(jnp.exp(logits - row_max), axis=2, keepdims=True))
    lse = jax.lax.optimization_barrier(row_max + lse)
    return jnp.sum(copies * jnp.exp(score - logits) * jnp.exp(logits - lse), axis=2)
