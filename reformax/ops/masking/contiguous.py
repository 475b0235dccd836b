"""Sorts sequences by segment, so that each segment is contiguous, and restores their order."""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, Shaped

from reformax.ops.masking.masks import segment_begins
from reformax.ops.masking.visibility import is_token

T = TypeVar("T")


def contiguous_segments(
    inputs: T, segment_ids: Int[Array, "B T"] | None
) -> tuple[Int[Array, "B T"] | None, T, Int[Array, "B T"] | None]:
    """The order that makes each segment contiguous, and arrays `[B, T, ...]` and ids in that order.

    Without segments the inputs are unchanged, and order and ids are None.
    """
    order, ids = order_of_segments(segment_ids)
    return order, jax.tree.map(lambda x: reorder(x, order), inputs), ids


def order_of_segments(
    segment_ids: Int[Array, "B T"] | None,
) -> tuple[Int[Array, "B T"] | None, Int[Array, "B T"] | None]:
    """The order that makes each segment contiguous, and the ids in it; None without segments."""
    if segment_ids is None:
        return None, None
    order = jnp.argsort(segment_ids, axis=1, stable=True)
    return order, reorder(segment_ids, order)


def tokens_first(
    inputs: T, segment_ids: Int[Array, "B T"] | None, shape: tuple[int, int]
) -> tuple[Int[Array, "B T"] | None, T, Int[Array, "B T"] | None, Int[Array, " B"]]:
    """The order that puts tokens before padding, arrays in it, segments and lengths.

    Segments are contiguous. They are numbered from 1 on, and padding has the number of the segment
    before it. `shape` is [B, T]. Without segments the inputs are unchanged.
    """
    if segment_ids is None:
        return None, inputs, None, jnp.full(shape[0], shape[1], jnp.int32)
    order = jnp.argsort(~is_token(segment_ids), axis=1, stable=True)
    inputs, ids = jax.tree.map(lambda x: reorder(x, order), (inputs, segment_ids))
    token = is_token(ids)
    numbers = jnp.cumsum(segment_begins(ids) & token, axis=1, dtype=jnp.int32)
    return order, inputs, numbers, jnp.sum(token, axis=1, dtype=jnp.int32)


def are_contiguous(ids: Int[Array, "B T"]) -> Bool[Array, " B"]:
    """Whether no other segment lies within a segment of the row. Padding may."""
    *_, numbers, _ = tokens_first((), ids, ids.shape)
    ordered = jnp.sort(ids, axis=1)
    n_segments = jnp.sum(segment_begins(ordered) & is_token(ordered), axis=1)
    return jnp.max(numbers, axis=1, initial=0) == n_segments


def first_of_segment(ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """The first position of each position's segment."""
    order = jnp.argsort(ids, axis=1, stable=True).astype(jnp.int32)
    sorted_ids = jnp.take_along_axis(ids, order, axis=1)
    slot = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
    new = segment_begins(sorted_ids)
    first = jnp.take_along_axis(order, lax.cummax(jnp.where(new, slot, 0), axis=1), axis=1)
    return jnp.zeros_like(order).at[jnp.arange(len(ids))[:, None], order].set(first)


def ends_of_segment(ids: Int[Array, "B T"]) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """The first and the last position of each position's segment."""
    last = ids.shape[1] - 1 - first_of_segment(ids[:, ::-1])[:, ::-1]
    return first_of_segment(ids), last


def reorder(x: Shaped[Array, "B T *d"], order: Int[Array, "B T"] | None) -> Shaped[Array, "B T *d"]:
    """`x` with its positions in the order; None keeps them."""
    if order is None:
        return x
    order = order.reshape(order.shape + (1,) * (x.ndim - 2))
    return jnp.take_along_axis(x, order, axis=1, mode="promise_in_bounds")


def restore_order(
    x: Shaped[Array, "B T *d"], order: Int[Array, "B T"] | None
) -> Shaped[Array, "B T *d"]:
    """The inverse of `reorder`."""
    return x if order is None else reorder(x, jnp.argsort(order, axis=1))
