"""Mixture of block attention as Pallas kernels for NVIDIA GPUs (Triton).

Neighbouring queries choose different blocks, and the union of their choices may be all blocks.
Queries are therefore grouped by the block that they chose (Lu et al. 2025, algorithm 1): a program
has a block and a tile of the queries that see it, at any positions. There are at most `T K / I + C`
tiles, whatever the choices.

  * A query has a slot for each of its K blocks. Programs write their sums to these slots, and array
    operations merge them: no atomics, one order of sums. The gradient of queries does the same.
  * In the gradient of keys and values, a program has a tile of a block's keys, and loops over the
    block's tiles of queries. A block that all queries chose is one long row.

Letters as in `reformax.ops.moba`; I is the number of queries of a tile.
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
from reformax.ops.softmax.online import Softmax


class MobaLists(NamedTuple):
    """The tiles of a call.

    Attributes:
      block: the block of each tile.
      pair: the tile's queries: q K + n for query q whose n-th block it is; -1 for none.
      bounds: the first tile of each block, and the end.
      exists: whether each query has an n-th block.
    """

    block: Int[Array, "B N M"]
    pair: Int[Array, "B N M I"]
    bounds: Int[Array, "B N C+1"]
    exists: Array  # [B, N, T, K]


class MobaSizes(NamedTuple):
    """The kernels' static settings: L, K, keys of a tile, and the rate of dropout."""

    block: int
    n_seen: int
    key: int
    dropout: float


class _MobaInputs(NamedTuple):
    q: Array  # [B, T, N, H]
    k: Array  # [B, T, G, H]
    v: Array  # [B, T, G, V]
    ids: Array | None  # [B, T]
    seed: Array | None  # [6]
    block: Array  # this and the next two are those of `MobaLists`
    pair: Array
    bounds: Array


class _MobaProgram(NamedTuple):
    """One program: its sequence and head, its reads and its mask."""

    sizes: MobaSizes
    batch: Any
    head: Any

    def queries(self, x: _MobaInputs, tile) -> tuple[Array, Array, Array | None]:
        """The pairs of a tile, the positions of its queries, -1 for none, and their segments."""
        row = jnp.arange(x.pair.shape[3], dtype=jnp.int32)
        pair = load(x.pair.at[self.batch, self.head, tile, row], None)
        position = jnp.where(pair < 0, -1, lax.div(pair, jnp.int32(self.sizes.n_seen)))
        return pair, position, self._ids(x, position, pair >= 0)

    def keys(self, x: _MobaInputs, block, tile) -> tuple[Array, Array, Array | None]:
        """A tile of a block's keys: positions, whether each is in the block, and segments."""
        within = tile * self.sizes.key + jnp.arange(self.sizes.key, dtype=jnp.int32)
        position = block * self.sizes.block + within
        exists = (within < self.sizes.block) & (position < x.k.shape[1])
        return position, exists, self._ids(x, position, exists)

    def _ids(self, x: _MobaInputs, position, exists):
        if x.ids is None:
            return None
        return load(x.ids.at[self.batch, jnp.where(exists, position, 0)], exists, 0)

    def rows(self, ref, position, exists) -> Array:
        """Rows of `[B, T, N, H]`, H padded; zeros where none exists."""
        return self._rows(ref, self.head, position, exists)

    def rows_of_keys(self, ref, x: _MobaInputs, position, exists) -> Array:
        """Rows of `[B, T, G, H]` of the head's group, likewise."""
        group = jnp.int32(x.q.shape[2] // x.k.shape[2])
        return self._rows(ref, lax.div(self.head, group), position, exists)

    def _rows(self, ref, head, position, exists) -> Array:
        width = power_of_two(ref.shape[3])
        safe = jnp.where(exists, position, 0)
        return load(*view_rows(ref, self.batch, safe, head, width, exists), 0.0)

    def statistics(self, ref, position, exists) -> Array | None:
        """Entries of `[B, N, T]`, zeros where none exists; None without `ref`."""
        if ref is None:
            return None
        return load(ref.at[self.batch, self.head, jnp.where(exists, position, 0)], exists, 0.0)

    def put(self, ref, slot, exists, value) -> None:
        """Writes rows of `[B, N, P, H]`."""
        column = jnp.arange(value.shape[1], dtype=jnp.int32)[None, :]
        mask = exists[:, None] & (column < ref.shape[3])
        # Masked rows have a slot out of bounds: the interpreter also writes where it masks.
        slot = jnp.where(exists, slot, ref.shape[2])
        view = ref.at[self.batch, self.head, slot[:, None], column]
        pltriton.store(view, value.astype(ref.dtype), mask=mask)

    def put_numbers(self, ref, slot, exists, value) -> None:
        """Writes entries of `[B, N, P]`."""
        view = ref.at[self.batch, self.head, jnp.where(exists, slot, ref.shape[2])]
        pltriton.store(view, value, mask=exists)

    def dropped(self, x: _MobaInputs, query, key) -> Array | float:
        return tile_dropout_mask(x.seed, self.sizes.dropout, self.batch, self.head, query, key)

    def n_keys(self, block, last_query) -> Any:
        """The tiles of a block's keys up to the last query's position."""
        end = CAUSAL.bounds(last_query, last_query + 1).end
        end = jnp.minimum(end - block * self.sizes.block, self.sizes.block)
        end = jnp.maximum(end, 0) + jnp.int32(self.sizes.key - 1)
        return lax.div(end, jnp.int32(self.sizes.key))


def _forward_kernel(x: _MobaInputs, out: Softmax, *, sizes):
    tile = pl.program_id(0)
    program = _MobaProgram(sizes, pl.program_id(2), pl.program_id(1))
    block = x.block[program.batch, program.head, tile]
    pair, position, ids = program.queries(x, tile)
    exists = pair >= 0
    q = program.rows(x.q, position, exists)

    def attend(key_tile, state):
        key, key_exists, key_ids = program.keys(x, block, key_tile)
        k, v = (program.rows_of_keys(ref, x, key, key_exists) for ref in (x.k, x.v))
        mask = CAUSAL.sees(column(Side(position, ids)), line(Side(key, key_ids, key_exists)))
        logits = hide(matmul(q, k, transpose_b=True), mask)
        dropped = program.dropped(x, position[:, None], key[None])
        return softmax_step(state, logits, v, x.q.shape[3], dropped)

    state = empty_softmax(position.shape[0], x.v.shape[3])
    state = lax.fori_loop(jnp.int32(0), program.n_keys(block, jnp.max(position)), attend, state)
    program.put(out.acc, pair, exists, state.acc)
    program.put_numbers(out.row_max, pair, exists, in_logits(state.row_max, x.q.shape[3]))
    program.put_numbers(out.row_sum, pair, exists, state.row_sum)


def _weights(program, x, q, k, query, key, ids, statistics, transposed):
    """A tile's weights and their dropout mask; `transposed` puts keys first."""
    key, key_exists, key_ids = key
    first, second = (line, column) if transposed else (column, line)
    mask = CAUSAL.sees(first(Side(query, ids)), second(Side(key, key_ids, key_exists)))
    products = matmul(k, q, transpose_b=True) if transposed else matmul(q, k, transpose_b=True)
    row_max, inverse_sum = statistics
    row_max = first(row_max) * LOG2_E
    inverse_sum = None if inverse_sum is None else first(inverse_sum)
    p = recompute_weights(hide(products, mask), row_max, inverse_sum, x.q.shape[3])
    return p, program.dropped(x, first(query), second(key))


def _queries_kernel(x: _MobaInputs, row: QueryRows, dq, *, sizes):
    tile = pl.program_id(0)
    program = _MobaProgram(sizes, pl.program_id(2), pl.program_id(1))
    block = x.block[program.batch, program.head, tile]
    pair, position, ids = program.queries(x, tile)
    exists = pair >= 0
    q, d_out = (program.rows(ref, position, exists) for ref in (x.q, row.d_out))
    row_max, dot, inverse_sum = (
        program.statistics(ref, position, exists) for ref in (row.row_max, row.dot, row.inverse_sum)
    )

    def differentiate(key_tile, sums):
        key = program.keys(x, block, key_tile)
        k, v = (program.rows_of_keys(ref, x, *key[:2]) for ref in (x.k, x.v))
        p, dropped = _weights(program, x, q, k, position, key, ids, (row_max, inverse_sum), False)
        ds = p * (matmul(d_out, v, transpose_b=True) * dropped - dot[:, None])
        return sums + matmul(ds.astype(k.dtype), k)

    sums = jnp.zeros(q.shape, jnp.float32)
    n_keys = program.n_keys(block, jnp.max(position))
    sums = lax.fori_loop(jnp.int32(0), n_keys, differentiate, sums)
    program.put(dq, pair, exists, sums * (1.0 / math.sqrt(x.q.shape[3])))


def _keys_kernel(x: _MobaInputs, row: QueryRows, gradients, *, sizes):
    program = _MobaProgram(sizes, pl.program_id(2), pl.program_id(1))
    n_tiles = jnp.int32(-(-sizes.block // sizes.key))
    block = lax.div(pl.program_id(0), n_tiles)
    key = program.keys(x, block, lax.rem(pl.program_id(0), n_tiles))
    k, v = (program.rows_of_keys(ref, x, *key[:2]) for ref in (x.k, x.v))

    def differentiate(tile, sums):
        dk, dv = sums
        pair, position, ids = program.queries(x, tile)
        exists = pair >= 0
        q, d_out = (program.rows(ref, position, exists) for ref in (x.q, row.d_out))
        row_max, dot, inverse_sum = (
            program.statistics(ref, position, exists)
            for ref in (row.row_max, row.dot, row.inverse_sum)
        )
        p, dropped = _weights(program, x, q, k, position, key, ids, (row_max, inverse_sum), True)
        dv = dv + matmul((p * dropped).astype(d_out.dtype), d_out)
        ds = p * (matmul(v, d_out, transpose_b=True) * dropped - dot[None, :])
        return dk + matmul(ds.astype(q.dtype), q), dv

    first, end = (x.bounds[program.batch, program.head, block + jnp.int32(i)] for i in (0, 1))
    sums = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    dk, dv = lax.fori_loop(first, end, differentiate, sums)
    for ref, value in zip(gradients, (dk * (1.0 / math.sqrt(x.q.shape[3])), dv), strict=True):
        view, mask = view_rows(ref, program.batch, key[0], program.head, value.shape[1], key[1])
        pltriton.store(view, value.astype(ref.dtype), mask=mask)


@functools.partial(CustomDerivatives, n_static=2)
def attend(
    sizes: MobaSizes,
    interpret: bool,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T G H"],
    v: Float[Array, "B T G V"],
    ids: Int[Array, "B T"] | None,
    lists: MobaLists,
    seed: Int[Array, 6] | None,
) -> Float[Array, "B T N V"]:
    """The attention of a call's lists by these kernels.

    Args:
      sizes: the static settings.
      interpret: whether to run the kernels on any device, slowly.
      q, k, v: queries, keys, values, zeros at padding.
      ids: the tokens' segments; None: one segment.
      lists: the queries that see each block.
      seed: `seed_words` of dropout; None without dropout.
    """
    return _attend_forward(sizes, interpret, q, k, v, ids, lists, seed)[0]


def _launch(kernel, sizes, interpret, inputs, shapes, n_programs):
    n_batch, _, n_heads, _ = inputs[0].q.shape
    return launch(
        functools.partial(kernel, sizes=sizes),
        inputs,
        shapes,
        grid=(n_programs, n_heads, n_batch),
        num_warps=4,
        num_stages=2,
        interpret=interpret,
        name="moba" + kernel.__name__.removesuffix("_kernel"),
    )


def _inputs(sizes, q, k, v, ids, lists, seed) -> _MobaInputs:
    return _MobaInputs(q, k, v, ids, seed, *lists[:3])


def _attend_forward(sizes, interpret, q, k, v, ids, lists, seed):
    q, k, v = first_order((q, k, v))
    n_batch, length, n_heads, _ = q.shape
    x = _inputs(sizes, q, k, v, ids, lists, seed)
    pairs = n_batch, n_heads, length * sizes.n_seen
    statistic = jax.ShapeDtypeStruct(pairs, jnp.float32)
    shapes = Softmax(jax.ShapeDtypeStruct((*pairs, v.shape[3]), jnp.float32), statistic, statistic)
    n_tiles = lists.block.shape[2]
    (parts,) = _launch(_forward_kernel, sizes, interpret, (x,), (shapes,), n_tiles)
    # The softmax of each query over its blocks. Slots that no program wrote are undefined.
    exists = lists.exists
    parts = Softmax(*(y.reshape(*exists.shape, *y.shape[3:]) for y in parts))
    whole = parts.merged(axis=3, where=exists)
    out = jnp.swapaxes(whole.output(), 1, 2).astype(v.dtype)
    return out, ((q, k, v, ids, lists, seed), (out, *whole[1:]))


def _attend_backward(sizes, interpret, residuals, d_out):
    inputs, results = residuals
    (out, row_max, row_sum), d_out = first_order((results, d_out))
    q, k, v, ids, lists, _ = inputs
    x = _inputs(sizes, *inputs)
    row = query_rows(d_out, out, row_max, row_sum, ids)
    exists = lists.exists
    shape = (*exists.shape[:2], q.shape[1] * sizes.n_seen, q.shape[3])
    shape = jax.ShapeDtypeStruct(shape, jnp.float32)
    dq = _launch(_queries_kernel, sizes, interpret, (x, row), shape, lists.block.shape[2])
    dq = jnp.where(exists[..., None], dq.reshape(*exists.shape, -1), 0).sum(axis=3)
    n_programs = (lists.bounds.shape[2] - 1) * -(-sizes.block // sizes.key)
    one_head_each = q.shape[2] == k.shape[2]
    like = tuple(
        jax.ShapeDtypeStruct((*q.shape[:3], y.shape[3]), y.dtype if one_head_each else jnp.float32)
        for y in (k, v)
    )
    (sums,) = _launch(_keys_kernel, sizes, interpret, (x, row), (like,), n_programs)
    if not one_head_each:  # a key head has the sum of its group
        sums = (
            d.reshape(*y.shape[:3], -1, y.shape[3]).sum(axis=3).astype(y.dtype)
            for d, y in zip(sums, (k, v), strict=True)
        )
    return jnp.swapaxes(dq, 1, 2).astype(q.dtype), *sums, None, None, None


attend.define(_attend_forward, _attend_backward)
