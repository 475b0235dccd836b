"""A step of decoding for LSH attention: one more token among those already sorted by bucket.

Letters beside those of `reformax.ops.base`: C is the capacity; a *place* is an index into a round's
order, a *position* one into the sequence.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from reformax.ops.parts.cache import KeyValues, Shared, attend_to, keep, put
from reformax.ops.parts.hashing import hash_by
from reformax.ops.parts.normalization import length_normalize
from reformax.ops.parts.sorting import sort_by_bucket

_take = functools.partial(jnp.take_along_axis, mode="promise_in_bounds")


class Hashed(NamedTuple):
    """What decoding keeps; entries of no token yet are arbitrary."""

    memory: KeyValues  # by position
    buckets: Int[Array, "B N R C"]  # by position
    order: Int[Array, "B N R C"]  # positions, sorted by bucket and position
    rotations: Shared  # [N, H, R, F]


def lsh_decoding(
    *,
    chunk_len: int,
    n_chunks_before: int,
    n_chunks_after: int,
    count_once: bool,
    strictly_causal: bool,
    circle: int | None,
    sizes_for: Callable[[int], Sequence[int]],
    draw: Callable[[Float[Array, "B T N H"], int, PRNGKeyArray], Float[Array, "N H R F"]],
) -> dict[str, Callable]:
    """`init_cache` and `step` of `lsh.lsh`, whose options the first five are.

    Args:
      circle: where the rounds' chunks stand in a circle, what a round is padded to a multiple of.
      sizes_for: the factors of the number of buckets, by the capacity.
      draw: the rotations, by vectors, capacity and rng.
    """

    def init_cache(params, q, k, v, *, plan, lengths, capacity, rng) -> Hashed:
        del params, k, plan  # a plan has no buckets, and may do without an order
        sizes, length = sizes_for(capacity), q.shape[1]
        rotations = draw(q, capacity, rng)
        buckets = hash_by(rotations, q, sizes)
        is_token = jnp.arange(length) < lengths[:, None, None, None]
        last = math.prod(sizes)
        order = sort_by_bucket(jnp.where(is_token, buckets, last), last + 1, None, 0).order
        n_free = ((0, 0), (0, 0), (0, 0), (0, capacity - length))
        return Hashed(
            keep(length_normalize(q), v, lengths, capacity),
            jnp.pad(buckets, n_free),
            jnp.pad(order, n_free),
            Shared(rotations),
        )

    def step(params, q, k, v, cache, *, position):
        del params, k
        memory, buckets, order, (rotations,) = cache
        capacity = order.shape[-1]
        memory = put(memory, length_normalize(q), v, position)
        bucket = hash_by(rotations, q, sizes_for(capacity))
        now = position[:, None, None, None]
        order, first, own = _inserted(order, buckets, bucket, now)
        buckets = buckets.at[jnp.arange(q.shape[0]), :, :, position].set(bucket[..., 0])

        if strictly_causal:
            reach = chunk_len * n_chunks_before
            place = own - reach + jnp.arange(reach)
            exists = place >= first
        else:
            n_places = (n_chunks_before + 1 + n_chunks_after) * chunk_len
            place = (own // chunk_len - n_chunks_before) * chunk_len + jnp.arange(n_places)
            exists = (place >= 0) & (place <= now)
        if circle:
            seen, exists = _in_a_circle(order, place, now, circle)
        else:
            seen = _take(order, jnp.clip(place, 0, capacity - 1), axis=-1)
        exists = exists & (seen != now)
        seen = jnp.where(exists, seen, -1)
        if count_once and seen.shape[2] > 1:
            exists = exists & ~_seen_before(seen)
        index = jnp.maximum(seen, 0).reshape(*seen.shape[:2], -1)
        keys, values = (_take(x, index[..., None], axis=2) for x in memory)
        out = attend_to(q, keys, values, exists.reshape(index.shape), alone=v)
        return out, Hashed(memory, buckets, order, Shared(rotations))

    return dict(init_cache=init_cache, step=step)


def _inserted(
    order: Int[Array, "B N R C"],
    buckets: Int[Array, "B N R C"],
    bucket: Int[Array, "B N R 1"],
    now: Int[Array, "B 1 1 1"],
) -> tuple[Int[Array, "B N R C"], Int[Array, "B N R 1"], Int[Array, "B N R 1"]]:
    """The order with position `now` after all that are of no later bucket.

    Returns:
      The order, the place where its bucket begins, and its own place.
    """
    place = jnp.arange(order.shape[-1], dtype=jnp.int32)
    own, first = (
        jnp.sum((place < now) & here, axis=-1, keepdims=True, dtype=jnp.int32)
        for here in (buckets <= bucket, buckets < bucket)
    )
    moved = jnp.concatenate([order[..., :1], order[..., :-1]], axis=-1)
    order = jnp.where(place < own, order, jnp.where(place == own, now, moved))
    return order, first, own


def _in_a_circle(
    order: Int[Array, "B N R C"],
    place: Int[Array, "B N R M"],
    now: Int[Array, "B 1 1 1"],
    whole: int,
) -> tuple[Int[Array, "B N R M"], Bool[Array, "B N R M"]]:
    """What stands at places of rounds that follow each other in a circle, and whether it exists."""
    n_rounds, capacity = order.shape[2:]
    length = (now // whole + 1) * whole
    place = jnp.arange(n_rounds)[:, None] * length + place
    index, place = jnp.divmod(place % (n_rounds * length), length)
    index = index * capacity + jnp.minimum(place, capacity - 1)
    shape = (*order.shape[:2], -1)
    seen = _take(order.reshape(shape), index.reshape(shape), axis=-1).reshape(index.shape)
    return seen, place <= now


def _seen_before(seen: Int[Array, "B N R M"]) -> Bool[Array, "B N R M"]:
    """Which positions an earlier round has shown already."""
    rounds = jnp.arange(seen.shape[2])[:, None]
    again = seen[..., None, None] == seen[:, :, None, None]  # [B, N, R, M, R, M]
    again = again & (rounds[:, :, None, None] > rounds)
    return jnp.any(again, axis=(-2, -1))
