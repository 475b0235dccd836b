"""A shard of a call: some of its heads, rows or positions, and their indices in the whole call.

Dropout is drawn by head and positions of the whole call, and hashes by head. A device with a part
of the arrays draws the same numbers where it knows the part's first indices. `Shard` holds these.
For rows, `devices.row_axes` knows them too.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from reformax import devices


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("head", "position"),
    meta_fields=("n_heads", "axis", "rows"),
)
@dataclasses.dataclass(frozen=True)
class Shard:
    """The first indices of a shard's arrays in the whole call.

    Attributes:
      head: the index of the first head.
      position: the first position of queries and of keys. Positions below 0 are padding.
      n_heads: the number of heads of the whole call; None: the shard has all of them.
      axis: the mesh axis whose devices each have a shard of the sequences, all of one length; None:
        the arrays are whole sequences. For an op with shards of the sequence or of its queries.
      rows: the mesh axes that rows are split over; None: those of `devices.row_axes`.
    """

    head: Int[Array, ""] | int = 0
    position: Int[Array, ""] | int = 0
    n_heads: int | None = None
    axis: str | None = None
    rows: devices.Axes = None


def row_axes_of(shard: Shard | None) -> devices.Axes:
    """The mesh axes that the rows of the whole call are split over."""
    given = None if shard is None else shard.rows
    return devices.row_axes() if given is None else given


def all_heads(shard: Shard | None, n_heads: int) -> int:
    """The number of heads of the whole call; the arrays have `n_heads` of them."""
    return (None if shard is None else shard.n_heads) or n_heads


def of_heads(x: Array, shard: Shard | None, n_heads: int, axis: int = 0) -> Array:
    """The part of `x`, whose `axis` is all heads, for the `n_heads` heads of the arrays.

    Heads that only fill up the last shards take the part of the last head.
    """
    if x.shape[axis] == n_heads:
        return x
    return jnp.take(x, shard.head + jnp.arange(n_heads), axis=axis, mode="clip")
