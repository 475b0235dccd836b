"""Decoding of attention to a band and to global keys (`softmax.band`)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from reformax.ops.calls.call import Call
from reformax.ops.decoding.cache import KeyValues, add_to_ring, attend_to, fill_ring, seen_in_ring
from reformax.ops.masking.bands import outside_band, rows_at
from reformax.ops.masking.visibility import Side, Visibility


class BandCache(NamedTuple):
    """The last positions, and the global keys. A global key of a later position has a row too."""

    ring: KeyValues
    global_rows: KeyValues  # [B, N, G, ...]
    global_positions: Int[Array, "B G"]


def reach(bands: tuple[Visibility, ...]) -> int:
    """The number of positions that a query sees the last of, its own with them."""
    return max((band.window - 1) * band.dilation + 1 for band in bands)


def fill(
    call: Call,
    bands: tuple[Visibility, ...],
    k: Array,
    v: Array,
    global_positions: Int[Array, "B G"],
) -> BandCache:
    """The cache after the first positions."""
    exists = (global_positions < call.lengths[:, None])[:, None, :, None]
    rows = (jnp.swapaxes(rows_at(x, global_positions), 1, 2) for x in (k, v))
    global_rows = KeyValues(*(jnp.where(exists, x, 0) for x in rows))
    ring = fill_ring(k, v, call.lengths, min(reach(bands), call.length))
    return BandCache(ring, global_rows, global_positions)


def step(
    call: Call, bands: tuple[Visibility, ...], q, k, v, cache: BandCache, impl: str
) -> tuple[Any, BandCache]:
    """Attention of one more position."""
    position = call.position
    ring, of_global = add_to_ring(cache.ring, k, v, position), cache.global_positions
    is_new, new = (of_global == position[:, None])[:, None, :, None], KeyValues(k, v)
    global_rows = jax.tree.map(
        lambda x, y: jnp.where(is_new, jnp.swapaxes(y, 1, 2), x), cache.global_rows, new
    )
    newest, masks = Side(position[:, None]), []
    for band in bands:
        far = outside_band(band, newest, Side(of_global))
        masks.append(jnp.concatenate([seen_in_ring(band, ring, position), far], axis=1))
    mask, new = jnp.stack(masks, axis=1), BandCache(ring, global_rows, of_global)
    return attend_to(call, q, *ring.joined(global_rows), mask, impl), new
