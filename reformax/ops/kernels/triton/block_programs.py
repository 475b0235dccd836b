"""A program of `kernels.block_sparse`: the tiles it visits, its mask, its reads and writes.

Letters as in `kernels.block_sparse`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array

from reformax.ops.kernels.triton.common import QueryRows, load, tile_bits, tile_dropout_mask
from reformax.ops.kernels.triton.flash import Program
from reformax.ops.masking.visibility import Side, Visibility, all_of
from reformax.ops.numerics.logits import Logits
from reformax.ops.softmax.block_lists import BlockInputs, FullLayout, Layout


class BlockTiles(NamedTuple):
    """The tile sizes of a kernel, and its warps and pipeline stages."""

    query: int
    key: int
    num_warps: int
    num_stages: int


class BlockWork(NamedTuple):
    """The list of tiles, and the part of it that each program visits."""

    parts: Array  # [6, programs], the fields of `BlockPart`
    entries: Array  # [nnz], indices of the other side's tiles
    # [2 or 4, B, tiles]: the first entry that segments leave visible, and the end; then the same of
    # entries that are of the tile's one segment alone
    spans: Array | None


class BlockPart(NamedTuple):
    """The work of one program: a tile of one side, and a range of the list."""

    head: Any
    tile: Any
    first: Any  # the first entry
    end_whole: Any  # the end of the tiles that need no mask
    end: Any
    buffer_index: Any  # index in the buffer of parts; -1 for a whole row, which needs no buffer
    first_whole: Any = None  # the first tile that needs no mask; None: `first`


class TileSlots(NamedTuple):
    """The slots of a tile of queries or of keys.

    A *slot* is an index into the arrays, a *position* one into the sequence.
    """

    slot: Array
    segment: Array | None
    position: Array
    exists: Array | None  # None: all slots exist
    unmasked: bool  # whether no slot of the other side is hidden, but that of the same position
    first: Any  # the first slot


@dataclasses.dataclass(frozen=True, eq=False)
class BlockProgram(Program):
    """One program of a kernel: its static settings, and how it reads, masks and writes."""

    layout: Layout | FullLayout
    tiles: BlockTiles
    any_whole: bool  # whether any tile needs no mask
    any_masked: bool  # whether any tile needs a mask
    # The rest is known only within a kernel.
    x: Any = None
    work: Any = None
    row: Any = None
    batch: Any = None
    part: Any = None

    def located(self, x: BlockInputs, work: BlockWork, row: QueryRows | None = None) -> Self:
        """The running program, with its batch and its part of the work."""
        # Call it outside of loops: in them the interpreter does not know program ids.
        located = dataclasses.replace(self, x=x, work=work, row=row, batch=pl.program_id(2))
        return dataclasses.replace(located, part=located._part())

    @property
    def logits(self) -> Logits:
        return self.layout.logits

    @property
    def per_head(self) -> bool:
        """Whether each head has its own mask."""
        return self.layout.n_masks > 1

    def _part(self) -> BlockPart:
        work = self.work
        part = BlockPart(*(work.parts[jnp.int32(i), pl.program_id(0)] for i in range(6)))
        if work.spans is not None:
            n = work.spans.shape[0]
            spans = [work.spans[jnp.int32(i), self.batch, part.tile] for i in range(n)]
            first, end = jnp.maximum(part.first, spans[0]), jnp.minimum(part.end, spans[1])
            first_whole, end_whole = None, first
            if n == 4:
                first_whole = jnp.maximum(first, spans[2])
                end_whole = jnp.minimum(jnp.minimum(part.end_whole, spans[3]), end)
                end_whole = jnp.maximum(first_whole, end_whole)
            whole = dict(first_whole=first_whole, end_whole=end_whole)
            part = part._replace(first=first, end=end, **whole)
        return part if self.per_head else part._replace(head=pl.program_id(1))

    # The tiles.

    def queries(self, tile, unmasked: bool = False) -> TileSlots:
        """A tile of queries; `unmasked` promises that no mask is needed."""
        refs = self.x.query_segment_ids, self.x.query_order
        return self._slots(refs, tile, self.tiles.query, self.layout.n_queries, unmasked)

    def keys(self, tile, unmasked: bool = False) -> TileSlots:
        """A tile of keys; `unmasked` as in `queries`."""
        refs = self.x.key_segment_ids, self.x.key_order
        return self._slots(refs, tile, self.tiles.key, self.layout.n_keys, unmasked)

    def _slots(self, refs: tuple, tile, size: int, length: int, unmasked: bool) -> TileSlots:
        slot = tile * size + jnp.arange(size, dtype=jnp.int32)
        exists = None if unmasked or length % size == 0 else slot < length
        of_segment, of_order = refs
        of_segment = None if unmasked else of_segment
        segment, position = (
            None if ref is None else load(ref.at[self.batch, slot], exists, 0)
            for ref in (of_segment, of_order)
        )
        position = slot if position is None else position
        return TileSlots(slot, segment, position, exists, unmasked, tile * size)

    def over_keys(self, queries: TileSlots, body: Callable, carry: Any) -> Any:
        return self._over(self.keys, body, carry)

    def over_queries(self, keys: TileSlots, body: Callable, carry: Any) -> Any:
        return self._over(self.queries, body, carry)

    def _over(self, side: Callable, body: Callable, carry: Any) -> Any:
        """The tiles of the program's part: those that need no mask, and then the others."""
        part = self.part
        first_whole = part.first if part.first_whole is None else part.first_whole

        def whole(i, carry):
            return body(side(self.work.entries[i], True), carry)

        def masked(i, carry):
            if part.first_whole is not None:  # some come before the whole tiles
                before = i - (part.end_whole - first_whole)
                i = jnp.where(before < first_whole, before, i)
            return body(side(self.work.entries[i], False), carry)

        first = part.end_whole
        if part.first_whole is not None:
            first = part.first + (part.end_whole - first_whole)
        if self.any_whole:
            carry = lax.fori_loop(first_whole, part.end_whole, whole, carry)
        if self.any_masked:
            carry = lax.fori_loop(first, part.end, masked, carry)
        return carry

    # Reading and writing.

    def address(self, block: TileSlots):
        return block.slot, self.part.head, block.exists

    def put_part(self, ref, buffer, block: TileSlots, value: Array) -> None:
        """Writes a tile's rows of `[B, T, N, H]`; those of a part go to `[P, B, N, L, H]`."""
        view, mask = self.view(ref, block, value.shape[1])
        if buffer is not None:
            is_row = jnp.broadcast_to(self.part.buffer_index < 0, value.shape)
            mask = is_row if mask is None else mask & is_row
            row = jnp.arange(value.shape[0], dtype=jnp.int32)[:, None]
            column = jnp.arange(value.shape[1], dtype=jnp.int32)[None, :]
            buffer_view = buffer.at[*self._buffer_index(), row, column]
            exists = ~is_row & (column < buffer.shape[4])
            pltriton.store(buffer_view, value.astype(buffer.dtype), mask=exists)
        pltriton.store(view, value.astype(ref.dtype), mask=mask)

    def put_statistics(self, ref, buffer, block: TileSlots, value: Array) -> None:
        """Writes a tile's entries of `[B, N, T]`; those of a part go to `[P, B, N, L]`."""
        slot, head, mask = self.address(block)
        if buffer is not None:
            is_row = jnp.broadcast_to(self.part.buffer_index < 0, value.shape)
            mask = is_row if mask is None else mask & is_row
            row = jnp.arange(value.shape[0], dtype=jnp.int32)
            pltriton.store(buffer.at[*self._buffer_index(), row], value, mask=~is_row)
        pltriton.store(ref.at[self.batch, head, slot], value, mask=mask)

    def _buffer_index(self):
        head = 0 if self.per_head else self.part.head
        return jnp.maximum(self.part.buffer_index, 0), self.batch, head

    # The mask.

    def visible(self, q: TileSlots, k: TileSlots) -> Array | None:
        chosen = None
        if self.x.chosen is not None:
            sides = Side(q.slot, exists=q.exists), Side(k.slot, exists=k.exists)
            chosen = tile_bits(self.x.chosen, self.batch, *sides, k.first, self.tiles.key)
        unmasked = q.unmasked or k.unmasked
        segments = (None, None) if unmasked else (q.segment, k.segment)
        query, key = Side(q.position, segments[0]), Side(k.position, segments[1], k.exists)
        seen = Visibility(self.layout.causal and not unmasked).sees(query, key)
        # A tile that needs no other mask hides a position from itself too.
        others = Visibility(exclude_self=self.layout.exclude_self)
        return all_of(chosen, seen, others.sees(Side(q.position), Side(k.position)))

    def dropped(self, q: TileSlots, k: TileSlots) -> Array | float:
        batch, head, n_folded = self.batch, self.part.head, self.layout.n_folded
        if n_folded:
            batch, head = (f(batch, jnp.int32(n_folded)) for f in (lax.div, lax.rem))
        address = batch, head, q.position, k.position
        return tile_dropout_mask(self.x.seed, self.layout.dropout, *address)
