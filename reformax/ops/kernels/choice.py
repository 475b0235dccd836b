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
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from reformax.ops.kernels.common import LOG2_E, LOWEST, launch, load, power_of_two
from reformax.ops.parts.chosen_blocks import BEFORE, FIRST, OWN, in_three
from reformax.ops.parts.softmax import nonzero

# Rows of a tile, and blocks or summaries.
ROWS, COLUMNS = 128, 64


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
    q: Array  # [B, T, N, H]
    keys: tuple[Array, ...]  # [B, C, G, H] each; they are added up
    ids: Array | None  # [B, T]
    key_ids: Array | None  # [B, C]
    first: Array | None  # [B, T]: the first block that a query may choose


class _Rows(NamedTuple):
    position: Array
    ids: Array | None
    exists: Array


def _products(x: _Inputs, q, batch, head, number, exists) -> Array:
    """Products of the rows and some keys, exact to float32."""
    width = jnp.arange(q.shape[1], dtype=jnp.int32)[None, :]
    total = jnp.zeros((q.shape[0], number.shape[0]), jnp.float32)
    for keys in x.keys:
        mask = exists[:, None] & (width < keys.shape[3])
        view = keys.at[batch, jnp.where(exists, number, 0)[:, None], head, width]
        exact = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
        dims = (((1,), (1,)), ((), ()))
        key = load(view, mask, 0.0)
        total += lax.dot_general(q, key, dims, exact, preferred_element_type=jnp.float32)
    return total


def _kernel(x: _Inputs, out, *, sizes: Sizes, group: int, n_queries: int):
    tile, head, batch = (pl.program_id(i) for i in range(3))
    size, width = x.q.shape[3], power_of_two(x.q.shape[3])
    padded = ROWS // n_queries  # rows of a query
    row = jnp.arange(ROWS, dtype=jnp.int32)
    member = lax.rem(row, jnp.int32(padded))
    position = tile * n_queries + lax.div(row, jnp.int32(padded))
    exists = (member < group) & (position < x.q.shape[1])
    position = jnp.where(exists, position, 0)
    number = jnp.arange(width, dtype=jnp.int32)[None, :]
    heads = jnp.where(exists, head * group + member, 0)
    view = x.q.at[batch, position[:, None], heads[:, None], number]
    q = load(view, exists[:, None] & (number < size), 0.0)
    ids = None if x.ids is None else load(x.ids.at[batch, position], exists, 0)
    rows = _Rows(position, ids, exists)
    last = jnp.max(position)
    scale = LOG2_E / math.sqrt(size)

    def logits(summary):
        """Products with some summaries, minus infinity where a row sees none."""
        there = (summary >= 0) & (summary < x.keys[0].shape[1])
        end = summary * sizes.stride + (sizes.span - 1)
        mask = there[None, :] & (end[None, :] <= rows.position[:, None]) & rows.exists[:, None]
        if x.ids is not None:
            of_key = load(x.key_ids.at[batch, jnp.where(there, summary, 0)], there, 0)
            mask = mask & (rows.ids[:, None] == of_key[None, :]) & (of_key != 0)[None, :]
        found = _products(x, q, batch, head, summary, there)
        return jnp.where(mask, found, -jnp.inf)

    columns = jnp.arange(COLUMNS, dtype=jnp.int32)
    top = total = None
    if sizes.weights:

        def count(i, state):
            top, total = state
            found = logits(i * COLUMNS + columns)
            new = jnp.maximum(top, jnp.max(found, axis=1))
            weights = jnp.exp2((found - new[:, None]) * scale)
            return new, total * jnp.exp2((top - new) * scale) + jnp.sum(weights, axis=1)

        n = lax.div(last, jnp.int32(sizes.stride * COLUMNS)) + jnp.int32(1)
        start = jnp.full((ROWS,), LOWEST, jnp.float32), jnp.zeros((ROWS,), jnp.float32)
        top, total = lax.fori_loop(jnp.int32(0), n, count, start)

    # Of each query, not of each of its heads.
    query = tile * n_queries + jnp.arange(n_queries, dtype=jnp.int32)
    there = query < x.q.shape[1]
    query = jnp.where(there, query, 0)
    own = lax.div(query, jnp.int32(sizes.block))[:, None]
    first = 0 if x.first is None else load(x.first.at[batch, query], there, 0)[:, None]

    def scores(block):
        if not sizes.weights:  # a row is a query: `padded` is 1
            return jnp.where(block[None, :] < own, logits(block), -jnp.inf)
        share = jnp.zeros((ROWS, COLUMNS), jnp.float32)
        for offset, n_shared in sizes.shares.items():
            found = logits(block * (sizes.block // sizes.stride) + offset)
            weights = jnp.exp2((found - top[:, None]) * scale) / nonzero(total)[:, None]
            share += weights * n_shared
        if padded > 1:
            share = jnp.sum(share.reshape(n_queries, padded, COLUMNS), axis=1)
        at = block[None, :]
        share = jnp.where(at == own - 1, BEFORE, share)
        share = jnp.where(at == first, FIRST, share)
        share = jnp.where(at == own, OWN, share)
        return jnp.where((at >= first) & (at <= own) & there[:, None], share, -jnp.inf)

    length = power_of_two(sizes.n_best)
    slot = jnp.arange(length, dtype=jnp.int32)[None, :]

    def insert(i, state):
        block = i * COLUMNS + columns

        def above(found, best):
            return jnp.max(found, axis=1) > jnp.min(best, axis=1)

        def replace(state):
            found, best, chosen, _ = state
            largest, least = jnp.max(found, axis=1)[:, None], jnp.min(best, axis=1)[:, None]
            none = jnp.int32(2**30)
            at = jnp.min(jnp.where(found == largest, block[None, :], none), axis=1)[:, None]
            to = jnp.min(jnp.where(best == least, slot, none), axis=1)[:, None]
            here = (slot == to) & (largest > least)
            best, chosen = jnp.where(here, largest, best), jnp.where(here, at, chosen)
            found = jnp.where(block[None, :] == at, -jnp.inf, found)
            return found, best, chosen, jnp.max(above(found, best).astype(jnp.int32))

        found = scores(block)
        state = found, *state, jnp.max(above(found, state[0]).astype(jnp.int32))
        return lax.while_loop(lambda state: state[3] > 0, replace, state)[1:3]

    # Slots behind the list are never the least.
    empty = jnp.where(slot < sizes.n_best, -jnp.inf, jnp.inf)
    best = jnp.broadcast_to(empty, (n_queries, length)).astype(jnp.float32)
    n = lax.div(last, jnp.int32(sizes.block * COLUMNS)) + jnp.int32(1)
    chosen = jnp.full((n_queries, length), -1, jnp.int32)
    _, chosen = lax.fori_loop(jnp.int32(0), n, insert, (best, chosen))
    place = jnp.where(there, query, out.shape[2])[:, None]
    mask = there[:, None] & (slot < sizes.n_best)
    pltriton.store(out.at[batch, head, place, slot], chosen, mask=mask)


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
    parts = (keys,) if keys.dtype == q.dtype else in_three(keys, q.dtype)
    return launch(
        functools.partial(_kernel, sizes=sizes, group=group, n_queries=n_queries),
        (_Inputs(q, parts, ids, key_ids, first),),
        jax.ShapeDtypeStruct((n_batch, n_kv, length, sizes.n_best), jnp.int32),
        grid=(-(-length // n_queries), n_kv, n_batch),
        num_warps=4,
        num_stages=2,
        interpret=interpret,
        name="choose_blocks",
    )
