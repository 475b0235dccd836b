"""A shard of a sequence's queries, each of which may see any key: what devices gather for it.

Each device of an axis holds a shard of the sequence and computes its queries. What these read of
all positions is gathered, and the gradients of what was gathered are summed on the device that has
the positions. An op that chooses keys gathers what it chooses by, which is small, and then the keys
and values: a ring would visit each chosen key's shard for each query.

All functions take the `Shard` of a call. Without its `axis` a sequence is whole on each device, and
they return what they are given. A *shard* is `[B, t, ...]`, with the same number of positions on
each device; T is the number of all.
"""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from reformax import devices
from reformax.ops.sharding.shard import Shard, row_axes_of

T = TypeVar("T")


def axis_of(shard: Shard | None) -> str | None:
    """The mesh axis that divides the sequence; None: it is whole."""
    return None if shard is None else shard.axis


def token_axes_of(shard: Shard | None) -> devices.Axes:
    """The mesh axes that the tokens of the whole call are split over."""
    rows, axis = row_axes_of(shard), axis_of(shard)
    rows = (rows,) if isinstance(rows, str) else tuple(rows or ())
    return rows if axis is None else (*rows, axis)


def first_query(shard: Shard | None, length: int) -> Int[Array, ""] | int:
    """The position of the first query of `length`."""
    return devices.first_index(length, axis_of(shard))


def query_positions(shard: Shard | None, length: int) -> Int[Array, "1 T"]:
    """The positions of `length` queries."""
    return first_query(shard, length) + jnp.arange(length, dtype=jnp.int32)[None]


def of_all(shard: Shard | None, tree: T) -> T:
    """The arrays `[B, T, ...]` of all positions, of the shard's arrays."""
    if (axis := axis_of(shard)) is None:
        return tree
    return jax.tree.map(lambda x: lax.all_gather(x, axis, axis=1, tiled=True), tree)


def of_shard(shard: Shard | None, x: Array, length: int) -> Array:
    """The shard, of `length` positions, of an array `[B, T, ...]`."""
    if axis_of(shard) is None:
        return x
    return lax.dynamic_slice_in_dim(x, first_query(shard, length), length, axis=1)


def spread(
    shard: Shard | None, most: int, ids: Int[Array, "B t"], *arrays: Array
) -> tuple[Array, ...]:
    """Up to `most` positions of a sequence, evenly spread; those of the shard.

    Args:
      shard: of the call.
      most: the number of positions, of all devices.
      ids: the shard's segments. They are 0, as at padding, where a device has fewer positions.
      *arrays: others of the shard, `[B or 1, t, ...]`.

    Returns:
      `ids` and the arrays at these positions.
    """
    length, axis = ids.shape[1], axis_of(shard)
    n_devices = 1 if axis is None else lax.axis_size(axis)
    step = -(-length * n_devices // most)
    if axis is None:
        return tuple(x[:, ::step] for x in (ids, *arrays))
    at = -first_query(shard, length) % step + jnp.arange(0, length, step)
    ids, *arrays = (jnp.take(x, at, axis=1, mode="clip") for x in (ids, *arrays))
    return jnp.where((at < length)[None], ids, 0), *arrays
