"""A program of `kernels.chunked`: the slots it visits, its mask, its reads and writes.

A *slot* is an index into the order, a *position* one into the sequence. Positions of T or more are
neither read nor written. Rows of segment 0 are not read, or are masked.
Letters as in `kernels.chunked`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from reformax.ops.kernels.triton.common import QueryRows, load, tile_dropout_mask
from reformax.ops.kernels.triton.flash import Program
from reformax.ops.kernels.triton.packed_chunks import PackedChunks
from reformax.ops.masking.visibility import Side, TileBounds, Visibility, all_of, is_token
from reformax.ops.numerics.logits import Logits


class ChunkTiles(NamedTuple):
    """The rows of a program and of a step of its loop, and its warps and pipeline stages."""

    rows: int
    loop_rows: int
    num_warps: int
    num_stages: int


class ChunkInputs(NamedTuple):
    """The arrays that both passes read; None for those that a call lacks.

    Without an order, the axes of heads and hashes have size 1. The arrays named `key_` are None
    where keys have the order of the queries.
    """

    q: Array  # [B, T, N, H]
    k: Array  # [B, T, N, H]
    v: Array  # [B, T, N, V]
    order: Array | None  # [B, N, R, Tp]
    packs: Array | None  # [W, B, N, R, Tp], `PackedChunks` of all hashes but the last
    segment: Array | None  # [B, N, R, Tp]
    seed: Array | None  # [6], of dropout
    key_order: Array | None = None  # [B, N, R, Tp]
    key_packs: Array | None = None  # [W, B, N, R, Tp]
    key_segment: Array | None = None  # [B, N, R, Tp]
    count: Array | None = None  # [B], tokens of one segment, the first of all orders; no `segment`
    # Of an order with a `first_slot`: it, by slot. `packs` are then, by each hash but the last, the
    # slot of each position and its first slot.
    first: Array | None = None  # [B, N, R, Tp]

    def at_keys(self) -> ChunkInputs:
        """The inputs in the order of the keys."""
        if self.key_order is None:
            return self
        return self._replace(order=self.key_order, packs=self.key_packs, segment=self.key_segment)


class ChunkBlock(NamedTuple):
    """Consecutive slots, and the numbers that decide which of them see each other."""

    slot: Array
    position: Array
    exists: Array | None  # whether there is such a position; None: all exist, and so do the slots
    segment: Array | None
    chunk: Array
    packs: tuple[Array, ...]  # the chunks, or slots, by the earlier hashes
    first: Array | None = None  # the first slot that a query sees


@dataclasses.dataclass(frozen=True, eq=False)
class ChunkProgram(Program):
    """One program of a kernel: its static settings, and how it reads, masks and writes."""

    chunks: Any  # ops.softmax.orders.Chunking
    tiles: ChunkTiles
    hash_index: int
    n_hashes: int  # 0 without an order
    n_slots: int
    # The rest is known only within a kernel.
    x: Any = None
    row: Any = None
    batch: Any = None
    head: Any = None
    count: Any = None  # of slots with tokens, where it is known

    def located(self, x: ChunkInputs, row: QueryRows | None = None) -> Self:
        """The running program, with its batch and head."""
        # Call it outside of loops: in them the interpreter does not know program ids.
        batch, head = pl.program_id(2), pl.program_id(1)
        count = None if x.count is None else load(x.count.at[batch], None)
        return dataclasses.replace(self, x=x, row=row, batch=batch, head=head, count=count)

    @property
    def logits(self) -> Logits:
        return self.chunks.logits

    @property
    def start(self):
        """The first slot of the program's block."""
        return pl.program_id(0) * self.tiles.rows

    @property
    def is_last(self) -> bool:
        """Whether this hash completes the softmax."""
        return self.hash_index + 1 >= self.n_hashes

    @property
    def aligned(self) -> bool:
        """Whether every block lies within one chunk."""
        length = self.chunks.chunk_len
        return length % self.tiles.rows == 0 and length % self.tiles.loop_rows == 0

    @property
    def unmasked(self) -> bool:
        """Whether every slot of every block has a position, so that loads need no mask."""
        tiled = self.tiles.rows % self.tiles.loop_rows == 0
        c = self.chunks
        # With a ratio above 1, the last programs have no keys.
        return tiled and self.aligned and c.ratio == 1 and self.n_slots == c.length == c.key_length

    # Reading and writing.

    def load_slots(self, ref, slot, exists, other, pack: int | None = None) -> Array | None:
        """Entries of `[B, N, R, Tp]`, or of a pack of `[W, B, N, R, Tp]`; None without `ref`."""
        if ref is None:
            return None
        index = (
            self.batch,
            self.head if ref.shape[-3] > 1 else jnp.int32(0),
            jnp.int32(self.hash_index if ref.shape[-2] > 1 else 0),
            slot,
        )
        index = index if pack is None else (jnp.int32(pack), *index)
        return load(ref.at[index], None if self.unmasked else exists, other)

    def side(self, of_keys: bool) -> tuple[int, int]:
        """The length of a chunk of queries or of keys, and the number of slots."""
        if of_keys:
            return self.chunks.chunk_len, self.n_slots // self.chunks.ratio
        return self.chunks.query_chunk_len, self.n_slots

    def queries(self) -> ChunkBlock:
        """The program's block, as queries."""
        return self._block(self.start, self.tiles.rows)

    def keys(self) -> ChunkBlock:
        """The program's block, as keys."""
        return self._block(self.start, self.tiles.rows, of_keys=True)

    def _block(self, start, size: int, stop=None, of_keys: bool = False) -> ChunkBlock:
        """`size` slots from `start`; those from `stop` on are padding."""
        x = self.x.at_keys() if of_keys else self.x
        chunk_len, n_slots = self.side(of_keys)
        slot = start + jnp.arange(size, dtype=jnp.int32)
        exists = slot < (n_slots if stop is None else stop)
        if x.order is not None:
            position = self.load_slots(x.order, slot, exists, self.n_slots)
        else:
            position = slot if self.unmasked else jnp.where(exists, slot, self.n_slots)
        segment = self.load_slots(x.segment, slot, exists, 0)
        if self.count is not None:
            segment = (slot < self.count).astype(jnp.int32)
        per_pack = PackedChunks.of(self.chunks).per_pack
        n_packs = 0 if x.packs is None else pl.cdiv(self.hash_index, per_pack)
        if x.packs is not None and x.first is not None:
            n_packs = 2 * self.hash_index
        first = self.load_slots(x.first, slot, exists, 0)
        packs = tuple(self.load_slots(x.packs, slot, exists, 0, pack) for pack in range(n_packs))
        length = self.chunks.key_length if of_keys else self.chunks.length
        exists = None if self.unmasked else position < length
        return ChunkBlock(slot, position, exists, segment, slot // chunk_len, packs, first)

    def address(self, block: ChunkBlock):
        return block.position, self.head, block.exists

    def statistics(self, ref, queries: ChunkBlock) -> Array:
        """A block's entries of `[B, N, R, Tp]`, which are in the order."""
        return self.load_slots(ref, queries.slot, queries.exists, 0.0)

    # The mask.

    def _slots_in_reach(self, before: int, after: int, of_keys: bool):
        """The first and the end of the slots within so many chunks of the program's block."""
        block_chunk, _ = self.side(not of_keys)
        chunk_len, n_slots = self.side(of_keys)
        first = (self.start // block_chunk - before) * chunk_len
        last = ((self.start + self.tiles.rows - 1) // block_chunk + 1 + after) * chunk_len
        last = jnp.minimum(last, n_slots)
        last = last if self.count is None else jnp.minimum(last, self.count)
        return jnp.maximum(first, 0), last

    def key_slots(self):
        """The first and the end of the slots that the program's queries see."""
        c = self.chunks
        first, last = self._slots_in_reach(c.n_chunks_before, c.n_chunks_after, of_keys=True)
        bounds = self._bounds(of_keys=False)
        last = last if bounds.end is None else jnp.minimum(last, bounds.end)
        return self._within_window(first, last)

    def over_keys(self, queries: ChunkBlock, body: Callable, carry: Any) -> Any:
        return self._over(self.key_slots(), body, carry, of_keys=True)

    def over_queries(self, keys: ChunkBlock, body: Callable, carry: Any) -> Any:
        c = self.chunks
        first, last = self._slots_in_reach(c.n_chunks_after, c.n_chunks_before, of_keys=False)
        bounds = self._bounds(of_keys=True)
        first = first if bounds.first is None else bounds.first
        return self._over(self._within_window(first, last), body, carry, of_keys=False)

    def _bounds(self, of_keys: bool) -> TileBounds:
        """The bounds that causality sets to the program's block; none in a sorted order."""
        if self.n_hashes:
            return TileBounds()
        rule = dataclasses.replace(self.chunks.rule, window=None)
        return rule.bounds(self.start, self.start + self.tiles.rows, of_keys)

    def _within_window(self, first, last):
        """The part of `first` to `last` that is within a window of the program's block."""
        if self.n_hashes or self.chunks.window is None:
            return first, last
        rule, size = Visibility(window=self.chunks.window), self.tiles.loop_rows
        bounds = rule.bounds(self.start, self.start + self.tiles.rows)
        return jnp.maximum(first, bounds.first // size * size), jnp.minimum(last, bounds.end)

    def _over(self, window, body: Callable, carry: Any, of_keys: bool) -> Any:
        """`carry = body(block, carry)` over the blocks of a window."""
        first, last = window
        size = self.tiles.loop_rows

        def step(i, carry):
            return body(self._block(first + i * size, size, last, of_keys), carry)

        n = lax.div(last - first + np.int32(size - 1), np.int32(size))
        return lax.fori_loop(np.int32(0), n, step, carry)

    def visible(self, q: ChunkBlock, k: ChunkBlock) -> Array | None:
        c = self.chunks
        # Causality hides positions after the end, too.
        exists = None if c.causal and c.n_keys is None else k.exists
        of_query, of_key = q.segment, k.segment
        if self.count is not None:  # what a query of padding sees is dropped
            exists, of_query, of_key = all_of(exists, is_token(of_key)), None, None
        masks = [c.rule.sees(Side(q.position, of_query), Side(k.position, of_key, exists))]
        if q.first is not None:
            return all_of(*masks, *self._between_slots(q, k))
        if not self.aligned:
            masks.append(self._chunk_in_reach(q.chunk, k.chunk))
        # A key counts only for the first hash by which the query sees it (the paper's N_ij).
        n_hashes, packed = self.hash_index, PackedChunks.of(self.chunks)
        for query_pack, key_pack in zip(q.packs, k.packs, strict=True):
            masks.append(~packed.near(query_pack, key_pack, min(n_hashes, packed.per_pack)))
            n_hashes -= packed.per_pack
        return all_of(*masks)

    def _between_slots(self, q: ChunkBlock, k: ChunkBlock) -> list[Array]:
        """Which keys are from a query's first slot to its own, and were in no earlier hash."""
        masks = [(k.slot >= q.first) & (k.slot <= q.slot)]
        for i in range(0, len(q.packs), 2):
            slot, first = q.packs[i], q.packs[i + 1]
            masks.append((k.packs[i] < first) | (k.packs[i] > slot))
        return masks

    def _chunk_in_reach(self, query_chunk, key_chunk) -> Array:
        """Whether a query's chunk attends to a key's chunk."""
        before, after = self.chunks.n_chunks_before, self.chunks.n_chunks_after
        # One comparison instead of two: negative distances are large unsigned numbers.
        distance = (query_chunk - key_chunk + after).astype(jnp.uint32)
        return distance <= jnp.uint32(before + after)

    def dropped(self, q: ChunkBlock, k: ChunkBlock) -> Array | float:
        seed, rate = self.x.seed, self.chunks.dropout
        return tile_dropout_mask(seed, rate, self.batch, self.head, q.position, k.position)

    def alone_weight(self, block: ChunkBlock, row_sum: Array) -> Array:
        """The weight of a position's value for itself: its dropout mask if it sees no other."""
        alone = (row_sum == 0.0) & (block.position < self.chunks.length)
        if block.segment is not None:
            alone = alone & is_token(block.segment)
        return jnp.where(alone, self.dropped(block, block), 0.0)
