"""The query heads of a key head: programs that have them, and the rows of a tile of queries."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Self

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from reformax.ops.kernels.triton.common import QueryRows, load, power_of_two
from reformax.ops.kernels.triton.flash import Program
from reformax.ops.numerics.logits import Logits

ROWS = 128


@dataclasses.dataclass(frozen=True, eq=False)
class GroupProgram(Program):
    """A program of a grid (index, heads of keys, B), whose inputs are zeros at padding.

    Attributes:
      sizes: the static settings, `logits` among them.
      x, row, batch: as in `Program`.
      head: the head of the keys.
      index: of the program, among those of its head.
    """

    sizes: Any
    x: Any
    row: QueryRows | None
    batch: Any
    head: Any
    index: Any
    zero_padding = True

    @classmethod
    def located(cls, sizes: Any, x: Any, row: QueryRows | None = None) -> Self:
        """The running program."""
        return cls(sizes, x, row, *(pl.program_id(i) for i in (2, 1, 0)))

    @property
    def logits(self) -> Logits:
        return self.sizes.logits


class GroupRows(NamedTuple):
    """The rows of a tile; the sum of the parts `q` are their vectors."""

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
    """The rows of a tile of queries.

    Args:
      q: references to parts of the queries, `[B, T, N, H]` each.
      ids: a reference to segments, `[B, T]`; None: one segment.
      batch, head: the sequence, and the head of the keys.
      first: the first query.
      group: query heads of a key head.
      padded: rows of a query: `group`, rounded up to a power of two.
    """
    row = jnp.arange(ROWS, dtype=jnp.int32)
    member = lax.rem(row, jnp.int32(padded))
    position = first + lax.div(row, jnp.int32(padded))
    exists = (member < group) & (position < q[0].shape[1])
    position = jnp.where(exists, position, 0)
    head = jnp.where(exists, head * group + member, 0)
    ids = None if ids is None else load(ids.at[batch, position], exists, 0)

    def vectors(ref) -> Array:
        column = jnp.arange(power_of_two(ref.shape[3]), dtype=jnp.int32)[None, :]
        view = ref.at[batch, position[:, None], head[:, None], column]
        return load(view, exists[:, None] & (column < ref.shape[3]), 0.0)

    return GroupRows(position, head, ids, exists, tuple(map(vectors, q)))
