"""One program of `kernels.block_sparse`: its share of the tiles, who sees whom, where it writes.

Letters as in `kernels.block_sparse`.
"""

from __future__ import annotations

import functools
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


class Tiles(NamedTuple):
    """The sizes of a kernel: queries and keys of a tile, warps, pipeline stages."""

    query: int
    key: int
    num_warps: int
    num_stages: int


class Inputs(NamedTuple):
    """The arrays that all kernels read; None for those that a call does not have."""

    q: Array  # [B, T, N, H]
    k: Array  # [B, S, N, H]
    v: Array  # [B, S, N, V]
    query_segment_ids: Array | None  # [B, T]
    key_segment_ids: Array | None  # [B, S]
    seed: Array | None  # [6], of dropout
    query_order: Array | None = None  # [B, T], the position that stands at each place
    key_order: Array | None = None  # [B, S]
    chosen: Array | None = None  # [B, T, S / 32], the keys that each query has chosen, a bit each


class Work(NamedTuple):
    """The work of each program, one column of `parts` each, and the list of tiles."""

    parts: Array  # [6, programs]: head, own tile, first entry, end of the whole ones, end, slot
    entries: Array  # [nnz], numbers of the other side's tiles
    spans: Array | None  # [2, B, tiles]: the first entry that segments leave visible, the end


class Own(NamedTuple):
    """The share of one program: a tile of one side, and a stretch of the list."""

    head: Any
    tile: Any
    first: Any  # entry of the stretch
    end_whole: Any  # of the tiles that need no mask, which come first
    end: Any
    slot: Any  # in the buffer of parts; -1 for a whole row, which goes to its place


class Block(NamedTuple):
    """Some positions of one side."""

    position: Array  # in the arrays
    segment: Array | None
    whole: bool  # whether all of them exist
    at: Array  # in the sequence, whose order the arrays may not have


class Program(NamedTuple):
    """One program of a kernel: its static part, and how it reads, masks and writes.

    `batch` is known within a kernel only.
    """

    tiles: Tiles
    n_queries: int
    n_keys: int
    causal: bool
    dropout: float
    per_head: bool  # whether each head has a mask of its own
    any_whole: bool  # whether the list has tiles that need no mask
    any_cut: bool  # whether it has others
    exclude_self: bool = False  # whether a key is hidden from the query of its position
    n_folded: int = 0  # heads that stand in the axis of examples
    batch: Any = None

    def here(self) -> Program:
        """The program that runs."""
        # Outside of loops, where the interpreter does not know the numbers of a program.
        return self._replace(batch=pl.program_id(2))

    def own(self, work: Work) -> Own:
        """The share of this program."""
        own = Own(*(work.parts[jnp.int32(i), pl.program_id(0)] for i in range(6)))
        if work.spans is not None:  # no tile is whole then
            first, end = (work.spans[jnp.int32(i), self.batch, own.tile] for i in (0, 1))
            first = jnp.maximum(own.first, first)
            own = own._replace(first=first, end_whole=first, end=jnp.minimum(own.end, end))
        return own if self.per_head else own._replace(head=pl.program_id(1))

    def queries(self, x: Inputs, tile, whole: bool = False) -> Block:
        """A tile of queries; `whole` says that all of them are known to exist."""
        whole = whole or self.n_queries % self.tiles.query == 0
        each = x.query_segment_ids, x.query_order
        return self._block(each, tile, self.tiles.query, self.n_queries, whole)

    def keys(self, x: Inputs, tile, whole: bool = False) -> Block:
        """A tile of keys, likewise."""
        whole = whole or self.n_keys % self.tiles.key == 0
        return self._block(
            (x.key_segment_ids, x.key_order), tile, self.tiles.key, self.n_keys, whole
        )

    def _block(self, each: tuple, tile, size: int, length: int, whole: bool) -> Block:
        position = tile * size + jnp.arange(size, dtype=jnp.int32)
        exists = None if whole else position < length
        segment, at = (
            None if ref is None else load(ref.at[self.batch, position], exists, 0) for ref in each
        )
        return Block(position, segment, whole, position if at is None else at)

    def rows(self, ref, block: Block, head, some=None) -> Array:
        """A block's rows of `[B, T, N, H]`, or some; zeros where there is none, H padded."""
        view, mask = self._view_rows(ref, block, head, power_of_two(ref.shape[3]))
        if some is not None:
            mask = some[:, None] if mask is None else mask & some[:, None]
            mask = jnp.broadcast_to(mask, (some.shape[0], power_of_two(ref.shape[3])))
        return load(view, mask, 0.0)

    def tokens(self, ref, block: Block, head) -> Array:
        """A block's rows with zeros at padding too, for products that hide nothing.

        Weights of 0 keep nothing out of them, for 0 times NaN is NaN.
        """
        return self.rows(ref, block, head, None if block.segment is None else block.segment != 0)

    def put_rows(self, ref, buffer, block: Block, own: Own, value: Array) -> None:
        """Writes rows of `[B, T, N, H]`, or a part's to the buffer `[P, B, N, L, H]`."""
        view, mask = self._view_rows(ref, block, own.head, value.shape[1])
        if buffer is not None:
            is_row = jnp.broadcast_to(own.slot < 0, value.shape)
            mask = is_row if mask is None else mask & is_row
            place = jnp.arange(value.shape[0], dtype=jnp.int32)[:, None]
            number = jnp.arange(value.shape[1], dtype=jnp.int32)[None, :]
            part = buffer.at[*self._in_buffer(own), place, number]
            exists = ~is_row & (number < buffer.shape[4])
            pltriton.store(part, value.astype(buffer.dtype), mask=exists)
        pltriton.store(view, value.astype(ref.dtype), mask=mask)

    def _view_rows(self, ref, block: Block, head, width: int):
        exists = None if block.whole else block.position < ref.shape[1]
        return view_rows(ref, self.batch, block.position, head, width, exists)

    def statistics(self, ref, block: Block, head) -> Array | None:
        """A block's entries of `[B, N, T]`, zeros where there is none; None of None."""
        if ref is None:
            return None
        exists = None if block.whole else block.position < ref.shape[2]
        return load(ref.at[self.batch, head, block.position], exists, 0.0)

    def put_statistics(self, ref, buffer, block: Block, own: Own, value: Array) -> None:
        """Writes entries of `[B, N, T]`, or a part's to the buffer `[P, B, N, L]`."""
        mask = None if block.whole else block.position < ref.shape[2]
        if buffer is not None:
            is_row = jnp.broadcast_to(own.slot < 0, value.shape)
            mask = is_row if mask is None else mask & is_row
            place = jnp.arange(value.shape[0], dtype=jnp.int32)
            pltriton.store(buffer.at[*self._in_buffer(own), place], value, mask=~is_row)
        pltriton.store(ref.at[self.batch, own.head, block.position], value, mask=mask)

    def _in_buffer(self, own: Own):
        return jnp.maximum(own.slot, 0), self.batch, 0 if self.per_head else own.head

    def over(self, work: Work, own: Own, body: Callable, carry: Any) -> Any:
        """`carry = body(tile, whole, carry)` over the tiles of the program's stretch."""

        def stretch(first, end, whole, carry):
            def step(i, carry):
                return body(work.entries[i], whole, carry)

            return lax.fori_loop(first, end, step, carry)

        if self.any_whole:
            carry = stretch(own.first, own.end_whole, True, carry)
        if self.any_cut:
            carry = stretch(own.end_whole, own.end, False, carry)
        return carry

    def visible(self, x: Inputs, q: Block, k: Block, whole: bool) -> Array | None:
        """Which key, `[1, K]`, each query, `[Q, 1]`, sees, or both transposed; None: all."""
        masks = []
        if x.chosen is not None:
            exists = None
            if not (q.whole and k.whole):
                exists = (q.position < self.n_queries) & (k.position < self.n_keys)
            masks.append(chosen_bits(x.chosen, self.batch, q.position, k.position, exists))
        if self.causal and not whole:
            masks.append(k.at <= q.at)
        if self.exclude_self:
            masks.append(k.at != q.at)
        if not k.whole:
            masks.append(k.position < self.n_keys)
        if q.segment is not None:
            masks += [q.segment == k.segment, k.segment != 0]
        return functools.reduce(jnp.logical_and, masks) if masks else None

    def dropped(self, x: Inputs, head, q: Block, k: Block) -> Array | float:
        """The dropout mask of a tile's weights."""
        batch = self.batch
        if self.n_folded:
            batch, head = (f(batch, jnp.int32(self.n_folded)) for f in (lax.div, lax.rem))
        return tile_dropout_mask(x.seed, self.dropout, batch, head, q.at, k.at)
