"""Sorts a sequence by hash bucket."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from reformax.ops.calls.call import Call
from reformax.ops.masking.masks import row_lengths, segment_numbers
from reformax.ops.masking.visibility import is_token
from reformax.ops.softmax.orders import Order

# The entries of `x` along its last axis at some indices, none of which is out of bounds.
take_last = functools.partial(jnp.take_along_axis, axis=-1, mode="promise_in_bounds")


def sort_by_bucket(
    buckets: Int[Array, "B N R T"],
    n_buckets: int,
    segment_ids: Int[Array, "B T"] | None,
    n_pad: int,
    one_segment: bool = False,
) -> Order:
    """The order by (segment, bucket, position) of a sequence padded by `n_pad`, padding last.

    With `one_segment` padding is a bucket after the others: that takes one sort.
    """
    if one_segment and segment_ids is not None:
        buckets = jnp.where(is_token(segment_ids)[:, None, None], buckets, n_buckets)
        n_buckets, segment_ids = n_buckets + (n_pad == 0), None
    length = buckets.shape[-1] + n_pad
    n_rows = math.prod(buckets.shape[:-1])
    buckets = jnp.pad(buckets, ((0, 0),) * 3 + ((0, n_pad),), constant_values=n_buckets)
    n_buckets += n_pad > 0
    if segment_ids is not None:
        segment_ids = jnp.pad(segment_ids, ((0, 0), (0, n_pad)))
        segment_ids = padding_last(segment_ids)
    most = n_buckets if segment_ids is None else max(n_buckets, length)
    if jax.default_backend() == "gpu" and n_rows * most <= 2**32:
        order = _sort_as_one_row(buckets, n_buckets)
        if segment_ids is not None:
            # A stable sort by segment keeps the order of a segment's buckets.
            number = jnp.broadcast_to(segment_numbers(segment_ids)[:, None, None], order.shape)
            order = take_last(order, _sort_as_one_row(take_last(number, order), length))
        return Order(order)
    position = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), buckets.shape)
    if segment_ids is not None:
        segment_ids = jnp.broadcast_to(segment_ids[:, None, None], buckets.shape)
        # A stable sort leaves equal keys in the order of their positions.
        order = lax.sort((segment_ids, buckets, position), num_keys=2, is_stable=True)[-1]
    elif n_buckets * length < 2**31:
        # One packed number sorts several times faster than a key with its payload.
        order = lax.sort(buckets * length + position) % length
    else:
        order = lax.sort((buckets, position), num_keys=1, is_stable=True)[-1]
    return Order(order)


def padding_last(segment_ids: Int[Array, "*d"]) -> Int[Array, "*d"]:
    """The numbers that `sort_by_bucket` sorts segments by: those of padding follow all others."""
    return jnp.where(is_token(segment_ids), segment_ids, jnp.iinfo(jnp.int32).max)


def n_sorted(call: Call) -> Int[Array, " B"] | None:
    """The number of tokens of rows of one segment, which `sort_by_bucket` puts before padding.

    None where a row may have several, or has no padding.
    """
    known = call.one_segment and call.segment_ids is not None
    return row_lengths(call.segment_ids) if known else None


def _sort_as_one_row(keys: Int[Array, "*d T"], n_keys: int) -> Int[Array, "*d T"]:
    """The order of each row by (key, position); keys are below `n_keys`.

    XLA has a radix sort on GPUs, for a single row only, and for unsigned keys only where a position
    is sorted along with each key.
    """
    shape, length = keys.shape, keys.shape[-1]
    n_rows = math.prod(shape[:-1])
    row = jnp.arange(n_rows, dtype=jnp.uint32).reshape(*shape[:-1], 1)
    keys = (row * n_keys + keys.astype(jnp.uint32)).reshape(-1)
    position = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), shape).reshape(-1)
    if n_rows * n_keys > 2**16 and n_rows * n_keys * length <= 2**32:
        order = lax.sort(keys * length + position.astype(jnp.uint32)) % length
        return order.astype(jnp.int32).reshape(shape)
    if n_rows * n_keys <= 2**16:  # a pass sorts by 8 bits: two passes instead of four
        keys = keys.astype(jnp.uint16)
    return lax.sort((keys, position), num_keys=1, is_stable=True)[-1].reshape(shape)


def within_buckets(order: Order, buckets: Int[Array, "B N R T"], reach: int) -> Order:
    """The order in which a query sees keys of its bucket, up to `reach` slots before its own."""
    order = order.with_slots()
    n_pad = order.query_positions.shape[-1] - buckets.shape[-1]
    buckets = jnp.pad(buckets, ((0, 0),) * 3 + ((0, n_pad),), constant_values=-1)
    buckets = take_last(buckets, order.query_positions)
    begins = jnp.pad(buckets[..., 1:] != buckets[..., :-1], ((0, 0),) * 3 + ((1, 0),))
    slot = jnp.arange(buckets.shape[-1], dtype=jnp.int32)[None, None, None]
    start = lax.cummax(jnp.where(begins, slot, 0), axis=buckets.ndim - 1)
    first = jnp.maximum(start, slot - min(reach, slot.shape[-1]))
    return order._replace(first_slot=take_last(first, order.query_slots))
