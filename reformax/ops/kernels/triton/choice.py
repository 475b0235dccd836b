"""The choice of blocks as a Pallas kernel for NVIDIA GPUs (Triton): scores stay on the chip.

A program owns some queries of a head. It runs through the blocks before them and keeps the best so
far: of a tile of scores, as long as one of a row is above the least of its list, the largest takes
that one's place. Few are, once a list is full: of C scores in any order, about K ln(C / K).

Letters as in `reformax.ops.moba`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from reformax.ops.kernels.triton.common import launch, load, matmul_in_parts, power_of_two
from reformax.ops.kernels.triton.group_rows import ROWS, GroupRows, group_rows
from reformax.ops.numerics.precision import in_three

# Blocks of a tile.
COLUMNS, WARPS = 64, 4


class ChoiceSizes(NamedTuple):
    """What the kernel knows before a call: K blocks of a query, L positions of a block."""

    n_best: int
    block: int


class _ChoiceInputs(NamedTuple):
    q: tuple[Array, ...]  # [B, T, N, H] each; they are added up
    means: tuple[Array, ...]  # [B, C, N, H] each; they are added up
    ids: Array | None  # [B, T]
    of_block: Array | None  # [B, C]


class _Best(NamedTuple):
    """The best blocks so far, in no order."""

    score: Float[Array, "I K"]
    block: Int[Array, "I K"]


class _ChoiceProgram(NamedTuple):
    """One program: its sequence and head, and what it reads."""

    sizes: ChoiceSizes
    x: _ChoiceInputs
    batch: Any
    head: Any

    def scores(self, rows: GroupRows, block: Int[Array, " J"]) -> Float[Array, "I J"]:
        """Products with some means, minus infinity where a query may not choose the block."""
        x, n_blocks = self.x, self.x.means[0].shape[1]
        own = lax.div(rows.position, jnp.int32(self.sizes.block))
        there = block < n_blocks
        mask = (block[None, :] < own[:, None]) & rows.exists[:, None] & there[None, :]
        if rows.ids is not None:
            ids = load(x.of_block.at[self.batch, jnp.where(there, block, 0)], there, 0)
            mask = mask & (rows.ids[:, None] == ids[None, :]) & (ids != 0)[None, :]
        return jnp.where(mask, self._products(rows.q, block, there), -jnp.inf)

    def _products(self, q: tuple[Array, ...], block, exists) -> Array:
        width = jnp.arange(q[0].shape[1], dtype=jnp.int32)[None, :]

        def read(means) -> Array:
            mask = exists[:, None] & (width < means.shape[3])
            view = means.at[self.batch, jnp.where(exists, block, 0)[:, None], self.head, width]
            return load(view, mask, 0.0)

        return matmul_in_parts(q, self.x.means, read)

    def put(self, out, rows: GroupRows, best: _Best) -> None:
        slot = jnp.arange(best.block.shape[1], dtype=jnp.int32)[None, :]
        place = jnp.where(rows.exists, rows.position, out.shape[2])[:, None]
        mask = rows.exists[:, None] & (slot < self.sizes.n_best)
        pltriton.store(out.at[self.batch, self.head, place, slot], best.block, mask=mask)


def _nothing(n_best: int) -> _Best:
    """Empty lists. Slots behind their end are never the least."""
    shape = ROWS, power_of_two(n_best)
    slot = jnp.arange(shape[1], dtype=jnp.int32)[None, :]
    score = jnp.broadcast_to(jnp.where(slot < n_best, -jnp.inf, jnp.inf), shape)
    return _Best(score.astype(jnp.float32), jnp.full(shape, -1, jnp.int32))


def _insert(scores: Float[Array, "I J"], block: Int[Array, " J"], best: _Best) -> _Best:
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
        program = (slot == to) & (largest > least)
        best = _Best(jnp.where(program, largest, best.score), jnp.where(program, at, best.block))
        return state(jnp.where(block[None, :] == at, -jnp.inf, scores), best)

    return lax.while_loop(lambda now: now[-1] > 0, replace, state(scores, best))[1]


def _kernel(x: _ChoiceInputs, out, *, sizes: ChoiceSizes):
    tile, head, batch = (pl.program_id(i) for i in range(3))
    program = _ChoiceProgram(sizes, x, batch, head)
    rows = group_rows(x.q, x.ids, batch, head, tile * ROWS, 1, 1)

    def step(i, best):
        block = i * COLUMNS + jnp.arange(COLUMNS, dtype=jnp.int32)
        return _insert(program.scores(rows, block), block, best)

    n = lax.div(jnp.max(rows.position), jnp.int32(sizes.block * COLUMNS)) + jnp.int32(1)
    best = lax.fori_loop(jnp.int32(0), n, step, _nothing(sizes.n_best))
    program.put(out, rows, best)


def choose(
    sizes: ChoiceSizes,
    interpret: bool,
    q: Float[Array, "B T N H"],
    means: Float[Array, "B C N H"],
    ids: Int[Array, "B T"] | None = None,
    of_block: Int[Array, "B C"] | None = None,
) -> Int[Array, "B N T K"]:
    """The earlier blocks with the highest scores for each query, in no order; -1 is none.

    Products are exact to float32, of means of float32 and queries of bfloat16 too.

    Args:
      sizes: what is known before the call.
      interpret: whether to run the kernel anywhere, slowly.
      q: queries.
      means: those of the blocks' keys, of one dtype with q or of float32.
      ids, of_block: segments of both; None is one.
    """
    n_batch, length, n_heads, _ = q.shape
    # A product of float32 on the chip would be one multiplication after the other.
    narrow = jnp.bfloat16 if q.dtype == jnp.float32 else q.dtype
    parts = ((x,) if x.dtype == narrow else in_three(x, narrow) for x in (q, means))
    return launch(
        functools.partial(_kernel, sizes=sizes),
        (_ChoiceInputs(*parts, ids, of_block),),
        jax.ShapeDtypeStruct((n_batch, n_heads, length, sizes.n_best), jnp.int32),
        grid=(-(-length // ROWS), n_heads, n_batch),
        num_warps=WARPS,
        num_stages=2,
        interpret=interpret,
        name="choose_blocks",
    )
