"""The query heads of a key head: programs that have them, their arrays and rows of a tile."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Self

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from reformax.ops.kernels.triton.common import (
    QueryRows,
    load,
    matmul_in_parts,
    tile_dropout_mask,
    tile_side,
    view_rows,
)
from reformax.ops.kernels.triton.flash import Program
from reformax.ops.numerics.logits import Logits
from reformax.ops.numerics.precision import in_three
from reformax.ops.softmax.dropout import far_address

ROWS = 128


class GroupInputs(NamedTuple):
    """The arrays that programs read, zeros at padding.

    Attributes:
      k, v: keys and values, or summaries of them.
      chosen: what each query sees, -1 for none: blocks of keys, or a list of keys, none of them
        twice, for all queries or a chunk of them. None: all keys up to itself.
      bits: a bit for each key, set where the query sees it; None: no key is hidden so.
      lists: which queries choose each block, in the backward pass of blocks (`nsa.NsaLists`).
      start: the first query of a chunk; None: 0.
    """

    q: Float[Array, "B T N H"]
    k: Float[Array, "B S G H"]
    v: Float[Array, "B S G V"]
    ids: Int[Array, "B T"] | None
    key_ids: Int[Array, "B S"] | None
    seed: Int[Array, 6] | None
    chosen: Int[Array, "B G T K"] | Int[Array, "B C K"] | None = None
    bits: Int[Array, "B T words"] | None = None
    lists: Any = None
    start: Int[Array, 1] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class GroupProgram(Program):
    """A program of a grid (index, heads of keys, B), whose inputs are zeros at padding.

    Attributes:
      sizes: the static settings, with `logits`, `dropout` and `far`: whether keys are at no
        position, so that dropout is drawn by their numbers and not by their last positions.
      x, row, batch: as in `Program`.
      head: the head of the keys.
      index: of the program, among those of its head.
    """

    sizes: Any
    x: GroupInputs
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
    def key_head(self) -> Any:
        return self.head

    @property
    def logits(self) -> Logits:
        return self.sizes.logits

    def address(self, block: Any):
        """The address of `GroupRows`, or of keys, which are of one head."""
        if not isinstance(block, GroupRows):
            return block.key, self.key_head, block.exists
        position = jnp.where(block.exists, block.position, self.x.q.shape[1])
        return position, block.head, block.exists

    def dropped(self, rows: GroupRows, keys: Any) -> Array | float:
        key = far_address(keys.key) if self.sizes.far else keys.last
        address = rows.head, rows.position, key
        return tile_dropout_mask(self.x.seed, self.sizes.dropout, self.batch, *address)


class GroupRows(NamedTuple):
    """The rows of a tile: heads of its queries. The sum of the parts `q` are their vectors."""

    position: Array
    head: Array
    ids: Array | None
    exists: Array
    unmasked: bool = False  # whether all rows see all keys that they meet
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
        column = jnp.arange(tile_side(ref.shape[3]), dtype=jnp.int32)[None, :]
        view = ref.at[batch, position[:, None], head[:, None], column]
        return load(view, exists[:, None] & (column < ref.shape[3]), 0.0)

    return GroupRows(position, head, ids, exists, q=tuple(map(vectors, q)))


class ScoredInputs(NamedTuple):
    """Queries and what they are scored with, `in_parts`: tensor cores have no float32 products."""

    q: tuple[Array, ...]  # [B, T, N, H] each; their sum is q
    keys: tuple[Array, ...]  # [B, C, G, H] each; their sum is the keys
    ids: Array | None  # [B, T]
    key_ids: Array | None  # [B, C]
    start: Array | None = None  # [1]: the first query; None: 0

    @classmethod
    def of(cls, q: Array, keys: Array, ids: Array | None, key_ids: Array | None) -> Self:
        narrow = jnp.bfloat16 if q.dtype == jnp.float32 else q.dtype
        parts = ((x,) if x.dtype == narrow else in_three(x, narrow) for x in (q, keys))
        return cls(*parts, ids, key_ids)

    def products(
        self, rows: GroupRows, batch: Any, head: Any, number, exists, transposed: bool = False
    ) -> Float[Array, "I J"]:
        """The products of rows with keys of a head, `number`; transposed, keys are the first axis.

        They are exact to float32. `exists` of None: all keys exist.
        """
        width = rows.q[0].shape[1]
        number = number if exists is None else jnp.where(exists, number, 0)

        def read(keys) -> Array:
            return load(*view_rows(keys, batch, number, head, width, exists))

        return matmul_in_parts(rows.q, self.keys, read, transposed)
