"""Attention of one sequence over several devices, to what stands near.

Each device of an axis holds a stretch of the sequence. A position that sees no further than a
`Reach` needs of the other stretches their borders alone. They travel by `ppermute`, straight from
the device that has them, and the gradient comes back on the same way.

All functions are for the inside of `jax.shard_map`. A *stretch* is `[B, t, ...]`: as many positions
on each device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from reformax.ops.parts.masks import ids_or_ones
from reformax.ops.parts.share import Share


class Reach(NamedTuple):
    """How far a position sees.

    Attributes:
      before: the positions before its own unit, a multiple of the unit.
      after: the positions behind its own, at most.
      unit: a chunk, which begins at a multiple of its length. A window goes by single positions.
    """

    before: int
    after: int
    unit: int = 1


def border(x: Array, axis: str, n: int, *, ahead: bool) -> Array:
    """The `n` positions before a stretch, or with `ahead` those behind it; zeros outside of all."""
    n_devices, length = lax.axis_size(axis), x.shape[1]
    parts, step = [], -1 if ahead else 1
    for hop in range(1, -(-n // length) + 1):
        if hop < n_devices:
            size = min(length, n - (hop - 1) * length)
            part = x[:, :size] if ahead else x[:, length - size :]
            pairs = [(i, i + step * hop) for i in range(n_devices)]
            pairs = [(i, j) for i, j in pairs if 0 <= j < n_devices]
            parts.append(lax.ppermute(part, axis, pairs))
    parts = parts if ahead else parts[::-1]
    missing = n - sum(part.shape[1] for part in parts)
    nothing = jnp.zeros((x.shape[0], missing, *x.shape[2:]), x.dtype)
    return jnp.concatenate([*parts, nothing] if ahead else [nothing, *parts], axis=1)


def attend(
    apply: Callable[..., Float[Array, "B L N V"]],
    reach: Reach,
    axis: str,
    q: Float[Array, "B t N H"],
    k: Float[Array, "B t N H"] | None,
    v: Float[Array, "B t N V"],
    segments: Int[Array, "B t"] | None,
    share: Share,
) -> Float[Array, "B t N V"]:
    """Attention of a stretch of queries to all that they see.

    Each device attends within its stretch. Where stretches are long and whole units, as they are in
    use, it then does so again for the rows near its ends, with the borders that they see. Otherwise
    the stretch and its borders are one sequence, of which it keeps the rows of its own queries.

    Args:
      apply: `(q, k, v, segments, share) -> out`, attention within one sequence.
      reach: how far a position sees.
      axis: the mesh axis that the sequence is split over.
      q, k, v: the stretch; `k` is None where queries are the keys.
      segments: ids; None: one segment.
      share: which heads these are.
    """
    length = q.shape[1]
    # Where stretches are no multiple of a unit, the first own unit began up to `slack` earlier.
    slack = reach.unit - 1 if length % reach.unit else 0
    before, after = reach.before + slack, reach.after
    if not slack:
        after -= after % reach.unit
    start = lax.axis_index(axis) * length
    begun = start % reach.unit if slack else 0

    def around(x: Array, first: int, last: int, exchanged: bool = True) -> Array:
        """Positions `first` to `last` of the stretch, and what they see around them."""
        left, right = max(before - first, 0), max(last + after - length, 0)
        inside = x[:, max(first - before, 0) : min(last + after, length)]
        if exchanged:
            ends = border(x, axis, left, ahead=False), border(x, axis, right, ahead=True)
            x = jnp.concatenate([ends[0], inside, ends[1]], axis=1)
        else:
            x = jnp.pad(inside, ((0, 0), (left, right), *[(0, 0)] * (x.ndim - 2)))
        if not slack:
            return x
        x = jnp.pad(x, ((0, 0), (0, slack), *[(0, 0)] * (x.ndim - 2)))
        return lax.dynamic_slice_in_dim(x, slack - begun, x.shape[1] - slack, axis=1)

    def rows(first: int, last: int) -> Float[Array, "B l N V"]:
        """The outputs at positions `first` to `last`, with the borders that they see."""
        ids = ids_or_ones(segments, q)
        out = apply(
            around(q, first, last, exchanged=k is None),
            None if k is None else around(k, first, last),
            around(v, first, last),
            around(ids, first, last),
            dataclasses.replace(share, position=start + first - begun - reach.before),
        )
        return lax.dynamic_slice_in_dim(out, reach.before + begun, last - first, axis=1)

    if slack or length < 2 * (before + after):
        return rows(0, length)
    out = apply(q, k, v, segments, dataclasses.replace(share, position=start))
    if before:
        out = out.at[:, :before].set(rows(0, before))
    if after:
        out = out.at[:, length - after :].set(rows(length - after, length))
    return out
