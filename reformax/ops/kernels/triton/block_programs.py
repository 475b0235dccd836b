"""A program of `kernels.block_sparse`: the tiles it visits, its mask, its reads and writes.

Letters as in `kernels.block_sparse`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array

from reformax.ops.kernels.triton.common import (
    chosen_bits,
    load,
    power_of_two,
    tile_dropout_mask,
    view_rows,
)
from reformax.ops.masking.visibility import Side, Visibility, all_of, is_token


class BlockTiles(NamedTuple):
    """The tile sizes of a kernel, and its warps and pipeline stages."""

    query: int
    key: int
    num_warps: int
    num_stages: int


class BlockInputs(NamedTuple):
    """The arrays that all kernels read; None for those that a call lacks."""

    q: Array  # [B, T, N, H]
    k: Array  # [B, S, N, H]
    v: Array  # [B, S, N, V]
    query_segment_ids: Array | None  # [B, T]
    key_segment_ids: Array | None  # [B, S]
    seed: Array | None  # [6], of dropout
    query_order: Array | None = None  # [B, T], the position of each slot
    key_order: Array | None = None  # [B, S]
    chosen: Array | None = None  # [B, T, S / 32], a bit for each key, set where a query chose it


class BlockWork(NamedTuple):
    """The list of tiles, and the part of it that each program visits."""

    parts: Array  # [6, programs], the fields of `BlockPart`
    entries: Array  # [nnz], indices of the other side's tiles
    spans: Array | None  # [2, B, tiles]: the first entry that segments leave visible, and the end


class BlockPart(NamedTuple):
    """The work of one program: a tile of one side, and a range of the list."""

    head: Any
    tile: Any
    first: Any  # the first entry
    end_whole: Any  # the end of the tiles that need no mask, which come first
    end: Any
    buffer_index: Any  # index in the buffer of parts; -1 for a whole row, which needs no buffer


class TileSlots(NamedTuple):
    """The slots of a tile of queries or of keys.

    A *slot* is an index into the arrays, a *position* one into the sequence.
    """

    slot: Array
    segment: Array | None
    whole: bool  # whether all slots exist
    position: Array


class BlockProgram(NamedTuple):
    """One program of a kernel: its static settings, and how it reads, masks and writes.

    `batch` is known only within a kernel.
    """

    tiles: BlockTiles
    n_queries: int
    n_keys: int
    causal: bool
    dropout: float
    per_head: bool  # whether each head has its own mask
    any_whole: bool  # whether any tile needs no mask
    any_masked: bool  # whether any tile needs a mask
    exclude_self: bool = False  # whether a key is hidden from the query of its position
    n_folded: int = 0  # heads that are folded into the axis of examples
    batch: Any = None

    def located(self) -> BlockProgram:
        """The running program, with its batch."""
        # Call it outside of loops: in them the interpreter does not know program ids.
        return self._replace(batch=pl.program_id(2))

    def part(self, work: BlockWork) -> BlockPart:
        """The work of this program."""
        part = BlockPart(*(work.parts[jnp.int32(i), pl.program_id(0)] for i in range(6)))
        if work.spans is not None:  # all tiles need a mask then
            first, end = (work.spans[jnp.int32(i), self.batch, part.tile] for i in (0, 1))
            first = jnp.maximum(part.first, first)
            part = part._replace(first=first, end_whole=first, end=jnp.minimum(part.end, end))
        return part if self.per_head else part._replace(head=pl.program_id(1))

    def queries(self, x: BlockInputs, tile, whole: bool = False) -> TileSlots:
        """A tile of queries; `whole` promises that all of them exist."""
        whole = whole or self.n_queries % self.tiles.query == 0
        refs = x.query_segment_ids, x.query_order
        return self._slots(refs, tile, self.tiles.query, self.n_queries, whole)

    def keys(self, x: BlockInputs, tile, whole: bool = False) -> TileSlots:
        """A tile of keys; `whole` as in `queries`."""
        whole = whole or self.n_keys % self.tiles.key == 0
        return self._slots(
            (x.key_segment_ids, x.key_order), tile, self.tiles.key, self.n_keys, whole
        )

    def _slots(self, refs: tuple, tile, size: int, length: int, whole: bool) -> TileSlots:
        slot = tile * size + jnp.arange(size, dtype=jnp.int32)
        exists = None if whole else slot < length
        segment, position = (
            None if ref is None else load(ref.at[self.batch, slot], exists, 0) for ref in refs
        )
        return TileSlots(slot, segment, whole, slot if position is None else position)

    def rows(self, ref, block: TileSlots, head, included=None) -> Array:
        """A tile's rows of `[B, T, N, H]`, H padded; zeros where none exists or is `included`."""
        view, mask = self._view_rows(ref, block, head, power_of_two(ref.shape[3]))
        if included is not None:
            mask = included[:, None] if mask is None else mask & included[:, None]
            mask = jnp.broadcast_to(mask, (included.shape[0], power_of_two(ref.shape[3])))
        return load(view, mask, 0.0)

    def tokens(self, ref, block: TileSlots, head) -> Array:
        """A tile's rows with zeros at padding too, for products whose weights may be 0 there.

        Padding may be NaN, and 0 times NaN is NaN.
        """
        included = None if block.segment is None else is_token(block.segment)
        return self.rows(ref, block, head, included)

    def put_rows(self, ref, buffer, block: TileSlots, part: BlockPart, value: Array) -> None:
        """Writes a tile's rows of `[B, T, N, H]`; those of a part go to `[P, B, N, L, H]`."""
        view, mask = self._view_rows(ref, block, part.head, value.shape[1])
        if buffer is not None:
            is_row = jnp.broadcast_to(part.buffer_index < 0, value.shape)
            mask = is_row if mask is None else mask & is_row
            row = jnp.arange(value.shape[0], dtype=jnp.int32)[:, None]
            column = jnp.arange(value.shape[1], dtype=jnp.int32)[None, :]
            buffer_view = buffer.at[*self._buffer_index(part), row, column]
            exists = ~is_row & (column < buffer.shape[4])
            pltriton.store(buffer_view, value.astype(buffer.dtype), mask=exists)
        pltriton.store(view, value.astype(ref.dtype), mask=mask)

    def _view_rows(self, ref, block: TileSlots, head, width: int):
        exists = None if block.whole else block.slot < ref.shape[1]
        return view_rows(ref, self.batch, block.slot, head, width, exists)

    def statistics(self, ref, block: TileSlots, head) -> Array | None:
        """A tile's entries of `[B, N, T]`, zeros where none exists; None where `ref` is None."""
        if ref is None:
            return None
        exists = None if block.whole else block.slot < ref.shape[2]
        return load(ref.at[self.batch, head, block.slot], exists, 0.0)

    def put_statistics(self, ref, buffer, block: TileSlots, part: BlockPart, value: Array) -> None:
        """Writes a tile's entries of `[B, N, T]`; those of a part go to `[P, B, N, L]`."""
        mask = None if block.whole else block.slot < ref.shape[2]
        if buffer is not None:
            is_row = jnp.broadcast_to(part.buffer_index < 0, value.shape)
            mask = is_row if mask is None else mask & is_row
            row = jnp.arange(value.shape[0], dtype=jnp.int32)
            pltriton.store(buffer.at[*self._buffer_index(part), row], value, mask=~is_row)
        pltriton.store(ref.at[self.batch, part.head, block.slot], value, mask=mask)

    def _buffer_index(self, part: BlockPart):
        return jnp.maximum(part.buffer_index, 0), self.batch, 0 if self.per_head else part.head

    def over(self, work: BlockWork, part: BlockPart, body: Callable, carry: Any) -> Any:
        """`carry = body(tile, whole, carry)` over the tiles of the program's part."""

        def entries(first, end, whole, carry):
            def step(i, carry):
                return body(work.entries[i], whole, carry)

            return lax.fori_loop(first, end, step, carry)

        if self.any_whole:
            carry = entries(part.first, part.end_whole, True, carry)
        if self.any_masked:
            carry = entries(part.end_whole, part.end, False, carry)
        return carry

    def visible(self, x: BlockInputs, q: TileSlots, k: TileSlots, whole: bool) -> Array | None:
        """Which keys `[1, K]` each query `[Q, 1]` sees, or both transposed; None: all keys."""
        chosen = None
        if x.chosen is not None:
            exists = None
            if not (q.whole and k.whole):
                exists = (q.slot < self.n_queries) & (k.slot < self.n_keys)
            chosen = chosen_bits(x.chosen, self.batch, q.slot, k.slot, exists)
        exists = None if k.whole else k.slot < self.n_keys
        query, key = Side(q.position, q.segment), Side(k.position, k.segment, exists)
        seen = Visibility(self.causal and not whole).sees(query, key)
        # A whole tile hides a position from itself too.
        others = Visibility(exclude_self=self.exclude_self)
        return all_of(chosen, seen, others.sees(Side(q.position), Side(k.position)))

    def dropped(self, x: BlockInputs, head, q: TileSlots, k: TileSlots) -> Array | float:
        """The dropout mask of a tile's weights."""
        batch = self.batch
        if self.n_folded:
            batch, head = (f(batch, jnp.int32(self.n_folded)) for f in (lax.div, lax.rem))
        return tile_dropout_mask(x.seed, self.dropout, batch, head, q.position, k.position)
