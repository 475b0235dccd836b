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

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Bool, Float, Int

from reformax.ops.kernels.triton import flash
from reformax.ops.kernels.triton.common import (
    QueryRows,
    launch,
    load,
    name_of,
    tile_dropout_mask,
    view_rows,
)
from reformax.ops.kernels.triton.flash import Program
from reformax.ops.masking.visibility import CAUSAL, Side
from reformax.ops.numerics.logits import Logits
from reformax.ops.softmax.learned_sinks import Results
from reformax.ops.softmax.online import Softmax


class MobaSizes(NamedTuple):
    """The kernels' static settings: L, K, keys of a tile, the rate of dropout, and logits."""

    block: int
    n_seen: int
    key: int
    dropout: float
    logits: Logits

    @property
    def n_tiles(self) -> int:
        """Tiles of a block's keys."""
        return -(-self.block // self.key)


class MobaInputs(NamedTuple):
    """The arrays of a call."""

    # Zeros at padding.
    q: Float[Array, "B T N H"]
    k: Float[Array, "B T G H"]
    v: Float[Array, "B T G V"]
    ids: Int[Array, "B T"] | None
    seed: Int[Array, 6] | None
    block: Int[Array, "B N M"]  # the block of each tile
    # The tile's queries: q K + n for query q whose n-th block it is; -1 for none.
    pair: Int[Array, "B N M I"]
    bounds: Int[Array, "B N C+1"]  # the first tile of each block, and the end
    # Whether each query has an n-th block. Programs do not read it.
    exists: Bool[Array, "B N T K"] | None


class MobaBlock(NamedTuple):
    """The queries or the keys of a tile."""

    position: Array  # -1 of a query that does not exist
    exists: Array
    segment: Array | None
    of_keys: bool


@dataclasses.dataclass(frozen=True, eq=False)
class MobaProgram(Program):
    """One program: its static settings, its sequence, head and block, its reads and its mask."""

    sizes: MobaSizes
    x: MobaInputs
    row: QueryRows | None
    batch: Any
    head: Any
    block: Any
    zero_padding = True

    @classmethod
    def of_queries(cls, sizes: MobaSizes, x: MobaInputs, row: QueryRows | None = None) -> Self:
        """The running program of a tile of the queries that chose a block."""
        batch, head = pl.program_id(2), pl.program_id(1)
        return cls(sizes, x, row, batch, head, x.block[batch, head, pl.program_id(0)])

    @classmethod
    def of_keys(cls, sizes: MobaSizes, x: MobaInputs, row: QueryRows) -> Self:
        """The running program of a tile of a block's keys."""
        block = lax.div(pl.program_id(0), jnp.int32(sizes.n_tiles))
        return cls(sizes, x, row, pl.program_id(2), pl.program_id(1), block)

    @property
    def logits(self) -> Logits:
        return self.sizes.logits

    # The tiles.

    def queries(self, tile, part: Any = 0, n_parts: int = 1) -> tuple[Array, MobaBlock]:
        """The pairs of a tile, or of a part of it, and its queries."""
        n_rows = self.x.pair.shape[3] // n_parts
        number = part * n_rows + jnp.arange(n_rows, dtype=jnp.int32)
        pair = load(self.x.pair.at[self.batch, self.head, tile, number], None)
        position = jnp.where(pair < 0, -1, lax.div(pair, jnp.int32(self.sizes.n_seen)))
        return pair, self._block(position, pair >= 0, of_keys=False)

    def keys(self, tile) -> MobaBlock:
        """A tile of the block's keys."""
        within = tile * self.sizes.key + jnp.arange(self.sizes.key, dtype=jnp.int32)
        position = self.block * self.sizes.block + within
        exists = (within < self.sizes.block) & (position < self.x.k.shape[1])
        return self._block(position, exists, of_keys=True)

    def _block(self, position, exists, of_keys: bool) -> MobaBlock:
        ids = self.x.ids
        if ids is not None:
            ids = load(ids.at[self.batch, jnp.where(exists, position, 0)], exists, 0)
        return MobaBlock(position, exists, ids, of_keys)

    def over_keys(self, queries: MobaBlock, body: Callable, carry: Any) -> Any:
        """The block's tiles up to the last query."""
        last = jnp.max(queries.position)
        end = CAUSAL.bounds(last, last + 1).end
        end = jnp.minimum(end - self.block * self.sizes.block, self.sizes.block)
        end = jnp.maximum(end, 0) + jnp.int32(self.sizes.key - 1)
        n_tiles = lax.div(end, jnp.int32(self.sizes.key))
        return lax.fori_loop(
            jnp.int32(0), n_tiles, lambda tile, carry: body(self.keys(tile), carry), carry
        )

    def over_queries(self, keys: MobaBlock, body: Callable, carry: Any) -> Any:
        """The tiles of the queries that chose the block, with dropout a part of one at a time."""
        bounds = (self.block + jnp.int32(i) for i in (0, 1))
        first, end = (self.x.bounds[self.batch, self.head, i] for i in bounds)
        n_rows = self.x.pair.shape[3]
        n_parts = max(1, n_rows // flash.QUERIES_OF_DROPOUT) if self.sizes.dropout else 1
        n = jnp.int32(n_parts)

        def step(i, carry):
            return body(self.queries(lax.div(i, n), lax.rem(i, n), n_parts)[1], carry)

        return lax.fori_loop(first * n, end * n, step, carry)

    # Reading and writing.

    def address(self, block: MobaBlock):
        head = self.head
        if block.of_keys:  # a key head has several query heads
            head = lax.div(head, jnp.int32(self.x.q.shape[2] // self.x.k.shape[2]))
        return jnp.where(block.exists, block.position, self.x.q.shape[1]), head, block.exists

    def put(self, ref, pair, value) -> None:
        """Writes rows of `[B, N, P, H]`."""
        column = jnp.arange(value.shape[1], dtype=jnp.int32)[None, :]
        mask = (pair >= 0)[:, None] & (column < ref.shape[3])
        # Masked rows have a slot out of bounds: the interpreter also writes where it masks.
        slot = jnp.where(pair >= 0, pair, ref.shape[2])
        view = ref.at[self.batch, self.head, slot[:, None], column]
        pltriton.store(view, value.astype(ref.dtype), mask=mask)

    def put_sums(self, ref, pair, value) -> None:
        """Writes entries of `[B, N, P]`."""
        view = ref.at[self.batch, self.head, jnp.where(pair >= 0, pair, ref.shape[2])]
        pltriton.store(view, value, mask=pair >= 0)

    # The mask.

    def visible(self, q: MobaBlock, k: MobaBlock) -> Array:
        return CAUSAL.sees(Side(q.position, q.segment), Side(k.position, k.segment, k.exists))

    def dropped(self, q: MobaBlock, k: MobaBlock) -> Array | float:
        seed, rate = self.x.seed, self.sizes.dropout
        return tile_dropout_mask(seed, rate, self.batch, self.head, q.position, k.position)


def _forward_kernel(x: MobaInputs, out: Softmax, *, sizes):
    program = MobaProgram.of_queries(sizes, x)
    pair, queries = program.queries(pl.program_id(0))
    # Array operations merge a query's blocks, so the softmax is not divided by its sum.
    state = flash.forward(program, queries)
    program.put(out.acc, pair, state.acc)
    program.put_sums(out.row_max, pair, state.row_max * program.scale)
    program.put_sums(out.row_sum, pair, state.row_sum)


def _queries_kernel(x: MobaInputs, row: QueryRows, dq, *, sizes):
    program = MobaProgram.of_queries(sizes, x, row)
    pair, queries = program.queries(pl.program_id(0))
    sums = flash.d_queries(program, queries, program.rows(x.q, queries))
    program.put(dq, pair, sums * program.scale)


def _keys_kernel(x: MobaInputs, row: QueryRows, gradients, *, sizes):
    program = MobaProgram.of_keys(sizes, x, row)
    keys = program.keys(lax.rem(pl.program_id(0), jnp.int32(sizes.n_tiles)))
    dk, dv = flash.d_keys(program, keys)
    for ref, value in zip(gradients, (dk * program.scale, dv), strict=True):
        rows = keys.position, program.head, value.shape[1], keys.exists
        view, mask = view_rows(ref, program.batch, *rows)
        pltriton.store(view, value.astype(ref.dtype), mask=mask)


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
        name=f"moba_{name_of(kernel)}",
    )


def forward(sizes: MobaSizes, x: MobaInputs, interpret: bool) -> Results:
    """The results of `flash.attention`."""
    (n_batch, length, n_heads, _), exists, v = x.q.shape, x.exists, x.v
    pairs = n_batch, n_heads, length * sizes.n_seen
    statistic = jax.ShapeDtypeStruct(pairs, jnp.float32)
    shapes = Softmax(jax.ShapeDtypeStruct((*pairs, v.shape[3]), jnp.float32), statistic, statistic)
    read, n_tiles = x._replace(exists=None), x.block.shape[2]
    (parts,) = _launch(_forward_kernel, sizes, interpret, (read,), (shapes,), n_tiles)
    # The softmax of each query over its blocks. Slots that no program wrote are undefined.
    parts = Softmax(*(y.reshape(*exists.shape, *y.shape[3:]) for y in parts))
    return parts.merged(axis=3, where=exists).results(v.dtype)


def backward(
    sizes: MobaSizes, x: MobaInputs, results: Results, d_out, interpret: bool
) -> tuple[Array, Array, Array]:
    """The gradients of q, k and v."""
    (q, k, v), exists, x = x[:3], x.exists, x._replace(exists=None)
    row = QueryRows.of(d_out, results, x.ids)
    shape = (*exists.shape[:2], q.shape[1] * sizes.n_seen, q.shape[3])
    shape = jax.ShapeDtypeStruct(shape, jnp.float32)
    dq = _launch(_queries_kernel, sizes, interpret, (x, row), shape, x.block.shape[2])
    dq = jnp.where(exists[..., None], dq.reshape(*exists.shape, -1), 0).sum(axis=3)
    n_programs = (x.bounds.shape[2] - 1) * sizes.n_tiles
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
    return jnp.swapaxes(dq, 1, 2).astype(q.dtype), *sums


attend = flash.attention(forward, backward)
