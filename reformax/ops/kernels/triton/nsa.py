"""The branches of native sparse attention as Pallas kernels for NVIDIA GPUs (Triton).

The query heads of a key head read the same keys, so they are the rows of one tile: M heads of
several queries (Yuan et al. 2025, sec. 3.4). Both branches are one function with different tiles.

  * Summaries: a program has neighbouring queries, and loops over the summaries before them.
  * Selected blocks: a program has one query, and loops over the blocks that it selected.
  * In the gradient of keys, a program loops over the queries that see its keys: all later ones, or
    the list of those that selected the block (`reformax.ops.softmax.chosen_blocks`). Every query
    selects the first block, so the work is cut into parts, whose sums are added afterwards: no
    atomics, one order of sums.

Letters as in `reformax.ops.nsa`; S is the number of keys, I of rows of a tile, W of parts.
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

from reformax.derivatives import CustomDerivatives
from reformax.ops.kernels.triton.common import (
    LOG2_E,
    QueryRows,
    column,
    empty_softmax,
    hide,
    in_logits,
    launch,
    line,
    load,
    matmul,
    power_of_two,
    query_rows,
    recompute_weights,
    softmax_step,
    tile_dropout_mask,
    view_rows,
)
from reformax.ops.masking.visibility import CAUSAL, Side
from reformax.ops.numerics.first_order import first_order
from reformax.ops.softmax.chosen_blocks import parts, tiles
from reformax.ops.softmax.online import Softmax, nonzero

# Keys of a tile, tiles of a part of a list, parts of the queries of a tile of summaries.
KEYS, PART_TILES, N_PARTS = 64, 64, 8
MIN_WARPS, STAGES, MAX_OF_FOUR_WARPS = 2, 2, 128 * 64
# Rows of a tile by the bytes of its dtype. Products of float32 make long programs.
ROWS = {2: 128, 4: 32}


class NsaSizes(NamedTuple):
    """The kernels' static settings.

    Attributes:
      group: M, query heads of a key head.
      block: L, positions of a selected block; 0 for summaries.
      n_selected: K, the blocks that a query selects; 0 for summaries.
      stride, span: d and P of summaries; 1 and 1 for positions.
      dropout: the rate of dropout.
      rows: rows of a tile.
    """

    group: int
    block: int
    n_selected: int
    stride: int
    span: int
    dropout: float
    rows: int

    @property
    def n_queries(self) -> int:
        """The queries of a program of queries; one where each query has other blocks."""
        return 1 if self.block else max(1, self.rows // self.group)

    @property
    def n_listed(self) -> int:
        """The queries of a step of a program of keys."""
        return max(1, self.rows // self.group)

    @property
    def n_keys(self) -> int:
        """The keys of a tile."""
        return min(KEYS, power_of_two(self.block)) if self.block else KEYS

    @property
    def per_block(self) -> int:
        """Tiles of keys of a selected block."""
        return -(-self.block // self.n_keys)


def n_rows(x: Array) -> int:
    """The rows of a tile of `[B, T, N, H]`."""
    return ROWS[x.dtype.itemsize]


class NsaLists(NamedTuple):
    """Which queries select each block.

    Attributes:
      pair: each tile's queries: t K + n for query t whose n-th block it is; -1 for none.
      parts: the block of each part, its first tile and its end; a part that does not exist is
        empty.
      first_part: the first part of each block, and the end.
    """

    pair: Int[Array, "B G M I"]
    parts: Int[Array, "3 B G W"]
    first_part: Int[Array, "B G J+1"]


class _NsaInputs(NamedTuple):
    q: Array  # [B, T, N, H]
    k: Array  # [B, S, G, H]
    v: Array  # [B, S, G, V]
    ids: Array | None  # [B, T]
    key_ids: Array | None  # [B, S]
    seed: Array | None  # [6]
    chosen: Array | None  # [B, G, T, K]
    lists: NsaLists | None = None


class _NsaRows(NamedTuple):
    """The rows of a tile: M heads of each of its queries."""

    position: Array
    head: Array
    ids: Array | None
    exists: Array


class _NsaColumns(NamedTuple):
    """The keys of a tile, and the last position that each one summarizes."""

    key: Array
    last: Array
    ids: Array | None
    exists: Array | None  # None: all keys exist, and all rows see them


class _NsaProgram(NamedTuple):
    """One program: its sequence and key head, its reads and its mask."""

    sizes: NsaSizes
    batch: Any
    head: Any

    def rows(self, x: _NsaInputs, n_queries: int, tile, pair=None) -> _NsaRows:
        """The rows of a tile of neighbouring queries, or with `pair` of a tile of a list."""
        group = self.sizes.group
        row = jnp.arange(power_of_two(n_queries * group), dtype=jnp.int32)
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
        return _NsaRows(position, head, ids, exists)

    def columns(self, x: _NsaInputs, first, end) -> _NsaColumns:
        """The keys from `first` on, which exist up to `end`; None: all exist."""
        key = first + jnp.arange(self.sizes.n_keys, dtype=jnp.int32)
        exists, safe = None, key
        if end is not None:
            exists = (key < end) & (key < x.k.shape[1])
            safe = jnp.where(exists, key, 0)
        ids = None if x.key_ids is None else load(x.key_ids.at[self.batch, safe], exists, 0)
        return _NsaColumns(safe, key * self.sizes.stride + (self.sizes.span - 1), ids, exists)

    def of_rows(self, ref, rows: _NsaRows) -> Array:
        """Vectors `[B, T, N, H]` of the rows, H padded; zeros where none exists."""
        width = power_of_two(ref.shape[3])
        return load(*self._view(ref, rows, width), 0.0)

    def put_rows(self, ref, rows: _NsaRows, value) -> None:
        view, mask = self._view(ref, rows, value.shape[1])
        pltriton.store(view, value.astype(ref.dtype), mask=mask)

    def _view(self, ref, rows: _NsaRows, width: int):
        column = jnp.arange(width, dtype=jnp.int32)[None, :]
        # Masked rows have a position out of bounds: the interpreter also writes where it masks.
        position = jnp.where(rows.exists, rows.position, ref.shape[1])
        head = jnp.where(rows.exists, rows.head, 0)
        view = ref.at[self.batch, position[:, None], head[:, None], column]
        return view, rows.exists[:, None] & (column < ref.shape[3])

    def numbers(self, ref, rows: _NsaRows) -> Array | None:
        """Entries of `[B, N, T]`; None without `ref`."""
        return None if ref is None else load(self._view_numbers(ref, rows), rows.exists, 0.0)

    def put_numbers(self, ref, rows: _NsaRows, value) -> None:
        pltriton.store(self._view_numbers(ref, rows), value, mask=rows.exists)

    def _view_numbers(self, ref, rows: _NsaRows):
        position = jnp.where(rows.exists, rows.position, ref.shape[2])
        return ref.at[self.batch, jnp.where(rows.exists, rows.head, 0), position]

    def of_columns(self, ref, columns: _NsaColumns) -> Array:
        """Vectors `[B, S, G, H]` of the keys, H padded; zeros where none exists."""
        width = power_of_two(ref.shape[3])
        view = view_rows(ref, self.batch, columns.key, self.head, width, columns.exists)
        return load(*view, 0.0)

    def visible(self, rows: _NsaRows, columns: _NsaColumns) -> Array | None:
        """Which keys each row sees, as two sides of a tile; None: all keys."""
        if columns.exists is None:
            return None
        keys = Side(columns.key, columns.ids, columns.exists, columns.last)
        return CAUSAL.sees(Side(rows.position, rows.ids, rows.exists), keys)

    def dropped(self, x: _NsaInputs, rows: _NsaRows, columns: _NsaColumns) -> Array | float:
        address = rows.head, rows.position, columns.last
        return tile_dropout_mask(x.seed, self.sizes.dropout, self.batch, *address)

    def over_keys(self, x: _NsaInputs, rows: _NsaRows, tile, body, carry):
        """`carry = body(columns, carry)` over the tiles of keys that a tile of queries sees."""
        sizes = self.sizes
        if not sizes.block:
            n_seen = jnp.max(jnp.where(rows.exists, rows.position, 0)) - (sizes.span - sizes.stride)
            n_seen = lax.div(jnp.maximum(n_seen + 1, 0), jnp.int32(sizes.stride))
            n_tiles = lax.div(n_seen + (sizes.n_keys - 1), jnp.int32(sizes.n_keys))
            n_clear = jnp.int32(0)

            def step(end, key_tile, carry):
                return body(self.columns(x, key_tile * sizes.n_keys, end), carry)

            clear, masked = (functools.partial(step, end) for end in (None, x.k.shape[1]))
            if x.ids is None:  # tiles that the first query sees whole
                n_seen = tile * sizes.n_queries - (sizes.span - sizes.stride) + 1
                n_seen = lax.div(jnp.maximum(n_seen, 0), jnp.int32(sizes.stride))
                n_clear = jnp.minimum(lax.div(n_seen, jnp.int32(sizes.n_keys)), n_tiles)
                carry = lax.fori_loop(jnp.int32(0), n_clear, clear, carry)
            return lax.fori_loop(n_clear, n_tiles, masked, carry)

        def step(key_tile, carry):
            per_block = jnp.int32(sizes.per_block)
            slot = lax.div(key_tile, per_block)
            block = x.chosen[self.batch, self.head, tile, slot]
            start = jnp.maximum(block, 0) * sizes.block
            end = jnp.where(block < 0, 0, start + sizes.block)
            first = start + lax.rem(key_tile, per_block) * sizes.n_keys
            return body(self.columns(x, first, end), carry)

        n_tiles = jnp.int32(sizes.n_selected * sizes.per_block)
        return lax.fori_loop(jnp.int32(0), n_tiles, step, carry)


def _program(sizes: NsaSizes) -> _NsaProgram:
    return _NsaProgram(sizes, pl.program_id(2), pl.program_id(1))


def _forward_kernel(x: _NsaInputs, out: Softmax, *, sizes):
    program, tile = _program(sizes), pl.program_id(0)
    rows = program.rows(x, sizes.n_queries, tile)
    q = program.of_rows(x.q, rows)

    def attend(columns, state):
        k, v = program.of_columns(x.k, columns), program.of_columns(x.v, columns)
        mask = program.visible(column(rows), line(columns))
        logits = hide(matmul(q, k, transpose_b=True), mask)
        dropped = program.dropped(x, column(rows), line(columns))
        return softmax_step(state, logits, v, x.q.shape[3], dropped)

    state = empty_softmax(rows.position.shape[0], x.v.shape[3])
    state = program.over_keys(x, rows, tile, attend, state)
    program.put_rows(out.acc, rows, state.acc / nonzero(state.row_sum)[:, None])
    program.put_numbers(out.row_max, rows, in_logits(state.row_max, x.q.shape[3]))
    program.put_numbers(out.row_sum, rows, state.row_sum)


def _weights(program, x, row, q, k, rows, columns, transposed):
    """A tile's weights and their dropout mask; `transposed` puts keys first."""
    first, second = (line, column) if transposed else (column, line)
    mask = program.visible(first(rows), second(columns))
    products = matmul(k, q, transpose_b=True) if transposed else matmul(q, k, transpose_b=True)
    row_max = first(program.numbers(row.row_max, rows)) * LOG2_E
    inverse_sum = program.numbers(row.inverse_sum, rows)
    inverse_sum = None if inverse_sum is None else first(inverse_sum)
    p = recompute_weights(hide(products, mask), row_max, inverse_sum, x.q.shape[3])
    return p, program.dropped(x, first(rows), second(columns))


def _queries_kernel(x: _NsaInputs, row: QueryRows, dq, *, sizes):
    program, tile = _program(sizes), pl.program_id(0)
    rows = program.rows(x, sizes.n_queries, tile)
    q, d_out = program.of_rows(x.q, rows), program.of_rows(row.d_out, rows)
    dot = program.numbers(row.dot, rows)

    def differentiate(columns, sums):
        k, v = program.of_columns(x.k, columns), program.of_columns(x.v, columns)
        p, dropped = _weights(program, x, row, q, k, rows, columns, False)
        ds = p * (matmul(d_out, v, transpose_b=True) * dropped - dot[:, None])
        return sums + matmul(ds.astype(k.dtype), k)

    sums = program.over_keys(x, rows, tile, differentiate, jnp.zeros(q.shape, jnp.float32))
    program.put_rows(dq, rows, sums * (1.0 / math.sqrt(x.q.shape[3])))


def _keys_kernel(x: _NsaInputs, row: QueryRows, gradients, *, sizes):
    """The sums of one part of the queries that see a tile of keys: `[B, W, G, n_keys, H]`."""
    program, index = _program(sizes), pl.program_id(0)
    if sizes.block:
        part = lax.div(index, jnp.int32(sizes.per_block))
        first = lax.rem(index, jnp.int32(sizes.per_block)) * sizes.n_keys
        block, start, end = (
            x.lists.parts[jnp.int32(i), program.batch, program.head, part] for i in range(3)
        )
        columns = program.columns(x, block * sizes.block + first, (block + 1) * sizes.block)
        step = jnp.int32(1)
    else:
        first = lax.div(index, jnp.int32(N_PARTS)) * sizes.n_keys
        columns = program.columns(x, first, x.k.shape[1])
        start = lax.div(first * sizes.stride + (sizes.span - 1), jnp.int32(sizes.n_listed))
        start = start + lax.rem(index, jnp.int32(N_PARTS))
        end, step = jnp.int32(-(-x.q.shape[1] // sizes.n_listed)), jnp.int32(N_PARTS)
    k, v = program.of_columns(x.k, columns), program.of_columns(x.v, columns)

    def differentiate(columns, query_tile, sums):
        dk, dv = sums
        pair = x.lists.pair if sizes.block else None
        rows = program.rows(x, sizes.n_listed, start + query_tile * step, pair)
        q, d_out = program.of_rows(x.q, rows), program.of_rows(row.d_out, rows)
        dot = program.numbers(row.dot, rows)
        p, dropped = _weights(program, x, row, q, k, rows, columns, True)
        dv = dv + matmul((p * dropped).astype(d_out.dtype), d_out)
        ds = p * (matmul(v, d_out, transpose_b=True) * dropped - dot[None, :])
        return dk + matmul(ds.astype(q.dtype), q), dv

    sums = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    count = lax.div(jnp.maximum(end - start + (step - 1), 0), step)
    n_masked = count
    split = not sizes.block and x.ids is None
    if split:  # queries after the last key see all keys
        last = (first + sizes.n_keys) * sizes.stride + (sizes.span - sizes.stride - 1)
        behind = lax.div(last + (sizes.n_listed - 1), jnp.int32(sizes.n_listed))
        n_masked = lax.div(jnp.maximum(behind - start + (step - 1), 0), step)
        whole = first + sizes.n_keys <= x.k.shape[1]
        n_masked = jnp.where(whole, jnp.minimum(n_masked, count), count)
    sums = lax.fori_loop(jnp.int32(0), n_masked, functools.partial(differentiate, columns), sums)
    if split:
        clear = columns._replace(exists=None)
        sums = lax.fori_loop(n_masked, count, functools.partial(differentiate, clear), sums)
    dk, dv = sums
    key = jnp.arange(sizes.n_keys, dtype=jnp.int32)[:, None]
    for ref, value in zip(gradients, (dk * (1.0 / math.sqrt(x.q.shape[3])), dv), strict=True):
        number = jnp.arange(value.shape[1], dtype=jnp.int32)[None, :]
        view = ref.at[program.batch, program.head, index, key, number]
        mask = jnp.broadcast_to(number < ref.shape[4], value.shape)
        pltriton.store(view, value, mask=mask)


def _sum_kernel(parts, first_part, out, *, per_block):
    """The sum of a block's parts, in their order."""
    batch, head, program = pl.program_id(2), pl.program_id(1), pl.program_id(0)
    block, tile = (f(program, jnp.int32(per_block)) for f in (lax.div, lax.rem))
    n_keys, size = parts.shape[3:]
    row = jnp.arange(n_keys, dtype=jnp.int32)[:, None]
    column = jnp.arange(power_of_two(size), dtype=jnp.int32)[None, :]
    mask = jnp.broadcast_to(column < size, (n_keys, power_of_two(size)))

    def add(part, total):
        view = parts.at[batch, head, part * per_block + tile, row, column]
        return total + load(view, mask, 0.0)

    first, end = (first_part[batch, head, block + jnp.int32(i)] for i in (0, 1))
    total = lax.fori_loop(first, end, add, jnp.zeros(mask.shape, jnp.float32))
    pltriton.store(out.at[batch, head, program, row, column], total.astype(out.dtype), mask=mask)


@functools.partial(CustomDerivatives, n_static=2)
def attend(
    sizes: NsaSizes,
    interpret: bool,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S G H"],
    v: Float[Array, "B S G V"],
    ids: Int[Array, "B T"] | None,
    key_ids: Int[Array, "B S"] | None,
    chosen: Int[Array, "B G T K"] | None,
    seed: Int[Array, 6] | None,
) -> Float[Array, "B T N V"]:
    """The attention of one branch by these kernels.

    Args:
      sizes: the static settings.
      interpret: whether to run the kernels on any device, slowly.
      q: queries, zeros at padding.
      k, v: summaries, or keys and values, zeros at padding.
      ids, key_ids: segments of queries and of keys; None: one segment.
      chosen: the blocks that each query selects, -1 for none; None for summaries.
      seed: `seed_words` of dropout; None without dropout.
    """
    return _attend_forward(sizes, interpret, q, k, v, ids, key_ids, chosen, seed)[0]


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
        name=f"nsa_{'selected' if sizes.block else 'compressed'}{kernel.__name__[:-7]}",
    )


def _warps(sizes: NsaSizes, size: int, of_queries: bool) -> int:
    """Two warps for a tile of one query's heads, eight where four would not hold a tile."""
    n_rows = (sizes.n_queries if of_queries else sizes.n_listed) * sizes.group
    if n_rows <= 32:
        return MIN_WARPS
    return 8 if power_of_two(size) * n_rows > MAX_OF_FOUR_WARPS else 4


def _inputs(sizes, q, k, v, ids, key_ids, chosen, seed) -> _NsaInputs:
    return _NsaInputs(q, k, v, ids, key_ids, seed, chosen)


def _lists(sizes: NsaSizes, chosen: Int[Array, "B G T K"]) -> NsaLists:
    found = tiles(chosen, -(-chosen.shape[2] // sizes.block), sizes.n_listed)
    return NsaLists(found.pair, *parts(found.bounds, found.block.shape[2], PART_TILES))


def _attend_forward(sizes, interpret, q, k, v, ids, key_ids, chosen, seed):
    q, k, v = first_order((q, k, v))
    n_batch, length, n_heads, _ = q.shape
    x = _inputs(sizes, q, k, v, ids, key_ids, chosen, seed)
    statistic = jax.ShapeDtypeStruct((n_batch, n_heads, length), jnp.float32)
    shapes = Softmax(
        jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), v.dtype), statistic, statistic
    )
    n_programs = -(-length // sizes.n_queries)
    ((out, row_max, row_sum),) = _launch(
        _forward_kernel, sizes, interpret, (x,), (shapes,), n_programs
    )
    return out, ((q, k, v, ids, key_ids, chosen, seed), (out, row_max, row_sum))


def _attend_backward(sizes, interpret, residuals, d_out):
    inputs, results = residuals
    (out, row_max, row_sum), d_out = first_order((results, d_out))
    q, _, _, ids, _, chosen, _ = inputs
    x = _inputs(sizes, *inputs)
    row = query_rows(d_out, out, row_max, row_sum, ids)
    like = jax.ShapeDtypeStruct(q.shape, q.dtype)
    n_programs = -(-q.shape[1] // sizes.n_queries)
    dq = _launch(_queries_kernel, sizes, interpret, (x, row), like, n_programs)
    if sizes.block:
        x = x._replace(chosen=None, lists=_lists(sizes, chosen))
    dk, dv = _gradients_of_keys(sizes, interpret, x, row)
    return dq, dk, dv, None, None, None, None


def _gradients_of_keys(sizes: NsaSizes, interpret, x: _NsaInputs, row: QueryRows):
    n_batch, n_positions, n_kv, _ = x.k.shape
    if sizes.block:
        n_tiles = (x.lists.first_part.shape[2] - 1) * sizes.per_block
        n_programs = x.lists.parts.shape[3] * sizes.per_block
    else:
        n_tiles = -(-n_positions // sizes.n_keys)
        n_programs = n_tiles * N_PARTS
    shapes = tuple(
        jax.ShapeDtypeStruct((n_batch, n_kv, n_programs, sizes.n_keys, y.shape[3]), jnp.float32)
        for y in (x.k, x.v)
    )
    (parts,) = _launch(_keys_kernel, sizes, interpret, (x, row), (shapes,), n_programs, False)

    def summed(parts, like):
        if not sizes.block:
            parts = parts.reshape(n_batch, n_kv, n_tiles, N_PARTS, *parts.shape[3:]).sum(axis=3)
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


attend.define(_attend_forward, _attend_backward)
