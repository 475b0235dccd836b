"""Global tokens, which see and are seen anywhere in the sequence: their positions and rows.

Letters besides those of `reformax.ops.base`: G global tokens.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from reformax.ops.masking.visibility import NOWHERE, Side, Visibility, all_of, is_token


def rows_at(x: Array, positions: Int[Array, "#B G"]) -> Array:
    """Rows of `x`, `[B, T, ...]`, at the positions; the last row for `NOWHERE`."""
    index = jnp.minimum(positions, x.shape[1] - 1)
    if index.shape[0] == 1:
        return jnp.asarray(x)[:, index[0]]  # a traced index needs an array of JAX
    return jnp.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - 2)), axis=1)


def ids_at(ids: Int[Array, "#B T"], positions: Int[Array, "#B G"]) -> Int[Array, "#B G"]:
    """The segment ids at the positions; 0 for `NOWHERE`."""
    if ids.shape[0] == 1:
        ids = jnp.broadcast_to(ids, (positions.shape[0], ids.shape[1]))
    return jnp.where(positions < ids.shape[1], rows_at(ids, positions), 0)


def first_where(real: Bool[Array, "B T"], n: int) -> Int[Array, "B G"]:
    """The first `n` positions where `real` is True; `NOWHERE` fills up shorter rows."""
    return jnp.sort(jnp.where(real, jnp.arange(real.shape[1])[None], NOWHERE), axis=1)[:, :n]


def first_global(
    global_tokens: Int[Array, "B T"] | None, segment_ids: Int[Array, "B T"] | None, n: int
) -> Int[Array, "B G"] | None:
    """The positions of the first `n` global tokens of each row; None without global tokens."""
    if global_tokens is None or not n:
        return None
    tokens = None if segment_ids is None else is_token(segment_ids)
    return first_where(all_of(global_tokens > 0, tokens), n)


def outside_band(band: Visibility, q: Side, k: Side) -> Bool[Array, "*d"]:
    """Which global keys each query sees. Those in its band are among its neighbours already."""
    everywhere = dataclasses.replace(band, window=None, dilation=1)
    neighbours = band.sees(Side(q.position), Side(k.position))
    return all_of(everywhere.sees(q, k), ~neighbours)
