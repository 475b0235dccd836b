"""A shard of a call: some of its heads, rows or positions, and their indices in the whole call.

Dropout is drawn by head and positions of the whole call, and hashes by head. A device with a part
of the arrays draws the same numbers where it knows the part's first indices. `Shard` holds these,
and is passed as the rng. For rows, `devices.row_axes` knows them too.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray

from reformax import devices


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("rng", "head", "position", "key_position"),
    meta_fields=("n_heads", "axis", "rows"),
)
@dataclasses.dataclass(frozen=True)
class Shard:
    """The rng of the whole call, and the first indices of a shard's arrays in it.

    Attributes:
      rng: the whole call's rng.
      head: the index of the first head.
      position: the first position of queries and of keys. Positions below 0 are padding.
      n_heads: the number of heads of the whole call; None: the shard has all of them.
      key_position: the first position of keys; None: `position`.
      axis: the mesh axis whose devices each have a shard of the sequences, all of one length; None:
        the arrays are whole sequences. For an op with shards of the sequence.
      rows: the mesh axes that rows are split over; None: those of `devices.row_axes`.
    """

    rng: PRNGKeyArray | None
    head: Int[Array, ""] | int = 0
    position: Int[Array, ""] | int = 0
    n_heads: int | None = None
    key_position: Int[Array, ""] | int | None = None
    axis: str | None = None
    rows: devices.Axes = None


def row_axes_of(rng: PRNGKeyArray | Shard | None) -> devices.Axes:
    """The mesh axes that the rows of the whole call are split over."""
    given = rng.rows if isinstance(rng, Shard) else None
    return devices.row_axes() if given is None else given


def rng_of(rng: PRNGKeyArray | Shard | None) -> PRNGKeyArray | None:
    """The rng of the whole call."""
    return rng.rng if isinstance(rng, Shard) else rng


def all_heads(rng: PRNGKeyArray | Shard | None, n_heads: int) -> int:
    """The number of heads of the whole call; the arrays have `n_heads` of them."""
    return (rng.n_heads if isinstance(rng, Shard) else None) or n_heads


def of_heads(x: Array, rng: PRNGKeyArray | Shard | None, n_heads: int, axis: int = 0) -> Array:
    """The part of `x`, whose `axis` is all heads, for the `n_heads` heads of the arrays.

    Heads that only fill up the last shards take the part of the last head.
    """
    if x.shape[axis] == n_heads:
        return x
    return jnp.take(x, rng.head + jnp.arange(n_heads), axis=axis, mode="clip")
