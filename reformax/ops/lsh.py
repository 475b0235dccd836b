"""Locality-sensitive hashing attention (Kitaev, Kaiser, Levskaya 2020, "Reformer", sec. 2).

Shared-QK attention in which a query sees the keys that fall near it when the sequence is sorted by
hash bucket. Angular hashing (Andoni et al. 2015) projects each vector on random directions and
takes the direction it points along most: vectors at a small angle share a bucket with high
probability, and several rounds make a miss in all of them unlikely. Time is
O(n_hashes * T * chunk_len).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from jax import lax
from jaxtyping import ArrayLike, Float

from reformax.ops.base import AttentionOp, Traits, named, no_params
from reformax.ops.parts.chunked import (
    Chunks,
    Order,
    check_chunks,
    chunked_attention,
    in_a_circle,
    inverse,
    padding,
)
from reformax.ops.parts.dispatch import KERNELS, check_impl, choose, kernel_obstacles
from reformax.ops.parts.hashing import (
    auto_buckets,
    bucket_factors,
    check_rotations,
    draw_rotations,
    hash_by,
)
from reformax.ops.parts.lsh_decoding import lsh_decoding
from reformax.ops.parts.sorting import sort_by_bucket, within_buckets


@named
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
    factors = None if n_buckets == "auto" else bucket_factors(n_buckets)
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
        options = dict(strictly_causal=strictly_causal, wrap=wrap, self_score=self_score)
        return choose(impl, **kernel_obstacles(q, None, v, **options))

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
            return within_buckets(order, buckets, chunk_len * n_chunks_before)
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

    return AttentionOp(
        init=no_params,
        plan=plan,
        apply=apply,
        traits=Traits(
            shared_qk=True,
            random_plan=rotations is None,
            bidirectional=not strictly_causal,
        ),
        **lsh_decoding(
            chunk_len=chunk_len,
            n_chunks_before=n_chunks_before,
            n_chunks_after=n_chunks_after,
            count_once=count_once,
            strictly_causal=strictly_causal,
            circle=chunk_len * pad_chunks if wrap else None,
            draw=lambda q, capacity, rng: draw(q, sizes_for(capacity), n_hashes_eval, rng),
            sizes_for=sizes_for,
        ),
    )
