"""Locality-sensitive hashing attention (Kitaev, Kaiser, Levskaya 2020, "Reformer", sec. 2).

Shared-QK attention in which a query sees the keys that fall near it when the sequence is sorted by
hash bucket. Angular hashing (Andoni et al. 2015) projects each vector on random directions and
takes the direction it points along most: vectors at a small angle share a bucket with high
probability, and several rounds make a miss in all of them unlikely. Time is
O(n_hashes * T * chunk_len).
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray

from reformax.ops.base import AttentionOp, Traits, check_impl, length_normalize, no_params
from reformax.ops.cache import KeyValues, Shared, attend_to, keep, put
from reformax.ops.chunked import (
    KERNELS,
    Chunks,
    Order,
    check_chunks,
    chosen_impl,
    chunked_attention,
    in_a_circle,
    inverse,
    padding,
)

MAX_BUCKETS_UNFACTORED = 128


class Hashed(NamedTuple):
    """What decoding keeps: C is the capacity, and entries of no token yet are arbitrary."""

    memory: KeyValues  # by position
    buckets: Int[Array, "B N R C"]  # by position
    order: Int[Array, "B N R C"]  # positions, sorted by bucket and position
    rotations: Shared  # [N, H, R, F]


def lsh(
    *,
    chunk_len: int = 64,
    n_hashes: int = 4,
    n_hashes_eval: int | None = None,
    n_buckets: int | Sequence[int] | str = "auto",
    n_chunks_before: int = 1,
    n_chunks_after: int = 0,
    count_once: bool = True,
    strictly_causal: bool = False,
    wrap: bool = False,
    pad_chunks: int = 1,
    self_score: float | None = None,
    rotations: Float[ArrayLike, "N H R F"] | None = None,
    impl: str = "auto",
) -> AttentionOp:
    """LSH attention with its hyperparameters fixed.

    It is exact shared-QK attention over the union of the chunks that the rounds show each query;
    where one chunk covers the length, it is `shared_qk.shared_qk()` itself. The first chunk has no
    chunk before it, unless `wrap` is set.

    A step of decoding computes the last row of attention over the tokens so far. Rows before it are
    not computed again, though a later token may have moved a chunk border, which decides what they
    see when all positions are computed at once. With `strictly_causal` nothing that follows decides
    what a position sees, and decoding computes the same function as all at once.

    Args:
      chunk_len: positions in a chunk of the sorted sequence.
      n_hashes: hashing rounds in training.
      n_hashes_eval: rounds at evaluation; by default as many as in training.
      n_buckets: even; or a sequence of even factors, each hashed with its own rotation, the bucket
        being their mixed-radix number (for many buckets: factors a, b cost a + b, not a * b);
        or "auto", about two buckets a chunk of the sequence, padding included, or of the capacity
        in decoding; factored above 128.
      n_chunks_before: how many chunks before its own, in sorted order, a query sees.
      n_chunks_after: how many chunks after its own.
      count_once: True counts a key once however many rounds show it, as the paper's N_ij does
        (appendix A); False counts it each time, as Trax does.
      strictly_causal: whether a query sees in each round the keys of its own bucket alone, those
        among the `chunk_len * n_chunks_before` places before its own in sorted order. For causal
        attention; the plan then is three integers a position in place of two.
      wrap: True sets the rounds' chunks in a circle, as Trax and Hugging Face do: before a round's
        first chunk is the last one of the round before, and before the first round's that of the
        last. Needs `count_once=False`.
      pad_chunks: the sequence is padded to a multiple of so many chunks, which only `wrap` can
        tell: the last chunk may be padding alone.
      self_score: the score that Trax and Hugging Face give a position's own key, -1e5. Among scores
        so large float32 is coarse, and one that sees nothing else gets its own value times a number
        that is up to half a percent off 1, which this reproduces; None makes it 1. A step of
        decoding makes it 1.
      rotations: what to hash with instead of rotations drawn from the rng: N heads, heads of size
        H, at least as many rounds R as are used, half the sum F of the factors of `n_buckets`.
      impl: `"xla"` runs everywhere. `"pallas"` are kernels for NVIDIA GPUs of Ampere or later and
        heads of 128 or less, without `strictly_causal`, `wrap` and `self_score`;
        `"pallas_interpret"` runs them anywhere, slowly, for tests. `"auto"` takes them where they
        run.

    Raises:
      ValueError: sizes out of range, an unknown `impl`, or options that exclude each other.
      NotImplementedError: at the call, when `impl="pallas"` is asked for what it cannot do.
    """
    check_impl(impl, *KERNELS)
    check_chunks(chunk_len, n_chunks_before, n_chunks_after, pad_chunks)
    if wrap and count_once:
        raise ValueError("wrap is True and count_once is True: set count_once=False")
    if n_hashes_eval is None:
        n_hashes_eval = n_hashes
    for name, n in (("n_hashes", n_hashes), ("n_hashes_eval", n_hashes_eval)):
        if n < 1:
            raise ValueError(f"{name} is {n}: expected at least 1")
    factors = None if n_buckets == "auto" else _factors(n_buckets)
    reach = chunk_len * n_chunks_before
    if strictly_causal and (n_chunks_before < 1 or n_chunks_after > 0):
        raise ValueError(
            f"strictly_causal=True with n_chunks_before={n_chunks_before} and "
            f"n_chunks_after={n_chunks_after}: expected at least 1 and 0"
        )
    if wrap and strictly_causal:
        raise ValueError("wrap is True and strictly_causal is True: leave one")
    if rotations is not None and factors is None:
        raise ValueError("rotations are given and n_buckets is 'auto': give the number of buckets")

    def implementation(q, v=None):
        return chosen_impl(
            impl, q, v, strictly_causal=strictly_causal, wrap=wrap, self_score=self_score
        )

    def sizes_for(length):
        return factors or auto_buckets(length, chunk_len)

    def draw(vectors, sizes, n_rounds, rng):
        if rotations is None:
            return draw_rotations(vectors, sizes, n_rounds, rng)
        return check_rotations(rotations, vectors, sizes, n_rounds)

    def plan(params, q, k, *, segments, causal, rng, train, length=None) -> Order | None:
        del params, k, causal
        if q.shape[1] <= chunk_len and not strictly_causal:
            return None  # One chunk shows every key, in whatever order.
        sizes = sizes_for(length or q.shape[1])
        n_rounds = n_hashes if train else n_hashes_eval
        vectors, which = lax.stop_gradient(q), implementation(q)
        buckets = hash_by(draw(vectors, sizes, n_rounds, rng), vectors, sizes, which)
        order = sort_by_bucket(
            buckets, math.prod(sizes), segments, padding(q.shape[1], chunk_len, pad_chunks)
        )
        if wrap:
            order = in_a_circle(order, chunk_len, n_chunks_before, n_chunks_after)
        if strictly_causal:
            return within_buckets(order, buckets, reach)
        # A kernel writes its rows where they belong; it asks only which rounds showed a key before.
        unasked = which != "xla" and (n_rounds == 1 or not count_once)
        return order._replace(slot=None) if unasked else order

    def apply(params, q, k, v, *, plan, segments, causal, dropout, rng):
        del params
        chunks = Chunks(
            length=q.shape[1],
            chunk_len=min(chunk_len, q.shape[1]),
            n_chunks_before=n_chunks_before,
            n_chunks_after=n_chunks_after,
            causal=causal,
            shared_qk=True,
            count_once=count_once,
            dropout=dropout,
            wrap=wrap and q.shape[1] > chunk_len,
            n_pad=padding(q.shape[1], chunk_len, pad_chunks),
            self_score=self_score,
        )
        which = implementation(q, v)
        if which == "xla" and plan is not None and plan.slot is None:  # values rule the kernel out
            plan = plan._replace(slot=inverse(plan.order))
        return chunked_attention(q, k, v, chunks, plan, segments, rng, which)

    def init_cache(params, q, k, v, *, plan, lengths, capacity, rng) -> Hashed:
        del params, k, plan  # a plan has no buckets, and may do without an order
        sizes, length = sizes_for(capacity), q.shape[1]
        drawn = draw(q, sizes, n_hashes_eval, rng)
        buckets = hash_by(drawn, q, sizes)
        is_token = jnp.arange(length) < lengths[:, None, None, None]
        last = math.prod(sizes)
        order = sort_by_bucket(jnp.where(is_token, buckets, last), last + 1, None, 0).order
        n_free = ((0, 0), (0, 0), (0, 0), (0, capacity - length))
        return Hashed(
            keep(length_normalize(q), v, lengths, capacity),
            jnp.pad(buckets, n_free),
            jnp.pad(order, n_free),
            Shared(drawn),
        )

    def step(params, q, k, v, cache, *, position):
        del params, k
        memory, buckets, order, (drawn,) = cache
        capacity = order.shape[-1]
        memory = put(memory, length_normalize(q), v, position)
        bucket = hash_by(drawn, q, sizes_for(capacity))

        # The new token stands after all that are not of a later bucket.
        now = position[:, None, None, None]
        place = jnp.arange(capacity, dtype=jnp.int32)
        n_upto, n_before = (
            jnp.sum((place < now) & here, axis=-1, keepdims=True, dtype=jnp.int32)
            for here in (buckets <= bucket, buckets < bucket)
        )
        moved = jnp.concatenate([order[..., :1], order[..., :-1]], axis=-1)
        order = jnp.where(place < n_upto, order, jnp.where(place == n_upto, now, moved))
        row = jnp.arange(q.shape[0])
        buckets = buckets.at[row, :, :, position].set(bucket[..., 0])

        if strictly_causal:
            window = n_upto - reach + jnp.arange(reach)
            exists = window >= n_before
        else:
            size = (n_chunks_before + 1 + n_chunks_after) * chunk_len
            window = (n_upto // chunk_len - n_chunks_before) * chunk_len + jnp.arange(size)
            exists = (window >= 0) & (window <= now) & (window != n_upto)
        take = functools.partial(jnp.take_along_axis, mode="promise_in_bounds")
        if wrap:
            whole = chunk_len * pad_chunks
            length = (now // whole + 1) * whole
            n_rounds = order.shape[2]
            place = jnp.arange(n_rounds)[:, None] * length + window
            index, window = jnp.divmod(place % (n_rounds * length), length)
            index = index * capacity + jnp.minimum(window, capacity - 1)
            shape = (*order.shape[:2], -1)
            seen = take(order.reshape(shape), index.reshape(shape), axis=-1).reshape(index.shape)
            exists = (window <= now) & (seen != now)
        else:
            seen = take(order, jnp.clip(window, 0, capacity - 1), axis=-1)
        seen = jnp.where(exists, seen, -1)
        index = jnp.maximum(seen, 0).reshape(*seen.shape[:2], -1)
        if count_once and seen.shape[2] > 1:
            rounds = jnp.arange(seen.shape[2])[:, None]
            again = seen[..., None, None] == seen[:, :, None, None]  # [B, N, R, M, R, M]
            again = again & (rounds[:, :, None, None] > rounds)
            exists = exists & ~jnp.any(again, axis=(-2, -1))
        keys, values = (take(x, index[..., None], axis=2) for x in memory)
        out = attend_to(q, keys, values, exists.reshape(index.shape), alone=v)
        return out, Hashed(memory, buckets, order, Shared(drawn))

    return AttentionOp(
        init=no_params,
        plan=plan,
        apply=apply,
        traits=Traits(
            shared_qk=True,
            random_plan=rotations is None,
            bidirectional=not strictly_causal,
        ),
        init_cache=init_cache,
        step=step,
    )


def _factors(n_buckets: int | Sequence[int]) -> tuple[int, ...]:
    try:
        sizes = n_buckets if isinstance(n_buckets, Sequence) else (n_buckets,)
        factors = tuple(operator.index(size) for size in sizes)
    except TypeError:
        factors = ()
    if not factors or any(f < 2 or f % 2 for f in factors) or math.prod(factors) >= 2**31:
        raise ValueError(
            f"n_buckets is {n_buckets!r}: expected 'auto', or even numbers of 2 or more with a "
            "product below 2**31"
        )
    return factors


def auto_buckets(length: int, chunk_len: int) -> tuple[int, ...]:
    """Bucket counts for a length: about two buckets a chunk, factored if they are many."""
    n_buckets = 2 * max(1, -(-length // chunk_len))
    if n_buckets <= MAX_BUCKETS_UNFACTORED:
        return (n_buckets,)
    first = 2 ** math.ceil(math.log2(n_buckets) / 2)
    return (first, 2 * max(1, n_buckets // (2 * first)))


def hash_vectors(
    vectors: Float[Array, "B T N H"],
    factors: Sequence[int],
    n_rounds: int,
    rng: PRNGKeyArray,
    impl: str = "xla",
) -> Int[Array, "B N R T"]:
    """Angular hashes: the argmax over [x R; -x R] for a random R (Reformer, sec. 2).

    Rotations are shared by the batch and drawn for each head and round.

    Args:
      vectors: what to hash; only directions matter.
      factors: even bucket counts; bucket = sum_i hash_i * prod(factors before i).
      n_rounds: R.
      rng: the source of the rotations.
      impl: "xla", or the kernel, which multiplies in the dtype of `vectors`.
    """
    return hash_by(draw_rotations(vectors, factors, n_rounds, rng), vectors, factors, impl)


def draw_rotations(
    vectors: Float[Array, "B T N H"], factors: Sequence[int], n_rounds: int, rng: PRNGKeyArray
) -> Float[Array, "N H R F"]:
    """Random directions for each head, round and half of the buckets of each factor."""
    n_heads, size = vectors.shape[2:]
    return jax.random.normal(rng, (n_heads, size, n_rounds, sum(factors) // 2))


def check_rotations(
    rotations: Float[ArrayLike, "N H R F"],
    vectors: Float[Array, "B T N H"],
    factors: Sequence[int],
    n_rounds: int,
) -> Float[Array, "N H R F"]:
    """The first rounds of given rotations; `ValueError` if they do not fit the vectors."""
    n_heads, size = vectors.shape[2:]
    shape = (n_heads, size, n_rounds, sum(factors) // 2)
    given = jnp.asarray(rotations, jnp.float32)[:, :, :n_rounds]
    if given.shape != shape:
        raise ValueError(
            f"rotations have shape {given.shape}: expected {shape}, [heads, head size, rounds, "
            "half the sum of the factors of n_buckets]"
        )
    return given


def hash_by(
    rotations: Float[Array, "N H R F"],
    vectors: Float[Array, "B T N H"],
    factors: Sequence[int],
    impl: str = "xla",
) -> Int[Array, "B N R T"]:
    """`hash_vectors` by rotations that were drawn before."""
    if impl != "xla":
        from reformax.ops.kernels import angular_hash

        interpret = impl == "pallas_interpret"
        return angular_hash.hash_vectors(vectors, rotations, factors, interpret)

    def one_round(rotation: Float[Array, "N H F"]) -> Int[Array, "B N T"]:
        rotated = jnp.einsum("nhf,btnh->bnft", rotation, vectors.astype(jnp.float32))
        bucket, start, scale = 0, 0, 1
        for factor in factors:
            # The argmax of [half; -half] by comparisons: XLA's own is ten times slower on a CPU.
            half = rotated[..., start : start + factor // 2, :]
            top = jnp.maximum(half.max(axis=-2, keepdims=True), -half.min(axis=-2, keepdims=True))
            index = jnp.arange(factor // 2, dtype=jnp.int32)[:, None]
            opposite = jnp.where(half == -top, index + factor // 2, factor - 1)
            bucket = bucket + scale * jnp.where(half == top, index, opposite).min(axis=-2)
            start, scale = start + factor // 2, scale * factor
        return bucket

    # Round by round: the products with all rotations are the largest array of the plan.
    map_rounds = (
        jax.vmap(one_round) if vectors.shape[1] == 1 else functools.partial(lax.map, one_round)
    )
    return jnp.moveaxis(map_rounds(jnp.moveaxis(rotations, 2, 0)), 0, 2)


def sort_by_bucket(
    buckets: Int[Array, "B N R T"],
    n_buckets: int,
    segments: Int[Array, "B T"] | None,
    n_pad: int,
) -> Order:
    """The order by (segment, bucket, position), padding last, of a sequence padded by `n_pad`."""
    length = buckets.shape[-1] + n_pad
    n_rows = math.prod(buckets.shape[:-1])
    buckets = jnp.pad(buckets, ((0, 0),) * 3 + ((0, n_pad),), constant_values=n_buckets)
    n_buckets += n_pad > 0
    position = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), buckets.shape)
    if segments is not None:
        segments = jnp.pad(jnp.asarray(segments, jnp.int32), ((0, 0), (0, n_pad)))
        segments = jnp.where(segments == 0, jnp.iinfo(jnp.int32).max, segments)
        segments = jnp.broadcast_to(segments[:, None, None], buckets.shape)
        # A stable sort leaves equal keys in the order of their positions.
        order = lax.sort((segments, buckets, position), num_keys=2, is_stable=True)[-1]
    elif jax.default_backend() == "gpu" and n_rows * n_buckets < 2**31:
        # As one row: there XLA has a radix sort, and it is for one row.
        row = jnp.arange(n_rows, dtype=jnp.int32).reshape(*buckets.shape[:-1], 1)
        keys = (row * n_buckets + buckets).reshape(-1)
        if n_rows * n_buckets * length < 2**32:
            words = keys.astype(jnp.uint32) * length + position.reshape(-1).astype(jnp.uint32)
            order = (lax.sort(words) % length).astype(jnp.int32)
        else:
            order = lax.sort((keys, position.reshape(-1)), num_keys=1, is_stable=True)[-1]
        order = order.reshape(buckets.shape)
    elif n_buckets * length < 2**31:
        # One packed word sorts several times faster than a key with its payload.
        order = lax.sort(buckets * length + position) % length
    else:
        order = lax.sort((buckets, position), num_keys=1, is_stable=True)[-1]
    return Order(order, inverse(order))


def within_buckets(order: Order, buckets: Int[Array, "B N R T"], reach: int) -> Order:
    """The order in which a position sees its own bucket, up to `reach` places before its own."""
    n_pad = order.order.shape[-1] - buckets.shape[-1]
    buckets = jnp.pad(buckets, ((0, 0),) * 3 + ((0, n_pad),), constant_values=-1)
    buckets = jnp.take_along_axis(buckets, order.order, axis=-1, mode="promise_in_bounds")
    begins = jnp.pad(buckets[..., 1:] != buckets[..., :-1], ((0, 0),) * 3 + ((1, 0),))
    place = jnp.arange(buckets.shape[-1], dtype=jnp.int32)
    start = lax.cummax(jnp.where(begins, place, 0), axis=buckets.ndim - 1)
    first = jnp.maximum(start, place - reach)
    first = jnp.take_along_axis(first, order.slot, axis=-1, mode="promise_in_bounds")
    return order._replace(first=first)
