"""Vectors less the mean of their segment, or of those before them in it.

Sums of what is before each position are taken by blocks of positions: within a block as one product
with ones below the diagonal, and between blocks by a scan over their sums. Products with ones are
exact, so vectors are read in their own dtype. A scan over all positions would pass over float32
copies of them some sixteen times.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from reformax.ops.parts.chunk_products import product
from reformax.ops.parts.containment import finite
from reformax.ops.parts.masks import segment_numbers
from reformax.ops.parts.side_by_side import back, side_by_side
from reformax.ops.parts.softmax import wide

# Positions of a block: as many products for each number, which takes no longer than reading it.
BLOCK = 128


def centred(
    x: Float[Array, "B T N H"], segments: Int[Array, "B T"] | None, causal: bool
) -> Float[Array, "B T N H"]:
    """Vectors less the mean of their segment; a number that is not finite is 0.

    Sums are float32, or float64 of float64, and what is left of a vector is rounded to its dtype.
    Where `causal`, it is the mean of those before, which later tokens do not change. The first
    vector of a segment stays as it is. All others then have the direction that they have less the
    mean with themselves.
    """
    x = finite(x)
    if causal:
        sums, counts = _before(x, segments)
        means = sums / jnp.maximum(counts, 1)[..., None, None]
    elif segments is None:
        means = x.mean(axis=1, keepdims=True, dtype=wide(x.dtype))
    else:
        means = jax.vmap(_of_segments)(x, segment_numbers(jnp.asarray(segments)))
    return (x - means).astype(x.dtype)


def _of_segments(x: Float[Array, "T N H"], number: Int[Array, " T"]) -> Float[Array, "T N H"]:
    """The mean of each position's segment."""
    sums, counts = (
        jax.ops.segment_sum(part, number, num_segments=len(number))
        for part in (x.astype(wide(x.dtype)), jnp.ones(len(number), wide(x.dtype)))
    )
    return (sums / jnp.maximum(counts, 1)[:, None, None])[number]


def _before(
    x: Float[Array, "B T N H"], segments: Int[Array, "B T"] | None
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T"]]:
    """The sum and the number of the vectors before each in its segment."""
    order, x, ids = side_by_side(x, segments)
    ids = jnp.zeros(x.shape[:2], jnp.int32) if ids is None else ids
    place = jnp.arange(x.shape[1])
    begins = jnp.diff(ids, prepend=ids[:, :1]) != 0
    counts = place - lax.cummax(jnp.where(begins, place, 0), axis=1)
    sums = sums_before(x.reshape(*x.shape[:2], -1), ids).reshape(x.shape)
    return back(sums, order), back(counts, order).astype(sums.dtype)


def sums_before(x: Float[Array, "B T F"], ids: Int[Array, "B T"]) -> Float[Array, "B T F"]:
    """The sum of the vectors before each that have its id; equal ids stand side by side.

    It is float32, or float64 of float64. Vectors are finite.
    """
    length = x.shape[1]
    size = min(BLOCK, length)
    n_pad = -length % size
    x = jnp.pad(x, ((0, 0), (0, n_pad), (0, 0))).reshape(len(x), -1, size, x.shape[-1])
    ids = jnp.pad(ids, ((0, 0), (0, n_pad)), mode="edge").reshape(len(ids), -1, size)
    total = functools.partial(product, dtype=x.dtype, precision=lax.Precision.HIGHEST)

    place = jnp.arange(size)
    like = ids[..., :, None] == ids[..., None, :]
    within = total("bcij,bcjf->bcif", like & (place[:, None] > place), x)
    # An id goes on in the block behind. What a block ends with may have filled it from its start.
    ends = total("bcj,bcjf->bcf", ids == ids[..., -1:], x)
    goes_on = jnp.pad(ids[:, 1:, 0] == ids[:, :-1, -1], ((0, 0), (1, 0)))
    fills = ids[..., 0] == ids[..., -1]
    ends = lax.associative_scan(_and_on, (~(goes_on & fills)[..., None], ends), axis=1)[1]
    carried = jnp.pad(ends[:, :-1], ((0, 0), (1, 0), (0, 0)))[:, :, None]
    carries = (ids == ids[..., :1]) & goes_on[..., None]
    sums = within + jnp.where(carries[..., None], carried, 0)
    return sums.reshape(len(x), -1, x.shape[-1])[:, :length]


def _and_on(one, other):
    """Sums of what stands side by side, from where an id begins."""
    (begins, sums), (begins_too, more) = one, other
    return begins | begins_too, more + jnp.where(begins_too, 0, sums)
