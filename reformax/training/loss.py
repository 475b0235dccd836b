"""Cross-entropy without ever holding the logits of a whole batch.

Logits of 65,536 positions cost more memory than a reversible model does, and so do those of a
vocabulary of 32,000 pieces, so they are computed for a chunk of positions at a time and computed
again in the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Logits that are in memory together at most, 256 MiB of them, however long a chunk may be.
MAX_LOGITS = 2**26


class Sums(NamedTuple):
    """Sums over targets: of `-log p`, of weight, of weight predicted right, and of the loss.

    The loss is what training minimises: `-log p` in nats, smoothed if that is asked for.
    """

    nats: Float[Array, ""]
    weight: Float[Array, ""]
    correct: Float[Array, ""]
    loss: Float[Array, ""]


def cross_entropy(
    logits_fn: Callable[[Float[Array, "B C D"]], Float[Array, "B C V"]],
    features: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    chunk_len: int,
    label_smoothing: float = 0.0,
) -> Sums:
    """The weighted sum of `-log p(target)`, `chunk_len` positions of each row at a time.

    With label smoothing e the loss is the cross-entropy to a distribution that has 1 - e at the
    target and e spread evenly over all ids, the target among them: `(1 - e) * -log p(target) + e *
    mean(-log p)`. From Szegedy et al. 2016, "Rethinking the Inception Architecture", section 7.

    Args:
      logits_fn: features of any number of positions to their logits.
      features: what the model computed, one vector a position.
      targets: ids below V.
      weights: 0 leaves a position out.
      chunk_len: positions of each row whose logits are in memory together, fewer where these would
        be more than `MAX_LOGITS`; any length T is right, the last chunk is padded with weight 0.
      label_smoothing: e, from 0 up to 1.

    Returns:
      float32 sums over the batch.
    """
    if chunk_len < 1:
        raise ValueError(f"loss_chunk_len={chunk_len} must be at least 1: use 1024, or the length")
    batch, length = targets.shape
    vocab_size = jax.eval_shape(logits_fn, features[:, :chunk_len]).shape[-1]
    chunk_len = min(chunk_len, max(1, MAX_LOGITS // (batch * vocab_size)))
    n_chunks = -(-length // chunk_len)
    if n_chunks == 1:
        return _chunk_sums(logits_fn, label_smoothing, features, targets, weights)

    def chunked(x):  # [B, T, ...] -> [n_chunks, B, chunk_len, ...]
        tail = [(0, 0)] * x.ndim
        tail[1] = (0, n_chunks * chunk_len - length)
        x = jnp.pad(x, tail).reshape(batch, n_chunks, chunk_len, *x.shape[2:])
        return jnp.swapaxes(x, 0, 1)

    @jax.checkpoint
    def add_chunk(sums, chunk):
        return jax.tree.map(jnp.add, sums, _chunk_sums(logits_fn, label_smoothing, *chunk)), None

    zero = Sums(*(jnp.zeros((), jnp.float32) for _ in Sums._fields))
    sums, _ = jax.lax.scan(add_chunk, zero, tuple(map(chunked, (features, targets, weights))))
    return sums


def _chunk_sums(logits_fn, label_smoothing, features, targets, weights) -> Sums:
    logits = logits_fn(features).astype(jnp.float32)
    target_logits = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    log_total = jax.nn.logsumexp(logits, axis=-1)
    nats = log_total - target_logits
    correct = jnp.argmax(logits, axis=-1) == targets
    total = jnp.sum(nats * weights)
    loss = total
    if label_smoothing:
        spread = jnp.sum((log_total - jnp.mean(logits, axis=-1)) * weights)
        loss = (1 - label_smoothing) * total + label_smoothing * spread
    return Sums(total, jnp.sum(weights), jnp.sum(correct * weights), loss)


def metric_name(task) -> str:
    """What the mean `-log2 p` of a target is called: pieces of sentences are no dims of data."""
    return "bits_per_dim" if task.translation is None else "bits_per_token"


def bits_per_dim(nats: float, weight: float) -> float:
    """Mean `-log2 p` of a target; nan if there is no target."""
    return float(nats) / math.log(2) / float(weight) if weight else math.nan
