"""Chunks in a circle and their rounding, as in Trax and Hugging Face.

In their attention the first chunk of a round looks at the last chunk of the round before, and that
of the first round at the last chunk of all. A position's own key is not hidden: its score is -1e5,
where float32 is coarse.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from reformax.ops.softmax.orders import ChunkSizes, Order

# The score that Trax and Hugging Face give a position's own key to hide it.
SELF_SCORE = -1e5


def in_a_circle(order: Order, chunks: ChunkSizes) -> Order:
    """The order with its rounds in a circle: the first follows the last.

    Before a round's first chunk stand the last keys of the round before, and behind its last chunk
    the first keys of the next round. A single round follows itself.
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
    """The weight of a position's own value where it sees nothing else: 1, up to rounding.

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
    # The barriers keep XLA from simplifying away the rounding.
    logits = jax.lax.optimization_barrier(score + jnp.log(copies))
    top = logits.max(axis=2, keepdims=True)
    everything = jnp.log(jnp.sum(jnp.exp(logits - top), axis=2, keepdims=True))
    everything = jax.lax.optimization_barrier(top + everything)
    return jnp.sum(copies * jnp.exp(score - logits) * jnp.exp(logits - everything), axis=2)
