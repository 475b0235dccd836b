"""LSH attention with separate queries and keys.

The buckets are those of angular hashing (Kitaev, Kaiser, Levskaya 2020, "Reformer", sec. 2), of the
queries, and of the keys less their mean: a softmax does not see what all keys share, and a hash
would see little else. In a causal call it is the mean of the keys before. Smyrf's asymmetric
transformations (Daras et al. 2020, sec. 3.1) do not serve here. The number that they add to a query
stands where a key has a zero, so the angle between the two is never below 60 degrees where they
have one length. Each round sorts the queries by bucket and, apart from them, the keys. Both orders
are cut into chunks, and the queries of a chunk see the keys of the chunk at its place and of its
neighbours. Time is O(n_hashes * T * chunk_len), besides sorting.

Queries and keys may be of two sequences. A query then stands at the middle of the keys of its
bucket (`ops.hashing.meeting`), and time is O(n_hashes * (T + S) * chunk_len).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from reformax.declared import Size
from reformax.ops import flash
from reformax.ops.base import AttentionOp, Traits, named, no_params
from reformax.ops.calls.dispatch import KERNELS, check_impl, choose, kernel_obstacles
from reformax.ops.decoding.cache import (
    KeyValues,
    Shared,
    add_to_ring,
    attend_to,
    fill_ring,
    replace_in_memory,
)
from reformax.ops.decoding.sorted_order import inserted, line, seen_before, with_bucket
from reformax.ops.hashing.angular import Hashing, bucket_factors, hash_by
from reformax.ops.hashing.centring import centred
from reformax.ops.hashing.meeting import meeting_orders
from reformax.ops.hashing.sorting import sort_by_bucket
from reformax.ops.lsh import Buckets, Rounds
from reformax.ops.masking.masks import segment_pair
from reformax.ops.masking.padding import tokens_only
from reformax.ops.softmax.chunked import chunked_attention
from reformax.ops.softmax.orders import ChunkCount, Chunks, ChunkSizes, Order

# Of algorithms that sort queries and keys by such hashes.
TRAITS = Traits(
    cross=True, random_plan=True, causal_plan=False, keeps_padding_out=True, head_shards=True
)


def two_orders(
    settings: Any,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T N H"],
    queries: Int[Array, "B N R T"],
    keys: Int[Array, "B N R T"],
) -> Order:
    """The positions whose query, and whose key, stands at each place, as a plan for `attend`."""
    order = Order(queries, keys=keys)
    return order.as_asked(impl_of(settings, q, k), settings.count_once, two_orders=True)


def impl_of(settings: Any, q: Array, k: Array, v: Array | None = None) -> str:
    """The implementation of a call, whose values may not be known yet."""
    return choose(settings.impl, **kernel_obstacles(q, k, v))


def attend(
    sizes: ChunkSizes, settings: Any, q, k, v, *, plan, segment_ids, causal, dropout, rng
) -> Float[Array, "B T N V"]:
    """Attention by `two_orders` in chunks of `sizes`; `settings` has own, count_once and impl."""
    options = dict(
        causal=causal,
        shared_qk=False,
        attend_self_if_alone=settings.attend_self_if_alone,
        count_once=settings.count_once,
        dropout=dropout,
        two_orders=True,
    )
    if not crosses(q, k, segment_ids):
        chunks = sizes.cut(q.shape[1], **options)
    elif plan is None:
        call = dict(segment_ids=segment_ids, causal=causal, dropout=dropout, rng=rng)
        return flash.flash(impl=settings.impl).apply((), q, k, v, plan=(), **call)
    else:
        options |= dict(n_keys=k.shape[1], ratio=ratio(q.shape[1], k.shape[1]))
        chunks = Chunks(q.shape[1], *sizes, **options)
    impl = impl_of(settings, q, k, v)
    return chunked_attention(q, k, v, chunks, plan, segment_ids, rng, impl)


def crosses(q: Float[Array, "B T N H"], k: Float[Array, "B S N H"], segment_ids) -> bool:
    """Whether queries and keys are of two sequences, as their lengths or segments say."""
    return q.shape[1] != k.shape[1] or isinstance(segment_ids, tuple)


def ratio(n_queries: int, n_keys: int) -> int:
    """Places of queries to each place of keys, in orders of two sequences."""
    return max(1, round(n_queries / n_keys))


class Settings(NamedTuple):
    """The hyperparameters of `asymmetric_lsh`, whose arguments they are."""

    chunk_len: int
    n_hashes: int
    n_buckets: int | Sequence[int] | str
    n_chunks_before: int
    n_chunks_after: int
    count_once: bool
    attend_self_if_alone: bool
    impl: str

    @property
    def chunks(self) -> ChunkSizes:
        """The sizes of chunks."""
        return ChunkSizes(self.chunk_len, self.n_chunks_before, self.n_chunks_after)

    @property
    def hashing(self) -> Hashing:
        """The numbers of buckets; rotations are drawn."""
        factors = None if self.n_buckets == "auto" else bucket_factors(self.n_buckets)
        return Hashing(factors, self.chunk_len, None)

    def check(self) -> None:
        """Raises `ValueError` for numbers of buckets that are not even and an unknown `impl`."""
        check_impl(self.impl, *KERNELS)
        _ = self.hashing


@named
def asymmetric_lsh(
    *,
    chunk_len: Size = 64,
    n_hashes: Rounds = 4,
    n_buckets: Buckets = "auto",
    n_chunks_before: ChunkCount = 1,
    n_chunks_after: ChunkCount = 1,
    count_once: bool = True,
    attend_self_if_alone: bool = True,
    impl: str = "auto",
) -> AttentionOp:
    """LSH attention whose keys have a projection of their own.

    It is exact attention over the union of the chunks that the rounds show each query; where one
    chunk covers the length, these are all keys, as in `dense.dense()`. A bucket's queries and its
    keys need not stand at the same places: neighbours on both sides make up for some of that.

    In a causal call later tokens decide what is in a chunk, and it may hold no key that a query may
    see. A step of decoding computes the last row of attention over the tokens so far.

    Across two sequences, of other lengths or with a pair of segments, a query sees the chunks
    around its bucket's keys; the more queries want one place, the farther they stand from it. Where
    one chunk covers the keys, all are seen.

    Args:
      chunk_len: queries, and keys, in a chunk; across sequences keys, and some may be missing.
      n_hashes: hashing rounds.
      n_buckets: as in `lsh.lsh`.
      n_chunks_before: how many chunks of keys before that at its own place a query sees.
      n_chunks_after: how many chunks of keys after it.
      count_once: True counts a key once however many rounds show it; False counts it each time.
      attend_self_if_alone: whether a position that sees nothing else attends to itself. False makes
        zeros of it, and so it is across two sequences, where a query has no key of its own.
      impl: as in `smyrf.smyrf`.

    Raises:
      ValueError: sizes out of range or an unknown `impl`.
      NotImplementedError: at the call, when `impl="pallas"` is asked for what it cannot do.
    """
    settings = Settings(**locals())
    settings.check()
    return AttentionOp(
        init=no_params,
        plan=functools.partial(_plan, settings),
        apply=functools.partial(_apply, settings),
        traits=TRAITS,
        init_cache=functools.partial(_init_cache, settings),
        step=functools.partial(_step, settings),
        replace_value=replace_in_memory,
    )


def _plan(
    settings: Settings, params, q, k, *, segment_ids, causal, rng, train, length=None
) -> Order | None:
    """The orders of queries and of keys in each round; None where one chunk has every key."""
    del params, train
    if k.shape[1] <= settings.chunk_len:
        return None
    q, k = lax.stop_gradient((q, k))
    if segment_ids is not None:
        q, k = (
            tokens_only(x, ids) for x, ids in zip((q, k), segment_pair(segment_ids), strict=True)
        )
    vectors = q, centred(k, segment_pair(segment_ids)[1], causal)
    hashing, length = settings.hashing, length or k.shape[1]
    factors = hashing.factors_for(length)
    rotations = hashing.rotations_for(q, length, settings.n_hashes, rng)
    buckets = [hash_by(rotations, x, factors, settings.impl) for x in vectors]
    if crosses(q, k, segment_ids):
        lengths = q.shape[1], k.shape[1]
        return meeting_orders(*buckets, segment_ids, settings.chunk_len, ratio(*lengths))
    n_pad = -q.shape[1] % settings.chunk_len
    sort = functools.partial(
        sort_by_bucket, n_buckets=math.prod(factors), segment_ids=segment_ids, n_pad=n_pad
    )
    return two_orders(settings, q, k, *(sort(x).queries for x in buckets))


def _apply(settings: Settings, params, q, k, v, **call):
    del params
    return attend(settings.chunks, settings, q, k, v, **call)


# Decoding. C is the capacity.


class Hashed(NamedTuple):
    """The cache of asymmetric LSH; entries of positions without a token are arbitrary."""

    memory: KeyValues  # by position
    sum: Float[Array, "B N H"]  # of all keys, which the next one's mean is made of
    of_queries: Int[Array, "B N R C"]  # buckets, by position
    of_keys: Int[Array, "B N R C"]
    order: Int[Array, "B N R C"]  # positions, sorted by their key's bucket and position
    rotations: Shared  # [N, H, R, F]


def _init_cache(settings: Settings, params, q, k, v, *, plan, lengths, capacity, rng) -> Hashed:
    del params, plan  # a plan has no buckets
    factors, length = settings.hashing.factors_for(capacity), q.shape[1]
    rotations = settings.hashing.rotations_for(q, capacity, settings.n_hashes, rng)
    is_token, last = line(length) < lengths[:, None, None, None], math.prod(factors)
    tokens = jnp.where(jnp.swapaxes(is_token, 1, 3), k, 0)
    vectors = q, centred(tokens, None, causal=True)
    of_queries, of_keys = (hash_by(rotations, x, factors, settings.impl) for x in vectors)
    order = sort_by_bucket(jnp.where(is_token, of_keys, last), last + 1, None, 0).queries
    room = ((0, 0), (0, 0), (0, 0), (0, capacity - length))
    return Hashed(
        fill_ring(k, v, lengths, capacity),
        tokens.astype(jnp.float32).sum(axis=1),
        *(jnp.pad(x, room) for x in (of_queries, of_keys, order)),
        Shared(rotations),
    )


def _step(
    settings: Settings, params, q, k, v, cache: Hashed, *, position: Int[Array, " B"]
) -> tuple[Float[Array, "B 1 N V"], Hashed]:
    del params
    memory, total, of_queries, of_keys, order, (rotations,) = cache
    memory = add_to_ring(memory, k, v, position)
    now, capacity = position[:, None, None, None], order.shape[-1]
    factors = settings.hashing.factors_for(capacity)
    key = k.astype(jnp.float32)
    mean = total[:, None] / jnp.maximum(now, 1).astype(total.dtype)
    vectors = q, (key - mean).astype(k.dtype)
    of_query, of_key = (hash_by(rotations, x, factors, settings.impl) for x in vectors)
    of_queries, of_keys = (
        with_bucket(buckets, new, position)
        for buckets, new in ((of_queries, of_query), (of_keys, of_key))
    )
    order, _, _ = inserted(order, of_keys, of_key, now)
    # Equal buckets stand by position, and the newest query stands behind them.
    before = (of_queries <= of_query) & (line(capacity) <= now)
    chunk_len, n_chunks_before, n_chunks_after = settings.chunks.within(capacity)
    chunk = (before.sum(axis=-1, keepdims=True) - 1) // chunk_len
    n_places = (n_chunks_before + 1 + n_chunks_after) * chunk_len
    place = (chunk - n_chunks_before) * chunk_len + line(n_places)
    seen = jnp.take_along_axis(order, jnp.clip(place, 0, capacity - 1), axis=-1)
    exists = (place >= 0) & (place <= now)
    if settings.count_once and settings.n_hashes > 1:
        exists = exists & ~seen_before(jnp.where(exists, seen, -1))
    index = seen.reshape(*seen.shape[:2], -1)
    out = attend_to(q, *memory, exists.reshape(index.shape), settings.impl, index=index)
    new = Hashed(memory, total + key[:, 0], of_queries, of_keys, order, Shared(rotations))
    return out, new
