"""The branches of native sparse attention as Pallas kernels for NVIDIA GPUs (Triton).

The query heads of a key head read the same keys, so they are the rows of one tile: M heads of some
queries (Yuan et al. 2025, sec. 3.4). Both branches are one function, whose tiles differ.

  * Summaries: a program owns neighbouring queries and runs through the summaries before them.
  * Selected blocks: a program owns one query, and runs through the blocks that it chose.
  * The gradient of keys goes by the queries that see them: all later ones, or the list of those
    that chose the block (`reformax.ops.softmax.chosen_blocks`). Every query chooses the first
    block, so the work is cut into parts, whose sums are added up after it: no atomics, one order of
    sums.

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
    dropout_mask,
    empty_softmax,
    hide,
    launch,
    line,
    load,
    power_of_two,
    product,
    query_rows,
    recompute_weights,
    softmax_step,
    view_rows,
)
from reformax.ops.numerics.first_order import first_order
from reformax.ops.softmax.chosen_blocks import parts, tiles
from reformax.ops.softmax.dropout import seed_words
from reformax.ops.softmax.online import Softmax, nonzero

# Keys of a tile, tiles of a part of a list, parts that summaries' queries are in.
KEYS, TILES_OF_A_PART, N_PARTS = 64, 64, 8
FEW, STAGES, MOST_OF_FOUR = 2, 2, 128 * 64
# Rows of a tile by the bytes of a number: products of float32 are long programs.
ROWS = {2: 128, 4: 32}


class NsaSizes(NamedTuple):
    """What the kernels know before a call.

    Attributes:
      group: M, query heads of a key head.
      block: L, positions of a selected block; 0 for summaries.
      n_selected: K, the blocks that a query selects; 0 for summaries.
      stride, span: d and P of summaries; 1 and 1 for positions.
      dropout: its rate.
      rows: of a tile.
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
        """The queries of a program that owns some; one where each has blocks of its own."""
        return 1 if self.block else max(1, self.rows // self.group)

    @property
    def n_listed(self) -> int:
        """The queries of a tile that keys meet."""
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
      pair: each tile's queries; query t that selects a block as its n-th is t K + n. -1 is none.
      parts: of each part of a block's tiles the block, its first tile, and the end; a part that
        does not exist has none.
      first_part: of each block, and the end.
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


class _Rows(NamedTuple):
    """The rows of a tile: M heads of each of its queries."""

    position: Array
    head: Array
    ids: Array | None
    exists: Array


class _Columns(NamedTuple):
    """The keys of a tile, and the last position that each one sums up."""

    place: Array
    last: Array
    ids: Array | None
    exists: Array | None  # None: all do, and all rows see them


class _NsaProgram(NamedTuple):
    """One program: its sequence and key head, and how it reads and masks."""

    sizes: NsaSizes
    batch: Any
    head: Any

    def rows(self, x: _NsaInputs, n_queries: int, tile, pair=None) -> _Rows:
        """The rows of a tile of neighbours, or with `pair` of a list's tile."""
        group = self.sizes.group
        number = jnp.arange(power_of_two(n_queries * group), dtype=jnp.int32)
        within = lax.div(number, jnp.int32(group))
        head = self.head * group + lax.rem(number, jnp.int32(group))
        exists = within < n_queries
        if pair is None:
            position = tile * n_queries + within
        else:
            at = jnp.where(exists, within, 0)
            found = load(pair.at[self.batch, self.head, tile, at], exists, -1)
            exists = exists & (found >= 0)
            position = lax.div(jnp.maximum(found, 0), jnp.int32(self.sizes.n_selected))
        exists = exists & (position < x.q.shape[1])
        position = jnp.where(exists, position, 0)
        ids = None if x.ids is None else load(x.ids.at[self.batch, position], exists, 0)
        return _Rows(position, head, ids, exists)

    def columns(self, x: _NsaInputs, first, end) -> _Columns:
        """The keys from `first` on, which exist up to `end`; None: all do."""
        place = first + jnp.arange(self.sizes.n_keys, dtype=jnp.int32)
        exists, safe = None, place
        if end is not None:
            exists = (place < end) & (place < x.k.shape[1])
            safe = jnp.where(exists, place, 0)
        ids = None if x.key_ids is None else load(x.key_ids.at[self.batch, safe], exists, 0)
        return _Columns(safe, place * self.sizes.stride + (self.sizes.span - 1), ids, exists)

    def of_rows(self, ref, rows: _Rows) -> Array:
        """Vectors `[B, T, N, H]` of the rows; zeros where there is none, H padded."""
        width = power_of_two(ref.shape[3])
        return load(*self._view(ref, rows, width), 0.0)

    def put_rows(self, ref, rows: _Rows, value) -> None:
        view, mask = self._view(ref, rows, value.shape[1])
        pltriton.store(view, value.astype(ref.dtype), mask=mask)

    def _view(self, ref, rows: _Rows, width: int):
        number = jnp.arange(width, dtype=jnp.int32)[None, :]
        # What does not exist is written behind the end: the interpreter writes back what it masks.
        position = jnp.where(rows.exists, rows.position, ref.shape[1])
        head = jnp.where(rows.exists, rows.head, 0)
        view = ref.at[self.batch, position[:, None], head[:, None], number]
        return view, rows.exists[:, None] & (number < ref.shape[3])

    def numbers(self, ref, rows: _Rows) -> Array | None:
        """Entries of `[B, N, T]`; None of None."""
        return None if ref is None else load(self._view_numbers(ref, rows), rows.exists, 0.0)

    def put_numbers(self, ref, rows: _Rows, value) -> None:
        pltriton.store(self._view_numbers(ref, rows), value, mask=rows.exists)

    def _view_numbers(self, ref, rows: _Rows):
        position = jnp.where(rows.exists, rows.position, ref.shape[2])
        return ref.at[self.batch, jnp.where(rows.exists, rows.head, 0), position]

    def of_columns(self, ref, columns: _Columns) -> Array:
        """Vectors `[B, S, G, H]` of the keys; zeros where there is none, H padded."""
        width = power_of_two(ref.shape[3])
        view = view_rows(ref, self.batch, columns.place, self.head, width, columns.exists)
        return load(*view, 0.0)

    def visible(self, rows: _Rows, columns: _Columns) -> Array | None:
        """Which key each row sees, as two sides of a tile; None: every one."""
        if columns.exists is None:
            return None
        mask = (columns.last <= rows.position) & columns.exists & rows.exists
        if rows.ids is not None:
            mask = mask & (rows.ids == columns.ids) & (columns.ids != 0)
        return mask

    def dropped(self, x: _NsaInputs, rows: _Rows, columns: _Columns) -> Array | float:
        address = rows.head, rows.position, columns.last
        return dropout_mask(x.seed, self.sizes.dropout, self.batch, *address)

    def over_keys(self, x: _NsaInputs, rows: _Rows, tile, body, carry):
        """`carry = body(columns, carry)` over the tiles of keys that a tile of queries sees."""
        sizes = self.sizes
        if not sizes.block:
            seen = jnp.max(jnp.where(rows.exists, rows.position, 0)) - (sizes.span - sizes.stride)
            seen = lax.div(jnp.maximum(seen + 1, 0), jnp.int32(sizes.stride))
            n_tiles = lax.div(seen + (sizes.n_keys - 1), jnp.int32(sizes.n_keys))
            n_clear = jnp.int32(0)

            def step(end, number, carry):
                return body(self.columns(x, number * sizes.n_keys, end), carry)

            clear, masked = (functools.partial(step, end) for end in (None, x.k.shape[1]))
            if x.ids is None:  # tiles that the first query sees whole
                seen = tile * sizes.n_queries - (sizes.span - sizes.stride) + 1
                seen = lax.div(jnp.maximum(seen, 0), jnp.int32(sizes.stride))
                n_clear = jnp.minimum(lax.div(seen, jnp.int32(sizes.n_keys)), n_tiles)
                carry = lax.fori_loop(jnp.int32(0), n_clear, clear, carry)
            return lax.fori_loop(n_clear, n_tiles, masked, carry)

        def step(number, carry):
            per_block = jnp.int32(sizes.per_block)
            which = lax.div(number, per_block)
            block = x.chosen[self.batch, self.head, tile, which]
            start = jnp.maximum(block, 0) * sizes.block
            end = jnp.where(block < 0, 0, start + sizes.block)
            first = start + lax.rem(number, per_block) * sizes.n_keys
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
        logits = hide(product(q, k, transpose_b=True), mask)
        dropped = program.dropped(x, column(rows), line(columns))
        return softmax_step(state, logits, v, x.q.shape[3], dropped)

    state = empty_softmax(rows.position.shape[0], x.v.shape[3])
    state = program.over_keys(x, rows, tile, attend, state)
    program.put_rows(out.acc, rows, state.acc / nonzero(state.row_sum)[:, None])
    program.put_numbers(out.row_max, rows, state.row_max)
    program.put_numbers(out.row_sum, rows, state.row_sum)


def _weights(program, x, row, q, k, rows, columns, transposed):
    """A tile's weights, and the mask of their dropout; `transposed` puts keys first."""
    first, second = (line, column) if transposed else (column, line)
    mask = program.visible(first(rows), second(columns))
    products = product(k, q, transpose_b=True) if transposed else product(q, k, transpose_b=True)
    size = x.q.shape[3]
    row_max = first(program.numbers(row.row_max, rows)) * (LOG2_E / math.sqrt(size))
    inverse_sum = program.numbers(row.inverse_sum, rows)
    inverse_sum = None if inverse_sum is None else first(inverse_sum)
    p = recompute_weights(hide(products, mask), row_max, inverse_sum, size)
    return p, program.dropped(x, first(rows), second(columns))


def _queries_kernel(x: _NsaInputs, row: QueryRows, dq, *, sizes):
    program, tile = _program(sizes), pl.program_id(0)
    rows = program.rows(x, sizes.n_queries, tile)
    q, d_out = program.of_rows(x.q, rows), program.of_rows(row.d_out, rows)
    dot = program.numbers(row.dot, rows)

    def differentiate(columns, sums):
        k, v = program.of_columns(x.k, columns), program.of_columns(x.v, columns)
        p, dropped = _weights(program, x, row, q, k, rows, columns, False)
        ds = p * (product(d_out, v, transpose_b=True) * dropped - dot[:, None])
        return sums + product(ds.astype(k.dtype), k)

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

    def differentiate(columns, number, sums):
        dk, dv = sums
        pair = x.lists.pair if sizes.block else None
        rows = program.rows(x, sizes.n_listed, start + number * step, pair)
        q, d_out = program.of_rows(x.q, rows), program.of_rows(row.d_out, rows)
        dot = program.numbers(row.dot, rows)
        p, dropped = _weights(program, x, row, q, k, rows, columns, True)
        dv = dv + product((p * dropped).astype(d_out.dtype), d_out)
        ds = p * (product(v, d_out, transpose_b=True) * dropped - dot[None, :])
        return dk + product(ds.astype(q.dtype), q), dv

    sums = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    count = lax.div(jnp.maximum(end - start + (step - 1), 0), step)
    n_masked = count
    split = not sizes.block and x.ids is None
    if split:  # queries behind all of the keys see all
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
    place = jnp.arange(sizes.n_keys, dtype=jnp.int32)[:, None]
    for ref, value in zip(gradients, (dk * (1.0 / math.sqrt(x.q.shape[3])), dv), strict=True):
        number = jnp.arange(value.shape[1], dtype=jnp.int32)[None, :]
        view = ref.at[program.batch, program.head, index, place, number]
        mask = jnp.broadcast_to(number < ref.shape[4], value.shape)
        pltriton.store(view, value, mask=mask)


def _sum_kernel(parts, first_part, out, *, per_block):
    """The sum of a block's parts, in their order."""
    batch, head, program = pl.program_id(2), pl.program_id(1), pl.program_id(0)
    block, tile = (f(program, jnp.int32(per_block)) for f in (lax.div, lax.rem))
    n_keys, size = parts.shape[3:]
    place = jnp.arange(n_keys, dtype=jnp.int32)[:, None]
    number = jnp.arange(power_of_two(size), dtype=jnp.int32)[None, :]
    mask = jnp.broadcast_to(number < size, (n_keys, power_of_two(size)))

    def add(part, total):
        view = parts.at[batch, head, part * per_block + tile, place, number]
        return total + load(view, mask, 0.0)

    first, end = (first_part[batch, head, block + jnp.int32(i)] for i in (0, 1))
    total = lax.fori_loop(first, end, add, jnp.zeros(mask.shape, jnp.float32))
    pltriton.store(out.at[batch, head, program, place, number], total.astype(out.dtype), mask=mask)


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
    rng: Array | None,
) -> Float[Array, "B T N V"]:
    """The attention of one branch by these kernels, with its gradient.

    Args:
      sizes: what is known before the call.
      interpret: whether to run the kernels anywhere, slowly.
      q: queries, zeros at padding.
      k, v: summaries, or keys and values, zeros at padding.
      ids, key_ids: segments of both; None is one.
      chosen: the blocks that each query selects, -1 for none; None for summaries.
      rng: the source of dropout; None if there is none.
    """
    return _attend_forward(sizes, interpret, q, k, v, ids, key_ids, chosen, rng)[0]


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
    """Few where a tile has the heads of one query; many where its numbers would not fit."""
    n_rows = (sizes.n_queries if of_queries else sizes.n_listed) * sizes.group
    if n_rows <= 32:
        return FEW
    return 8 if power_of_two(size) * n_rows > MOST_OF_FOUR else 4


def _inputs(sizes, q, k, v, ids, key_ids, chosen, rng) -> _NsaInputs:
    seed = seed_words(rng, len(q)) if sizes.dropout > 0.0 else None
    return _NsaInputs(q, k, v, ids, key_ids, seed, chosen)


def _lists(sizes: NsaSizes, chosen: Int[Array, "B G T K"]) -> NsaLists:
    found = tiles(chosen, -(-chosen.shape[2] // sizes.block), sizes.n_listed)
    return NsaLists(found.pair, *parts(found.bounds, found.block.shape[2], TILES_OF_A_PART))


def _attend_forward(sizes, interpret, q, k, v, ids, key_ids, chosen, rng):
    q, k, v = first_order((q, k, v))
    n_batch, length, n_heads, _ = q.shape
    x = _inputs(sizes, q, k, v, ids, key_ids, chosen, rng)
    numbers = jax.ShapeDtypeStruct((n_batch, n_heads, length), jnp.float32)
    shapes = Softmax(jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), v.dtype), numbers, numbers)
    n_programs = -(-length // sizes.n_queries)
    ((out, row_max, row_sum),) = _launch(
        _forward_kernel, sizes, interpret, (x,), (shapes,), n_programs
    )
    return out, ((q, k, v, ids, key_ids, chosen, rng), (out, row_max, row_sum))


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
            # A block's last tile may reach behind it.
            shape = n_batch, n_kv, -1, sizes.per_block * sizes.n_keys, parts.shape[4]
            parts = parts.reshape(shape)[:, :, :, : sizes.block]
        parts = parts.reshape(n_batch, n_kv, -1, parts.shape[-1])[:, :, :n_positions]
        return jnp.swapaxes(parts, 1, 2).astype(like.dtype)

    return summed(parts[0], x.k), summed(parts[1], x.v)


attend.define(_attend_forward, _attend_backward)
