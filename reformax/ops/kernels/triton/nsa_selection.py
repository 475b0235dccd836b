"""The selection of blocks in native sparse attention as Pallas kernels for NVIDIA GPUs (Triton).

There are three kernels. Logits stay on the chip.

  * The first computes the sum of the softmax over the summaries, for each query and head.
  * The second recomputes the weights, with the summaries of a block next to each other. Their sums
    over heads and summaries are the blocks' scores. It writes the scores of all blocks for a chunk
    of queries at a time.
  * The third selects a query's best blocks. It finds the K-th largest score bit by bit, and writes
    the blocks whose scores reach it, in order (a radix select). It does not sort, and its steps do
    not depend on K. A query's scores are one tile, which 31 comparisons search in registers. The
    select of `kernels.indexer` reads rows of any length again for each digit, and so takes four
    bits a digit. Here that would be 128 comparisons.

Letters as in `reformax.ops.nsa`; I is the number of rows of a tile.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from reformax.ops.kernels.triton.common import (
    LOG2_E,
    LOWEST,
    column,
    hide,
    launch,
    line,
    load,
    name_of,
    statistics_step,
    tile_side,
)
from reformax.ops.kernels.triton.group_rows import ROWS, GroupRows, ScoredInputs, group_rows
from reformax.ops.masking.visibility import CAUSAL, Side
from reformax.ops.numerics.best import FIRST_BLOCK, OWN_BLOCK, PREVIOUS_BLOCK, with_nan_highest
from reformax.ops.numerics.logits import Logits
from reformax.ops.numerics.query_chunks import join_chunks
from reformax.ops.softmax.online import nonzero

# Summaries of a tile; pipeline stages by the number of parts of a number (`in_three`).
COLUMNS = 64
WARPS, STAGES = 4, {1: 3, 3: 2}
# Bytes of scores in memory at a time.
MAX_SCORE_BYTES = 2**30
BLOCKS_PER_WARP = 1024


class SelectionSizes(NamedTuple):
    """The kernels' static settings."""

    n_best: int  # K, the blocks that a query selects
    block: int  # L, positions of a block
    # d and P: positions between the starts of summaries, and of a summary.
    stride: int
    span: int
    group: int  # M, query heads of a key head
    logits: Logits

    @property
    def members(self) -> int:
        """Rows of a query: its heads, rounded up to a power of two."""
        return 1 << (self.group - 1).bit_length()

    @property
    def n_queries(self) -> int:
        """Queries of a tile."""
        return ROWS // self.members

    @property
    def per_block(self) -> int:
        """Summaries that begin in a block."""
        return self.block // self.stride

    @property
    def width(self) -> int:
        """`per_block`, rounded up to a power of two."""
        return 1 << (self.per_block - 1).bit_length()

    @property
    def multiplicity(self) -> tuple[tuple[int, ...], ...]:
        """The strides that each summary of a block overlaps, in that block and in later ones.

        Entry `[lag][i]` counts the strides of summary i in the block `lag` blocks later.
        """
        per_summary = self.span // self.stride
        n = 1 - (1 - per_summary) // self.per_block
        table = [[0] * self.per_block for _ in range(n)]
        for stride in range(self.per_block):
            for offset in range(per_summary):
                lag, summary = divmod(stride - offset, self.per_block)
                table[-lag][summary] += 1
        return tuple(map(tuple, table))


class _SelectionProgram(NamedTuple):
    """One program: its sequence and key head, and the arrays that it reads."""

    sizes: SelectionSizes
    x: ScoredInputs
    batch: Any
    head: Any
    first: Any  # its first query

    @property
    def scale(self) -> float:
        return LOG2_E / math.sqrt(self.x.q[0].shape[3])

    @property
    def last(self) -> Any:
        """The last query of the tile."""
        end = self.first + self.sizes.n_queries
        return jnp.minimum(end, self.x.q[0].shape[1]) - 1

    def rows(self) -> GroupRows:
        x, sizes = self.x, self.sizes
        sizes_of_group = sizes.group, sizes.members
        return group_rows(x.q, x.ids, self.batch, self.head, self.first, *sizes_of_group)

    def n_seen(self, position) -> Any:
        """The number of summaries that end at or before a position."""
        stride, span = self.sizes.stride, self.sizes.span
        n = lax.div(jnp.maximum(position - (span - 1) + stride, 0), jnp.int32(stride))
        return jnp.minimum(n, self.x.keys[0].shape[1])

    def n_unmasked(self, width: int) -> Any:
        """The number of tiles of `width` summaries that all of its queries see whole."""
        if self.x.ids is not None:
            return jnp.int32(0)
        return lax.div(self.n_seen(self.first), jnp.int32(width))

    def logits(self, rows: GroupRows, summary, exists, transposed: bool) -> Array:
        """Unscaled logits of rows and summaries, minus infinity where a row does not see one.

        Args:
          exists: whether each summary exists; None: all exist, and all rows see them.
          transposed: whether summaries are the first axis.
        """
        found = self.x.products(rows, self.batch, self.head, summary, exists, transposed)
        found = self.sizes.logits.capped(found, math.sqrt(self.x.q[0].shape[3]))
        if exists is None:
            return found
        last, ids = summary * self.sizes.stride + (self.sizes.span - 1), None
        if rows.ids is not None:
            ids = load(self.x.key_ids.at[self.batch, jnp.where(exists, summary, 0)], exists, 0)
        of_row, of_key = (line, column) if transposed else (column, line)
        query, key = Side(rows.position, rows.ids, rows.exists), Side(last, ids, exists)
        return hide(found, CAUSAL.sees(of_row(query), of_key(key)))


def _program(sizes: SelectionSizes, x: ScoredInputs) -> _SelectionProgram:
    tile, head, batch = (pl.program_id(i) for i in range(3))
    start = 0 if x.start is None else x.start[0]
    return _SelectionProgram(sizes, x, batch, head, start + tile * sizes.n_queries)


def _sums_kernel(x: ScoredInputs, out, *, sizes: SelectionSizes):
    """The logarithm, to base 2, of the sum of each row's softmax."""
    program = _program(sizes, x)
    rows, n_summaries = program.rows(), x.keys[0].shape[1]

    def count(unmasked: bool):
        def step(i, state):
            summary = i * COLUMNS + jnp.arange(COLUMNS, dtype=jnp.int32)
            exists = None if unmasked else summary < n_summaries
            found = program.logits(rows, summary, exists, False)
            return statistics_step(*state, found, program.scale)[:2]

        return step

    state = jnp.full((ROWS,), LOWEST, jnp.float32), jnp.zeros((ROWS,), jnp.float32)
    n_unmasked = program.n_unmasked(COLUMNS)
    n = lax.div(program.n_seen(program.last) + (COLUMNS - 1), jnp.int32(COLUMNS))
    state = lax.fori_loop(jnp.int32(0), n_unmasked, count(True), state)
    row_max, row_sum = lax.fori_loop(n_unmasked, n, count(False), state)
    found = row_max * program.scale + jnp.log(nonzero(row_sum)) * LOG2_E
    position = jnp.where(rows.exists, rows.position, out.shape[2])
    pltriton.store(out.at[program.batch, rows.head, position], found, mask=rows.exists)


def _scores_kernel(x: ScoredInputs, sums, out, *, sizes: SelectionSizes):
    """The scores (eq. 9) that the summaries starting in a block add to it and to later blocks."""
    program = _program(sizes, x)
    rows, width = program.rows(), sizes.width
    # With infinity, the weights of a row that does not exist are 0.
    row_lse = load(sums.at[program.batch, rows.head, rows.position], rows.exists, math.inf)[None, :]
    n_blocks = COLUMNS // width
    query = jnp.arange(sizes.n_queries, dtype=jnp.int32)[None, :]
    row = pl.program_id(0) * sizes.n_queries + query
    slot = jnp.arange(COLUMNS, dtype=jnp.int32)
    offset = lax.rem(slot, jnp.int32(width))
    column = jnp.arange(width, dtype=jnp.int32)[None, :, None]
    even = sizes.per_block == width

    def write(unmasked: bool):
        def step(i, _):
            first = i * n_blocks
            summary = (first + lax.div(slot, jnp.int32(width))) * sizes.per_block + offset
            exists = None
            if not unmasked:
                exists = (summary < x.keys[0].shape[1]) & (offset < sizes.per_block)
            weights = jnp.exp2(
                program.logits(rows, summary, exists, True) * program.scale - row_lse
            )
            shape = COLUMNS, sizes.n_queries, sizes.members
            weights = jnp.sum(weights.reshape(shape), axis=2)
            weights = weights.reshape(n_blocks, width, sizes.n_queries)
            block = first + jnp.arange(n_blocks, dtype=jnp.int32)[:, None]
            mask = jnp.broadcast_to(block < out.shape[4], (n_blocks, sizes.n_queries))
            block = jnp.where(block < out.shape[4], block, out.shape[4])
            for lag, counts in enumerate(sizes.multiplicity):
                factor = jnp.zeros((1, width, 1), jnp.float32)
                for index, n in enumerate(counts):
                    factor = jnp.where(column == index, jnp.float32(n), factor)
                view = out.at[lag, program.batch, program.head, row, block]
                pltriton.store(view, jnp.sum(weights * factor, axis=1), mask=mask)

        return step

    n_unmasked = program.n_unmasked(n_blocks * sizes.per_block) if even else jnp.int32(0)
    n = lax.div(program.last, jnp.int32(sizes.block * n_blocks)) + 1
    lax.fori_loop(jnp.int32(0), n_unmasked, write(True), None)
    lax.fori_loop(n_unmasked, n, write(False), None)


def _best_kernel(scores, first_blocks, start, out, *, sizes: SelectionSizes, length: int):
    """A query's best blocks, in order, followed by -1."""
    row, head, batch = (pl.program_id(i) for i in range(3))
    query = row if start is None else start[0] + row
    n_blocks = scores.shape[4]
    block = jnp.arange(tile_side(n_blocks), dtype=jnp.int32)
    exists = query < length
    query = jnp.minimum(query, length - 1)
    query_block = lax.div(query, jnp.int32(sizes.block))
    first_block = jnp.int32(0) if first_blocks is None else first_blocks[batch, query]
    score = jnp.zeros(block.shape, jnp.float32)
    for lag in range(len(sizes.multiplicity)):
        exists_before = (block >= lag) & (block <= query_block)
        before = jnp.where(exists_before, block - lag, 0)
        score += load(scores.at[lag, batch, head, row, before], exists_before, 0.0)
    score = with_nan_highest(score)
    score = jnp.where(block == query_block - 1, PREVIOUS_BLOCK, score)
    score = jnp.where(block == first_block, FIRST_BLOCK, score)
    score = jnp.where(block == query_block, OWN_BLOCK, score)
    # The bits of nonnegative floats have the order of the floats.
    score = lax.bitcast_convert_type(score, jnp.int32)
    score = jnp.where((block >= first_block) & (block <= query_block) & exists, score, -1)

    def count(mask) -> Array:
        return jnp.sum(mask, dtype=jnp.int32)

    def step(i, least):
        """Finds another bit of the largest number that K scores reach."""
        candidate = least | lax.shift_left(jnp.int32(1), jnp.int32(30) - i)
        return jnp.where(count(score >= candidate) >= sizes.n_best, candidate, least)

    least = lax.fori_loop(jnp.int32(0), jnp.int32(31), step, jnp.int32(0))
    above, tied = score > least, score == least
    room = sizes.n_best - count(above)
    chosen = above | (tied & (jnp.cumsum(tied, dtype=jnp.int32) <= room))
    slot_of_block = jnp.cumsum(chosen, dtype=jnp.int32) - 1
    slot_of_block = jnp.where(chosen, slot_of_block, out.shape[3])
    pltriton.store(out.at[batch, head, row, slot_of_block], block, mask=chosen)
    slot = jnp.arange(tile_side(sizes.n_best), dtype=jnp.int32)
    none = (slot >= count(chosen)) & (slot < sizes.n_best)
    slot = jnp.where(none, slot, out.shape[3])
    pltriton.store(out.at[batch, head, row, slot], jnp.full(slot.shape, -1, jnp.int32), mask=none)


def select(
    sizes: SelectionSizes,
    interpret: bool,
    q: Float[Array, "B T N H"],
    keys: Float[Array, "B C G H"],
    ids: Int[Array, "B T"] | None = None,
    key_ids: Int[Array, "B C"] | None = None,
    first: Int[Array, "B T"] | None = None,
) -> Int[Array, "B G T K"]:
    """The blocks with the highest scores for each query, in order; -1 is none.

    Products are exact to float32.

    Args:
      ids, key_ids: segments of queries and of summaries; None: one segment.
      first: the first block that a query may select; None: block 0.
    """
    n_batch, length, n_heads, _ = q.shape
    n_kv, n_blocks = keys.shape[2], -(-length // sizes.block)
    x = ScoredInputs.of(q, keys, ids, key_ids)
    run = functools.partial(_launch, sizes, interpret, len(x.keys))
    shape = jax.ShapeDtypeStruct((n_batch, n_heads, length), jnp.float32)
    n_tiles = -(-length // sizes.n_queries)
    sums = run(_sums_kernel, (x,), shape, (n_tiles, n_kv, n_batch))

    def some_queries(start, n_tiles: int) -> Int[Array, "B G Q K"]:
        n_rows = n_tiles * sizes.n_queries
        shape = len(sizes.multiplicity), n_batch, n_kv, n_rows, n_blocks
        scores = jax.ShapeDtypeStruct(shape, jnp.float32)
        inputs = x._replace(start=start), sums
        scores = run(_scores_kernel, inputs, scores, (n_tiles, n_kv, n_batch))
        best = jax.ShapeDtypeStruct((n_batch, n_kv, n_rows, sizes.n_best), jnp.int32)
        kernel = functools.partial(_best_kernel, length=length)
        grid = n_rows, n_kv, n_batch
        warps = max(1, min(16, tile_side(n_blocks) // BLOCKS_PER_WARP))
        return run(kernel, (scores, first, start), best, grid, warps)

    tile_bytes = 4 * len(sizes.multiplicity) * n_batch * n_kv * sizes.n_queries * n_blocks
    at_a_time = max(1, MAX_SCORE_BYTES // tile_bytes)
    if at_a_time >= n_tiles:
        return some_queries(None, n_tiles)[:, :, :length]
    starts = jnp.arange(0, n_tiles, at_a_time, dtype=jnp.int32) * sizes.n_queries
    best = lax.map(lambda start: some_queries(start[None], at_a_time), starts)
    return join_chunks(best, length, axis=2)


def _launch(sizes, interpret, n_parts, kernel, inputs, shape, grid, num_warps=None):
    return launch(
        functools.partial(kernel, sizes=sizes),
        inputs,
        shape,
        grid=grid,
        num_warps=num_warps or WARPS,
        num_stages=STAGES[n_parts],
        interpret=interpret,
        name=f"nsa_{name_of(kernel)}",
    )
