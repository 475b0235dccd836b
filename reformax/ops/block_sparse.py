"""Block-sparse attention: only the nonzero blocks of a mask (FlashAttention, algorithm 5).

A block mask selects blocks of the attention matrix, and the softmax is over these alone (Dao et al.
2022, "FlashAttention", sec. 3.3 and appendix D.1). Time is proportional to the number of nonzero
blocks in both passes, and memory to the length. Patterns are in `block_patterns`.

The arithmetic is FlashAttention's: `tiles` in array operations, one tile after the other, and
`kernels.block_sparse` on NVIDIA GPUs.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from reformax.declared import Called, Count, SettingError, Size, shown
from reformax.ops.base import AttentionOp, options
from reformax.ops.block_patterns import Mask, Pattern, butterfly
from reformax.ops.calls.call import Call
from reformax.ops.calls.dispatch import KERNELS, compute_by
from reformax.ops.calls.obstacles import kernel_obstacles
from reformax.ops.decoding.cache import KeyValues, add_to_ring, attend_to, fill_ring
from reformax.ops.masking.bands import first_global, ids_at, rows_at
from reformax.ops.masking.masks import ids_or_ones
from reformax.ops.masking.padding import attend_to_tokens
from reformax.ops.masking.visibility import CAUSAL, Side
from reformax.ops.sharding.shard import all_heads
from reformax.ops.softmax import band, block_kernels, block_lists, tiles
from reformax.ops.softmax.block_lists import MIN_TILE, BlockInputs, Layout, TileLists

BUTTERFLY = butterfly()
BlockSize = Annotated[Size | tuple[Size, Size], Called("a number of at least 1, or two")]
MaskOrPattern = Annotated[Any, Called("a block mask, or a function that returns one")]


@options
class block_sparse(AttentionOp):
    """Attention to the keys in the nonzero blocks of a mask.

    With `n_global`, the tokens where `global_tokens` is above 0 are global: besides the blocks,
    they see their whole segment, and all of it sees them. With `block_patterns.bigbird(n_global=0)`
    this is the ETC form of BigBird (Zaheer et al. 2020, sec. 2), with global tokens at any
    position.

    Args:
      pattern: which block of queries sees which block of keys. It is a boolean array, `[n_blocks_q,
        n_blocks_k]` or with an axis for heads in front, or a function of the two numbers of blocks
        that returns one, such as those of `block_patterns`. An array fits one number of blocks and
        cannot decode.
      block_size: positions in a block; a pair is for queries and keys.
      n_global: how many tokens of a row can be global, the first where `global_tokens` is above 0.
        With 0 none are, and `global_tokens` is refused. Otherwise attention is not causal and stays
        within one sequence.
      impl: `"xla"` runs everywhere. `"pallas"` is a kernel for NVIDIA GPUs of Ampere or later,
        heads of 256 or less and blocks of a multiple of 16. `"auto"` takes the kernel where it
        computes the same function.

    Raises:
      ValueError: a block size below 1, a pattern that is no block mask, an unknown `impl`; at the
        call, a mask whose shape is not the numbers of blocks, or masks by head where devices share
        the heads.
      NotImplementedError: at the call, when `"pallas"` is asked for what it cannot do.
    """

    pattern: MaskOrPattern = BUTTERFLY
    block_size: BlockSize = 128
    n_global: Count = 0
    impl: str = "auto"

    _impls = KERNELS

    @property
    def causality(self) -> str:
        return "never" if self.n_global else "either"

    @property
    def cross(self) -> bool:
        return not self.n_global

    @property
    def global_tokens(self) -> bool:
        return self.n_global > 0

    @property
    def plan_needs(self) -> str:
        return "inputs" if self.n_global else "nothing"

    @property
    def shards(self) -> tuple[str, ...]:
        # Whether a function makes masks by head is known at the call, which refuses them.
        by_head = self._fixed_mask is not None and self._fixed_mask.ndim == 3
        return () if by_head or self.n_global else ("heads",)

    @property
    def decoding(self) -> str:
        return "no" if self.n_global or self._fixed_mask is not None else "rows"

    @property
    def _hides_padding(self) -> bool:
        return not self.n_global

    @property
    def _fixed_mask(self) -> Mask | None:
        """The pattern where it is an array: a mask of one number of blocks."""
        return None if callable(self.pattern) else _check_mask(self.pattern)

    def _check(self) -> None:
        if not callable(self.pattern):
            _check_mask(self.pattern)

    def _layout(self, call: Call, n_queries: int, n_keys: int, n_heads: int) -> Layout:
        """The layout of a call without `n_global`."""
        block_q, block_k = map(int, np.broadcast_to(self.block_size, 2))
        shape = -(-n_queries // block_q), -(-n_keys // block_k)
        mask = _made_by(self.pattern, shape) if callable(self.pattern) else self._fixed_mask
        if mask.shape not in (shape, (n_heads, *shape)):
            raise SettingError(
                f"pattern has shape {mask.shape}: expected {shape}, the blocks of {block_q} in "
                f"{n_queries} queries and of {block_k} in {n_keys} keys, or {(n_heads, *shape)}"
            )
        mask = mask[None] if mask.ndim == 2 else mask
        # One block that holds all positions is equal to a larger one.
        block_q, block_k = (
            min(size, -(-length // MIN_TILE) * MIN_TILE)
            for size, length in ((block_q, n_queries), (block_k, n_keys))
        )
        sizes = block_q, block_k, n_queries, n_keys
        return Layout(mask, *sizes, call.causal, call.dropout, call.logits)

    def _apply(self, call, params, q, k, v, plan):
        if self.n_global and plan is not None:
            return self._with_global(call, q, k, v, plan)
        n_heads = q.shape[2]
        layout = self._layout(call, q.shape[1], k.shape[1], all_heads(call.shard, n_heads))
        if layout.n_masks not in (1, n_heads):  # a layout is one for all devices
            raise SettingError(
                f"pattern gives masks of {layout.n_masks} heads, {layout.mask.shape}, and devices "
                "share the heads: use context=1, or a pattern of one mask for all heads"
            )
        return _attend(call, layout, self.impl, q, k, v)

    # Global tokens. G of them are keys of additional blocks, which all queries see. At their own
    # positions they are masked. Their rows are computed separately.

    def _plan(self, call, params, q, k) -> Int[Array, "B G"] | tuple[()] | None:
        """The positions of global tokens; None without any."""
        tokens = call.global_tokens, call.segment_ids
        return first_global(*tokens, self.n_global) if self.n_global else ()

    def _with_global(self, call: Call, q, k, v, plan) -> Float[Array, "B T N V"]:
        length = k.shape[1]
        layout = self._layout(call, length, length, q.shape[2])
        n_global, n_pad = plan.shape[1], -length % layout.block_k
        n_blocks = -(-n_global // layout.block_k)
        layout = dataclasses.replace(
            layout,
            mask=np.pad(layout.mask, ((0, 0), (0, 0), (0, n_blocks)), constant_values=True),
            n_keys=length + n_pad + n_global,
        )

        def with_global(x, global_rows):  # [B, S, ...] with those of global tokens at the end
            return jnp.concatenate(
                [jnp.pad(x, ((0, 0), (0, n_pad), (0, 0), (0, 0))), global_rows], axis=1
            )

        global_k, global_v = (rows_at(x, plan) for x in (k, v))
        ids = ids_or_ones(call.segment_ids, k)
        row = jnp.arange(len(k))[:, None]
        masked_ids = ids.at[row, plan].set(0, mode="drop")
        masked_ids = jnp.pad(masked_ids, ((0, 0), (0, n_pad)))
        key_ids = jnp.concatenate([masked_ids, ids_at(ids, plan)], axis=1)
        keys, values = with_global(k, global_k), with_global(v, global_v)
        out = _attend(call.but(segment_ids=(ids, key_ids)), layout, self.impl, q, keys, values)
        rows = band.rows_of_global_tokens(call, rows_at(q, plan), k, v, plan)
        return out.at[row, plan].set(rows.astype(out.dtype), mode="drop")

    def _init_cache(self, call, params, q, k, v, plan) -> KeyValues:
        return fill_ring(k, v, call.lengths, call.length)

    def _step(self, call, params, q, k, v, cache: KeyValues):
        position = call.position
        cache = add_to_ring(cache, k, v, position)
        n_heads, capacity = cache.keys.shape[1:3]
        layout = self._layout(call, capacity, capacity, n_heads)
        block_q, block_k = layout.block_q, layout.block_k
        rows = layout.rows(block_q, block_k)
        # The keys of the blocks that the query's block sees, [B, G, M].
        width = max(1, rows.count.max())
        seen = block_lists.padded_entries(rows, block_lists.cut_lists(rows, width), width, capacity)
        seen = jnp.asarray(seen.reshape(-1, -(-capacity // block_q), width))
        seen = jnp.swapaxes(seen[:, position // block_q], 0, 1)[..., None]
        seen = (seen * block_k + jnp.arange(block_k)[None, None, None]).reshape(*seen.shape[:2], -1)
        mask = CAUSAL.sees(Side(position[:, None, None]), Side(seen))
        read = cache.at(jnp.minimum(seen, capacity - 1))
        return attend_to(call, q, *read, mask, self.impl), cache


def _attend(call: Call, layout: Layout, impl: str, q, k, v) -> Float[Array, "B T N V"]:
    sizes = layout.block_q, layout.block_k
    odd = sizes if any(size % MIN_TILE for size in sizes) else None

    def in_arrays() -> Float[Array, "B T N V"]:
        in_tiles = functools.partial(_in_tiles, call, layout)
        return attend_to_tokens(in_tiles, q, k, v, call.segment_ids)

    def in_kernels(interpret: bool) -> Float[Array, "B T N V"]:
        x = BlockInputs.of(call, q, k, v)
        return block_kernels.kernels().attend(layout, interpret, x)[0]

    obstacles = kernel_obstacles(q, k, v, call.logits, block_size=odd)
    return compute_by(impl, in_arrays, pallas=(obstacles, in_kernels))


def _made_by(pattern: Pattern, shape: tuple[int, int]) -> Mask:
    """The mask of a pattern for these numbers of blocks."""
    try:
        return _check_mask(pattern(*shape))
    except TypeError as error:
        raise SettingError(
            f"pattern is {shown(pattern)}: expected a function of two numbers of blocks ({error})"
        ) from None


def _check_mask(mask: Any) -> Mask:
    if isinstance(mask, jax.core.Tracer):
        raise SettingError("pattern is traced: expected an array of NumPy, known before the call")
    mask = np.asarray(mask)
    if mask.dtype != bool or mask.ndim not in (2, 3):
        raise SettingError(
            f"pattern has shape {mask.shape} and dtype {mask.dtype}: expected booleans, "
            "[n_blocks_q, n_blocks_k] or [heads, n_blocks_q, n_blocks_k], or a function of the "
            "numbers of blocks that returns them"
        )
    return mask


def _in_tiles(call: Call, layout: Layout, q, k, v) -> Float[Array, "B T N V"]:
    """The op in array operations: the tiles are the blocks."""
    sizes = layout.block_q, layout.block_k
    tiling = tiles.tiling_of(call, q, k, *sizes)
    plan = tiles.TilePlan(
        *(_visits(rows(*sizes), layout.n_masks) for rows in (layout.rows, layout.columns))
    )
    return tiles.attend(tiles.forward, tiling, tiles.inputs(call, q, k, v), plan)


def _visits(rows: TileLists, n_masks: int) -> tiles.Visits:
    stop = np.cumsum(rows.count.reshape(n_masks, -1), axis=1)
    start = stop - rows.count.reshape(stop.shape)
    # The list of each mask, padded to the length of the longest.
    index = np.arange(max(1, stop[:, -1].max()))
    index = index + (np.cumsum(stop[:, -1]) - stop[:, -1])[:, None]
    column = np.append(rows.entries, 0)[np.minimum(index, len(rows.entries))]
    return tiles.Visits(*(jnp.asarray(x, jnp.int32) for x in (start, stop, column)))
