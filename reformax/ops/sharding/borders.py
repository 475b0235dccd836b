"""Attention of one sequence over several devices, to what stands near.

Each device of an axis holds a stretch of the sequence. A position that sees no further than a
`Reach` needs of the other stretches their borders alone. They travel by `ppermute`, straight from
the device that has them, and the gradient comes back on the same way.

All functions are for the inside of `jax.shard_map`. A *stretch* is `[B, t, ...]`: as many positions
on each device.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from reformax.derivatives import CustomDerivatives
from reformax.ops.masking.masks import ids_or_ones
from reformax.ops.sharding.shard import Shard


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
    segment_ids: Int[Array, "B t"] | None,
    share: Shard,
) -> Float[Array, "B t N V"]:
    """Attention of a stretch of queries to all that they see.

    Each device attends within its stretch. Where stretches are long and whole units, as they are in
    use, it then does so again for the rows near its ends, with the borders that they see. Otherwise
    the stretch and its borders are one sequence, of which it keeps the rows of its own queries.

    Args:
      apply: `(q, k, v, segment_ids, share) -> out`, attention within one sequence.
      reach: how far a position sees.
      axis: the mesh axis that the sequence is split over.
      q, k, v: the stretch; `k` is None where queries are the keys.
      segment_ids: ids; None: one segment.
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

    def joined(inside: Array, head: Array, tail: Array, left: int, right: int, exchanged: bool):
        """What is inside, behind the `left` positions before it and before the `right` behind it.

        The former come from the tail of the stretch before, the latter from the head of the next.
        """
        if exchanged:
            ends = border(tail, axis, left, ahead=False), border(head, axis, right, ahead=True)
            x = jnp.concatenate([ends[0], inside, ends[1]], axis=1)
        else:
            x = jnp.pad(inside, ((0, 0), (left, right), *[(0, 0)] * (inside.ndim - 2)))
        if not slack:
            return x
        x = jnp.pad(x, ((0, 0), (0, slack), *[(0, 0)] * (x.ndim - 2)))
        return lax.dynamic_slice_in_dim(x, slack - begun, x.shape[1] - slack, axis=1)

    def rows(first: int, last: int, seen: list[Array | None]) -> Float[Array, "B l N V"]:
        """The outputs at positions `first` to `last`, of what they see."""
        place = dataclasses.replace(share, position=start + first - begun - reach.before)
        out = apply(*seen, place)
        return lax.dynamic_slice_in_dim(out, reach.before + begun, last - first, axis=1)

    # Each array whole, its head and its tail, and whether borders of it travel.
    ids, n = ids_or_ones(segment_ids, q), before + after
    is_short = slack > 0 or length < 2 * n
    parts = [None if x is None else (x, x, x) if is_short else with_ends(x, n) for x in (q, k, v)]
    parts.append((ids, ids, ids) if is_short else (ids, ids[:, :n], ids[:, length - n :]))
    travels = k is None, True, True, True

    def near(inside: int, left: int, right: int) -> list[Array | None]:
        """What rows see: all of a stretch (0), its head (1) or its tail (2), and borders."""
        return [
            None if x is None else joined(x[inside], x[1], x[2], left, right, travel)
            for x, travel in zip(parts, travels, strict=True)
        ]

    if is_short:
        return rows(0, length, near(0, before, after))
    whole = [None if x is None else x[0] for x in parts[:3]]
    out = apply(*whole, segment_ids, dataclasses.replace(share, position=start))
    if before:
        first = rows(0, before, near(1, before, 0))
        out = lax.dynamic_update_slice_in_dim(out, first, 0, axis=1)
    if after:
        last = rows(length - after, length, near(2, 0, after))
        out = lax.dynamic_update_slice_in_dim(out, last, length - after, axis=1)
    return out


def with_ends(x: Array, n: int) -> tuple[Array, Array, Array]:
    """A stretch, its first and its last `n` positions, which do not overlap.

    The gradients of the ends are added to that of the stretch in its place. Of slices they would
    be padded to the stretch's length, and all of it read and written once more for each.
    """
    return _with_ends(n, x)


@functools.partial(CustomDerivatives, n_static=1)
def _with_ends(n, x):
    return x, x[:, :n], x[:, x.shape[1] - n :]


def _with_ends_backward(n: int, _, gradients):
    d_x, *d_ends = gradients
    for start, d_end in zip((0, d_x.shape[1] - n), d_ends, strict=True):
        here = lax.dynamic_slice_in_dim(d_x, start, n, axis=1)
        d_x = lax.dynamic_update_slice_in_dim(d_x, here + d_end, start, axis=1)
    return (d_x,)


_with_ends.define(
    lambda n, x: (_with_ends.function(n, x), None),
    _with_ends_backward,
    lambda n, _, tangents: _with_ends(n, *tangents),
)
