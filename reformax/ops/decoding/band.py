"""Decoding of attention to a band and to a few keys (`softmax.band`)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from reformax.ops.decoding.cache import (
    KeyValues,
    add_to_ring,
    attend_to,
    fill_ring,
    positions_by_slot,
)
from reformax.ops.masking.bands import Band, rows_at


class BandCache(NamedTuple):
    """The last positions, and the few keys. A position that is still to come has its slot."""

    ring: KeyValues
    few: KeyValues
    places: Int[Array, "B G"]


def fill(
    bands: tuple[Band, ...], k: Array, v: Array, few: Int[Array, "B G"], lengths, capacity: int
) -> BandCache:
    """The cache after the first `lengths` positions."""
    reach = max((band.window - 1) * band.dilation + 1 for band in bands)
    here = (few < lengths[:, None])[:, None, :, None]
    rows = (jnp.swapaxes(rows_at(x, few), 1, 2) for x in (k, v))
    held = KeyValues(*(jnp.where(here, x, 0) for x in rows))
    return BandCache(fill_ring(k, v, lengths, min(reach, capacity)), held, few)


def step(
    bands: tuple[Band, ...], q, k, v, cache: BandCache, position, impl: str
) -> tuple[Any, BandCache]:
    """Attention of one more position."""
    ring, places = add_to_ring(cache.ring, k, v, position), cache.places
    now = (places == position[:, None])[:, None, :, None]
    few = KeyValues(
        *(
            jnp.where(now, jnp.swapaxes(new, 1, 2), x)
            for x, new in zip(cache.few, (k, v), strict=True)
        )
    )
    held = positions_by_slot(position, ring.keys.shape[2])
    masks = []
    for band in bands:
        near = band.shows(position[:, None], held) & (held >= 0)
        far = (places <= position[:, None]) & ~band.shows(position[:, None], places)
        masks.append(jnp.concatenate([near, far], axis=1))
    both = (jnp.concatenate(pair, axis=2) for pair in zip(ring, few, strict=True))
    return attend_to(q, *both, jnp.stack(masks, axis=1), impl), BandCache(ring, few, places)
