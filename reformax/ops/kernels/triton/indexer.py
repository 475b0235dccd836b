"""DeepSeek sparse attention's indexer and its choice as Pallas kernels for NVIDIA GPUs (Triton).

A kernel writes scores, as integers of the same order, for a chunk of queries at a time. From these
`kernels.top_k` chooses a query's best positions.

Keys may be summaries of blocks of `span` positions, which are seen from their block's last position
on. Letters as in `reformax.ops.dsa`; S keys, I and C are the queries and keys of a tile, F is the
number of keys padded to whole tiles.
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
from jaxtyping import Array, Bool, Float, Int

from reformax.ops.kernels.triton.common import (
    column,
    launch,
    line,
    load,
    matmul_in_parts,
    tile_product,
    tile_side,
    view_rows,
)
from reformax.ops.kernels.triton.top_k import HIDDEN, RowRule, top_k
from reformax.ops.masking.visibility import Side, Visibility
from reformax.ops.numerics.best import with_nan_highest
from reformax.ops.numerics.precision import IndexDtype
from reformax.ops.numerics.query_chunks import join_chunks

# Queries and keys of a tile.
ROWS, COLUMNS, WARPS = 128, 64, 8
# Keys of a tile of scores, whose queries are read once for each, and the widest heads of such.
SCORE_COLUMNS, NARROW = 128, 64
# The unit of the low part of a number, whose high part is a float16.
LOW_UNIT = 2.0**-11
# Bytes of scores in memory at a time, or as many as the choice of all queries takes: a chunk of few
# queries of many keys does not fill a GPU. One tile of queries of each sequence may take more.
MAX_SCORE_BYTES = 2**30


class IndexerInputs(NamedTuple):
    """The indexer's arrays, which the kernels read."""

    queries: tuple[Array, ...]  # [B, T, J, D] each; their sum is the queries
    weights: Array  # [B, T, J]
    keys: tuple[Array, ...]  # [B, S, 1, D] each; their sum is the keys
    ids: Array | None  # [B, T]
    key_ids: Array | None  # [B, S]
    start: Array  # [1]: the first query of a chunk, counted from the first of all
    key_scale: Array | None = None  # [B, S]: what scores are multiplied by
    first: Array | None = None  # [1]: the position of the first of all queries; None: 0

    @property
    def softmax_scale(self) -> float:
        """The scale of scores in the softmax that an indexer learns by."""
        return 1.0 / math.sqrt(self.queries[0].shape[2] * self.queries[0].shape[3])


class IndexerProgram(NamedTuple):
    """One program: its sequence, the arrays that it reads, and its mask."""

    x: IndexerInputs
    batch: Any
    causal: bool
    span: int
    columns: int = COLUMNS  # keys of a tile

    @property
    def n_tiles(self) -> int:
        """Tiles of keys."""
        return -(-self.x.keys[0].shape[1] // self.columns)

    @property
    def first(self) -> Any:
        """The position of the first of all queries, from which `queries` counts."""
        return 0 if self.x.first is None else self.x.first[0]

    def queries(self, tile: Any) -> Side:
        """A tile of the queries, counted from the chunk's first query."""
        position = self.x.start[0] + tile * ROWS + jnp.arange(ROWS, dtype=jnp.int32)
        return self.side(position, self.x.queries[0], self.x.ids)

    def keys(self, tile: Any) -> Side:
        """A tile of the keys, whose `position` is their number."""
        number = tile * self.columns + jnp.arange(self.columns, dtype=jnp.int32)
        return self.side(number, self.x.keys[0], self.x.key_ids)

    def _last(self, number):
        """The last position of keys."""
        return number * self.span + (self.span - 1)

    def side(self, position, rows, ids) -> Side:
        """The positions, 0 where none exists, and their segments."""
        exists = position < rows.shape[1]
        position = jnp.where(exists, position, 0)
        ids = None if ids is None else load(ids.at[self.batch, position], exists, 0)
        return Side(position, ids, exists)

    def end(self, tile: Any) -> Any:
        """The end of the tiles of keys that a tile of queries may see."""
        first = self.first + self.x.start[0]
        end = Visibility(self.causal).bounds(first, first + (tile + 1) * ROWS).end
        if end is None:
            return jnp.int32(self.n_tiles)
        n_keys = lax.div(end, jnp.int32(self.span))
        n_tiles = lax.div(n_keys + (self.columns - 1), jnp.int32(self.columns))
        return jnp.minimum(n_tiles, self.n_tiles)

    def first_query_tile(self, key_tile: Any) -> Any:
        """The first tile of the chunk's queries that may see a tile of keys."""
        key = self._last(key_tile * self.columns)
        first = Visibility(self.causal).bounds(key, key + self.columns, of_keys=True).first
        if first is None:
            return jnp.int32(0)
        start = self.first + self.x.start[0]
        return lax.div(jnp.maximum(first - start, 0), jnp.int32(ROWS))

    def visible(self, query: Side, key: Side) -> Bool[Array, "I C"]:
        """Which keys each query of a tile sees."""
        return self.sees(column(query), line(key))

    def sees(self, query: Side, key: Side) -> Bool[Array, "*d"]:
        """Which keys each query sees, of sides that broadcast; `position` of keys is a number."""
        key = key if self.span == 1 else key._replace(last=self._last(key.position))
        if self.x.first is not None:
            query = query._replace(position=query.position + self.first)
        return Visibility(self.causal).sees(query, key)

    def of_queries(self, query: Side, head: Any) -> tuple[Float[Array, "I D"], ...]:
        """The parts of an index head's queries."""
        return tuple(self._rows(ref, query, head) for ref in self.x.queries)

    def of_keys(self, key: Side) -> tuple[Float[Array, "C D"], ...]:
        return tuple(self._rows(ref, key, 0) for ref in self.x.keys)

    def _rows(self, ref, side: Side, head: Any) -> Array:
        width = tile_side(ref.shape[3])
        return load(*view_rows(ref, self.batch, side.position, head, width, side.exists), 0.0)

    def weights(self, query: Side, head: Any) -> Float[Array, " I"]:
        return load(self.x.weights.at[self.batch, query.position, head], query.exists, 0.0)

    def scores(self, query: Side, key: Side) -> Float[Array, "I C"]:
        """Eq. 1."""
        keys = self.of_keys(key)

        def add(head, total):
            products = jnp.maximum(_products(self.of_queries(query, head), keys), 0.0)
            return total + self.weights(query, head)[:, None] * products

        n_heads = jnp.int32(self.x.queries[0].shape[2])
        total = jnp.zeros((ROWS, self.columns), jnp.float32)
        total = lax.fori_loop(jnp.int32(0), n_heads, add, total)
        if self.x.key_scale is None:
            return total
        scale = load(self.x.key_scale.at[self.batch, key.position], key.exists, 0.0)
        return total * scale[None, :]


def _products(queries: tuple[Array, ...], keys: tuple[Array, ...]) -> Float[Array, "I C"]:
    """The products of vectors that are one part, or two of `_halves`."""
    if len(queries) == 1:
        return matmul_in_parts(queries, keys)
    (high, low), (high_keys, low_keys) = queries, keys
    # The product of both low parts is less than what float32 holds of the others.
    small = tile_product(high, low_keys, "11") + tile_product(low, high_keys, "11")
    return small * LOW_UNIT + tile_product(high, high_keys, "11")


def _halves(x: Float[Array, "*d D"]) -> tuple[tuple[Array, Array], Float[Array, "*d"]]:
    """Float32 vectors as two parts of float16 and a scale: `(high + LOW_UNIT low) scale`.

    The parts hold 22 digits of a vector's largest number, and a sum of 64 products in float32 is as
    far from the exact one. The scale is a power of two.
    """
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    scale = lax.reduce_precision(largest, 8, 0)
    scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, 1.0, scale)
    scaled, digits = x / scale, jnp.finfo(jnp.float16)
    # XLA may leave out a cast there and back.
    high = lax.reduce_precision(scaled, digits.nexp, digits.nmant)
    low = (scaled - high) * (1 / LOW_UNIT)
    return (high.astype(jnp.float16), low.astype(jnp.float16)), scale[..., 0]


def tile_index(
    tile: Any, key_tile: Any, columns: int = COLUMNS
) -> tuple[Int[Array, "I 1"], Int[Array, "1 C"]]:
    """The indices of a tile in an array of a chunk of queries."""
    row = tile * ROWS + jnp.arange(ROWS, dtype=jnp.int32)[:, None]
    return row, key_tile * columns + jnp.arange(columns, dtype=jnp.int32)[None, :]


def in_order(scores: Float[Array, "*d"]) -> Int[Array, "*d"]:
    """Integers of the order of float32 numbers, NaN as infinity."""
    bits = lax.bitcast_convert_type(with_nan_highest(scores), jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(2**31 - 1), bits)


def _scores_kernel(x: IndexerInputs, out, *, causal: bool, span: int, columns: int):
    """A tile of scores, as integers of the same order."""
    tile, key_tile, batch = (pl.program_id(i) for i in range(3))
    program = IndexerProgram(x, batch, causal, span, columns)

    @pl.when(key_tile < program.end(tile))
    def _():
        query, key = program.queries(tile), program.keys(key_tile)
        bits = in_order(program.scores(query, key))
        score = jnp.where(program.visible(query, key), bits, jnp.int32(HIDDEN))
        pltriton.store(out.at[batch, *tile_index(tile, key_tile, columns)], score)


def chunk_starts(
    n_batch: int, length: int, n_keys: int, n_best: int
) -> tuple[Int[Array, "chunks 1"], int]:
    """The first queries of the chunks whose scores fit in memory, and the tiles of a chunk."""
    n_tiles = -(-length // ROWS)
    tile_bytes = 4 * n_batch * ROWS * padded_length(n_keys)
    most = max(MAX_SCORE_BYTES, 4 * n_batch * length * n_best)
    n_at_a_time = min(max(1, most // tile_bytes), n_tiles)
    return jnp.arange(0, n_tiles, n_at_a_time, dtype=jnp.int32)[:, None] * ROWS, n_at_a_time


def padded_length(length: int) -> int:
    """F, the number of keys padded to whole tiles of the scores and of their gradient."""
    return -(-length // SCORE_COLUMNS) * SCORE_COLUMNS


def choose_positions(
    n_best: int,
    causal: bool,
    interpret: bool,
    queries: Float[Array, "B T J D"],
    weights: Float[Array, "B T J"],
    keys: Float[Array, "B S D"],
    ids: Int[Array, "B T"] | None,
    key_ids: Int[Array, "B S"] | None,
    span: int = 1,
    dtype: IndexDtype = "float32",
    first: Int[Array, ""] | None = None,
) -> Int[Array, "B T K"]:
    """The numbers of the keys with the highest scores, in order; -1 is none.

    Products are as exact as sums in float32. Of equal scores the first ones are chosen, as by
    `lax.top_k`.

    Args:
      n_best: K.
      queries, weights, keys: the indexer's arrays, float32, `precision.rounded`.
      span: positions of a key.
      dtype: what queries and keys were rounded to.
      first: the position of the first query, of queries that are a shard of a sequence. None: 0.
        Queries of positions below 0 see no keys.
    """
    n_batch, length, n_keys = *queries.shape[:2], keys.shape[1]
    if dtype == "bfloat16":
        queries, keys = ((x.astype(jnp.bfloat16),) for x in (queries, keys))
        key_scale = None
    else:  # tensor cores have no float32 products
        (queries, scale), (keys, key_scale) = _halves(queries), _halves(keys)
        weights = weights * scale  # a ReLU of what is scaled is a scaled ReLU
    keys = tuple(x[:, :, None] for x in keys)
    first = None if first is None else jnp.reshape(first, 1).astype(jnp.int32)
    none = jnp.zeros(1, jnp.int32)
    x = IndexerInputs(queries, weights, keys, ids, key_ids, none, key_scale, first)
    columns = SCORE_COLUMNS if queries[0].shape[3] <= NARROW else COLUMNS
    starts, n_tiles = chunk_starts(n_batch, length, n_keys, n_best)
    n_rows = n_tiles * ROWS

    def some_queries(start) -> Int[Array, "B Q K"]:
        shape = jax.ShapeDtypeStruct((n_batch, n_rows, padded_length(n_keys)), jnp.int32)
        rule = dict(causal=causal, span=span)
        scores = launch(
            functools.partial(_scores_kernel, **rule, columns=columns),
            (x._replace(start=start),),
            shape,
            grid=(n_tiles, shape.shape[2] // columns, n_batch),
            num_warps=WARPS,
            num_stages=n_stages_for(*queries),
            interpret=interpret,
            name="dsa_scores",
        )
        if first is None:
            return top_k(n_best, interpret, scores, RowRule(length, n_keys, **rule), start)
        rows = RowRule(n_keys * span, n_keys, **rule)  # those of no query are hidden
        return top_k(n_best, interpret, scores, rows, first + start)

    return join_chunks(lax.map(some_queries, starts), length)


def n_stages_for(*rows: Array) -> int:
    """Pipeline stages of a loop over such rows: as many as fit on a chip."""
    n_bytes = sum(tile_side(x.shape[-1]) * x.dtype.itemsize for x in rows)
    return 2 if n_bytes <= 384 else 1
