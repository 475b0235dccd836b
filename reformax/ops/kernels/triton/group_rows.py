"""The rows of a tile that chooses blocks: the query heads of a key head, of some queries."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from reformax.ops.kernels.triton.common import load, power_of_two

ROWS = 128


class GroupRows(NamedTuple):
    """Where each row of a tile stands; q are its vectors, by parts that add up."""

    position: Array
    head: Array
    ids: Array | None
    exists: Array
    q: tuple[Array, ...] = ()


def group_rows(
    q: tuple[Array, ...],
    ids: Array | None,
    batch: Any,
    head: Any,
    first: Any,
    group: int,
    padded: int,
) -> GroupRows:
    """The rows of the queries from `first` on, as many as a tile holds.

    Args:
      q: queries in memory, `[B, T, N, H]` each.
      ids: segments in memory, `[B, T]`; None is one.
      batch, head: the sequence, and the head of the keys.
      first: the first query.
      group: query heads of a head of keys.
      padded: rows of a query: `group`, filled up to a power of two.
    """
    row = jnp.arange(ROWS, dtype=jnp.int32)
    member = lax.rem(row, jnp.int32(padded))
    position = first + lax.div(row, jnp.int32(padded))
    exists = (member < group) & (position < q[0].shape[1])
    position = jnp.where(exists, position, 0)
    head = jnp.where(exists, head * group + member, 0)
    ids = None if ids is None else load(ids.at[batch, position], exists, 0)

    def vectors(ref) -> Array:
        number = jnp.arange(power_of_two(ref.shape[3]), dtype=jnp.int32)[None, :]
        view = ref.at[batch, position[:, None], head[:, None], number]
        return load(view, exists[:, None] & (number < ref.shape[3]), 0.0)

    return GroupRows(position, head, ids, exists, tuple(map(vectors, q)))
