"""Inserts one more position into the order by hash bucket, in decoding.

Letters besides those of `reformax.ops.base`: C is the capacity. A *slot* is an index into an order.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int

from reformax.ops.decoding.cache import put


def with_bucket(
    buckets: Int[Array, "B N R C"], bucket: Int[Array, "B N R 1"], position: Int[Array, " B"]
) -> Int[Array, "B N R C"]:
    """The buckets with the bucket of each row's `position` added."""
    rows = buckets.reshape(buckets.shape[0], -1, buckets.shape[-1], 1)
    return put(rows, bucket.reshape(*rows.shape[:2], 1), position).reshape(buckets.shape)


def insert_newest(
    order: Int[Array, "B N R C"],
    buckets: Int[Array, "B N R C"],
    bucket: Int[Array, "B N R 1"],
    newest: Int[Array, "B 1 1 1"],
) -> tuple[Int[Array, "B N R C"], Int[Array, "B N R 1"], Int[Array, "B N R 1"]]:
    """Inserts position `newest` after all positions of its bucket and of lower buckets.

    Returns:
      The order, the first slot of the bucket, and the slot of `newest`.
    """
    index = arange_last(order.shape[-1])
    slot, bucket_start = (
        jnp.sum((index < newest) & counted, axis=-1, keepdims=True, dtype=jnp.int32)
        for counted in (buckets <= bucket, buckets < bucket)
    )
    shifted = jnp.concatenate([order[..., :1], order[..., :-1]], axis=-1)
    order = jnp.where(index < slot, order, jnp.where(index == slot, newest, shifted))
    return order, bucket_start, slot


def arange_last(n: int) -> Int[Array, "1 1 1 n"]:
    """0 to n - 1 along the last axis of an order."""
    return jnp.arange(n, dtype=jnp.int32)[None, None, None]
