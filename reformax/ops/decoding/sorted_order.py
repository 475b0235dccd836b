"""Sorted orders in decoding: one more position is put into the order by hash bucket.

Letters besides those of `reformax.ops.base`: C is the capacity.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from reformax.ops.decoding.cache import put


def with_bucket(
    buckets: Int[Array, "B N R C"], bucket: Int[Array, "B N R 1"], position: Int[Array, " B"]
) -> Int[Array, "B N R C"]:
    """The buckets with that of each row's `position`."""
    lines = buckets.reshape(buckets.shape[0], -1, buckets.shape[-1], 1)
    return put(lines, bucket.reshape(*lines.shape[:2], 1), position).reshape(buckets.shape)


def inserted(
    order: Int[Array, "B N R C"],
    buckets: Int[Array, "B N R C"],
    bucket: Int[Array, "B N R 1"],
    now: Int[Array, "B 1 1 1"],
) -> tuple[Int[Array, "B N R C"], Int[Array, "B N R 1"], Int[Array, "B N R 1"]]:
    """The order with position `now` behind the positions of its own bucket and of those before it.

    Returns:
      The order, the place where its bucket begins, and its own place.
    """
    place = line(order.shape[-1])
    own, first = (
        jnp.sum((place < now) & here, axis=-1, keepdims=True, dtype=jnp.int32)
        for here in (buckets <= bucket, buckets < bucket)
    )
    shifted = jnp.concatenate([order[..., :1], order[..., :-1]], axis=-1)
    order = jnp.where(place < own, order, jnp.where(place == own, now, shifted))
    return order, first, own


def seen_before(seen: Int[Array, "B N R M"]) -> Bool[Array, "B N R M"]:
    """Which positions an earlier round has shown."""
    rounds = jnp.arange(seen.shape[2])[None, None, :, None]
    again = seen[..., None, None] == seen[:, :, None, None]  # [B, N, R, M, R, M]
    again = again & (rounds[..., None, None] > rounds[:, :, None, None])
    return jnp.any(again, axis=(-2, -1))


def line(n: int) -> Int[Array, "1 1 1 n"]:
    """0 to n - 1 along the last of the axes of an order."""
    return jnp.arange(n, dtype=jnp.int32)[None, None, None]
