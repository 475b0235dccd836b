"""The choice of blocks as a Pallas kernel for NVIDIA GPUs (Triton): scores stay on the chip.

A program owns the query heads of a key head, of some queries. It runs through the blocks before
them and keeps the best so far: of a tile of scores, as long as one of a row is above the least of
its list, the largest takes that one's place. Few are, once a list is full: of J scores in any
order, about K ln(J / K).

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

from reformax.ops.kernels.common import LOG2_E, LOWEST, launch, load, power_of_two, product
from reformax.ops.kernels.query_rows import ROWS, QueryRows, query_rows
from reformax.ops.parts.chosen_blocks import BEFORE, FIRST, OWN, in_three
from reformax.ops.parts.softmax import nonzero

# Blocks or summaries of a tile; parts of a number of float32 (`in_three`).
COLUMNS, N_PARTS, WARPS = 64, 3, 4


class Sizes(NamedTuple):
    """What the kernel knows before a call.

    Attributes:
      n_best: how many blocks a query chooses.
      block: positions of a block.
      stride, span: positions from one summary to the next, and of a summary. Equal to `block`
        where each block has one.
      weights: whether a block's score is its share of the softmax over all summaries, summed over
        the heads, and some are always chosen; or else the product itself.
    """

    n_best: int
    block: int
    stride: int
    span: int
    weights: bool

    @property
    def shares(self) -> dict[int, int]:
        """How many strides block j shares with summary `j block / stride + offset`, by offset."""
        per_block, per_summary = self.block // self.stride, self.span // self.stride
        pairs = [m - n for m in range(per_block) for n in range(per_summary)]
        return {offset: pairs.count(offset) for offset in sorted(set(pairs))}


class _Inputs(NamedTuple):
    q: tuple[Array, ...]  # [B, T, N, H] each; they are added up
    keys: tuple[Array, ...]  # [B, C, G, H] each; they are added up
    ids: Array | None  # [B, T]
    key_ids: Array | None  # [B, C]
    first: Array | None  # [B, T]: the first block that a query may choose


class _Queries(NamedTuple):
    """The queries of a tile, without their heads."""

    position: Array
    exists: Array
    own: Array
    first: Array | int


class _Best(NamedTuple):
    """The best blocks so far, in no order."""

    score: Float[Array, "Q K"]
    block: Int[Array, "Q K"]


class _Here(NamedTuple):
    """One program: its sequence and key head, and what it reads."""

    sizes: Sizes
    x: _Inputs
    batch: Any
    head: Any
    n_queries: int
    group: int

    @property
    def padded(self) -> int:
        """Rows of a query."""
        return ROWS // self.n_queries

    @property
    def scale(self) -> float:
        return LOG2_E / math.sqrt(self.x.q[0].shape[3])

    def rows(self, tile) -> QueryRows:
        first = tile * self.n_queries
        x, group, padded = self.x, self.group, self.padded
        return query_rows(x.q, x.ids, self.batch, self.head, first, group, padded)

    def queries(self, tile) -> _Queries:
        query = tile * self.n_queries + jnp.arange(self.n_queries, dtype=jnp.int32)
        exists = query < self.x.q[0].shape[1]
        query = jnp.where(exists, query, 0)
        own = lax.div(query, jnp.int32(self.sizes.block))[:, None]
        first = 0
        if self.x.first is not None:
            first = load(self.x.first.at[self.batch, query], exists, 0)[:, None]
        return _Queries(query, exists, own, first)

    def logits(self, rows: QueryRows, summary) -> Array:
        """Products with some summaries, minus infinity where a row sees none."""
        sizes, n_summaries = self.sizes, self.x.keys[0].shape[1]
        there = (summary >= 0) & (summary < n_summaries)
        end = summary * sizes.stride + (sizes.span - 1)
        mask = there[None, :] & (end[None, :] <= rows.position[:, None]) & rows.exists[:, None]
        if rows.ids is not None:
            view = self.x.key_ids.at[self.batch, jnp.where(there, summary, 0)]
            of_key = load(view, there, 0)
            mask = mask & (rows.ids[:, None] == of_key[None, :]) & (of_key != 0)[None, :]
        return jnp.where(mask, self._products(rows.q, summary, there), -jnp.inf)

    def _products(self, q: tuple[Array, ...], number, exists) -> Array:
        """Products exact to float32: of parts, those that have a say in its digits."""
        width = jnp.arange(q[0].shape[1], dtype=jnp.int32)[None, :]
        total = jnp.zeros((ROWS, number.shape[0]), jnp.float32)
        for i, keys in reversed(list(enumerate(self.x.keys))):  # small ones first
            mask = exists[:, None] & (width < keys.shape[3])
            view = keys.at[self.batch, jnp.where(exists, number, 0)[:, None], self.head, width]
            key = load(view, mask, 0.0)
            for part in reversed(q[: N_PARTS - i]):
                total += product(part, key, transpose_b=True)
        return total

    def sums(self, rows: QueryRows, last) -> tuple[Array, Array]:
        """The largest product of each row, and the sum of its softmax."""

        def count(i, state):
            top, total = state
            found = self.logits(rows, i * COLUMNS + jnp.arange(COLUMNS, dtype=jnp.int32))
            new = jnp.maximum(top, jnp.max(found, axis=1))
            weights = jnp.exp2((found - new[:, None]) * self.scale)
            return new, total * jnp.exp2((top - new) * self.scale) + jnp.sum(weights, axis=1)

        n = lax.div(last, jnp.int32(self.sizes.stride * COLUMNS)) + jnp.int32(1)
        start = jnp.full((ROWS,), LOWEST, jnp.float32), jnp.zeros((ROWS,), jnp.float32)
        return lax.fori_loop(jnp.int32(0), n, count, start)

    def shares(self, rows: QueryRows, queries: _Queries, sums, block) -> Array:
        """What some blocks are worth to each query by the weights of summaries."""
        sizes, (top, total) = self.sizes, sums
        share = jnp.zeros((ROWS, COLUMNS), jnp.float32)
        for offset, n_shared in sizes.shares.items():
            found = self.logits(rows, block * (sizes.block // sizes.stride) + offset)
            share += jnp.exp2((found - top[:, None]) * self.scale) * n_shared
        share = share / nonzero(total)[:, None]
        if self.padded > 1:
            share = jnp.sum(share.reshape(self.n_queries, self.padded, COLUMNS), axis=1)
        own, first, at = queries.own, queries.first, block[None, :]
        share = jnp.where(at == own - 1, BEFORE, share)
        share = jnp.where(at == first, FIRST, share)
        share = jnp.where(at == own, OWN, share)
        may = (at >= first) & (at <= own) & queries.exists[:, None]
        return jnp.where(may, share, -jnp.inf)

    def put(self, out, queries: _Queries, best: _Best) -> None:
        slot = jnp.arange(best.block.shape[1], dtype=jnp.int32)[None, :]
        place = jnp.where(queries.exists, queries.position, out.shape[2])[:, None]
        mask = queries.exists[:, None] & (slot < self.sizes.n_best)
        pltriton.store(out.at[self.batch, self.head, place, slot], best.block, mask=mask)


def _nothing(n_queries: int, n_best: int) -> _Best:
    """Empty lists. Slots behind their end are never the least."""
    shape = n_queries, power_of_two(n_best)
    slot = jnp.arange(shape[1], dtype=jnp.int32)[None, :]
    score = jnp.broadcast_to(jnp.where(slot < n_best, -jnp.inf, jnp.inf), shape)
    return _Best(score.astype(jnp.float32), jnp.full(shape, -1, jnp.int32))


def _insert(scores: Float[Array, "Q J"], block: Int[Array, " J"], best: _Best) -> _Best:
    """The best of the lists and of some more blocks."""
    slot = jnp.arange(best.block.shape[1], dtype=jnp.int32)[None, :]
    none = jnp.int32(2**30)

    def state(scores, best: _Best):
        """What may change, and whether a block is better than the least of its query's list."""
        largest, least = jnp.max(scores, axis=1), jnp.min(best.score, axis=1)
        return scores, best, largest, least, jnp.max((largest > least).astype(jnp.int32))

    def replace(now):
        scores, best, largest, least, _ = now
        largest, least = largest[:, None], least[:, None]
        at = jnp.min(jnp.where(scores == largest, block[None, :], none), axis=1)[:, None]
        to = jnp.min(jnp.where(best.score == least, slot, none), axis=1)[:, None]
        here = (slot == to) & (largest > least)
        best = _Best(jnp.where(here, largest, best.score), jnp.where(here, at, best.block))
        return state(jnp.where(block[None, :] == at, -jnp.inf, scores), best)

    return lax.while_loop(lambda now: now[-1] > 0, replace, state(scores, best))[1]


def _kernel(x: _Inputs, out, *, sizes: Sizes, group: int, n_queries: int):
    tile, head, batch = (pl.program_id(i) for i in range(3))
    here = _Here(sizes, x, batch, head, n_queries, group)
    rows, queries = here.rows(tile), here.queries(tile)
    last = jnp.max(rows.position)
    sums = here.sums(rows, last) if sizes.weights else None

    def step(i, best):
        block = i * COLUMNS + jnp.arange(COLUMNS, dtype=jnp.int32)
        if sizes.weights:
            scores = here.shares(rows, queries, sums, block)
        else:  # a row is a query
            scores = jnp.where(block[None, :] < queries.own, here.logits(rows, block), -jnp.inf)
        return _insert(scores, block, best)

    n = lax.div(last, jnp.int32(sizes.block * COLUMNS)) + jnp.int32(1)
    best = lax.fori_loop(jnp.int32(0), n, step, _nothing(n_queries, sizes.n_best))
    here.put(out, queries, best)


def choose(
    sizes: Sizes,
    interpret: bool,
    q: Float[Array, "B T N H"],
    keys: Float[Array, "B C G H"],
    ids: Int[Array, "B T"] | None = None,
    key_ids: Int[Array, "B C"] | None = None,
    first: Int[Array, "B T"] | None = None,
) -> Int[Array, "B G T K"]:
    """The blocks with the highest scores for each query, in no order; -1 is none.

    Products are exact to float32, of keys of float32 and queries of bfloat16 too.

    Args:
      sizes: what is known before the call.
      interpret: whether to run the kernel anywhere, slowly.
      q: queries.
      keys: the summaries, of one dtype with q or of float32. A key head serves N / G heads, which
        choose together where `sizes.weights`; or else N is G.
      ids, key_ids: segments of both; None is one.
      first: the first block that a query may choose; None: that of position 0.
    """
    n_batch, length, n_heads, _ = q.shape
    n_kv = keys.shape[2]
    group = n_heads // n_kv
    padded = 1 << (group - 1).bit_length()
    if padded > ROWS:
        raise NotImplementedError(
            f"q has {group} heads for each of the keys': expected at most {ROWS}, use impl='xla'"
        )
    n_queries = ROWS // padded
    # A product of float32 on the chip would be one multiplication after the other.
    narrow = jnp.bfloat16 if q.dtype == jnp.float32 else q.dtype
    queries, summaries = ((x,) if x.dtype == narrow else in_three(x, narrow) for x in (q, keys))
    return launch(
        functools.partial(_kernel, sizes=sizes, group=group, n_queries=n_queries),
        (_Inputs(queries, summaries, ids, key_ids, first),),
        jax.ShapeDtypeStruct((n_batch, n_kv, length, sizes.n_best), jnp.int32),
        grid=(-(-length // n_queries), n_kv, n_batch),
        num_warps=WARPS,
        num_stages=2,
        interpret=interpret,
        name="choose_blocks",
    )
