"""Subtracts from each vector the mean of its segment, or of the vectors before it in its segment.

Exclusive prefix sums are computed in blocks of positions: within a block as a product with ones
below the diagonal, and between blocks likewise, on the blocks' sums. Products with ones are exact,
so vectors keep their dtype. A scan over all positions would read float32 copies of them some
sixteen times.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from reformax.ops.masking.contiguous import contiguous_segments, restore_order
from reformax.ops.masking.masks import segment_numbers
from reformax.ops.masking.padding import tokens_only
from reformax.ops.masking.visibility import is_token, same_segment
from reformax.ops.numerics.precision import accum_dtype, product

# Positions of a block. So many products for each number take no longer than reading it.
BLOCK = 128


def centred(
    x: Float[Array, "B T N H"],
    segment_ids: Int[Array, "B T"] | None,
    causal: bool,
    one_segment: bool = False,
) -> Float[Array, "B T N H"]:
    """Vectors minus the mean of their segment.

    Sums are float32, or float64 for float64, and the difference is rounded to the vectors' dtype.
    If `causal`, the mean is that of the earlier vectors of the segment, which later tokens do not
    change. The first vector of a segment stays. All others have the direction that they would have
    if the mean included them.
    """
    if one_segment and segment_ids is not None:
        return _centred_tokens(x, segment_ids, causal)
    if causal:
        sums, counts = _before(x, segment_ids)
        means = sums / jnp.maximum(counts, 1)[..., None, None]
    elif segment_ids is None:
        means = x.mean(axis=1, keepdims=True, dtype=accum_dtype(x.dtype))
    else:
        means = jax.vmap(_of_segments)(x, segment_numbers(segment_ids))
    return (x.astype(means.dtype) - means).astype(x.dtype)


def _centred_tokens(x, ids: Int[Array, "B T"], causal: bool) -> Float[Array, "B T N H"]:
    """`centred` of rows of one segment, without its sorts and scatters."""
    tokens, real = tokens_only(x, ids), is_token(ids)
    counts = jnp.cumsum(real, axis=1, dtype=jnp.int32)
    if causal:
        sums, _ = _before(tokens, None)
        counts = counts - real
    else:
        sums = tokens.sum(axis=1, keepdims=True, dtype=accum_dtype(x.dtype))
        counts = counts[:, -1:]
    means = sums / jnp.maximum(counts, 1).astype(sums.dtype)[..., None, None]
    return (x.astype(means.dtype) - means).astype(x.dtype)


def _of_segments(x: Float[Array, "T N H"], number: Int[Array, " T"]) -> Float[Array, "T N H"]:
    """The mean of each position's segment."""
    sums, counts = (
        jax.ops.segment_sum(part, number, num_segments=len(number))
        for part in (x.astype(accum_dtype(x.dtype)), jnp.ones(len(number), accum_dtype(x.dtype)))
    )
    return (sums / jnp.maximum(counts, 1)[:, None, None])[number]


def _before(
    x: Float[Array, "B T N H"], segment_ids: Int[Array, "B T"] | None
) -> tuple[Float[Array, "B T N H"], Float[Array, "#B T"]]:
    """The sum and the number of the vectors before each position in its segment."""
    order, rows, ids = contiguous_segments(x.reshape(*x.shape[:2], -1), segment_ids)
    if segment_ids is None:
        sums = sums_before(rows, jnp.zeros(x.shape[:2], jnp.int32))
        return sums.reshape(x.shape), jnp.arange(x.shape[1], dtype=sums.dtype)[None]
    ones = jnp.ones((*x.shape[:2], 1), x.dtype)
    sums, counts = (restore_order(sums_before(part, ids), order) for part in (rows, ones))
    return sums.reshape(x.shape), counts[..., 0]


def sums_before(
    x: Float[Array, "B T F"], ids: Int[Array, "B T"], sought: Int[Array, "B T"] | None = None
) -> Float[Array, "B T F"]:
    """The sum of the earlier vectors with the id that each position seeks.

    Sums are float32, or float64 for float64. Equal ids are contiguous.

    Args:
      ids: the id of each vector.
      sought: the id that each position seeks, its own or the previous one; None: its own.
    """
    length, sought = x.shape[1], ids if sought is None else sought
    size = min(BLOCK, length)
    n_pad = -length % size
    x = jnp.pad(x, ((0, 0), (0, n_pad), (0, 0))).reshape(len(x), -1, size, x.shape[-1])
    ids, sought = (
        jnp.pad(i, ((0, 0), (0, n_pad)), mode="edge").reshape(len(x), -1, size)
        for i in (ids, sought)
    )
    before = jnp.tril(jnp.ones((1, 1, size, size), bool), -1)
    seen = same_segment(sought[..., :, None], ids[..., None, :]) & before
    sums = product("bcij,bcjf->bcif", seen, x, x.dtype, lax.Precision.HIGHEST)
    if length > size:
        # A block seeks at most one id of earlier blocks, the last one of the block before. `where`
        # keeps sums that overflow from reaching other ids.
        end = ids[..., -1:]
        same = same_segment(sought[..., -1:], end)
        ends = x[:, :, -1].astype(sums.dtype) + jnp.where(same, sums[:, :, -1], 0)
        last = jnp.pad(end[:, :-1], ((0, 0), (1, 0), (0, 0)))
        carried = sums_before(ends, end[..., 0], last[..., 0])
        sums = sums + jnp.where(same_segment(sought, last)[..., None], carried[:, :, None], 0)
    return sums.reshape(len(x), -1, x.shape[-1])[:, :length]
