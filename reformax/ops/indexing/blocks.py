"""Blocks of positions as what a query chooses: their mean keys, and those complete up to a query.

Letters besides those of `reformax.ops.base`: C blocks of `size` positions, Q queries of a chunk, K
chosen blocks, or their positions.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from reformax.ops.calls.dispatch import INTERPRETED
from reformax.ops.indexing.rule import ChoiceRule
from reformax.ops.indexing.scores import IndexQueries, Score, scores
from reformax.ops.indexing.streaming import best_keys
from reformax.ops.masking.visibility import CAUSAL, Side, Visibility, is_token
from reformax.ops.numerics.best import best_of
from reformax.ops.numerics.precision import IndexDtype, accum_dtype
from reformax.ops.numerics.query_chunks import in_blocks, positions_in


def pooled_blocks(
    k: Float[Array, "B T N H"], ids: Int[Array, "B T"], size: int
) -> tuple[Int[Array, "B C"], Float[Array, "B C N H"]]:
    """The segment of each block's last token, and the mean of the block's keys of that segment."""
    keys, ids = in_blocks(k.astype(accum_dtype(k.dtype)), size), in_blocks(ids, size)
    last = jnp.max(jnp.where(is_token(ids), jnp.arange(ids.shape[2])[None, None], 0), axis=2)
    block_ids = jnp.take_along_axis(ids, last[..., None], axis=2)
    included = Visibility().sees(Side(None, block_ids), Side(None, ids))
    count = jnp.maximum(included.sum(axis=2), 1).astype(keys.dtype)
    key_sum = jnp.where(included[..., None, None], keys, 0).sum(axis=2)
    return block_ids[..., 0], key_sum / count[..., None, None]


def newest_block(position: Int[Array, "*d"], size: int) -> Int[Array, "*d"]:
    """The last complete block at a position; -1 before the first."""
    return (position + 1) // size - 1


def best_blocks(
    score: Score,
    dtype: IndexDtype,
    size: int,
    n_best: int,
    index: IndexQueries,
    keys: Float[Array, "B C D"],
    queries: Side,
    block_ids: Int[Array, "B C"],
    impl: str,
    packed: bool,
) -> Int[Array, "B T K"]:
    """The numbers of the complete blocks with the highest scores; -1 is none.

    Args:
      score, dtype: how blocks are scored.
      size: positions of a block.
      n_best: K.
      index, keys: of the queries, and of the blocks.
      queries: positions `[1 or B, T]`, and segments `[B, T]`; kernels take positions from 0 on.
      block_ids: the segments of the blocks.
      impl: of `choose_impl`; kernels return the numbers in order.
      packed: whether there are several segments, or padding.
    """
    if impl == "xla":
        side = queries._replace(position=newest_block(queries.position, size))
        rule = ChoiceRule(causal=True)
        return best_keys(score, rule, n_best, index, keys, side, block_ids)[1]
    from reformax.ops.kernels.triton.indexer import choose_positions

    masks = (queries.segment_id, block_ids) if packed else (None, None)
    interpret = impl == INTERPRETED
    return choose_positions(n_best, True, interpret, *index, keys, *masks, size, dtype)


def best_of_newest(
    score: Score,
    size: int,
    n_best: int,
    index: IndexQueries,
    keys: Float[Array, "B C D"],
    position: Int[Array, " B"],
) -> Int[Array, "B K"]:
    """`best_blocks` of one query of each row, which sees all segments."""
    block = jnp.arange(keys.shape[1], dtype=jnp.int32)[None, None]
    newest = newest_block(position, size)[:, None, None]
    allowed = CAUSAL.sees(Side(newest), Side(block))
    return best_of(scores(score, index, keys), allowed, n_best)[:, 0]


# Choices by position: those of chosen blocks, and then those of a query's own block so far.


def positions_of(
    blocks: Int[Array, "B Q C"], position: Int[Array, "#B Q"], size: int
) -> Int[Array, "B Q K"]:
    """The positions of chosen blocks, and of each query's own one if it is not complete."""
    own = (newest_block(position, size) + 1)[..., None] * size
    own = own + jnp.arange(size - 1, dtype=jnp.int32)[None, None]
    own = jnp.where(own <= position[..., None], own, -1)
    own = jnp.broadcast_to(own, (*blocks.shape[:2], own.shape[2]))
    return jnp.concatenate([positions_in(blocks, size), own], axis=-1)


def in_parts(
    chosen: Int[Array, "B T K"], size: int
) -> tuple[Int[Array, "B T _"], Int[Array, "B T _"]]:
    """The positions of chosen blocks and of the query's own block, from `positions_of`."""
    n_in_blocks = chosen.shape[2] - (size - 1)
    return chosen[..., :n_in_blocks], chosen[..., n_in_blocks:]
