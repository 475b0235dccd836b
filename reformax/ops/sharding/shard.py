"""A share of a call: some of its heads or positions, and which ones they are.

Dropout belongs to a weight's head and positions in the whole call, and hashes to a head. Who has a
part of the arrays therefore draws what belongs to it, if he knows where it begins. `Shard` says so
in the place of an rng. Of rows, `devices.row_axes` knows too.
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
    """An rng, and where the arrays of a call stand in those of the whole one.

    Attributes:
      rng: that of the whole call.
      head: the first head.
      position: the first position of queries and of keys. It may be below 0 where what stands
        there is padding.
      n_heads: the heads of the whole call; None: the call has them all.
      key_position: the first position of keys, where it is another than that of queries.
      axis: the mesh axis whose devices each have a stretch of the sequences, as many positions one
        as the other; None: the arrays are whole sequences. For an op with the trait
        `sequence_shards`.
      rows: the mesh axes whose devices each have other rows; None: those of `devices.row_axes`.
    """

    rng: PRNGKeyArray | None
    head: Int[Array, ""] | int = 0
    position: Int[Array, ""] | int = 0
    n_heads: int | None = None
    key_position: Int[Array, ""] | int | None = None
    axis: str | None = None
    rows: devices.Axes = None


def row_axes_of(rng: PRNGKeyArray | Shard | None) -> devices.Axes:
    """The mesh axes whose devices each have other rows of the whole call."""
    told = rng.rows if isinstance(rng, Shard) else None
    return devices.row_axes() if told is None else told


def rng_of(rng: PRNGKeyArray | Shard | None) -> PRNGKeyArray | None:
    """The rng of the whole call."""
    return rng.rng if isinstance(rng, Shard) else rng


def all_heads(rng: PRNGKeyArray | Shard | None, n_heads: int) -> int:
    """The number of heads of the whole call, of which the arrays have `n_heads`."""
    return (rng.n_heads if isinstance(rng, Shard) else None) or n_heads


def of_heads(x: Array, rng: PRNGKeyArray | Shard | None, n_heads: int, axis: int = 0) -> Array:
    """From `x`, whose `axis` is all heads, the part of the `n_heads` that the arrays have.

    Heads that fill up the last shares, behind all of `x`, have that of its last one.
    """
    if x.shape[axis] == n_heads:
        return x
    return jnp.take(x, rng.head + jnp.arange(n_heads), axis=axis, mode="clip")
