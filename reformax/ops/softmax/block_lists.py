"""Lists the nonzero tiles of a block mask, and merges the results of parts of the lists.

Block-sparse attention computes the nonzero tiles of each row of the mask, and of each column for
the gradient of keys. The lists are NumPy arrays, because the mask is known when a call is traced.
Without a mask, all rows have the same list.

Rows may have very different lengths: a global block is a full row among thousands of ten tiles
each. Kernels that compute rows in parallel therefore cut them into *parts* with a bounded number of
tiles, and merge the results of the parts in a tree. Every sum then has a fixed order, and results
repeat bit for bit.

Letters besides those of `reformax.ops.base`: G masks, one for each head or 1 for all; U rows of all
masks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from reformax.ops.calls.call import Call
from reformax.ops.masking.masks import segment_pair
from reformax.ops.masking.visibility import Visibility
from reformax.ops.numerics.logits import PLAIN, Logits
from reformax.ops.numerics.precision import accum_dtype
from reformax.ops.softmax.online import Softmax

# The least side of a kernel's tile.
MIN_TILE = 16
# The number of parts that are merged at once.
FAN_IN = 8

Ints = Int[np.ndarray, "..."]


class TileLists(NamedTuple):
    """The nonzero tiles of each row: `entries[start[i] : start[i] + count[i]]`.

    A tile is whole if all its queries see all its keys by position. A list begins with whole tiles.
    """

    start: Int[np.ndarray, " U"]
    count: Int[np.ndarray, " U"]
    n_whole: Int[np.ndarray, " U"]
    entries: Int[np.ndarray, " nnz"]  # the column of each tile; in lists of columns, its row


class ListParts(NamedTuple):
    """Slices of bounded length of the entries of `TileLists`, in order; one or more for a row."""

    row: Ints
    first: Ints  # the index of its first entry
    count: Ints
    n_whole: Ints
    per_row: Int[np.ndarray, " U"]


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """The static part of a block-sparse attention: which query sees which key, by position."""

    # Whether each block of queries sees each block of keys.
    mask: Bool[np.ndarray, "G n_blocks_q n_blocks_k"]
    block_q: int  # queries in a block
    block_k: int  # keys in a block
    n_queries: int  # the number of queries, T
    n_keys: int  # the number of keys, S
    causal: bool
    dropout: float
    logits: Logits = PLAIN

    exclude_self = False
    n_folded = 0

    @property
    def rule(self) -> Visibility:
        """Which keys of its blocks a query sees."""
        return Visibility(self.causal)

    @property
    def n_masks(self) -> int:
        """The number of heads if each has another mask, else 1."""
        return len(self.mask)

    def rows(self, tile_q: int, tile_k: int) -> TileLists:
        """The nonzero tiles of each row of `tile_q` queries."""
        head, query, key, whole = self._tiles(tile_q, tile_k)
        return _rows(head, query, key, whole, self.n_masks, -(-self.n_queries // tile_q))

    def columns(self, tile_q: int, tile_k: int) -> TileLists:
        """The nonzero tiles of each column of `tile_k` keys."""
        head, query, key, whole = self._tiles(tile_q, tile_k)
        return _rows(head, key, query, whole, self.n_masks, -(-self.n_keys // tile_k))

    def _tiles(self, tile_q: int, tile_k: int) -> tuple[Ints, Ints, Ints, Ints]:
        """The mask, the row and the column of each nonzero tile, and whether it is whole.

        The sizes of tiles divide those of blocks.
        """
        head, query, key = (x[:, None, None] for x in np.nonzero(self.mask))
        each_q, each_k = np.ogrid[: self.block_q // tile_q, : self.block_k // tile_k]
        query, key = query * len(each_q) + each_q, key * each_k.shape[1] + each_k
        head, query, key = (x.ravel() for x in np.broadcast_arrays(head, query, key))
        first_q, first_k = query * tile_q, key * tile_k
        end_q, end_k = first_q + tile_q, first_k + tile_k
        seen = (first_q < self.n_queries) & (first_k < self.n_keys)
        whole = (end_q <= self.n_queries) & (end_k <= self.n_keys)
        bounds = self.rule.bounds(first_q, np.minimum(end_q, self.n_queries))
        if bounds.end is not None:
            seen &= first_k < bounds.end
            whole &= end_k <= bounds.whole_end
        return head[seen], query[seen], key[seen], whole[seen]


def _rows(mask: Ints, row: Ints, entry: Ints, whole: Ints, n_masks: int, n_rows: int) -> TileLists:
    row = mask * n_rows + row
    order = np.lexsort((entry, ~whole, row))
    count, n_whole = (np.bincount(x, minlength=n_masks * n_rows) for x in (row, row[whole]))
    return TileLists(np.cumsum(count) - count, count, n_whole, entry[order].astype(np.int32))


@dataclasses.dataclass(frozen=True)
class FullLayout:
    """The `Layout` of attention without a mask, whose rows have the same list."""

    n_queries: int
    n_keys: int
    causal: bool
    dropout: float
    logits: Logits = PLAIN
    block_q: int = 128
    block_k: int = 128
    n_masks: int = 1
    exclude_self: bool = False  # whether a key is hidden from the query of its own position

    n_folded = 0

    @property
    def rule(self) -> Visibility:
        """Which keys a query sees."""
        return Visibility(self.causal, exclude_self=self.exclude_self)

    def rows(self, tile_q: int, tile_k: int) -> TileLists:
        """The tiles of each row of `tile_q` queries, from the first keys on."""
        n_columns = -(-self.n_keys // tile_k)
        first_q = tile_q * np.arange(-(-self.n_queries // tile_q))
        count = np.full_like(first_q, n_columns)
        n_whole = np.full_like(first_q, self.n_keys // tile_k)
        keys = self.rule.bounds(first_q, np.minimum(first_q + tile_q, self.n_queries))
        if keys.end is not None:
            count = np.minimum(count, -(-keys.end // tile_k))
            n_whole = np.minimum(n_whole, keys.whole_end // tile_k)
        n_whole = n_whole * (first_q + tile_q <= self.n_queries)
        return TileLists(np.zeros_like(count), count, n_whole, np.arange(n_columns, dtype=np.int32))

    def columns(self, tile_q: int, tile_k: int) -> TileLists:
        """The tiles of each column of `tile_k` keys, from the last queries on."""
        n_rows = -(-self.n_queries // tile_q)
        first_k = tile_k * np.arange(-(-self.n_keys // tile_k))
        # The first row that sees any of the keys, and the first that sees all of them.
        first = whole = np.zeros_like(first_k)
        queries = self.rule.bounds(first_k, first_k + tile_k, of_keys=True)
        if queries.first is not None:
            first = np.where(queries.first < self.n_queries, queries.first // tile_q, n_rows)
            whole = np.minimum(-(-queries.whole_first // tile_q), n_rows)
        # A list begins with the last row. If that row is not full, no tile counts as whole.
        full = (first_k + tile_k <= self.n_keys) & (self.n_queries % tile_q == 0)
        entries = np.arange(n_rows, dtype=np.int32)[::-1]
        return TileLists(np.zeros_like(first), n_rows - first, full * (n_rows - whole), entries)


@dataclasses.dataclass(frozen=True)
class SortedLayout(FullLayout):
    """The `Layout` of queries and keys that are sorted by bucket.

    A list holds all tiles in order, none of them whole. The call computes which range of the list a
    row needs.
    """

    n_folded: int = 1  # the number of heads, which are folded into the axis of examples

    def rows(self, tile_q: int, tile_k: int) -> TileLists:
        """All tiles of each row of `tile_q` queries."""
        return _all_in_order(-(-self.n_queries // tile_q), -(-self.n_keys // tile_k))

    def columns(self, tile_q: int, tile_k: int) -> TileLists:
        """All tiles of each column of `tile_k` keys."""
        return _all_in_order(-(-self.n_keys // tile_k), -(-self.n_queries // tile_q))


def _all_in_order(n_rows: int, n_columns: int) -> TileLists:
    none = np.zeros(n_rows, int)
    return TileLists(none, none + n_columns, none, np.arange(n_columns, dtype=np.int32))


def cut_lists(rows: TileLists, most: int) -> ListParts:
    """Cuts the lists into parts of at most `most` tiles."""
    per_row = np.maximum(-(-rows.count // most), 1)
    row, nth = _ranges(per_row)
    start = rows.start[row] + nth * most
    count = np.clip(rows.count[row] - nth * most, 0, most)
    n_whole = np.clip(rows.n_whole[row] - nth * most, 0, count)
    return ListParts(row, start, count, n_whole, per_row)


def _ranges(sizes: Ints) -> tuple[Ints, Ints]:
    """`(0, 0), (0, 1), ...`: the index of each range, and the indices within it."""
    which = np.repeat(np.arange(len(sizes)), sizes)
    return which, np.arange(len(which)) - np.repeat(np.cumsum(sizes) - sizes, sizes)


def padded_entries(
    rows: TileLists, parts: ListParts, width: int, nothing: int
) -> Int[np.ndarray, "P W"]:
    """The entries of each part, one part a row, filled up with `nothing`."""
    nth = np.arange(width)
    index = np.where(nth < parts.count[:, None], parts.first[:, None] + nth, len(rows.entries))
    return np.append(rows.entries, np.int32(nothing))[index]


def merge_softmax(parts: Softmax, per_row: Ints) -> Softmax:
    """Merges the softmax of each row's parts."""

    def merged(x: Softmax, exists: Bool[Array, "P F"]) -> Softmax:
        exists = exists.reshape(*exists.shape, *[1] * (x.row_max.ndim - 2))
        return x.merged(axis=1, where=exists)

    return merge(parts, per_row, merged)


def merge_sums(parts: Any, per_row: Ints) -> Any:
    """Sums each row's parts, in every array of a tree."""

    def merged(x, exists):
        return jax.tree.map(lambda x: jnp.einsum("pf...,pf->p...", x, exists.astype(x.dtype)), x)

    return merge(parts, per_row, merged)


def merge(parts: Any, per_row: Ints, merged: Callable[[Any, Array], Any]) -> Any:
    """Merges the results of parts, `[P, ...]`, to the results of rows, `[U, ...]`.

    Args:
      parts: a tree of arrays.
      per_row: the number of parts of each row.
      merged: `(x, exists) -> y`, which merges `[P, F, ...]` to `[P, ...]` and ignores parts that do
        not exist.
    """
    first, left, stride = np.cumsum(per_row) - per_row, np.asarray(per_row), 1
    while left.max(initial=1) > 1:
        groups = np.where(left > 1, -(-left // FAN_IN), 0)
        row, nth = _ranges(groups)
        member = nth[:, None] * FAN_IN + np.arange(FAN_IN)
        exists = member < left[row][:, None]
        slot = first[row][:, None] + stride * np.where(exists, member, 0)
        one = merged(jax.tree.map(lambda x, slot=slot: x[slot], parts), jnp.asarray(exists))
        leader = first[row] + stride * FAN_IN * nth
        parts = jax.tree.map(
            lambda x, new, slot=leader: x.at[slot].set(new, unique_indices=True), parts, one
        )
        left, stride = -(-left // FAN_IN), stride * FAN_IN
    return parts if stride == 1 else jax.tree.map(lambda x: x[first], parts)


class BlockInputs(NamedTuple):
    """The arrays of a call; None for those that it lacks. Kernels have no `bias` and `sinks`.

    Attributes:
      query_segment_ids, key_segment_ids: ids of both; for a `SortedLayout` their groups.
      query_order, key_order: for a `SortedLayout` the position of each slot.
      chosen: a bit for each key, set where a query chose it (`common.bits_of`).
    """

    q: Float[Array, "B T N H"]
    k: Float[Array, "B S N H"]
    v: Float[Array, "B S N V"]
    query_segment_ids: Int[Array, "B T"] | None
    key_segment_ids: Int[Array, "B S"] | None
    seed: Int[Array, 6] | None
    query_order: Int[Array, "B T"] | None = None
    key_order: Int[Array, "B S"] | None = None
    chosen: Int[Array, "B T words"] | None = None
    bias: Float[Array, "#B #N #T #S"] | None = None
    sinks: Float[Array, " N"] | None = None  # of `softmax.learned_sinks`

    @classmethod
    def of(cls, call: Call, q: Array, k: Array, v: Array) -> BlockInputs:
        """The arrays of an op's call, without bias and sinks."""
        return cls(q, k, v, *segment_pair(call.segment_ids), call.seed)

    @property
    def dtype(self) -> Any:
        """The dtype of logits, softmax and sums."""
        return accum_dtype(self.q.dtype, self.k.dtype, self.v.dtype)
