"""Candidates in the blocks whose mean keys have the highest scores, as HISA finds them.

Letters as in `base.py`, and A blocks that a query always keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from reformax.declared import SettingError, Size
from reformax.ops.calls.options import options
from reformax.ops.indexing.blocks import pooled_blocks
from reformax.ops.indexing.candidates.base import (
    Candidates,
    IndexedKeys,
    QueryChunk,
    without_repeats,
)
from reformax.ops.indexing.scores import gathered, scores, scores_of_gathered
from reformax.ops.masking.contiguous import ends_of_segment
from reformax.ops.masking.visibility import EARLIER_BLOCKS, Side, Visibility
from reformax.ops.numerics.best import best_of, taken
from reformax.ops.numerics.query_chunks import in_blocks, positions_in


class Level(NamedTuple):
    """The blocks of one size: the mean of a block's keys, and the segment that it is over."""

    means: Float[Array, "B C D"]
    ids: Int[Array, "B C"]


@options
class Pooled(Candidates):
    """The keys of the blocks whose mean keys have the highest scores, from coarse blocks to fine.

    HISA (arXiv 2603.28458) has one size. With several, a query scores all blocks of the first, and
    of each next size those within the blocks that it kept. It always keeps its own block, of each
    size, and the first and the last block that reach into its segment: their means are over a part
    of them. Segments are contiguous; of others, a block's mean is over the segment of its last
    token, and other segments do not find it.

    Args:
      block_sizes: positions of a block, each a multiple of the next; the paper has 128.
      n_blocks: blocks that a query keeps of each size, besides those that it always keeps.

    Time is `T^2 / block_sizes[0]` mean scores, and `T n_blocks` times the ratios of the sizes and
    the last size.
    """

    block_sizes: Sequence[Size] = (128,)
    n_blocks: Size = 64

    repeats: ClassVar[bool] = False

    def __post_init__(self):
        super().__post_init__()
        sizes = tuple(self.block_sizes)
        object.__setattr__(self, "block_sizes", sizes)
        if not sizes or any(a % b for a, b in zip(sizes, sizes[1:], strict=False)):
            raise SettingError(
                f"block_sizes is {sizes}: expected at least one size, each a multiple of the next"
            )

    def prepare(self, x: IndexedKeys) -> PooledKeys:
        levels = []
        for size in self.block_sizes:
            ids, means = pooled_blocks(x.keys[:, :, None], x.ids, size)
            levels.append(Level(means[:, :, 0], ids))
        return PooledKeys(tuple(levels), None if x.causal else ends_of_segment(x.ids))

    def n_numbers(self, x: IndexedKeys, n_searched: int, n_each: int) -> int:
        size_above, n_most = x.keys.shape[1], 0
        n_kept, size = 1, x.keys.shape[1]
        for size in self.block_sizes:
            n_blocks = n_kept * -(-size_above // size)
            keys = 0 if size_above == x.keys.shape[1] else x.keys.shape[2]
            n_most = max(n_most, n_blocks * (n_searched + 1 + keys))
            n_kept, size_above = min(self.n_blocks, n_blocks) + 3, size
        return max(n_most, n_kept * size * n_each)

    def of(self, prepared: PooledKeys, x: IndexedKeys, queries: QueryChunk) -> Int[Array, "B Q M"]:
        n_batch, n_queries = queries.ids.shape
        always = self._kept_always(prepared, queries)
        kept, above = None, 1
        for size, level in zip(self.block_sizes, prepared.levels, strict=True):
            n_blocks = level.means.shape[1]
            if kept is None:
                block = jnp.arange(n_blocks, dtype=jnp.int32)[None, None]
                ids = level.ids[:, None]
                mean_scores = scores(x.score, queries.index, level.means)
            else:
                child = jnp.arange(above // size, dtype=jnp.int32)[None, None, None]
                block = jnp.where(kept < 0, -above, kept)[..., None] * (above // size) + child
                block = block.reshape(n_batch, n_queries, -1)
                at = jnp.clip(block, 0, n_blocks - 1)
                means, ids = (gathered(y, at) for y in level)
                mean_scores = scores_of_gathered(x.score, queries.index, means)
            exists = (block >= 0) & (block < n_blocks)
            of_query = Side(queries.position[..., None] // size, queries.ids[..., None])
            rule = EARLIER_BLOCKS if x.causal else Visibility()
            ends = without_repeats(always // size)
            allowed = rule.sees(of_query, Side(block, ids, exists=exists))
            allowed &= (block[..., None] != ends[..., None, :]).all(axis=-1)
            best = best_of(mean_scores, allowed, min(self.n_blocks, mean_scores.shape[-1]))
            chosen = taken(jnp.broadcast_to(block, mean_scores.shape), best)
            kept = jnp.concatenate([ends, chosen], axis=-1)
            kept = jnp.sort(kept, axis=-1)  # of equal scores the first block within is kept next
            above = size
        return positions_in(kept, above)

    def start(self, x: IndexedKeys) -> Float[Array, "B C D"]:
        """The sum of the keys of each of the smallest blocks."""
        return in_blocks(x.token_keys, self.block_sizes[-1]).sum(axis=2)

    def advance(self, state, x: IndexedKeys, key, position) -> Float[Array, "B C D"]:
        row = jnp.arange(state.shape[0])
        return state.at[row, position // self.block_sizes[-1]].add(key[:, 0])

    def of_newest(self, state, x: IndexedKeys, queries: QueryChunk) -> Int[Array, "B 1 M"]:
        levels = []
        for size in self.block_sizes:
            sums = in_blocks(state, size // self.block_sizes[-1]).sum(axis=2)
            levels.append(Level(sums / size, jnp.ones(sums.shape[:2], jnp.int32)))
        return self.of(PooledKeys(tuple(levels), None), x, queries)

    def _kept_always(self, prepared: PooledKeys, queries: QueryChunk) -> Int[Array, "B Q A"]:
        """Positions whose blocks a query always keeps: its own, and the ends of its segment.

        A causal query needs no ends: the mean of a block before its own one is over the segment of
        the block's last token, which is the query's.
        """
        own = jnp.broadcast_to(queries.position, queries.ids.shape)[..., None]
        if prepared.ends is None:
            return own
        ends = (x[:, queries.position[0]][..., None] for x in prepared.ends)
        return jnp.concatenate([own, *ends], axis=-1)


class PooledKeys(NamedTuple):
    """The blocks of each size, and each position's first and last one of its segment."""

    levels: tuple[Level, ...]
    ends: tuple[Int[Array, "B S"], Int[Array, "B S"]] | None
