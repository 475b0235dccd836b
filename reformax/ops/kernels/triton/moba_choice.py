"""MoBA's choice of blocks as a Pallas kernel for NVIDIA GPUs (Triton). Scores stay on the chip.

A program has a tile of queries of a head. It loops over the earlier blocks and keeps a list of the
best K of each query. While a tile has a score above the lowest of its query's list, the largest
score replaces that one. Such scores are few once the list is full: about K ln(C / K) of C scores in
random order.

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

from reformax.ops.kernels.triton.common import column, hide, launch, line, load, tile_side
from reformax.ops.kernels.triton.group_rows import ROWS, GroupRows, ScoredInputs, group_rows
from reformax.ops.masking.visibility import EARLIER_BLOCKS, Side
from reformax.ops.numerics.best import with_nan_highest

# Blocks of a tile.
COLUMNS, WARPS = 64, 4


class ChoiceSizes(NamedTuple):
    """The kernel's static settings: K blocks of a query, L positions of a block."""

    n_best: int
    block: int


class _Best(NamedTuple):
    """The best blocks so far, in no order."""

    score: Float[Array, "I K"]
    block: Int[Array, "I K"]


class _ChoiceProgram(NamedTuple):
    """One program: its sequence and head, and the arrays that it reads."""

    sizes: ChoiceSizes
    x: ScoredInputs
    batch: Any
    head: Any

    def scores(self, rows: GroupRows, block: Int[Array, " J"]) -> Float[Array, "I J"]:
        """Products with the means, minus infinity where a query may not choose the block."""
        x, n_blocks = self.x, self.x.keys[0].shape[1]
        query_block = lax.div(rows.position, jnp.int32(self.sizes.block))
        exists = block < n_blocks
        ids = None
        if rows.ids is not None:
            ids = load(x.key_ids.at[self.batch, jnp.where(exists, block, 0)], exists, 0)
        query, key = Side(query_block, rows.ids, rows.exists), Side(block, ids, exists)
        mask = EARLIER_BLOCKS.sees(column(query), line(key))
        return hide(with_nan_highest(x.products(rows, self.batch, self.head, block, exists)), mask)

    def put(self, out, rows: GroupRows, best: _Best) -> None:
        slot = jnp.arange(best.block.shape[1], dtype=jnp.int32)[None, :]
        position = jnp.where(rows.exists, rows.position, out.shape[2])[:, None]
        mask = rows.exists[:, None] & (slot < self.sizes.n_best)
        pltriton.store(out.at[self.batch, self.head, position, slot], best.block, mask=mask)


def _nothing(n_best: int) -> _Best:
    """Empty lists. Slots from `n_best` on are never the lowest."""
    shape = ROWS, tile_side(n_best)
    slot = jnp.arange(shape[1], dtype=jnp.int32)[None, :]
    score = jnp.broadcast_to(jnp.where(slot < n_best, -jnp.inf, jnp.inf), shape)
    return _Best(score.astype(jnp.float32), jnp.full(shape, -1, jnp.int32))


def _insert(scores: Float[Array, "I J"], block: Int[Array, " J"], best: _Best) -> _Best:
    """Inserts blocks into the lists of their queries, where they are among the best."""
    slot = jnp.arange(best.block.shape[1], dtype=jnp.int32)[None, :]
    none = jnp.int32(2**30)

    def state(scores, best: _Best):
        """The loop's carry; the last entry: whether a block exceeds its query's lowest."""
        largest, least = jnp.max(scores, axis=1), jnp.min(best.score, axis=1)
        return scores, best, largest, least, jnp.max((largest > least).astype(jnp.int32))

    def replace(carry):
        scores, best, largest, least, _ = carry
        largest, least = largest[:, None], least[:, None]
        chosen = jnp.min(jnp.where(scores == largest, block[None, :], none), axis=1)[:, None]
        target = jnp.min(jnp.where(best.score == least, slot, none), axis=1)[:, None]
        replaced = (slot == target) & (largest > least)
        best = _Best(
            jnp.where(replaced, largest, best.score), jnp.where(replaced, chosen, best.block)
        )
        return state(jnp.where(block[None, :] == chosen, -jnp.inf, scores), best)

    return lax.while_loop(lambda carry: carry[-1] > 0, replace, state(scores, best))[1]


def _kernel(x: ScoredInputs, out, *, sizes: ChoiceSizes):
    tile, head, batch = (pl.program_id(i) for i in range(3))
    program = _ChoiceProgram(sizes, x, batch, head)
    rows = group_rows(x.q, x.ids, batch, head, tile * ROWS, 1, 1)

    def step(i, best):
        block = i * COLUMNS + jnp.arange(COLUMNS, dtype=jnp.int32)
        return _insert(program.scores(rows, block), block, best)

    n = lax.div(jnp.max(rows.position), jnp.int32(sizes.block * COLUMNS)) + jnp.int32(1)
    best = lax.fori_loop(jnp.int32(0), n, step, _nothing(sizes.n_best))
    program.put(out, rows, best)


def choose_blocks(
    sizes: ChoiceSizes,
    interpret: bool,
    q: Float[Array, "B T N H"],
    means: Float[Array, "B C N H"],
    ids: Int[Array, "B T"] | None = None,
    block_ids: Int[Array, "B C"] | None = None,
) -> Int[Array, "B N T K"]:
    """The earlier blocks with the highest scores for each query, in no order; -1 is none.

    Products are exact to float32, also those of float32 means with bfloat16 queries.

    Args:
      means: means of the blocks' keys, in the dtype of q or in float32.
      ids, block_ids: segments of queries and of blocks; None: one segment.
    """
    n_batch, length, n_heads, _ = q.shape
    return launch(
        functools.partial(_kernel, sizes=sizes),
        (ScoredInputs.of(q, means, ids, block_ids),),
        jax.ShapeDtypeStruct((n_batch, n_heads, length, sizes.n_best), jnp.int32),
        grid=(-(-length // ROWS), n_heads, n_batch),
        num_warps=WARPS,
        num_stages=2,
        interpret=interpret,
        name="choose_blocks",
    )
