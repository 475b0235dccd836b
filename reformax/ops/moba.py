"""Mixture of block attention: a query sees its block and the blocks with the best mean keys.

Lu et al. 2025 ("MoBA: Mixture of Block Attention for Long-Context LLMs", sec. 2.2): keys are cut
into blocks, a block's score is the product of the query and the mean of the block's keys (eq. 6),
and the softmax is over the keys of the blocks with the highest scores. They always include the
query's block, and no later ones. The choice of blocks has no gradient.

Queries are sorted by the blocks that they chose, so that each block meets tiles of the queries that
see it (sec. 2.3, algorithm 1). Time is T * top_k * block_size for the softmax and T^2 / block_size
for the scores; memory is T * top_k.

Letters besides those of `reformax.ops.base`: C blocks, L positions in a block, K blocks that a
query sees, M tiles of I queries and one block.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from reformax.declared import Size
from reformax.ops.base import AttentionOp, options
from reformax.ops.calls.call import Call
from reformax.ops.calls.dispatch import KERNELS, compute_by
from reformax.ops.calls.heads import repeat_heads
from reformax.ops.calls.obstacles import group_obstacles
from reformax.ops.decoding.cache import KeyValues, add_to_ring, attend_to, fill_ring
from reformax.ops.indexing.blocks import pooled_blocks
from reformax.ops.masking.masks import ids_or_ones
from reformax.ops.masking.padding import tokens_only
from reformax.ops.masking.visibility import CAUSAL, EARLIER_BLOCKS, Side
from reformax.ops.numerics.best import best_of
from reformax.ops.numerics.precision import accum_dtype, in_three, product
from reformax.ops.numerics.query_chunks import (
    by_chunks,
    in_blocks,
    join_chunks,
    positions,
    positions_in,
)
from reformax.ops.softmax.chosen_blocks import ChosenTiles, tiles
from reformax.ops.softmax.gathered import gather_rows, gathered_softmax
from reformax.ops.softmax.online import Softmax

# Queries whose scores are in memory at a time.
SCORED_QUERIES = 1024
# Queries of a kernel's tile, by the bytes of the dtype, and keys.
QUERIES, KEYS = {2: 128, 4: 32}, 64


@options
class moba(AttentionOp):
    """Causal attention to a query's block and to the best of the earlier blocks.

    It is dense attention where `top_k` is at least the number of blocks. Blocks are at fixed
    positions of the row. In packed rows, the mean of a block is over the segment of its last token,
    and queries of other segments do not choose the block: if segments are contiguous, only that
    segment continues after the block.

    Args:
      block_size: positions in a block; 512 in the paper's sec. 3.1.
      top_k: blocks that a query sees, including its own; 3 in sec. 3.1.
      impl: `"xla"` runs everywhere. `"pallas"` is a kernel for NVIDIA GPUs of Ampere or later and
        heads of 128 or less. `"auto"` takes the kernel where it computes the same function.

    Raises:
      ValueError: a number below 1, an unknown `impl`.
      NotImplementedError: at the call, when `"pallas"` is asked for what it cannot do.
    """

    block_size: Size = 512
    top_k: Size = 3
    impl: str = "auto"

    causality = "only"
    shards = ("heads",)
    chooses_keys = True
    _grouped = True
    _impls = KERNELS

    def _plan(self, call, params, q, k) -> Int[Array, "B N T K-1"]:
        """The earlier blocks that each query chooses."""
        q, k, segment_ids = lax.stop_gradient(q), lax.stop_gradient(k), call.segment_ids
        n_batch, length, n_heads, _ = q.shape
        ids = ids_or_ones(segment_ids, q)
        size = min(self.block_size, length)
        block_ids, means = pooled_blocks(tokens_only(k, ids), ids, size)
        (means,) = repeat_heads(q, means)
        n_best = min(self.top_k, means.shape[1]) - 1
        if n_best == 0:
            return jnp.zeros((n_batch, n_heads, length, 0), jnp.int32)

        def in_kernels(interpret: bool) -> Int[Array, "B N T K-1"]:
            from reformax.ops.kernels.triton import moba_choice as kernel

            sizes = kernel.ChoiceSizes(n_best, size)
            masks = () if segment_ids is None else (ids, block_ids)
            return kernel.choose_blocks(sizes, interpret, tokens_only(q, ids), means, *masks)

        def best(q, ids, position):  # [B, Q, N, H], [B, Q], [1, Q]
            block = jnp.arange(means.shape[1])[None, None]
            query = Side((position // size)[..., None], ids[..., None])
            allowed = EARLIER_BLOCKS.sees(query, Side(block, block_ids[:, None]))
            return best_of(_products(q, means), allowed[:, None], n_best)

        def in_arrays() -> Int[Array, "B N T K-1"]:
            queries = tokens_only(q, ids), ids, positions(length)
            chosen = by_chunks(best, 1, *queries, at_a_time=n_batch * SCORED_QUERIES)
            return join_chunks(chosen, length, axis=2)

        obstacles = group_obstacles(q, k, None)
        return compute_by(self.impl, in_arrays, pallas=(obstacles, in_kernels))

    def _apply(self, call, params, q, k, v, plan):
        length, size = q.shape[1], min(self.block_size, q.shape[1])

        def in_arrays() -> Float[Array, "B T N V"]:
            arrays = q, *repeat_heads(q, k, v)
            return _in_arrays(call, _tiles(plan, size, size), size, *arrays)

        def in_kernels(interpret: bool) -> Float[Array, "B T N V"]:
            from reformax.ops.kernels.triton import moba as kernel
            from reformax.ops.kernels.triton.common import tile_side

            n_rows = min(QUERIES[q.dtype.itemsize], tile_side(length))
            found = _tiles(plan, size, n_rows)
            n_keys = min(KEYS, tile_side(size))
            sizes = kernel.MobaSizes(size, plan.shape[3] + 1, n_keys, call.dropout, call.logits)
            lists = found.block, found.pair, found.bounds, found.slot >= 0
            x = kernel.MobaInputs(q, k, v, call.segment_ids, call.seed, *lists)
            return kernel.attend(sizes, interpret, x)

        obstacles = group_obstacles(q, k, v, call.logits)
        return compute_by(self.impl, in_arrays, pallas=(obstacles, in_kernels))

    def _init_cache(self, call, params, q, k, v, plan) -> MobaCache:
        memory = fill_ring(k, v, call.lengths, call.length)  # zeros where there is no position yet
        keys = jnp.swapaxes(memory.keys, 1, 2).astype(accum_dtype(k.dtype))
        blocks = in_blocks(keys, min(self.block_size, call.length))
        return MobaCache(memory, jnp.swapaxes(blocks.sum(axis=2), 1, 2))

    def _step(self, call, params, q, k, v, cache: MobaCache):
        position = call.position
        memory = add_to_ring(cache.memory, k, v, position)
        capacity, n_blocks = memory.keys.shape[2], cache.sums.shape[2]
        size = min(self.block_size, capacity)
        query_block = (position // size).astype(jnp.int32)
        new = k[:, 0].astype(cache.sums.dtype)
        sums = cache.sums.at[jnp.arange(q.shape[0]), :, query_block].add(new)

        n_rows, n_heads, group = q.shape[0], q.shape[2], q.shape[2] // k.shape[2]
        query = q[:, 0].astype(sums.dtype).reshape(n_rows, -1, group, q.shape[3])
        scores = jnp.einsum("bgmh,bgch->bgmc", query, sums / size, precision=lax.Precision.HIGHEST)
        scores = scores.reshape(n_rows, n_heads, -1)
        block = Side(jnp.arange(n_blocks, dtype=jnp.int32)[None, None])
        allowed = EARLIER_BLOCKS.sees(Side(query_block[:, None, None]), block)
        chosen = best_of(scores, allowed, min(self.top_k, n_blocks) - 1)
        query_block = jnp.broadcast_to(query_block[:, None, None], (*chosen.shape[:2], 1))
        blocks = jnp.concatenate([query_block, chosen.astype(jnp.int32)], axis=-1)
        key = positions_in(blocks, size)
        mask = CAUSAL.sees(Side(position[:, None, None]), Side(key, exists=key >= 0))
        row, head = jnp.arange(n_rows)[:, None, None], jnp.arange(n_heads)[None, :, None] // group
        keys, values = (x[row, head, jnp.clip(key, 0, capacity - 1)] for x in memory)
        out = attend_to(call, q, keys, values, mask, self.impl)
        return out, MobaCache(memory, sums)


def _products(q: Float[Array, "B Q N H"], means: Float[Array, "B C N H"]) -> Array:
    """Products exact to float32, `[B, N, Q, C]`."""
    axes = "btnh,bcnh->bntc"
    if q.dtype == means.dtype or jax.default_backend() == "cpu":
        exact = dict(precision=lax.Precision.HIGHEST, preferred_element_type=means.dtype)
        return jnp.einsum(axes, q.astype(means.dtype), means, **exact)
    return sum(product(axes, q, part, q.dtype) for part in in_three(means, q.dtype))


def _tiles(chosen: Int[Array, "B N T K-1"], size: int, n_rows: int) -> ChosenTiles:
    """The tiles, of `n_rows` queries and a block of `size` keys each."""
    length = chosen.shape[2]
    query_block = jnp.arange(length, dtype=jnp.int32) // size
    query_block = jnp.broadcast_to(query_block[None, None, :, None], (*chosen.shape[:3], 1))
    return tiles(
        jnp.concatenate([query_block, chosen.astype(jnp.int32)], axis=-1),
        -(-length // size),
        n_rows,
    )


def _in_arrays(call: Call, tiles: ChosenTiles, size: int, q, k, v) -> Float[Array, "B T N V"]:
    """The op in array operations, in a loop over the tiles of all sequences and heads."""
    n_batch, length, n_heads, _ = q.shape
    dtype = accum_dtype(q.dtype, v.dtype)
    query = jnp.where(tiles.pair < 0, -1, tiles.pair // tiles.slot.shape[3])
    ids = ids_or_ones(call.segment_ids, q)

    # Arrays by tile, with the axis of tiles in front; [M, B, N, L, ...].
    def queries_by_tile(x: Array) -> Array:  # of [B, N or 1, T, ...]
        return _by_tile(gather_rows(x, jnp.maximum(query, 0)))

    def blocks_by_tile(x: Array) -> Array:  # of [B, T, N or 1, ...]
        return _by_tile(gather_rows(jnp.moveaxis(in_blocks(x, size), 3, 1), tiles.block))

    heads = jnp.swapaxes(q, 1, 2)
    attend = jax.checkpoint(functools.partial(_tile, call))
    parts = lax.map(
        lambda tile: attend(*tile),
        (
            (_by_tile(query), queries_by_tile(ids[:, None])),
            (_by_tile(tiles.block), blocks_by_tile(ids[:, :, None])),
            queries_by_tile(heads.astype(dtype)),
            *(blocks_by_tile(x.astype(dtype)) for x in (k, v)),
        ),
    )

    # The softmax of each query over the blocks that it sees.
    def pairs_by_query(x: Array) -> Array:  # [M, B, N, L, ...] -> [B, N, T, K, ...]
        x = jnp.moveaxis(x, 0, 2)
        x = x.reshape(n_batch, n_heads, -1, *x.shape[4:])
        return gather_rows(x, jnp.maximum(tiles.slot, 0))

    whole = Softmax(*map(pairs_by_query, parts)).merged(axis=3, where=tiles.slot >= 0)
    return whole.results(v.dtype)[0]


def _by_tile(x: Array) -> Array:
    """Moves the axis of tiles of `[B, N, M, ...]` to the front."""
    return jnp.moveaxis(x, 2, 0)


def _tile(call: Call, queries, keys, q, k, v) -> Softmax:
    """The softmax of a tile's queries over its block.

    Args:
      queries: the queries' positions, -1 for none, and their segments.
      keys: the block's index, and the segments of its keys.
      q, k, v: `[B, N, L, ...]`.
    """
    query, query_ids = (x[..., None] for x in queries)
    block, key_ids = (x[..., None, :] for x in (keys[0][..., None], keys[1]))
    key = block * k.shape[2] + jnp.arange(k.shape[2], dtype=jnp.int32)[None, None, None]
    mask = CAUSAL.sees(Side(query, query_ids), Side(key, key_ids))
    return gathered_softmax(call, q, k, v, mask, (query, key))


class MobaCache(NamedTuple):
    """All positions, and the sum of the keys of each block."""

    memory: KeyValues
    sums: Float[Array, "B G C H"]
