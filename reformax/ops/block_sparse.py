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
import math
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from reformax.declared import Called, Count, SettingError, Size, shown
from reformax.ops.base import AttentionOp, Traits, named, no_params, no_plan
from reformax.ops.block_patterns import Mask, Pattern, butterfly
from reformax.ops.calls.dispatch import KERNELS, check_impl, choose_impl, kernel_obstacles
from reformax.ops.decoding.cache import KeyValues, add_to_ring, attend_to, fill_ring
from reformax.ops.masking.bands import first_global, ids_at, rows_at
from reformax.ops.masking.masks import ids_or_ones, segment_pair
from reformax.ops.masking.padding import attend_to_tokens
from reformax.ops.masking.visibility import CAUSAL, Side
from reformax.ops.sharding.shard import all_heads
from reformax.ops.softmax import band, block_lists, tiles
from reformax.ops.softmax.block_lists import MIN_TILE, Layout, TileLists
from reformax.ops.softmax.dropout import seed_words

BUTTERFLY = butterfly()
BlockSize = Annotated[Size | tuple[Size, Size], Called("a number of at least 1, or two")]
MaskOrPattern = Annotated[Any, Called("a block mask, or a function that returns one")]


@named
def block_sparse(
    *,
    pattern: MaskOrPattern = BUTTERFLY,
    block_size: BlockSize = 128,
    n_global: Count = 0,
    impl: str = "auto",
) -> AttentionOp:
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
        heads of 128 or less and blocks of a multiple of 16; `"pallas_interpret"` runs it anywhere,
        slowly, for tests. `"auto"` takes the kernel where it computes the same function.

    Raises:
      ValueError: a block size below 1, a pattern that is no block mask, an unknown `impl`; at the
        call, a mask whose shape is not the numbers of blocks, or masks by head where devices share
        the heads.
      NotImplementedError: at the call, when `"pallas"` is asked for what it cannot do.
    """
    check_impl(impl, *KERNELS)
    block_q, block_k = map(int, np.broadcast_to(block_size, 2))
    fixed_mask = None if callable(pattern) else _check_mask(pattern)

    layout_of = functools.partial(
        _layout, pattern if fixed_mask is None else fixed_mask, block_q, block_k
    )
    if n_global:
        return AttentionOp(
            init=no_params,
            plan=functools.partial(_plan, n_global),
            apply=functools.partial(_apply_with_global, layout_of, impl),
            traits=Traits(causal=False, global_tokens=True),
        )
    return AttentionOp(
        init=no_params,
        plan=no_plan,
        apply=functools.partial(_apply, layout_of, impl),
        # Whether a function makes masks by head is known at the call, which refuses them.
        traits=Traits(
            cross=True,
            keeps_padding_out=True,
            head_shards=fixed_mask is None or fixed_mask.ndim == 2,
        ),
        init_cache=_init_cache if fixed_mask is None else None,
        step=functools.partial(_step, layout_of, impl) if fixed_mask is None else None,
    )


def _layout(
    pattern: Pattern | Mask,
    block_q: int,
    block_k: int,
    n_queries: int,
    n_keys: int,
    n_heads: int,
    causal: bool,
    dropout: float,
) -> Layout:
    """The layout of a call without `n_global`."""
    shape = -(-n_queries // block_q), -(-n_keys // block_k)
    mask = _made_by(pattern, shape) if callable(pattern) else pattern
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
    return Layout(mask, block_q, block_k, n_queries, n_keys, causal, dropout)


def _apply(
    layout_of: Callable[..., Layout],
    impl: str,
    params,
    q,
    k,
    v,
    *,
    plan,
    segment_ids,
    causal,
    dropout,
    rng,
):
    del params, plan
    n_heads = q.shape[2]
    layout = layout_of(q.shape[1], k.shape[1], all_heads(rng, n_heads), causal, dropout)
    if layout.n_masks not in (1, n_heads):  # a layout is one for all devices
        raise SettingError(
            f"pattern gives masks of {layout.n_masks} heads, {layout.mask.shape}, and devices "
            "share the heads: use context=1, or a pattern of one mask for all heads"
        )
    return _attend(layout, impl, q, k, v, segment_ids, rng)


def _attend(layout: Layout, impl: str, q, k, v, segment_ids, rng) -> Float[Array, "B T N V"]:
    sizes = layout.block_q, layout.block_k
    odd = sizes if any(size % MIN_TILE for size in sizes) else None
    impl = choose_impl(impl, **kernel_obstacles(q, k, v, block_size=odd))
    if impl == "xla":
        in_tiles = functools.partial(_in_tiles, layout, segment_ids=segment_ids, rng=rng)
        return attend_to_tokens(in_tiles, q, k, v, segment_ids)
    from reformax.ops.kernels.triton import block_sparse as kernel

    interpret = impl == "pallas_interpret"
    return kernel.attend(layout, interpret, q, k, v, segment_pair(segment_ids), rng)[0]


# Global tokens. G of them are keys of additional blocks, which all queries see. At their own
# positions they are masked. Their rows are computed separately.


def _plan(
    n_global: int, params, q, k, *, segment_ids, causal, rng, train, length=None, global_tokens=None
) -> Int[Array, "B G"] | None:
    """The positions of global tokens; None without any."""
    del params, q, k, causal, rng, train, length
    return first_global(global_tokens, segment_ids, n_global)


def _apply_with_global(
    layout_of, impl: str, params, q, k, v, *, plan, segment_ids, causal, dropout, rng
) -> Float[Array, "B T N V"]:
    if plan is None:
        options = dict(plan=plan, segment_ids=segment_ids, causal=causal, dropout=dropout, rng=rng)
        return _apply(layout_of, impl, params, q, k, v, **options)
    length = k.shape[1]
    layout = layout_of(length, length, q.shape[2], causal, dropout)
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
    ids = ids_or_ones(segment_ids, k)
    row = jnp.arange(len(k))[:, None]
    masked_ids = ids.at[row, plan].set(0, mode="drop")
    masked_ids = jnp.pad(masked_ids, ((0, 0), (0, n_pad)))
    key_ids = jnp.concatenate([masked_ids, ids_at(ids, plan)], axis=1)
    out = _attend(
        layout, impl, q, with_global(k, global_k), with_global(v, global_v), (ids, key_ids), rng
    )
    seed = seed_words(rng, len(q)) if dropout else None
    rows = band.rows_of_global_tokens(
        rows_at(q, plan), k, v, plan, segment_ids, False, dropout, seed
    )
    return out.at[row, plan].set(rows.astype(out.dtype), mode="drop")


def _init_cache(params, q, k, v, *, plan, lengths, capacity, rng) -> KeyValues:
    del params, q, plan, rng
    return fill_ring(k, v, lengths, capacity)


def _step(
    layout_of: Callable[..., Layout], impl: str, params, q, k, v, cache: KeyValues, *, position
):
    del params
    cache = add_to_ring(cache, k, v, position)
    n_heads, capacity = cache.keys.shape[1:3]
    layout = layout_of(capacity, capacity, n_heads, True, 0.0)
    block_q, block_k = layout.block_q, layout.block_k
    rows = layout.rows(block_q, block_k)
    # The keys of the blocks that the query's block sees, [B, G, M].
    width = max(1, rows.count.max())
    seen = block_lists.padded_entries(rows, block_lists.cut_lists(rows, width), width, capacity)
    seen = jnp.asarray(seen.reshape(-1, -(-capacity // block_q), width))
    seen = jnp.swapaxes(seen[:, position // block_q], 0, 1)[..., None]
    seen = (seen * block_k + jnp.arange(block_k)[None, None, None]).reshape(*seen.shape[:2], -1)
    index = jnp.minimum(seen, capacity - 1)[..., None]
    keys, values = (jnp.take_along_axis(x, index, axis=2) for x in cache)
    mask = CAUSAL.sees(Side(position[:, None, None]), Side(seen))
    return attend_to(q, keys, values, mask, impl), cache


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


def _in_tiles(layout: Layout, q, k, v, *, segment_ids, rng) -> Float[Array, "B T N V"]:
    """The op in array operations: the tiles are the blocks."""
    tiling = tiles.Tiling(
        query_size=min(layout.block_q, layout.n_queries),
        key_size=min(layout.block_k, layout.n_keys),
        causal=layout.causal,
        scale=1 / math.sqrt(q.shape[-1]),
        dropout=layout.dropout,
    )
    sizes = layout.block_q, layout.block_k
    plan = tiles.TilePlan(
        *(_visits(rows(*sizes), layout.n_masks) for rows in (layout.rows, layout.columns))
    )
    x = tiles.inputs(q, k, v, None, segment_ids, layout.dropout, rng)
    return tiles.attend(tiles.forward, tiling, x, plan)


def _visits(rows: TileLists, n_masks: int) -> tiles.Visits:
    stop = np.cumsum(rows.count.reshape(n_masks, -1), axis=1)
    start = stop - rows.count.reshape(stop.shape)
    # The list of each mask, padded to the length of the longest.
    index = np.arange(max(1, stop[:, -1].max()))
    index = index + (np.cumsum(stop[:, -1]) - stop[:, -1])[:, None]
    column = np.append(rows.entries, 0)[np.minimum(index, len(rows.entries))]
    return tiles.Visits(*(jnp.asarray(x, jnp.int32) for x in (start, stop, column)))
