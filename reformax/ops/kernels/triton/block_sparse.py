"""Block-sparse attention as Pallas kernels for NVIDIA GPUs (Triton).

They compute the function of `reformax.ops.block_sparse`. A program has a tile of queries, and
loops over the tiles of keys that a list names (FlashAttention, algorithm 5). There are three
kernels: one for the output, one for the gradient of queries, by the rows of the mask, and one for
the gradients of keys and values, by its columns. Each row has one writer, so sums have one order
and need no atomics.

  * Tiles in which every query sees every key come first in a list, and need no mask. A mask is for
    tiles that cross the diagonal or the end of the sequence, and for all tiles of a call with
    segments and a block mask. A position that does not see itself has a mask of its own.
  * Without a block mask, segments shorten the lists: a packed sequence costs as much as its
    segments alone. Of those that are left, tiles of one segment and no padding need no mask.
  * A row with much more work than the average, such as that of a global block, is cut into parts.
    A part writes its sums to a buffer, and array operations merge them.
  * Long parts start first.

Letters as in `reformax.ops.base`; P is the number of parts of cut rows, L the positions of a tile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from reformax.ops.hashing import sorted_groups
from reformax.ops.hashing.sorted_groups import SortedSequence
from reformax.ops.kernels.triton import flash
from reformax.ops.kernels.triton.block_programs import BlockProgram, BlockTiles, BlockWork
from reformax.ops.kernels.triton.common import (
    QueryRows,
    launch,
    softmax_shapes,
    tile_side,
)
from reformax.ops.softmax import block_lists
from reformax.ops.softmax.block_lists import (
    BlockInputs,
    FullLayout,
    Layout,
    SortedLayout,
    TileLists,
)
from reformax.ops.softmax.learned_sinks import Results
from reformax.ops.softmax.online import Softmax, nonzero

# The fewest tiles of a part, and the number of parts that keeps all processors of a GPU busy.
MIN_PART, TARGET_PARTS = 16, 2048


def _forward_kernel(
    x: BlockInputs, work: BlockWork, out: Softmax, buffer: Softmax | None, *, program: BlockProgram
):
    program = program.located(x, work)
    queries = program.queries(program.part.tile)
    acc, row_max, row_sum = flash.forward(program, queries)
    divisor = nonzero(row_sum)
    if buffer is None:
        buffer = Softmax(None, None, None)
    else:
        divisor = jnp.where(program.part.buffer_index < 0, divisor, 1.0)
    program.put_part(out.acc, buffer.acc, queries, acc * (1.0 / divisor)[:, None])
    program.put_statistics(out.row_max, buffer.row_max, queries, row_max * program.scale)
    program.put_statistics(out.row_sum, buffer.row_sum, queries, row_sum)


def _queries_kernel(
    x: BlockInputs, row: QueryRows, work: BlockWork, dq, buffer, *, program: BlockProgram
):
    program = program.located(x, work, row)
    queries = program.queries(program.part.tile)
    sums = flash.d_queries(program, queries, program.rows(x.q, queries))
    program.put_part(dq, buffer, queries, sums * program.scale)


def _keys_kernel(
    x: BlockInputs, row: QueryRows, work: BlockWork, gradients, buffer, *, program: BlockProgram
):
    program = program.located(x, work, row)
    keys = program.keys(program.part.tile)
    dk, dv = flash.d_keys(program, keys)
    dk_buffer, dv_buffer = (None, None) if buffer is None else buffer
    program.put_part(gradients[0], dk_buffer, keys, dk * program.scale)
    program.put_part(gradients[1], dv_buffer, keys, dv)


class _Cut(NamedTuple):
    """The work of a kernel, and the cut rows, which are merged after it."""

    work: BlockWork
    program: BlockProgram
    tile: Int[np.ndarray, " R"]  # of each cut row
    head: Int[np.ndarray, " R"]
    per_row: Int[np.ndarray, " R"]  # parts of each cut row


def _cut(
    layout: Layout | FullLayout, rows: TileLists, x: BlockInputs, tiles: BlockTiles, by_query: bool
) -> _Cut:
    """Divides the tiles of all rows or columns among programs, long parts first."""
    packed, per_head = x.query_segment_ids is not None, layout.n_masks > 1
    by_span = packed and isinstance(layout, FullLayout) and not isinstance(layout, SortedLayout)
    all_masked = (packed and not by_span) or x.chosen is not None
    n_heads = 1 if per_head else x.q.shape[2]
    per_part = int(rows.count.sum()) * x.q.shape[0] * n_heads // TARGET_PARTS
    parts = block_lists.cut_lists(rows, max(MIN_PART, per_part))
    n_tiles = len(rows.count) // layout.n_masks
    head, tile = np.divmod(parts.row, n_tiles)
    is_cut = parts.per_row > 1
    buffer_index = np.where(is_cut[parts.row], np.cumsum(is_cut[parts.row]) - 1, -1)
    end_whole = parts.first + (0 if all_masked else parts.n_whole)
    columns = np.stack(
        [head, tile, parts.first, end_whole, parts.first + parts.count, buffer_index]
    )
    columns = columns[:, np.argsort(-parts.count, kind="stable")].astype(np.int32)
    any_whole, any_masked = (bool(np.any(columns[i + 1] > columns[i])) for i in (2, 3))
    any_masked = any_masked or packed
    program = BlockProgram(layout, tiles, any_whole, any_masked)
    # A kernel takes no empty array: an empty list has one entry, which no program reads.
    entries = rows.entries if len(rows.entries) else np.zeros(1, np.int32)
    spans = None
    if isinstance(layout, SortedLayout):
        orders = (
            SortedSequence(x.query_order, x.query_segment_ids),
            SortedSequence(x.key_order, x.key_segment_ids),
        )
        visits = sorted_groups.visits(tiles[:2], layout.causal, *orders)
        spans = jnp.stack((visits.by_query if by_query else visits.by_key)[:2])
    elif by_span:
        ids = _tile_ids(x.query_segment_ids, tiles.query), _tile_ids(x.key_segment_ids, tiles.key)
        spans = _spans(*(ids if by_query else ids[::-1]), rows.entries)
        spans = spans if any_whole else spans[:2]
    work = BlockWork(jnp.asarray(columns), jnp.asarray(entries), spans)
    row_head, row_tile = np.divmod(np.flatnonzero(is_cut), n_tiles)
    return _Cut(work, program, row_tile, row_head, parts.per_row[is_cut])


class _TileIds(NamedTuple):
    """The segment ids of each tile."""

    lowest: Int[Array, "B tiles"]  # of its tokens; a tile of only padding overlaps no other
    highest: Int[Array, "B tiles"]
    only: Int[Array, "B tiles"]  # the id of all its positions; 0: they differ, or are padding


def _tile_ids(segment_ids: Int[Array, "B T"], size: int) -> _TileIds:
    tiles = jnp.pad(segment_ids, ((0, 0), (0, -segment_ids.shape[1] % size)))
    tiles = tiles.reshape(len(segment_ids), -1, size)
    limits = jnp.iinfo(segment_ids.dtype)
    most, least = (jnp.array(x, segment_ids.dtype) for x in (limits.max, limits.min))
    lowest = jnp.min(jnp.where(tiles == 0, most, tiles), axis=2)
    highest = jnp.max(jnp.where(tiles == 0, least, tiles), axis=2)
    alike = (lowest == highest) & jnp.all(tiles != 0, axis=2)
    return _TileIds(lowest, highest, jnp.where(alike, lowest, 0))


def _spans(
    ids: _TileIds, others: _TileIds, entries: Int[np.ndarray, " E"]
) -> Int[Array, "4 B tiles"]:
    """Ranges of the entries, for each tile: the first and the end of two of them.

    The first is of the entries whose range of ids overlaps the tile's range. The other is the first
    run of entries that have the tile's one id at all positions, of which none needs a mask.

    Args:
      ids: of the tiles of the programs' side.
      others: of the tiles of the other side.
      entries: tiles of the other side.
    """
    lowest, highest, only = (x[:, entries][:, None] for x in others)
    tile = _TileIds(*(x[..., None] for x in ids))
    overlaps = (lowest <= tile.highest) & (tile.lowest <= highest)
    index, n = jnp.arange(len(entries), dtype=jnp.int32)[None, None], len(entries)

    def first(where: Array) -> Int[Array, "B tiles"]:
        return jnp.min(jnp.where(where, index, n), axis=2)

    end = jnp.max(jnp.where(overlaps, index + 1, 0), axis=2)
    alike = (only == tile.only) & (tile.only != 0)
    first_alike = first(alike)
    end_alike = first(~alike & (index >= first_alike[..., None]))
    return jnp.stack([first(overlaps), end, first_alike, end_alike])


def _launch_parts(kernel: Callable, cut: _Cut, inputs: tuple, shapes: Any, interpret: bool) -> Any:
    """Runs a kernel, and returns its results and the buffers of parts, None where no row is cut.

    Args:
      kernel: called with the inputs, the work, references to results and to buffers.
      inputs: trees of arrays, the first `BlockInputs`.
      shapes: the shapes of the results, `[B, T, N, H]` or `[B, N, T]`.
    """
    program = cut.program
    n_batch, _, n_heads, _ = inputs[0].q.shape
    size = program.tiles.key if kernel is _keys_kernel else program.tiles.query
    n_axis = 1 if program.per_head else n_heads
    n_parts = int(cut.per_row.sum())

    def part(shape):
        end = shape.shape[3:]
        return jax.ShapeDtypeStruct((n_parts, n_batch, n_axis, size, *end), jnp.float32)

    return launch(
        functools.partial(kernel, program=program),
        (*inputs, cut.work),
        (shapes, jax.tree.map(part, shapes) if n_parts else None),
        grid=(cut.work.parts.shape[1], n_axis, n_batch),
        num_warps=program.tiles.num_warps,
        num_stages=program.tiles.num_stages,
        interpret=interpret,
        name=kernel.__name__.strip("_"),
    )


def _put(x: Array, rows: Array, cut: _Cut) -> Array:
    """Sets the cut rows `[R, B, N, L, ...]` in `x`, `[B, T, N, ...]`."""
    size = rows.shape[3]
    position = cut.tile[:, None] * size + np.arange(size)
    rows = jnp.moveaxis(rows, (0, 2), (1, 3)).astype(x.dtype)  # [B, R, L, N, ...]
    if cut.program.per_head:
        return x.at[:, position, cut.head[:, None]].set(rows[:, :, :, 0], mode="drop")
    return x.at[:, position].set(rows, mode="drop")


def forward(
    layout: Layout | FullLayout,
    x: BlockInputs,
    tiles: BlockTiles | None = None,
    interpret: bool = False,
) -> Results:
    """The results of `flash.attention`.

    Args:
      layout: which queries see which keys, with blocks of a multiple of 16 positions.
      tiles: the kernel's tiles, of sizes that divide the blocks; None: chosen by the sizes.
    """
    tiles = tiles or _tiles(layout, x, FORWARD)
    cut = _cut(layout, layout.rows(*tiles[:2]), x, tiles, by_query=True)
    shapes = softmax_shapes(x.q, x.v)
    (out, row_max, row_sum), parts = _launch_parts(_forward_kernel, cut, (x,), shapes, interpret)
    if parts is not None:
        rows = block_lists.merge_softmax(parts, cut.per_row)
        out = _put(out, rows.output(), cut)
        row_max, row_sum = (
            jnp.swapaxes(_put(jnp.swapaxes(x, 1, 2), new, cut), 1, 2)
            for x, new in ((row_max, rows.row_max), (row_sum, rows.row_sum))
        )
    return out, row_max, row_sum


def backward(
    layout: Layout | FullLayout,
    x: BlockInputs,
    results: Results,
    d_out: Float[Array, "B T N V"],
    tiles: tuple[BlockTiles, BlockTiles] | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S N H"], Float[Array, "B S N V"]]:
    """The gradients of q, k and v.

    Args:
      layout, x: as in `forward`, whose `results` follow.
      tiles: the tiles of the kernels of queries and of keys; None: chosen by the sizes.
    """
    row = QueryRows.of(d_out, results, x.query_segment_ids)
    by_query, by_key = tiles or (_tiles(layout, x, QUERIES), _tiles(layout, x, KEYS))

    def differentiate(kernel, rows, tiles, like):
        cut = _cut(layout, rows, x, tiles, by_query=kernel is _queries_kernel)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), like)
        results, parts = _launch_parts(kernel, cut, (x, row), shapes, interpret)
        if parts is None:
            return results
        merged = block_lists.merge_sums(parts, cut.per_row)
        return jax.tree.map(lambda x, new: _put(x, new, cut), results, merged)

    dq = differentiate(_queries_kernel, layout.rows(*by_query[:2]), by_query, x.q)
    of_keys = layout.columns(*by_key[:2]), by_key, (x.k, x.v)
    dk, dv = differentiate(_keys_kernel, *of_keys)
    return dq, dk, dv


# With each row's sum of weights, 0 where it sees no key.
attend = flash.attention(forward, backward, with_sums=True)


# For dtypes of two bytes and heads of 64.
FORWARD = BlockTiles(64, 64, 4, 2)
QUERIES = BlockTiles(128, 64, 4, 3)
KEYS = BlockTiles(128, 64, 4, 2)
# Larger tiles with dropout spill 512 bytes a thread.
KEYS_OF_DROPOUT = BlockTiles(64, 64, 4, 3)
# Instead of them for heads of 256, whose sums take the registers of eight warps.
WIDE = {
    FORWARD: BlockTiles(64, 64, 8, 1),
    QUERIES: BlockTiles(64, 32, 8, 1),
    KEYS: BlockTiles(32, 64, 8, 1),
}
WIDE_FLOAT32 = {
    FORWARD: BlockTiles(64, 32, 8, 1),
    QUERIES: BlockTiles(32, 32, 8, 1),
    KEYS: BlockTiles(32, 32, 8, 1),
}


def _tiles(layout: Layout | FullLayout, x: BlockInputs, tiles: BlockTiles) -> BlockTiles:
    """`tiles`, or smaller ones where blocks are smaller or rows take more of the chip's memory."""
    width, itemsize = max(x.q.shape[3], x.v.shape[3]), x.q.dtype.itemsize
    n_bytes = width * itemsize
    if width > 128:
        tiles = (WIDE if itemsize == 2 else WIDE_FLOAT32)[tiles]
    elif n_bytes > 128:
        tiles = BlockTiles(64, 64, 4, 2 if n_bytes <= 256 else 1)
    elif tiles == KEYS and x.seed is not None:
        tiles = KEYS_OF_DROPOUT

    def side(block: int, length: int, most: int) -> int:
        # The largest power of two that divides a block, or holds a shorter length.
        return min(block & -block, most, tile_side(length))

    sizes = (
        side(layout.block_q, layout.n_queries, tiles.query),
        side(layout.block_k, layout.n_keys, tiles.key),
    )
    num_warps = tiles.num_warps if sizes == tiles[:2] else 4
    return tiles._replace(query=sizes[0], key=sizes[1], num_warps=num_warps)
