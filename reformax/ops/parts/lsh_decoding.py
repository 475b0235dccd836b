"""A step of decoding for LSH attention: one more token among those already sorted by bucket.

C is the capacity, besides the letters of `reformax.ops.base`; a *place* is an index into a round's
order, a *position* one into the sequence.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from reformax.ops.parts.cache import (
    KeyValues,
    Shared,
    add_to_ring,
    attend_to,
    fill_ring,
    put,
    replace_value,
)
from reformax.ops.parts.hashing import hash_by
from reformax.ops.parts.normalization import length_normalize
from reformax.ops.parts.sorting import sort_by_bucket

if TYPE_CHECKING:
    from reformax.ops.lsh import Settings

_take = functools.partial(jnp.take_along_axis, mode="promise_in_bounds")


class Hashed(NamedTuple):
    """The cache of LSH attention; entries of positions without a token are arbitrary."""

    memory: KeyValues  # by position
    buckets: Int[Array, "B N R C"]  # by position
    order: Int[Array, "B N R C"]  # positions, sorted by bucket and position
    rotations: Shared  # [N, H, R, F]


def lsh_decoding(settings: Settings) -> dict[str, Callable]:
    """The functions of decoding for `lsh.lsh`."""
    return dict(
        init_cache=functools.partial(_init_cache, settings),
        step=functools.partial(_step, settings),
        replace_value=_replace_value,
    )


def _replace_value(cache: Hashed, v, position) -> Hashed:
    return cache._replace(memory=replace_value(cache.memory, v, position))


def _init_cache(settings: Settings, params, q, k, v, *, plan, lengths, capacity, rng) -> Hashed:
    del params, k, plan  # a plan has no buckets
    factors, length = settings.hashing.factors_for(capacity), q.shape[1]
    rotations = settings.hashing.rotations_for(q, capacity, settings.n_rounds(train=False), rng)
    buckets = hash_by(rotations, q, factors)
    is_token = line(length) < lengths[:, None, None, None]
    last = math.prod(factors)
    order = sort_by_bucket(jnp.where(is_token, buckets, last), last + 1, None, 0).queries
    n_free = ((0, 0), (0, 0), (0, 0), (0, capacity - length))
    return Hashed(
        fill_ring(length_normalize(q), v, lengths, capacity),
        jnp.pad(buckets, n_free),
        jnp.pad(order, n_free),
        Shared(rotations),
    )


def _step(
    settings: Settings, params, q, k, v, cache: Hashed, *, position: Int[Array, " B"]
) -> tuple[Float[Array, "B 1 N V"], Hashed]:
    del params, k
    memory, buckets, order, (rotations,) = cache
    memory = add_to_ring(memory, length_normalize(q), v, position)
    bucket = hash_by(rotations, q, settings.hashing.factors_for(order.shape[-1]))
    now = position[:, None, None, None]
    buckets = with_bucket(buckets, bucket, position)
    order, first, own = inserted(order, buckets, bucket, now)

    seen, exists = _seen(settings, order, first, own, now)
    exists = exists & (seen != now)
    seen = jnp.where(exists, seen, -1)
    if settings.count_once and seen.shape[2] > 1:
        exists = exists & ~seen_before(seen)
    index = jnp.maximum(seen, 0).reshape(*seen.shape[:2], -1)
    alone = v if settings.own else None
    out = attend_to(q, *memory, exists.reshape(index.shape), alone, index=index)
    return out, Hashed(memory, buckets, order, Shared(rotations))


def _seen(
    settings: Settings,
    order: Int[Array, "B N R C"],
    first: Int[Array, "B N R 1"],
    own: Int[Array, "B N R 1"],
    now: Int[Array, "B 1 1 1"],
) -> tuple[Int[Array, "B N R M"], Bool[Array, "B N R M"]]:
    """The positions in reach of the newest one in each round, and whether there is one.

    Args:
      settings: the op's.
      order: each round's order, with the newest position in it.
      first: the place where its bucket begins.
      own: its place.
      now: the newest position.
    """
    chunk_len, n_chunks_before, n_chunks_after = settings.chunks
    if settings.strictly_causal:
        reach = chunk_len * n_chunks_before
        place = own - reach + line(reach)
        exists = place >= first
    else:
        n_places = (n_chunks_before + 1 + n_chunks_after) * chunk_len
        place = (own // chunk_len - n_chunks_before) * chunk_len + line(n_places)
        exists = (place >= 0) & (place <= now)
    if settings.wrap:
        return _in_a_circle(order, place, now, settings.whole)
    return _take(order, jnp.clip(place, 0, order.shape[-1] - 1), axis=-1), exists


def with_bucket(
    buckets: Int[Array, "B N R C"], bucket: Int[Array, "B N R 1"], position: Int[Array, " B"]
) -> Int[Array, "B N R C"]:
    """The buckets with that of each row's `position`."""
    lines = buckets.reshape(buckets.shape[0], -1, buckets.shape[-1], 1)
    return put(lines, bucket.reshape(*lines.shape[:2], 1), position).reshape(buckets.shape)


def inserted(
    order: Int[Array, "B N R C"],
    buckets: Int[Array, "B N R C"],
    bucket: Int[Array, "B N R 1"],
    now: Int[Array, "B 1 1 1"],
) -> tuple[Int[Array, "B N R C"], Int[Array, "B N R 1"], Int[Array, "B N R 1"]]:
    """The order with position `now` behind the positions of its own bucket and of those before it.

    Returns:
      The order, the place where its bucket begins, and its own place.
    """
    place = line(order.shape[-1])
    own, first = (
        jnp.sum((place < now) & here, axis=-1, keepdims=True, dtype=jnp.int32)
        for here in (buckets <= bucket, buckets < bucket)
    )
    shifted = jnp.concatenate([order[..., :1], order[..., :-1]], axis=-1)
    order = jnp.where(place < own, order, jnp.where(place == own, now, shifted))
    return order, first, own


def _in_a_circle(
    order: Int[Array, "B N R C"],
    place: Int[Array, "B N R M"],
    now: Int[Array, "B 1 1 1"],
    whole: int,
) -> tuple[Int[Array, "B N R M"], Bool[Array, "B N R M"]]:
    """The positions at places of rounds in a circle, and whether there is one.

    Rounds are padded to a multiple of `whole` places.
    """
    n_rounds, capacity = order.shape[2:]
    length = (now // whole + 1) * whole
    place = jnp.arange(n_rounds)[None, None, :, None] * length + place
    index, place = jnp.divmod(place % (n_rounds * length), length)
    index = index * capacity + jnp.minimum(place, capacity - 1)
    shape = (*order.shape[:2], -1)
    seen = _take(order.reshape(shape), index.reshape(shape), axis=-1).reshape(index.shape)
    return seen, place <= now


def seen_before(seen: Int[Array, "B N R M"]) -> Bool[Array, "B N R M"]:
    """Which positions an earlier round has shown."""
    rounds = jnp.arange(seen.shape[2])[None, None, :, None]
    again = seen[..., None, None] == seen[:, :, None, None]  # [B, N, R, M, R, M]
    again = again & (rounds[..., None, None] > rounds[:, :, None, None])
    return jnp.any(again, axis=(-2, -1))


def line(n: int) -> Int[Array, "1 1 1 n"]:
    """0 to n - 1 along the last of the axes of an order."""
    return jnp.arange(n, dtype=jnp.int32)[None, None, None]
