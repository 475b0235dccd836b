"""Groups queries by the blocks of keys that they chose, in tiles of queries of one block.

Lu et al. 2025 ("MoBA", sec. 2.3, algorithm 1). Where each of T queries chooses K of J blocks, at
most `T K / I + J` tiles of I queries are needed.

Letters besides those of `reformax.ops.base`: J blocks, K that a query chose, M tiles of I queries,
W parts of lists.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int


class ChosenTiles(NamedTuple):
    """Pairs of a query and a block that it chose, in tiles of one block each."""

    block: Int[Array, "B N M"]  # the block of each tile
    # The pairs in each tile's slots; query q with its n-th block is q K + n. -1: none.
    pair: Int[Array, "B N M I"]
    bounds: Int[Array, "B N J+1"]  # the first tile of each block, and the end
    # The slot of each query's K pairs among the M I slots of all tiles; -1 where a query has fewer.
    slot: Int[Array, "B N T K"]


def tiles(blocks: Int[Array, "B N T K"], n_blocks: int, n_rows: int) -> ChosenTiles:
    """The tiles, of `n_rows` queries each, of the blocks that queries chose; -1: none."""
    length, n_chosen = blocks.shape[2:]
    n_tiles = length * n_chosen // n_rows + n_blocks  # each block has at most one that is not full

    def of_head(blocks: Int[Array, "T K"]) -> ChosenTiles:
        block = jnp.where(blocks < 0, n_blocks, blocks).reshape(-1)
        number, n_slots = jnp.arange(block.size, dtype=jnp.int32), n_tiles * n_rows
        in_order, pair = lax.sort((block, number), num_keys=1, is_stable=True)
        count = jnp.zeros(n_blocks + 1, jnp.int32).at[block].add(1)
        tiles = -(-count // n_rows)
        end, tiles_end = jnp.cumsum(count), jnp.cumsum(tiles)
        slot = (tiles_end - tiles)[in_order] * n_rows + number - (end - count)[in_order]
        slot = jnp.where(in_order < n_blocks, slot, n_slots).astype(jnp.int32)
        pairs = jnp.full(n_slots, -1, jnp.int32).at[slot].set(pair, mode="drop")
        of_pair = jnp.zeros(block.size, jnp.int32).at[pair].set(slot)
        of_pair = jnp.where(of_pair < n_slots, of_pair, -1).reshape(length, n_chosen)
        bounds = jnp.pad(tiles_end[:n_blocks], (1, 0)).astype(jnp.int32)
        of_tile = _range_index(bounds, n_tiles)
        return ChosenTiles(of_tile, pairs.reshape(n_tiles, n_rows), bounds, of_pair)

    return jax.vmap(jax.vmap(of_head))(blocks)


def _range_index(bounds: Int[Array, " J+1"], n: int) -> Int[Array, " n"]:
    """The index of the range of `bounds` that each of 0 to n - 1 is in; at most the last one."""
    number = jnp.arange(n, dtype=jnp.int32)
    found = jnp.searchsorted(bounds[1:], number, side="right", method="scan_unrolled")
    return jnp.minimum(found, len(bounds) - 2).astype(jnp.int32)


def parts(
    bounds: Int[Array, "B N J+1"], n_tiles: int, size: int
) -> tuple[Int[Array, "3 B N W"], Int[Array, "B N J+1"]]:
    """Cuts each block's list of tiles into parts of at most `size` tiles.

    Returns:
      The block, the first tile and the end of each part, the latter two 0 where the part does not
      exist. Then the first part of each block, and the end.
    """
    n_parts = n_tiles // size + bounds.shape[2] - 1

    def of_head(bounds):
        ends = jnp.cumsum(-(-jnp.diff(bounds) // size))
        first = jnp.pad(ends, (1, 0)).astype(jnp.int32)
        number, block = jnp.arange(n_parts, dtype=jnp.int32), _range_index(first, n_parts)
        start = bounds[block] + (number - first[block]) * size
        end = jnp.minimum(start + size, bounds[block + 1])
        exists = number < first[-1]
        return jnp.stack([block, jnp.where(exists, start, 0), jnp.where(exists, end, 0)]), first

    each, first = jax.vmap(jax.vmap(of_head))(bounds)
    return jnp.moveaxis(each, 2, 0), first
