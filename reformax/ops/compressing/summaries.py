"""Summaries of blocks: gated sums over the positions of a block, or of several blocks in a row.

DeepSeek-AI 2026 ("DeepSeek-V4", sec. 2.3). A position has S series of values and of gates. Summary
c sums the last series over block c, the one before over block c - 1, and so on. In each feature the
gates, with a learnt number for the position in the block, are a softmax over these positions:

    c = RMSNorm(sum_p softmax_p(gate_p + position_p) * value_p)

A summary belongs to the segment of its block's last position, and sums that segment alone. Padding
is in none. A block without a last position, at the end of a row, has no summary that is seen.

Letters besides those of `reformax.ops.base`: C blocks of L positions, S series, F features.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from reformax.ops.decoding.cache import KeyValues
from reformax.ops.masking.visibility import is_token, same_segment
from reformax.ops.numerics.normalization import length_normalize
from reformax.ops.numerics.precision import accum_dtype
from reformax.ops.numerics.query_chunks import in_blocks
from reformax.ops.sharding.borders import border
from reformax.ops.sharding.queries import axis_of, first_query, of_all, of_shard
from reformax.ops.sharding.shard import Shard
from reformax.ops.softmax.online import masked_softmax


class Series(NamedTuple):
    """The inputs of summaries. The series of a head are side by side."""

    values: Float[Array, "B T G*S F"]
    gates: Float[Array, "B T G*S F"]


def init_weights(size: int, n_series: int, n_features: int) -> dict[str, Array]:
    """The weights of summaries, by which gates of zeros make normalised means."""
    return {"positions": jnp.zeros((size, n_series, n_features)), "norm": jnp.ones(n_features)}


def summarize(
    params: dict[str, Any], x: Series, ids: Int[Array, "B T"], size: int
) -> Float[Array, "B C G F"]:
    """The summaries of all blocks of `size` positions, those without a last position too."""
    dtype, n_series = accum_dtype(x.values.dtype), params["positions"].shape[1]

    def blocks(y):  # [B, C, L, G, S, F]
        y = in_blocks(y.astype(dtype), size)
        return y.reshape(*y.shape[:3], -1, n_series, y.shape[-1])

    values, gates, ids = blocks(x.values), blocks(x.gates), in_blocks(ids, size)
    own, parts = ids[:, :, -1:], []
    for series in range(n_series):
        n = n_series - 1 - series
        bias = params["positions"][:, series].astype(dtype)[None, None, :, None]
        of_block = _earlier(ids, n)
        summed = same_segment(of_block, own) & is_token(of_block)
        gate = _earlier(gates[..., series, :], n) + bias
        parts.append((_earlier(values[..., series, :], n), gate, summed))
    values, gates, summed = (
        jnp.moveaxis(jnp.concatenate(y, axis=2), 2, -1) for y in zip(*parts, strict=True)
    )
    summed = summed[:, :, None, None]
    total = (masked_softmax(gates, summed) * jnp.where(summed, values, 0)).sum(axis=-1)
    return (length_normalize(total) * params["norm"].astype(dtype)[None, None, None]).astype(
        x.values.dtype
    )


def summarize_shards(
    params: dict[str, Any], x: Series, ids: Int[Array, "B T"], size: int, shard: Shard | None
) -> Float[Array, "B C G F"]:
    """`summarize` where devices have shards of a sequence; `x` is the device's, `ids` all of them.

    A device makes the summaries of the blocks that end in its shard, for which it reads the end of
    the shards before. Blocks without a last position are zeros.
    """
    if (axis := axis_of(shard)) is None:
        return summarize(params, x, ids, size)
    length, n_series = x.values.shape[1], params["positions"].shape[1]
    n_before, n_blocks = n_series * size - 1, -(-length // size)
    first = first_query(shard, length)
    # Of whole blocks: from those before the first one that may end in the shard.
    start = first // size * size - (n_series - 1) * size
    n_read = (n_series - 1 + n_blocks) * size

    def aligned(y: Array) -> Array:
        y = jnp.concatenate([border(y, axis, n_before, ahead=False), y], axis=1)
        y = jnp.pad(y, [(0, 0), (0, size)] + [(0, 0)] * (y.ndim - 2))
        return lax.dynamic_slice_in_dim(y, n_before + start - first, n_read, axis=1)

    read = jax.tree.map(aligned, (x, of_shard(shard, ids, length)))
    made = of_all(shard, summarize(params, *read, size)[:, n_series - 1 :])
    end = np.arange(ids.shape[1] // size) * size + size - 1  # of complete blocks
    of_device = end // length
    made = made[:, of_device * n_blocks + end // size - of_device * length // size]
    return jnp.pad(made, ((0, 0), (0, -(-ids.shape[1] // size) - len(end)), (0, 0), (0, 0)))


def newest_summary(
    params: dict[str, Any], ring: KeyValues, position: Int[Array, " B"], size: int
) -> Float[Array, "B G F"]:
    """The summary of the block that ends at `position`, from a ring of the last series."""
    n = size * params["positions"].shape[1]
    at = position[:, None] - jnp.arange(n, dtype=jnp.int32)[None, ::-1]
    each = (jnp.swapaxes(x, 1, 2) for x in ring.at((at % ring.keys.shape[2])[:, None]))
    return summarize(params, Series(*each), (at >= 0).astype(jnp.int32), size)[:, -1]


def _earlier(x: Array, n: int) -> Array:
    """The array shifted by `n` blocks: each block has the one `n` before it; zeros at first."""
    return jnp.pad(x, [(0, 0), (n, 0)] + [(0, 0)] * (x.ndim - 2))[:, : x.shape[1]]
