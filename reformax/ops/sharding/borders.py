"""Local attention in one sequence over several devices, by halo exchange.

Each device of an axis holds a shard of the sequence. A position that sees no further than a `Reach`
needs only the borders of the other shards. `ppermute` sends them from the devices that hold them,
and sends their gradients back.

All functions run inside `jax.shard_map`. A *shard* is `[B, t, ...]`, with the same number of
positions on each device.
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
from reformax.ops.sharding.shard import Shard


class Reach(NamedTuple):
    """How far a position sees, in positions."""

    before: int  # visible positions before the query's unit, a multiple of the unit
    after: int  # visible positions after the query, at most
    # The length of a chunk, which begins at a multiple of it. 1 for a sliding window.
    unit: int = 1


def border(x: Array, axis: str, n: int, *, ahead: bool) -> Array:
    """The `n` positions before a shard, or after it with `ahead`; zeros outside the sequence."""
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
    shard: Shard,
) -> Float[Array, "B t N V"]:
    """Attention of a shard of queries to all keys that they see.

    Each device attends within its shard. Long shards of whole units are the usual case: the device
    then computes the rows near the shard's ends again, with the borders that they see. Otherwise
    the device attends within the shard and its borders, and keeps the rows of its own queries.

    Args:
      apply: `(q, k, v, segment_ids, shard) -> out`, attention within one sequence.
      reach: how far a position sees.
      axis: the mesh axis that the sequence is split over.
      q, k, v: the shard's arrays; `k` is None where queries are the keys.
      segment_ids: the shard's ids; None: one segment.
      shard: which heads the arrays have.
    """
    length = q.shape[1]
    # Where a shard is not a multiple of a unit, its first unit begins up to `slack` earlier.
    slack = reach.unit - 1 if length % reach.unit else 0
    before, after = reach.before + slack, reach.after
    if not slack:
        after -= after % reach.unit
    start = lax.axis_index(axis) * length
    begun = start % reach.unit if slack else 0

    def joined(inside: Array, head: Array, tail: Array, left: int, right: int, exchange: bool):
        """`inside` with the `left` positions before it and the `right` positions after it.

        The former come from the tail of the shard before, the latter from the head of the next.
        """
        if exchange:
            ends = border(tail, axis, left, ahead=False), border(head, axis, right, ahead=True)
            x = jnp.concatenate([ends[0], inside, ends[1]], axis=1)
        else:
            x = jnp.pad(inside, ((0, 0), (left, right), *[(0, 0)] * (inside.ndim - 2)))
        if not slack:
            return x
        x = jnp.pad(x, ((0, 0), (0, slack), *[(0, 0)] * (x.ndim - 2)))
        return lax.dynamic_slice_in_dim(x, slack - begun, x.shape[1] - slack, axis=1)

    def rows(first: int, last: int, seen: list[Array | None]) -> Float[Array, "B l N V"]:
        """The outputs at positions `first` to `last`, given what they see."""
        at = dataclasses.replace(shard, position=start + first - begun - reach.before)
        out = apply(*seen, at)
        return lax.dynamic_slice_in_dim(out, reach.before + begun, last - first, axis=1)

    # Each whole array with its head and its tail, and whether devices exchange its borders.
    n, ids = before + after, segment_ids
    if ids is None:  # booleans say that a row is one segment
        ids = jnp.ones(q.shape[:2], bool)
    is_short = slack > 0 or length < 2 * n
    parts = [None if x is None else (x, x, x) if is_short else with_ends(x, n) for x in (q, k, v)]
    parts.append((ids, ids, ids) if is_short else (ids, ids[:, :n], ids[:, length - n :]))
    exchanged = k is None, True, True, True

    def near(inside: int, left: int, right: int) -> list[Array | None]:
        """The keys that rows see: a whole shard (0), its head (1) or its tail (2), and borders."""
        return [
            None if x is None else joined(x[inside], x[1], x[2], left, right, exchange)
            for x, exchange in zip(parts, exchanged, strict=True)
        ]

    if is_short:
        return rows(0, length, near(0, before, after))
    whole = [None if x is None else x[0] for x in parts[:3]]
    out = apply(*whole, segment_ids, dataclasses.replace(shard, position=start))
    if before:
        first = rows(0, before, near(1, before, 0))
        out = lax.dynamic_update_slice_in_dim(out, first, 0, axis=1)
    if after:
        last = rows(length - after, length, near(2, 0, after))
        out = lax.dynamic_update_slice_in_dim(out, last, length - after, axis=1)
    return out


def with_ends(x: Array, n: int) -> tuple[Array, Array, Array]:
    """A shard, its first `n` positions and its last `n`, which do not overlap.

    The gradients of the ends are added to slices of the shard's gradient. JAX's gradient of a slice
    pads it to the shard's length, and so reads and writes the whole shard once more for each end.
    """
    return _with_ends(n, x)


@functools.partial(CustomDerivatives, n_static=1)
def _with_ends(n, x):
    return x, x[:, :n], x[:, x.shape[1] - n :]


def _with_ends_backward(n: int, _, gradients):
    d_x, *d_ends = gradients
    for start, d_end in zip((0, d_x.shape[1] - n), d_ends, strict=True):
        d_slice = lax.dynamic_slice_in_dim(d_x, start, n, axis=1)
        d_x = lax.dynamic_update_slice_in_dim(d_x, d_slice + d_end, start, axis=1)
    return (d_x,)


_with_ends.define(
    lambda n, x: (_with_ends.function(n, x), None),
    _with_ends_backward,
    lambda n, _, tangents: _with_ends(n, *tangents),
)
