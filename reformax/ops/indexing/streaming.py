"""The best keys of each query, with scores in memory for one tile of queries and keys at a time.

Tiles of keys follow each other by position. The best keys so far come first in the merge with the
next tile, so that of equal scores the first position is chosen, as in one row of all scores
(StreamIndex, arXiv 2605.02568). A causal chunk of queries visits no later tile.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from reformax import devices
from reformax.ops.indexing.rule import ChoiceRule
from reformax.ops.indexing.scores import IndexQueries, Score, scores
from reformax.ops.masking.visibility import Side, Visibility
from reformax.ops.numerics.best import best_of, taken, with_nan_highest
from reformax.ops.numerics.query_chunks import cut_chunks, join_chunks

# Numbers of a chunk's scores in memory at a time, and the fewest keys of a tile.
AT_A_TIME, TILE = 2**22, 1024


def best_keys(
    score: Score,
    rule: ChoiceRule,
    n_best: int,
    index: IndexQueries,
    keys: Float[Array, "B S D"],
    queries: Side,
    ids: Int[Array, "B S"],
    every: tuple[Any, int] = (0, 1),
) -> tuple[Float[Array, "B T K"], Int[Array, "B T K"]]:
    """The highest scores of each query and the positions of their keys, as `lax.top_k` orders them.

    Where there is none, they are minus infinity and -1. NaN is infinity.

    Args:
      score, rule: how keys are scored, and which ones a query may choose.
      n_best: K.
      index: of the queries.
      keys: of the keys.
      queries: positions `[1 or B, T]`, and segments `[B, T]`.
      ids: the segments of the keys.
      every: `(i, n)`: keys have the positions i, i + n, i + 2n and so on.
    """
    (n_batch, length), n_keys, (offset, stride) = index.weights.shape[:2], keys.shape[1], every
    size = min(max(TILE, n_best), n_keys)
    n_rows = max(AT_A_TIME // (n_batch * (index.weights.shape[2] + 2) * (size + n_best)), 1)
    n_rows = min(n_rows, length)
    tiles = tuple(cut_chunks(x, size) for x in (keys, ids))
    take = functools.partial(lax.dynamic_index_in_dim, axis=0, keepdims=False)

    def best_of_chunk(chunk):
        index, position, query_ids = IndexQueries(*chunk[:2]), *chunk[2:]
        query = Side(position[..., None], query_ids[..., None])

        def add_tile(i, found):
            best, best_position = found
            tile_keys, tile_ids = (take(x, i) for x in tiles)
            number = i * size + jnp.arange(size, dtype=jnp.int32)[None, None]
            key_position = offset + number * stride
            key = Side(key_position, tile_ids[:, None], exists=number < n_keys)
            found_scores = with_nan_highest(scores(score, index, tile_keys))
            tile = jnp.where(rule.allows(query, key), found_scores, -jnp.inf)
            both = jnp.concatenate([best, tile], axis=-1)
            key_position = jnp.broadcast_to(key_position, tile.shape)
            positions = jnp.concatenate([best_position, key_position], axis=-1)
            at = best_of(both, True, n_best)
            return taken(both, at, -jnp.inf), taken(positions, at)

        shape = n_batch, n_rows, n_best
        none = jnp.full(shape, -jnp.inf, keys.dtype), jnp.full(shape, -1, jnp.int32)
        last = jnp.max(position)
        end = Visibility(rule.causal).bounds(last, last + 1).end
        end = n_keys if end is None else jnp.minimum(-((offset - end) // stride), n_keys)
        none = devices.varying_as((keys, *chunk), none)
        return lax.fori_loop(0, -(-end // size), add_tile, none)

    arrays = *index, queries.position, queries.segment_id
    chunks = tuple(cut_chunks(x, n_rows) for x in arrays)
    best, chosen = lax.map(best_of_chunk, chunks)
    return join_chunks(best, length), join_chunks(chosen, length)


def best_over(
    axis: str, best: Float[Array, "B T K"], chosen: Int[Array, "B T K"]
) -> Int[Array, "B T K"]:
    """The positions of the highest of all devices' `best_keys`, in the same order."""
    n_best = chosen.shape[2]
    both = (lax.all_gather(x, axis, axis=2, tiled=True) for x in (-best, chosen))
    return lax.sort(tuple(both), dimension=2, num_keys=2)[1][..., :n_best]
