"""DeepSeek sparse attention's indexer and its choice as Pallas kernels for NVIDIA GPUs (Triton).

  * Scores are written by tiles, of some queries at a time, as integers of the same order.
  * The best positions of a query: the number that K of its scores reach is found four bits at a
    time, each by one run through the row, and the positions that reach it are written in their
    order, of equal ones the first. No sort, and as many runs for any K.

Letters as in `reformax.ops.dsa`; I and C are the queries and keys of a tile, F keys filled up to
whole tiles.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Bool, Float, Int

from reformax.ops.kernels.triton.common import (
    launch,
    load,
    matmul_in_parts,
    power_of_two,
    view_rows,
)
from reformax.ops.numerics.precision import in_three

# Queries and keys of a tile.
ROWS, COLUMNS, WARPS = 128, 64, 4
# Bytes of scores in memory at a time; a tile of queries of each row may take more.
AT_A_TIME = 2**30
# Of the choice: scores of a tile, bits that a run finds, of all bits.
WIDTH, BITS, ALL_BITS, WARPS_OF_CHOICE = 1024, 4, 32, 8
# The score of what a query may not see.
HIDDEN = -(2**31)


class IndexerInputs(NamedTuple):
    """What the kernels read of the indexer."""

    queries: tuple[Array, ...]  # [B, T, J, D] each; they are added up
    weights: Array  # [B, T, J]
    keys: tuple[Array, ...]  # [B, S, 1, D] each; they are added up
    ids: Array | None  # [B, T]
    start: Array  # [1]: the first query


class Side(NamedTuple):
    """Some positions, 0 where one does not exist, and their segments."""

    position: Int[Array, " I"]
    exists: Bool[Array, " I"]
    ids: Int[Array, " I"] | None


class IndexerProgram(NamedTuple):
    """One program: its sequence, what it reads, and what it sees."""

    x: IndexerInputs
    batch: Any
    causal: bool

    @property
    def n_tiles(self) -> int:
        """Tiles of keys."""
        return -(-self.x.keys[0].shape[1] // COLUMNS)

    def queries(self, tile: Any) -> Side:
        """A tile of the queries from the first one on."""
        position = self.x.start[0] + tile * ROWS + jnp.arange(ROWS, dtype=jnp.int32)
        return self._side(position)

    def keys(self, tile: Any) -> Side:
        return self._side(tile * COLUMNS + jnp.arange(COLUMNS, dtype=jnp.int32))

    def _side(self, position) -> Side:
        exists = position < self.x.keys[0].shape[1]
        position = jnp.where(exists, position, 0)
        x = self.x.ids
        ids = None if x is None else load(x.at[self.batch, position], exists, 0)
        return Side(position, exists, ids)

    def end(self, tile: Any) -> Any:
        """Behind the last tile of keys that a tile of queries may see."""
        if not self.causal:
            return jnp.int32(self.n_tiles)
        last = self.x.start[0] + (tile + 1) * ROWS - 1
        return jnp.minimum(lax.div(last, jnp.int32(COLUMNS)) + 1, jnp.int32(self.n_tiles))

    def visible(self, query: Side, key: Side) -> Bool[Array, "I C"]:
        mask = query.exists[:, None] & key.exists[None, :]
        if self.causal:
            mask = mask & (key.position[None, :] <= query.position[:, None])
        if query.ids is not None:
            mask = mask & (query.ids[:, None] == key.ids[None, :]) & (key.ids != 0)[None, :]
        return mask

    def of_queries(self, query: Side, head: Any) -> tuple[Float[Array, "I D"], ...]:
        """The parts of an index head's queries."""
        return tuple(self._rows(ref, query, head) for ref in self.x.queries)

    def of_keys(self, key: Side) -> tuple[Float[Array, "C D"], ...]:
        return tuple(self._rows(ref, key, 0) for ref in self.x.keys)

    def _rows(self, ref, side: Side, head: Any) -> Array:
        width = power_of_two(ref.shape[3])
        return load(*view_rows(ref, self.batch, side.position, head, width, side.exists), 0.0)

    def weights(self, query: Side, head: Any) -> Float[Array, " I"]:
        return load(self.x.weights.at[self.batch, query.position, head], query.exists, 0.0)

    def scores(self, query: Side, key: Side) -> Float[Array, "I C"]:
        """Eq. 1."""
        keys = self.of_keys(key)

        def add(head, total):
            found = jnp.maximum(matmul_in_parts(self.of_queries(query, head), keys), 0.0)
            return total + self.weights(query, head)[:, None] * found

        n_heads = jnp.int32(self.x.queries[0].shape[2])
        return lax.fori_loop(jnp.int32(0), n_heads, add, jnp.zeros((ROWS, COLUMNS), jnp.float32))


def within(tile: Any, of_keys: Any) -> tuple[Int[Array, "I 1"], Int[Array, "1 C"]]:
    """The places of a tile in an array of some queries."""
    row = tile * ROWS + jnp.arange(ROWS, dtype=jnp.int32)[:, None]
    return row, of_keys * COLUMNS + jnp.arange(COLUMNS, dtype=jnp.int32)[None, :]


def _scores_kernel(x: IndexerInputs, out, *, causal: bool):
    """A tile of scores, as integers of the same order."""
    tile, of_keys, batch = (pl.program_id(i) for i in range(3))
    program = IndexerProgram(x, batch, causal)

    @pl.when(of_keys < program.end(tile))
    def _():
        query, key = program.queries(tile), program.keys(of_keys)
        bits = lax.bitcast_convert_type(program.scores(query, key), jnp.int32)
        bits = jnp.where(bits < 0, bits ^ jnp.int32(2**31 - 1), bits)
        score = jnp.where(program.visible(query, key), bits, jnp.int32(HIDDEN))
        pltriton.store(out.at[batch, *within(tile, of_keys)], score)


def _best_kernel(scores, start, out, *, length: int, causal: bool):
    """A query's best positions, in their order; -1 behind them."""
    row, batch = pl.program_id(0), pl.program_id(1)
    query, n_best = start[0] + row, out.shape[2]
    end = jnp.where(query < length, query + 1 if causal else jnp.int32(length), 0)
    width = min(WIDTH, power_of_two(length))
    of_tile = jnp.arange(width, dtype=jnp.int32)

    def over(body, carry):
        """`carry = body(position, score, carry)` over the tiles of the row."""

        def step(i, carry):
            place = i * width + of_tile
            exists = place < end
            at = jnp.where(exists, place, 0)
            score = load(scores.at[batch, row, at], exists, HIDDEN)
            return body(place, score, carry)

        n_tiles = lax.div(end + (width - 1), jnp.int32(width))
        return lax.fori_loop(jnp.int32(0), n_tiles, step, carry)

    def total(x) -> Array:
        return jnp.sum(x, dtype=jnp.int32)

    digit = jnp.arange(2**BITS, dtype=jnp.int32)

    def find(i, found):
        """More bits of the largest number that K scores reach, and how many are above all bits."""
        least, n_above = found
        shift = jnp.int32(ALL_BITS - BITS) - BITS * i
        candidate = least + lax.shift_left(digit, jnp.broadcast_to(shift, digit.shape))

        def count(place, score, n):
            reach = score[None, :] >= candidate[:, None]
            return n + jnp.sum(reach, axis=1, dtype=jnp.int32)

        n_reach = over(count, jnp.zeros(digit.shape, jnp.int32))
        best = jnp.maximum(total(n_reach >= n_best) - 1, 0)
        above = total(jnp.where(digit == best + 1, n_reach, 0))
        n_above = jnp.where(best < 2**BITS - 1, above, n_above)
        return least + lax.shift_left(best, shift), n_above

    found = jnp.int32(HIDDEN), jnp.int32(0)
    runs = jnp.int32(ALL_BITS // BITS)
    least, n_above = lax.fori_loop(jnp.int32(0), runs, find, found)

    def write(place, score, written):
        n_written, n_even = written
        even = (score == least) & (score > HIDDEN)
        rank = n_even + jnp.cumsum(even, dtype=jnp.int32)
        chosen = (score > least) | (even & (rank <= n_best - n_above))
        slot = n_written + jnp.cumsum(chosen, dtype=jnp.int32) - 1
        # What is not chosen goes behind the end: the interpreter writes back what it masks.
        slot = jnp.where(chosen, slot, n_best)
        pltriton.store(out.at[batch, row, slot], place, mask=chosen)
        return n_written + total(chosen), n_even + total(even)

    n_written, _ = over(write, (jnp.int32(0), jnp.int32(0)))

    def fill(i, _):
        slot = i * width + of_tile
        none = (slot >= n_written) & (slot < n_best)
        slot = jnp.where(none, slot, n_best)
        pltriton.store(out.at[batch, row, slot], jnp.full(slot.shape, -1, jnp.int32), mask=none)

    first = lax.div(n_written, jnp.int32(width))
    lax.fori_loop(first, jnp.int32(-(-n_best // width)), fill, None)


def starts(n_batch: int, length: int) -> tuple[Int[Array, "chunks 1"], int]:
    """The first queries of chunks whose scores are in memory at a time, and the tiles of one."""
    n_tiles = -(-length // ROWS)
    of_tile = 4 * n_batch * ROWS * filled(length)
    at_a_time = min(max(1, AT_A_TIME // of_tile), n_tiles)
    return jnp.arange(0, n_tiles, at_a_time, dtype=jnp.int32)[:, None] * ROWS, at_a_time


def filled(length: int) -> int:
    """F."""
    return -(-length // COLUMNS) * COLUMNS


def choose(
    n_best: int,
    causal: bool,
    interpret: bool,
    queries: Float[Array, "B T J D"],
    weights: Float[Array, "B T J"],
    keys: Float[Array, "B T D"],
    ids: Int[Array, "B T"] | None,
) -> Int[Array, "B T K"]:
    """The positions of the highest scores, in their order; -1 is none.

    Products are exact to float32. Of equal scores the first ones are chosen, as by `lax.top_k`.

    Args:
      n_best: K.
      causal: whether later positions are hidden.
      interpret: whether to run the kernels anywhere, slowly.
      queries, weights, keys: those of the indexer, float32.
      ids: the segments; None is one.
    """
    n_batch, length = keys.shape[:2]
    # A product of float32 on the chip would be one multiplication after the other.
    of_queries, of_keys = (in_three(x, jnp.bfloat16) for x in (queries, keys[:, :, None]))
    firsts, n_tiles = starts(n_batch, length)
    run = functools.partial(_launch, interpret)
    n_rows = n_tiles * ROWS

    def some(start) -> Int[Array, "B Q K"]:
        x = IndexerInputs(of_queries, weights, of_keys, ids, start)
        shape = jax.ShapeDtypeStruct((n_batch, n_rows, filled(length)), jnp.int32)
        grid = n_tiles, filled(length) // COLUMNS, n_batch
        kernel, n_stages = functools.partial(_scores_kernel, causal=causal), stages(*of_queries)
        scores = run(kernel, (x,), shape, grid, WARPS, n_stages)
        best = jax.ShapeDtypeStruct((n_batch, n_rows, n_best), jnp.int32)
        kernel = functools.partial(_best_kernel, length=length, causal=causal)
        return run(kernel, (scores, start), best, (n_rows, n_batch), WARPS_OF_CHOICE, 2)

    found = jnp.moveaxis(lax.map(some, firsts), 0, 1)
    return found.reshape(n_batch, -1, n_best)[:, :length]


def stages(*rows: Array) -> int:
    """Steps of a loop whose loads are under way: of those rows together a chip holds as many."""
    n_bytes = sum(power_of_two(x.shape[-1]) * x.dtype.itemsize for x in rows)
    return 2 if n_bytes <= 384 else 1


def _launch(interpret: bool, kernel: functools.partial, inputs, shape, grid, num_warps, n_stages):
    name = kernel.func.__name__.strip("_").removesuffix("_kernel")
    return launch(
        kernel,
        inputs,
        shape,
        grid=grid,
        num_warps=num_warps,
        num_stages=n_stages,
        interpret=interpret,
        name=f"dsa_{name}",
    )
