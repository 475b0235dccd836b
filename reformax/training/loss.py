"""Cross-entropy without ever holding the logits of a whole sequence.

Logits of 65,536 positions cost more memory than a reversible model does, so they are computed for
a chunk of positions at a time and computed again in the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Sums(NamedTuple):
    """Sums over targets: of loss in nats, of weight, and of weight predicted right."""

    nats: Float[Array, ""]
    weight: Float[Array, ""]
    correct: Float[Array, ""]


def cross_entropy(
    logits_fn: Callable[[Float[Array, "B C D"]], Float[Array, "B C V"]],
    features: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    chunk_len: int,
) -> Sums:
    """The weighted sum of `-log p(target)`, `chunk_len` positions of each row at a time.

    Args:
      logits_fn: features of any number of positions to their logits.
      features: what the model computed, one vector a position.
      targets: ids below V.
      weights: 0 leaves a position out.
      chunk_len: positions whose logits are in memory together; any length T is right, the last
        chunk is padded with weight 0.

    Returns:
      float32 sums over the batch.
    """
    if chunk_len < 1:
        raise ValueError(f"loss_chunk_len={chunk_len} must be at least 1: use 1024, or the length")
    batch, length = targets.shape
    n_chunks = -(-length // chunk_len)
    if n_chunks == 1:
        return _chunk_sums(logits_fn, features, targets, weights)

    def chunked(x):  # [B, T, ...] -> [n_chunks, B, chunk_len, ...]
        tail = [(0, 0)] * x.ndim
        tail[1] = (0, n_chunks * chunk_len - length)
        x = jnp.pad(x, tail).reshape(batch, n_chunks, chunk_len, *x.shape[2:])
        return jnp.swapaxes(x, 0, 1)

    @jax.checkpoint
    def add_chunk(sums, chunk):
        return jax.tree.map(jnp.add, sums, _chunk_sums(logits_fn, *chunk)), None

    zero = Sums(*(jnp.zeros((), jnp.float32) for _ in Sums._fields))
    sums, _ = jax.lax.scan(add_chunk, zero, tuple(map(chunked, (features, targets, weights))))
    return sums


def _chunk_sums(logits_fn, features, targets, weights) -> Sums:
    logits = logits_fn(features).astype(jnp.float32)
    target_logits = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    nats = jax.nn.logsumexp(logits, axis=-1) - target_logits
    correct = jnp.argmax(logits, axis=-1) == targets
    return Sums(jnp.sum(nats * weights), jnp.sum(weights), jnp.sum(correct * weights))


def bits_per_dim(nats: float, weight: float) -> float:
    """Mean `-log2 p` of a target; nan if there is no target."""
    return float(nats) / math.log(2) / float(weight) if weight else math.nan
