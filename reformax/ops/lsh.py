"""Locality-sensitive hashing attention (Kitaev, Kaiser, Levskaya 2020, "Reformer", sec. 2).

Shared-QK attention in which a query sees the keys that fall near it when the sequence is sorted by
hash bucket. Angular hashing (Andoni et al. 2015) projects each vector on random directions and
takes the direction it points along most: vectors at a small angle share a bucket with high
probability, and several rounds make a miss in all of them unlikely. Time is
O(n_hashes * T * chunk_len).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray

from reformax.ops.base import AttentionOp, Traits, no_params
from reformax.ops.chunked import Chunks, Order, check_chunks, chunked_attention, in_a_circle

MAX_BUCKETS_UNFACTORED = 128


def lsh(
    *,
    chunk_len: int = 64,
    n_hashes: int = 4,
    n_hashes_eval: int | None = None,
    n_buckets: int | Sequence[int] | str = "auto",
    n_chunks_before: int = 1,
    n_chunks_after: int = 0,
    count_once: bool = True,
    wrap: bool = False,
    pad_chunks: int = 1,
    self_score: float | None = None,
    rotations: Float[ArrayLike, "N H R F"] | None = None,
) -> AttentionOp:
    """LSH attention with its hyperparameters fixed.

    It is exact shared-QK attention over the union of the chunks that the rounds show each query;
    where one chunk covers the length, it is `shared_qk.shared_qk()` itself. The first chunk has no
    chunk before it, unless `wrap` is set.

    Args:
      chunk_len: positions in a chunk of the sorted sequence.
      n_hashes: hashing rounds in training.
      n_hashes_eval: rounds at evaluation; by default as many as in training.
      n_buckets: even; or a sequence of even factors, each hashed with its own rotation, the bucket
        being their mixed-radix number (for many buckets: factors a, b cost a + b, not a * b);
        or "auto", about two buckets a chunk, factored above 128.
      n_chunks_before: how many chunks before its own, in sorted order, a query sees.
      n_chunks_after: how many chunks after its own.
      count_once: True counts a key once however many rounds show it, as the paper's N_ij does
        (appendix A); False counts it each time, as Trax does.
      wrap: True sets the rounds' chunks in a circle, as Trax and Hugging Face do: before a round's
        first chunk is the last one of the round before, and before the first round's that of the
        last. Needs `count_once=False`.
      pad_chunks: the sequence is padded to a multiple of so many chunks, which only `wrap` can
        tell: the last chunk may be padding alone.
      self_score: the score that Trax and Hugging Face give a position's own key, -1e5. Among scores
        so large float32 is coarse, and one that sees nothing else gets its own value times a number
        that is up to half a percent off 1, which this reproduces; None makes it 1.
      rotations: what to hash with instead of rotations drawn from the rng: N heads, heads of size
        H, at least as many rounds R as are used, half the sum F of the factors of `n_buckets`.

    Raises:
      ValueError: sizes out of range, or options that exclude each other.
    """
    check_chunks(chunk_len, n_chunks_before, n_chunks_after)
    if wrap and count_once:
        raise ValueError("wrap is True and count_once is True: set count_once=False")
    if pad_chunks < 1:
        raise ValueError(f"pad_chunks is {pad_chunks}: expected at least 1")
    if n_hashes_eval is None:
        n_hashes_eval = n_hashes
    for name, n in (("n_hashes", n_hashes), ("n_hashes_eval", n_hashes_eval)):
        if n < 1:
            raise ValueError(f"{name} is {n}: expected at least 1")
    factors = None if n_buckets == "auto" else _factors(n_buckets)

    if rotations is not None and factors is None:
        raise ValueError("rotations are given and n_buckets is 'auto': give the number of buckets")

    def n_pad(length: int) -> int:
        return 0 if length <= chunk_len else -length % (chunk_len * pad_chunks)

    def plan(params, q, k, *, segments, causal, rng, train) -> Order:
        del params, k, causal
        length = q.shape[1]
        sizes = factors or auto_buckets(length, chunk_len)
        n_rounds = n_hashes if train else n_hashes_eval
        if length <= chunk_len:
            n_rounds = 1  # One chunk shows every key, and more rounds would show the same ones.
        buckets = hash_vectors(lax.stop_gradient(q), sizes, n_rounds, rng, rotations)
        order = sort_by_bucket(buckets, math.prod(sizes), segments, n_pad(length))
        if wrap and length > chunk_len:
            order = in_a_circle(order, chunk_len, n_chunks_before, n_chunks_after)
        return order

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
            n_pad=n_pad(q.shape[1]),
            self_score=self_score,
        )
        return chunked_attention(q, k, v, chunks, plan, segments, rng)

    return AttentionOp(
        init=no_params,
        plan=plan,
        apply=apply,
        traits=Traits(shared_qk=True, random_plan=rotations is None),
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
    rng: PRNGKeyArray | None,
    rotations: Float[ArrayLike, "N H R F"] | None = None,
) -> Int[Array, "B N R T"]:
    """Angular hashes: the argmax over [x R; -x R] for a random R (Reformer, sec. 2).

    Rotations are shared by the batch and drawn for each head and round.

    Args:
      vectors: what to hash; only directions matter.
      factors: even bucket counts; bucket = sum_i hash_i * prod(factors before i).
      n_rounds: R.
      rng: the source of the rotations.
      rotations: given ones to use instead, of which the first `n_rounds` rounds count.

    Raises:
      ValueError: rotations of another shape.
    """
    n_heads, size = vectors.shape[2:]
    shape = (n_heads, size, n_rounds, sum(factors) // 2)
    if rotations is None:
        rotations = jax.random.normal(rng, shape)
    else:
        rotations = jnp.asarray(rotations, jnp.float32)[:, :, :n_rounds]
        if rotations.shape != shape:
            raise ValueError(
                f"rotations have shape {rotations.shape}: expected {shape}, [heads, head size, "
                "rounds, half the sum of the factors of n_buckets]"
            )

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
    return jnp.moveaxis(lax.map(one_round, jnp.moveaxis(rotations, 2, 0)), 0, 2)


def sort_by_bucket(
    buckets: Int[Array, "B N R T"],
    n_buckets: int,
    segments: Int[Array, "B T"] | None,
    n_pad: int,
) -> Order:
    """The order by (segment, bucket, position), padding last, of a sequence padded by `n_pad`."""
    n_batch, _, _, length = buckets.shape
    length += n_pad
    buckets = jnp.pad(buckets, ((0, 0),) * 3 + ((0, n_pad),), constant_values=n_buckets)
    position = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), buckets.shape)
    if segments is None and (n_buckets + 1) * length < 2**31:
        # One packed word sorts several times faster than a key with its payload.
        order = lax.sort(buckets * length + position) % length
    else:
        keys = (buckets,)
        if segments is not None:
            segments = jnp.pad(jnp.asarray(segments, jnp.int32), ((0, 0), (0, n_pad)))
            segments = jnp.where(segments == 0, jnp.iinfo(jnp.int32).max, segments)
            keys = (jnp.broadcast_to(segments[:, None, None], buckets.shape), buckets)
        # A stable sort leaves equal keys in the order of their positions.
        order = lax.sort((*keys, position), num_keys=len(keys), is_stable=True)[-1]
    slot = jnp.put_along_axis(
        jnp.zeros_like(order), order, position, axis=-1, inplace=False, mode="promise_in_bounds"
    )
    return Order(order, slot)
