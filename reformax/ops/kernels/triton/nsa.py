"""Causal attention of groups of heads to summaries, blocks or a window: Pallas kernels for Triton.

They are the branches of native sparse attention (`ops.nsa`) and the parts of compressed and causal
Long-Short attention (`kernels.compressed`).

The query heads of a key head read the same keys, so they are the rows of one tile: M heads of
several queries (Yuan et al. 2025, sec. 3.4). All are one function with different tiles.

  * Summaries: a program has neighbouring queries, and loops over the summaries before them.
  * A window: the same of positions, from the first in the window of its first query on.
  * Chosen summaries: a program of all summaries, with a mask of a bit for each query and summary,
    where `kernels.listed` does not pay.
  * Selected blocks: a program has one query, and loops over the blocks that it selected.
  * In the gradient of keys, a program loops over the queries that see its keys: all later ones, or
    the list of those that selected the block (`reformax.ops.softmax.chosen_blocks`). Every query
    selects the first block, so the work is cut into parts, whose sums are added afterwards: no
    atomics, one order of sums.

Letters as in `reformax.ops.nsa`; S is the number of keys, I of rows of a tile, W of parts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Int

from reformax.ops.kernels.triton import flash
from reformax.ops.kernels.triton.common import (
    QueryRows,
    launch,
    load,
    name_of,
    softmax_shapes,
    tile_bits,
    tile_side,
)
from reformax.ops.kernels.triton.group_rows import GroupInputs, GroupProgram, GroupRows
from reformax.ops.masking.visibility import Side, Visibility
from reformax.ops.numerics.logits import Logits
from reformax.ops.softmax.chosen_blocks import parts, tiles
from reformax.ops.softmax.learned_sinks import Results
from reformax.ops.softmax.online import Softmax

# Keys of a tile, tiles of a part of a list, parts of the queries of a tile of summaries.
KEYS, PART_TILES, N_PARTS = 64, 64, 8
MIN_WARPS, STAGES, MAX_OF_FOUR_WARPS = 2, 2, 128 * 64
# Rows of a tile by the bytes of its dtype. Products of float32 make long programs.
ROWS = {2: 128, 4: 32}


class NsaSizes(NamedTuple):
    """The kernels' static settings."""

    group: int  # M, query heads of a key head
    dropout: float
    rows: int  # rows of a tile
    logits: Logits
    block: int = 0  # L, positions of a selected block; 0 for summaries
    n_selected: int = 0  # K, the blocks that a query selects; 0 for summaries
    # d and P of summaries, which are seen from the P-th position of theirs on; 1 for positions.
    stride: int = 1
    span: int = 1
    n_each: int = 1  # summaries of each span, which follow each other
    # Keys `window` or more positions before a query are hidden; None: none is.
    window: int | None = None
    far: bool = False  # as in `GroupProgram`

    @property
    def rule(self) -> Visibility:
        """Which keys a query sees."""
        return Visibility(causal=True, window=self.window)

    @property
    def n_parts(self) -> int:
        """The parts of the queries that see a tile of summaries; few see one of a window."""
        return N_PARTS if self.window is None else 1

    @property
    def n_queries(self) -> int:
        """The queries of a program of queries; one where each query has other blocks."""
        return 1 if self.block else max(1, self.rows // self.group)

    @property
    def n_listed(self) -> int:
        """The queries of a step of a program of keys, fewer with dropout."""
        rows = min(self.rows, flash.QUERIES_OF_DROPOUT) if self.dropout else self.rows
        return max(1, rows // self.group)

    @property
    def n_keys(self) -> int:
        """The keys of a tile."""
        return min(KEYS, tile_side(self.block)) if self.block else KEYS

    @property
    def per_block(self) -> int:
        """Tiles of keys of a selected block."""
        return -(-self.block // self.n_keys)


def n_rows(x: Array) -> int:
    """The rows of a tile of `[B, T, N, H]`."""
    return ROWS[x.dtype.itemsize]


class NsaLists(NamedTuple):
    """Which queries select each block."""

    # Each tile's queries: t K + n for query t whose n-th block it is; -1 for none.
    pair: Int[Array, "B G M I"]
    # The block of each part, its first tile and its end; a part that does not exist is empty.
    parts: Int[Array, "3 B G W"]
    first_part: Int[Array, "B G J+1"]  # the first part of each block, and the end


class NsaColumns(NamedTuple):
    """The keys of a tile, and the position from which on each is seen."""

    key: Array
    last: Array
    ids: Array | None
    exists: Array | None  # None: all keys exist, and all rows see them
    first: Any  # key


class KeysWork(NamedTuple):
    """The tiles of queries of a program of keys: every `step`-th from `start` to `end`."""

    first: Any  # key
    start: Any
    end: Any
    step: Any


@dataclasses.dataclass(frozen=True, eq=False)
class NsaProgram(GroupProgram):
    """One program: its static settings, its sequence and key head, its reads and its mask."""

    sizes: NsaSizes
    work: KeysWork | None = None

    # The tiles.

    def queries(self, n_queries: int, tile, pair=None) -> GroupRows:
        """The rows of a tile of neighbouring queries, or with `pair` of a tile of a list."""
        x, group = self.x, self.sizes.group
        row = jnp.arange(tile_side(n_queries * group), dtype=jnp.int32)
        within = lax.div(row, jnp.int32(group))
        head = self.head * group + lax.rem(row, jnp.int32(group))
        exists = within < n_queries
        if pair is None:
            position = tile * n_queries + within
        else:
            safe = jnp.where(exists, within, 0)
            entry = load(pair.at[self.batch, self.head, tile, safe], exists, -1)
            exists = exists & (entry >= 0)
            position = lax.div(jnp.maximum(entry, 0), jnp.int32(self.sizes.n_selected))
        exists = exists & (position < x.q.shape[1])
        position = jnp.where(exists, position, 0)
        ids = None if x.ids is None else load(x.ids.at[self.batch, position], exists, 0)
        return GroupRows(position, head, ids, exists)

    def keys(self, first, end) -> NsaColumns:
        """The keys from `first` on, which exist up to `end`; None: all exist."""
        x, key = self.x, first + jnp.arange(self.sizes.n_keys, dtype=jnp.int32)
        exists, safe = None, key
        if end is not None:
            exists = (key < end) & (key < x.k.shape[1])
            safe = jnp.where(exists, key, 0)
        ids = None if x.key_ids is None else load(x.key_ids.at[self.batch, safe], exists, 0)
        return NsaColumns(safe, self._seen_from(key), ids, exists, first)

    def _seen_from(self, key: Any) -> Any:
        """The position from which on a key is seen."""
        span = key if self.sizes.n_each == 1 else lax.div(key, jnp.int32(self.sizes.n_each))
        return span * self.sizes.stride + (self.sizes.span - 1)

    def _n_seen(self, query: Any) -> Any:
        """The keys that `query` sees without a window, which are the first ones."""
        sizes = self.sizes
        n_spans = jnp.maximum(query + (1 + sizes.stride - sizes.span), 0)
        return lax.div(n_spans, jnp.int32(sizes.stride)) * sizes.n_each

    def part_of_keys(self) -> tuple[Self, NsaColumns]:
        """The program of a tile of keys, with its part of the queries, and the tile."""
        sizes, x, index = self.sizes, self.x, self.index
        if sizes.block:
            part = lax.div(index, jnp.int32(sizes.per_block))
            first = lax.rem(index, jnp.int32(sizes.per_block)) * sizes.n_keys
            block, start, end = (
                x.lists.parts[jnp.int32(i), self.batch, self.head, part] for i in range(3)
            )
            columns = self.keys(block * sizes.block + first, (block + 1) * sizes.block)
            step = jnp.int32(1)
        else:
            step, n_listed = jnp.int32(sizes.n_parts), jnp.int32(sizes.n_listed)
            first = lax.div(index, step) * sizes.n_keys
            columns = self.keys(first, x.k.shape[1])
            start = lax.div(self._seen_from(first), n_listed)
            start = start + lax.rem(index, step)
            end = jnp.int32(-(-x.q.shape[1] // sizes.n_listed))
            if sizes.window is not None:
                query_end = sizes.rule.bounds(first, first + sizes.n_keys, of_keys=True).end
                end = jnp.minimum(end, lax.div(query_end + (n_listed - 1), n_listed))
        return dataclasses.replace(self, work=KeysWork(first, start, end, step)), columns

    def over_keys(self, queries: GroupRows, body: Callable, carry: Any) -> Any:
        over = self._over_selected if self.sizes.block else self._over_summaries
        return over(queries, body, carry)

    def _over_summaries(self, queries: GroupRows, body: Callable, carry: Any) -> Any:
        x, sizes = self.x, self.sizes
        n_seen = self._n_seen(jnp.max(jnp.where(queries.exists, queries.position, 0)))
        n_tiles = lax.div(n_seen + (sizes.n_keys - 1), jnp.int32(sizes.n_keys))
        first_query, n_clear = self.index * sizes.n_queries, jnp.int32(0)

        def step(end, key_tile, carry):
            return body(self.keys(key_tile * sizes.n_keys, end), carry)

        clear, masked = (functools.partial(step, end) for end in (None, x.k.shape[1]))
        if sizes.window is not None:
            first = sizes.rule.bounds(first_query, first_query + 1).first
            n_clear = lax.div(jnp.maximum(first, 0), jnp.int32(sizes.n_keys))  # too far away
        elif x.ids is None and x.bits is None:  # tiles that the first query sees whole
            n_clear = lax.div(self._n_seen(first_query), jnp.int32(sizes.n_keys))
            n_clear = jnp.minimum(n_clear, n_tiles)
            carry = lax.fori_loop(jnp.int32(0), n_clear, clear, carry)
        return lax.fori_loop(n_clear, n_tiles, masked, carry)

    def _over_selected(self, queries: GroupRows, body: Callable, carry: Any) -> Any:
        sizes, per_block = self.sizes, jnp.int32(self.sizes.per_block)

        def step(key_tile, carry):
            slot = lax.div(key_tile, per_block)
            block = self.x.chosen[self.batch, self.head, self.index, slot]
            start = jnp.maximum(block, 0) * sizes.block
            end = jnp.where(block < 0, 0, start + sizes.block)
            first = start + lax.rem(key_tile, per_block) * sizes.n_keys
            return body(self.keys(first, end), carry)

        n_tiles = jnp.int32(sizes.n_selected * sizes.per_block)
        return lax.fori_loop(jnp.int32(0), n_tiles, step, carry)

    def over_queries(self, keys: NsaColumns, body: Callable, carry: Any) -> Any:
        x, sizes, (first, start, end, step) = self.x, self.sizes, self.work
        pair = x.lists.pair if sizes.block else None

        def visit(unmasked: bool, i, carry):
            rows = self.queries(sizes.n_listed, start + i * step, pair)
            return body(rows._replace(unmasked=unmasked), carry)

        count = lax.div(jnp.maximum(end - start + (step - 1), 0), step)
        n_masked = count
        split = not sizes.block and x.ids is None and x.bits is None and sizes.window is None
        if split:  # queries after the last key see all keys
            last = self._seen_from(first + (sizes.n_keys - 1))
            past = lax.div(last + (sizes.n_listed - 1), jnp.int32(sizes.n_listed))
            n_masked = lax.div(jnp.maximum(past - start + (step - 1), 0), step)
            whole = first + sizes.n_keys <= x.k.shape[1]
            n_masked = jnp.where(whole, jnp.minimum(n_masked, count), count)
        carry = lax.fori_loop(jnp.int32(0), n_masked, functools.partial(visit, False), carry)
        if split:
            carry = lax.fori_loop(n_masked, count, functools.partial(visit, True), carry)
        return carry

    # The mask.

    def visible(self, rows: GroupRows, columns: NsaColumns) -> Array | None:
        if rows.unmasked or columns.exists is None:
            return None
        keys = Side(columns.key, columns.ids, columns.exists, columns.last)
        query = Side(rows.position, rows.ids, rows.exists)
        seen = self.sizes.rule.sees(query, keys)
        if self.x.bits is None:
            return seen
        return seen & tile_bits(
            self.x.bits, self.batch, query, keys, columns.first, self.sizes.n_keys
        )


def _forward_kernel(x: GroupInputs, out: Softmax, *, sizes):
    program = NsaProgram.located(sizes, x)
    rows = program.queries(sizes.n_queries, program.index)
    program.put_softmax(out, rows, flash.forward(program, rows))


def _queries_kernel(x: GroupInputs, row: QueryRows, dq, *, sizes):
    program = NsaProgram.located(sizes, x, row)
    rows = program.queries(sizes.n_queries, program.index)
    sums = flash.d_queries(program, rows, program.rows(x.q, rows))
    program.put_rows(dq, rows, sums * program.scale)


def _keys_kernel(x: GroupInputs, row: QueryRows, gradients, *, sizes):
    """The sums of one part of the queries that see a tile of keys: `[B, W, G, n_keys, H]`."""
    program, columns = NsaProgram.located(sizes, x, row).part_of_keys()
    dk, dv = flash.d_keys(program, columns)
    key = jnp.arange(sizes.n_keys, dtype=jnp.int32)[:, None]
    for ref, value in zip(gradients, (dk * program.scale, dv), strict=True):
        number = jnp.arange(value.shape[1], dtype=jnp.int32)[None, :]
        view = ref.at[program.batch, program.head, program.index, key, number]
        mask = jnp.broadcast_to(number < ref.shape[4], value.shape)
        pltriton.store(view, value, mask=mask)


def _sum_kernel(parts, first_part, out, *, per_block):
    """The sum of a block's parts, in their order."""
    batch, head, program = pl.program_id(2), pl.program_id(1), pl.program_id(0)
    block, tile = (f(program, jnp.int32(per_block)) for f in (lax.div, lax.rem))
    n_keys, size = parts.shape[3:]
    row = jnp.arange(n_keys, dtype=jnp.int32)[:, None]
    column = jnp.arange(tile_side(size), dtype=jnp.int32)[None, :]
    mask = jnp.broadcast_to(column < size, (n_keys, tile_side(size)))

    def add(part, total):
        view = parts.at[batch, head, part * per_block + tile, row, column]
        return total + load(view, mask, 0.0)

    first, end = (first_part[batch, head, block + jnp.int32(i)] for i in (0, 1))
    total = lax.fori_loop(first, end, add, jnp.zeros(mask.shape, jnp.float32))
    pltriton.store(out.at[batch, head, program, row, column], total.astype(out.dtype), mask=mask)


def _launch(kernel, sizes: NsaSizes, interpret, inputs, shapes, n_programs, of_queries=True):
    n_batch, _, n_kv, _ = inputs[0].k.shape
    return launch(
        functools.partial(kernel, sizes=sizes),
        inputs,
        shapes,
        grid=(n_programs, n_kv, n_batch),
        num_warps=_warps(sizes, inputs[0].k.shape[3], of_queries),
        num_stages=STAGES,
        interpret=interpret,
        name=f"nsa_{_branch(sizes)}_{name_of(kernel)}",
    )


def _branch(sizes: NsaSizes) -> str:
    if sizes.window is not None:
        return "window"
    return "selected" if sizes.block else "compressed"


def _warps(sizes: NsaSizes, size: int, of_queries: bool) -> int:
    """Two warps for a tile of one query's heads, eight where four would not hold a tile."""
    n_rows = (sizes.n_queries if of_queries else sizes.n_listed) * sizes.group
    if n_rows <= 32:
        return MIN_WARPS
    return 8 if tile_side(size) * n_rows > MAX_OF_FOUR_WARPS else 4


def _lists(sizes: NsaSizes, chosen: Int[Array, "B G T K"]) -> NsaLists:
    found = tiles(chosen, -(-chosen.shape[2] // sizes.block), sizes.n_listed)
    return NsaLists(found.pair, *parts(found.bounds, found.block.shape[2], PART_TILES))


def forward(sizes: NsaSizes, x: GroupInputs, interpret: bool) -> Results:
    """The results of `flash.attention`."""
    shapes, n_programs = softmax_shapes(x.q, x.v), -(-x.q.shape[1] // sizes.n_queries)
    (results,) = _launch(_forward_kernel, sizes, interpret, (x,), (shapes,), n_programs)
    return tuple(results)


def backward(
    sizes: NsaSizes, x: GroupInputs, results: Results, d_out, interpret: bool
) -> tuple[Array, Array, Array]:
    """The gradients of q, k and v."""
    row = QueryRows.of(d_out, results, x.ids)
    like = jax.ShapeDtypeStruct(x.q.shape, x.q.dtype)
    n_programs = -(-x.q.shape[1] // sizes.n_queries)
    dq = _launch(_queries_kernel, sizes, interpret, (x, row), like, n_programs)
    if sizes.block:
        x = x._replace(chosen=None, lists=_lists(sizes, x.chosen))
    dk, dv = _gradients_of_keys(sizes, interpret, x, row)
    return dq, dk, dv


def _gradients_of_keys(sizes: NsaSizes, interpret, x: GroupInputs, row: QueryRows):
    n_batch, n_positions, n_kv, _ = x.k.shape
    if sizes.block:
        n_tiles = (x.lists.first_part.shape[2] - 1) * sizes.per_block
        n_programs = x.lists.parts.shape[3] * sizes.per_block
    else:
        n_tiles = -(-n_positions // sizes.n_keys)
        n_programs = n_tiles * sizes.n_parts
    shapes = tuple(
        jax.ShapeDtypeStruct((n_batch, n_kv, n_programs, sizes.n_keys, y.shape[3]), jnp.float32)
        for y in (x.k, x.v)
    )
    (parts,) = _launch(_keys_kernel, sizes, interpret, (x, row), (shapes,), n_programs, False)

    def summed(parts, like):
        if not sizes.block:
            shape = n_batch, n_kv, n_tiles, sizes.n_parts, *parts.shape[3:]
            parts = parts.reshape(shape).sum(axis=3)
        else:
            parts = launch(
                functools.partial(_sum_kernel, per_block=sizes.per_block),
                (parts, x.lists.first_part),
                jax.ShapeDtypeStruct((n_batch, n_kv, n_tiles, *parts.shape[3:]), like.dtype),
                grid=(n_tiles, n_kv, n_batch),
                num_warps=4,
                num_stages=1,
                interpret=interpret,
                name="nsa_sum",
            )
            # A block's last tile may extend beyond the block.
            shape = n_batch, n_kv, -1, sizes.per_block * sizes.n_keys, parts.shape[4]
            parts = parts.reshape(shape)[:, :, :, : sizes.block]
        parts = parts.reshape(n_batch, n_kv, -1, parts.shape[-1])[:, :, :n_positions]
        return jnp.swapaxes(parts, 1, 2).astype(like.dtype)

    return summed(parts[0], x.k), summed(parts[1], x.v)


attend = flash.attention(forward, backward)
