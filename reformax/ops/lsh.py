"""Locality-sensitive hashing attention (Kitaev, Kaiser, Levskaya 2020, "Reformer", sec. 2).

Shared-QK attention in which a query sees the keys that fall near it when the sequence is sorted by
hash bucket. Angular hashing (Andoni et al. 2015) projects each vector on random directions and
takes the direction it points along most. Vectors at a small angle then share a bucket with high
probability, and several rounds make a miss in all of them unlikely. Time is
O(n_hashes * T * chunk_len).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from reformax.declared import Bounds, Called, SettingError, Size
from reformax.ops.base import AttentionOp, Traits, named, no_params
from reformax.ops.calls.dispatch import KERNELS, check_impl, choose, kernel_obstacles
from reformax.ops.decoding.cache import (
    KeyValues,
    Shared,
    add_and_attend,
    fill_ring,
    replace_in_memory,
)
from reformax.ops.decoding.sorted_order import inserted, line, seen_before, with_bucket
from reformax.ops.hashing import circle
from reformax.ops.hashing.angular import Hashing, bucket_factors, hash_by
from reformax.ops.hashing.sorting import sort_by_bucket, within_buckets
from reformax.ops.numerics.normalization import length_normalize
from reformax.ops.softmax.chunked import chunked_attention
from reformax.ops.softmax.orders import ChunkCount, ChunkSizes, Order, PadChunks

# Every round orders the whole sequence.
Rounds = Annotated[int, Bounds(1, 1024)]
Buckets = Annotated[int | Sequence[int] | str, Called("'auto', or even numbers")]

_take = functools.partial(jnp.take_along_axis, mode="promise_in_bounds")


class Settings(NamedTuple):
    """The hyperparameters of `lsh`, whose arguments they are."""

    chunk_len: int
    n_hashes: int
    n_hashes_eval: int | None
    n_buckets: int | Sequence[int] | str
    n_chunks_before: int
    n_chunks_after: int
    count_once: bool
    strictly_causal: bool
    wrap: bool
    pad_chunks: int
    attend_self_if_alone: bool
    self_score: float | None
    rotations: Float[ArrayLike, "N H R F"] | None
    impl: str

    @property
    def chunks(self) -> ChunkSizes:
        """The sizes of chunks."""
        return ChunkSizes(self.chunk_len, self.n_chunks_before, self.n_chunks_after)

    @property
    def hashing(self) -> Hashing:
        """The numbers of buckets and the rotations."""
        factors = None if self.n_buckets == "auto" else bucket_factors(self.n_buckets)
        return Hashing(factors, self.chunk_len, self.rotations)

    @property
    def whole(self) -> int:
        """The number of places that a sequence of several chunks is padded to a multiple of."""
        return self.chunk_len * (self.pad_chunks if self.wrap else 1)

    def n_rounds(self, train: bool) -> int:
        """The number of hashing rounds."""
        return self.n_hashes if train or self.n_hashes_eval is None else self.n_hashes_eval

    def check(self) -> None:
        """Raises `ValueError` for sizes out of range and options that exclude each other."""
        check_impl(self.impl, *KERNELS)
        if self.wrap and self.count_once:
            raise SettingError("wrap is True and count_once is True: set count_once=False")
        factors = self.hashing.factors
        if self.strictly_causal and (self.n_chunks_before < 1 or self.n_chunks_after > 0):
            raise SettingError(
                f"strictly_causal=True with n_chunks_before={self.n_chunks_before} and "
                f"n_chunks_after={self.n_chunks_after}: expected at least 1 and 0"
            )
        if self.wrap and self.strictly_causal:
            raise SettingError("wrap is True and strictly_causal is True: leave one out")
        if not self.attend_self_if_alone and self.self_score is not None:
            raise SettingError(
                f"attend_self_if_alone is False and self_score is {self.self_score}: leave one out"
            )
        if self.rotations is not None and factors is None:
            raise SettingError(
                "rotations are given and n_buckets is 'auto': give the number of buckets"
            )


@named
def lsh(
    *,
    chunk_len: Size = 64,
    n_hashes: Rounds = 4,
    n_hashes_eval: Rounds | None = None,
    n_buckets: Buckets = "auto",
    n_chunks_before: ChunkCount = 1,
    n_chunks_after: ChunkCount = 0,
    count_once: bool = True,
    strictly_causal: bool = False,
    wrap: bool = False,
    pad_chunks: PadChunks = 1,
    attend_self_if_alone: bool = True,
    self_score: float | None = None,
    rotations: Float[ArrayLike, "N H R F"] | None = None,
    impl: str = "auto",
) -> AttentionOp:
    """LSH attention with its hyperparameters fixed.

    It is exact shared-QK attention over the union of the chunks that the rounds show each query;
    where one chunk covers the length, these are all keys, as in `shared_qk.shared_qk()`. The first
    chunk has no chunk before it, unless `wrap` is set.

    A step of decoding computes the last row of attention over the tokens so far. In one call over
    all positions, later tokens may move the border of a chunk, and an earlier row may see other
    keys than it did in its step. With `strictly_causal`, no later token decides what a position
    sees, and decoding computes the same function as one call.

    Args:
      chunk_len: positions in a chunk of the sorted sequence.
      n_hashes: hashing rounds in training.
      n_hashes_eval: rounds at evaluation; by default as many as in training.
      n_buckets: an even number, a sequence of even factors, or "auto". Each factor is hashed with
        its own rotation and a bucket is their mixed-radix number, the first factor's digit the
        least: two factors a and b cost a + b in place of a * b. "auto" makes about two buckets a
        chunk, above 128 in two factors. It counts the chunks of the sequence, padding included; in
        decoding those of the capacity.
      n_chunks_before: how many chunks before its own, in sorted order, a query sees.
      n_chunks_after: how many chunks after its own.
      count_once: True counts a key once however many rounds show it, as the paper's N_ij does
        (appendix A); False counts it each time, as Trax does.
      strictly_causal: True shows a query, in each round, only the keys of its own bucket that are
        among the `chunk_len * n_chunks_before` places before its own. For causal attention. The
        plan is then three integers a position in place of two.
      wrap: True sets the rounds' chunks in a circle, as Trax and Hugging Face do: before a round's
        first chunk is the last chunk of the round before, and before the first round the last one.
        Needs `count_once=False`.
      pad_chunks: with `wrap`, the sequence is padded to a multiple of so many chunks.
      attend_self_if_alone: whether a position that sees nothing else attends to itself. False makes
        zeros of it.
      self_score: the score that Trax and Hugging Face give a position's own key, -1e5. Float32 is
        coarse among scores so large: a position that sees nothing else gets its own value times a
        number up to half a percent off 1. This reproduces it. None, and a step of decoding, make
        it 1.
      rotations: the rotations to hash with; None draws them from the rng. N heads of size H, at
        least as many rounds R as are used, and F half the sum of the factors of `n_buckets`.
      impl: `"xla"` runs everywhere. `"pallas"` are kernels for NVIDIA GPUs of Ampere or later and
        heads of 128 or less, without `strictly_causal`, `wrap` and `self_score`;
        `"pallas_interpret"` runs them anywhere, slowly, for tests. `"auto"` takes them where they
        run.

    Raises:
      ValueError: sizes out of range, an unknown `impl`, or options that exclude each other.
      NotImplementedError: at the call, when `impl="pallas"` is asked for what it cannot do.
    """
    settings = Settings(**locals())
    settings.check()
    return AttentionOp(
        init=no_params,
        plan=functools.partial(_plan, settings),
        apply=functools.partial(_apply, settings),
        traits=Traits(
            shared_qk=True,
            exclude_self=not attend_self_if_alone,
            random_plan=rotations is None,
            causal_plan=strictly_causal,
            bidirectional=not strictly_causal,
            keeps_padding_out=True,
            head_shards=True,
        ),
        init_cache=functools.partial(_init_cache, settings),
        step=functools.partial(_step, settings),
        replace_value=replace_in_memory,
    )


def _choose(settings: Settings, q: Array, v: Array | None = None) -> str:
    """The implementation of a call, whose values may not be known yet."""
    obstacles = kernel_obstacles(
        *(q, None, v),
        strictly_causal=settings.strictly_causal,
        wrap=settings.wrap,
        self_score=settings.self_score,
    )
    return choose(settings.impl, **obstacles)


def _plan(
    settings: Settings, params, q, k, *, segment_ids, causal, rng, train, length=None
) -> Order | None:
    """The order by bucket in each round; None where one chunk shows every key."""
    del params, k, causal
    one_chunk = q.shape[1] <= settings.chunk_len
    if one_chunk and not settings.strictly_causal:
        return None
    vectors, impl = lax.stop_gradient(q), _choose(settings, q)
    length, n_rounds = length or q.shape[1], settings.n_rounds(train)
    factors = settings.hashing.factors_for(length)
    rotations = settings.hashing.rotations_for(vectors, length, n_rounds, rng)
    buckets = hash_by(rotations, vectors, factors, settings.impl)
    n_pad = 0 if one_chunk else -q.shape[1] % settings.whole
    order = sort_by_bucket(buckets, math.prod(factors), segment_ids, n_pad)
    if settings.strictly_causal:
        return within_buckets(order, buckets, settings.chunk_len * settings.n_chunks_before)
    if settings.wrap:
        order = circle.in_a_circle(order, settings.chunks)
    return order.as_asked(impl, settings.count_once)


def _apply(settings: Settings, params, q, k, v, *, plan, segment_ids, causal, dropout, rng):
    del params
    chunks = settings.chunks.cut(
        q.shape[1],
        circle=settings.wrap,
        causal=causal,
        shared_qk=True,
        attend_self_if_alone=settings.attend_self_if_alone,
        count_once=settings.count_once,
        dropout=dropout,
    )
    impl = _choose(settings, q, v)
    own_weight = None
    if settings.self_score is not None and plan is not None:
        own_weight = circle.own_weight(settings.self_score, plan, settings.chunks)
    return chunked_attention(q, k, v, chunks, plan, segment_ids, rng, impl, own_weight)


# Decoding. C is the capacity; a *place* is an index into a round's order, a *position* one into the
# sequence.


class Hashed(NamedTuple):
    """The cache of LSH attention; entries of positions without a token are arbitrary."""

    memory: KeyValues  # by position
    buckets: Int[Array, "B N R C"]  # by position
    order: Int[Array, "B N R C"]  # positions, sorted by bucket and position
    rotations: Shared  # [N, H, R, F]


def _init_cache(settings: Settings, params, q, k, v, *, plan, lengths, capacity, rng) -> Hashed:
    del params, k, plan  # a plan has no buckets
    factors, length = settings.hashing.factors_for(capacity), q.shape[1]
    rotations = settings.hashing.rotations_for(q, capacity, settings.n_rounds(train=False), rng)
    buckets = hash_by(rotations, q, factors, settings.impl)
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
    factors = settings.hashing.factors_for(order.shape[-1])
    bucket = hash_by(rotations, q, factors, settings.impl)
    now = position[:, None, None, None]
    buckets = with_bucket(buckets, bucket, position)
    order, first, own = inserted(order, buckets, bucket, now)

    seen, exists = _seen(settings, order, first, own, now)
    exists = exists & (seen != now)
    seen = jnp.where(exists, seen, -1)
    if settings.count_once and seen.shape[2] > 1:
        exists = exists & ~seen_before(seen)
    index = jnp.maximum(seen, 0).reshape(*seen.shape[:2], -1)
    alone = v if settings.attend_self_if_alone else None
    mask, new = exists.reshape(index.shape), KeyValues(length_normalize(q), v)
    options = dict(alone=alone, index=index)
    out, memory = add_and_attend(q, memory, new, position, mask, settings.impl, **options)
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
    sizes = settings.chunks.within(order.shape[-1], circle=settings.wrap)
    chunk_len, n_chunks_before, n_chunks_after = sizes
    if settings.strictly_causal:
        reach = chunk_len * n_chunks_before
        place = own - reach + line(reach)
        exists = place >= first
    else:
        n_places = (n_chunks_before + 1 + n_chunks_after) * chunk_len
        place = (own // chunk_len - n_chunks_before) * chunk_len + line(n_places)
        exists = (place >= 0) & (place <= now)
    if settings.wrap:
        return _in_a_circle(order, place, now, chunk_len * settings.pad_chunks)
    return _take(order, jnp.clip(place, 0, order.shape[-1] - 1), axis=-1), exists


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
