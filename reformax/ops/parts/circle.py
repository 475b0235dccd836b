"""Chunks in a circle, and how they round: what Trax and Hugging Face do otherwise.

In their attention every round's first chunk looks at the last chunk of the round before, and the
first round's at the last chunk of all. A position's own key has a score of -1e5 instead of being
hidden, and among scores so large float32 is coarse.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from reformax.ops.parts.orders import ChunkSizes, Order


def in_a_circle(order: Order, chunks: ChunkSizes) -> Order:
    """The order with rounds that follow each other, the first after the last.

    Before a round's first chunk stand the last keys of the round before, and behind its last chunk
    the first keys of the next round. Of one round it makes a circle.
    """
    chunk_len, n_chunks_before, n_chunks_after = chunks
    n_rounds, length = order.queries.shape[2:]
    before, after = n_chunks_before * chunk_len, n_chunks_after * chunk_len
    place = np.arange(n_rounds)[:, None] * length + np.arange(-before, length + after)
    rounds = order.queries.reshape(*order.queries.shape[:2], -1)
    return order._replace(keys=rounds[:, :, place % (n_rounds * length)])


def sequence_in_a_circle(n_batch: int, n_heads: int, length: int, chunks: ChunkSizes) -> Order:
    """One round of the sequence as it is, in a circle."""
    position = jnp.arange(length, dtype=jnp.int32)
    position = jnp.broadcast_to(position, (n_batch, n_heads, 1, length))
    return in_a_circle(Order(position, position), chunks)


def own_weight(self_score: float, order: Order, chunks: ChunkSizes) -> Float[Array, "B N T"]:
    """The weight of a position's own value where it sees nothing else: about 1, as float32 has it.

    It is a softmax over the position's own key in every round. The logarithms of how often a round
    shows the key, and of the number of rounds, are added to scores of `self_score`. Near -1e5,
    float32 rounds what is added to multiples of 1/128.
    """
    chunk_len, n_chunks_before, n_chunks_after = chunks
    score = jnp.float32(self_score)
    copies = jnp.ones(order.queries.shape, jnp.float32)
    if order.keys is not None:
        places = order.with_places().places
        own_chunk = jnp.take_along_axis(places, order.keys, axis=-1) // chunk_len
        chunk = jnp.arange(order.keys.shape[-1]) // chunk_len - n_chunks_before
        distance = chunk - own_chunk
        seen = (distance >= -n_chunks_before) & (distance <= n_chunks_after)
        index = np.ogrid[tuple(slice(n) for n in order.keys.shape[:-1])]
        copies = jnp.zeros_like(copies).at[*(i[..., None] for i in index), order.keys].add(seen)
    # The barriers keep XLA from cancelling on paper what rounds in float32.
    logits = jax.lax.optimization_barrier(score + jnp.log(copies))
    top = logits.max(axis=2, keepdims=True)
    everything = jnp.log(jnp.sum(jnp.exp(logits - top), axis=2, keepdims=True))
    everything = jax.lax.optimization_barrier(top + everything)
    return jnp.sum(copies * jnp.exp(score - logits) * jnp.exp(logits - everything), axis=2)
