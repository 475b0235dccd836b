"""LSH attention with separate queries and keys.

The buckets are those of angular hashing (Kitaev, Kaiser, Levskaya 2020, "Reformer", sec. 2), of the
queries, and of the keys less their mean: a softmax does not see what all keys share, and a hash
would see little else. Smyrf's asymmetric transformations (Daras et al. 2020, sec. 3.1) do not serve
here. The number that they add to a query stands where a key has a zero, so the angle between the
two is never below 60 degrees where they have one length. Each round sorts the queries by bucket
and, apart from them, the keys. Both orders are cut into chunks, and the queries of a chunk see the
keys of the chunk at its place and of its neighbours. Time is O(n_hashes * T * chunk_len), besides
sorting.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from jax import lax

from reformax.declared import Size
from reformax.ops.base import AttentionOp, named, no_params
from reformax.ops.lsh import Buckets, Rounds
from reformax.ops.parts import asymmetric
from reformax.ops.parts.dispatch import KERNELS, check_impl
from reformax.ops.parts.hashing import Hashing, bucket_factors, hash_by
from reformax.ops.parts.orders import ChunkCount, ChunkSizes, Order
from reformax.ops.parts.sorting import sort_by_bucket


class Settings(NamedTuple):
    """The hyperparameters of `asymmetric_lsh`, whose arguments they are."""

    chunk_len: int
    n_hashes: int
    n_buckets: int | Sequence[int] | str
    n_chunks_before: int
    n_chunks_after: int
    count_once: bool
    own: bool
    impl: str

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
    own: bool = True,
    impl: str = "auto",
) -> AttentionOp:
    """LSH attention whose keys have a projection of their own.

    It is exact attention over the union of the chunks that the rounds show each query; where one
    chunk covers the length, these are all keys, as in `dense.dense()`. A bucket's queries and its
    keys need not stand at the same places: neighbours on both sides make up for some of that.

    In a causal call later tokens decide what is in a chunk, and it may hold no key that a query may
    see. There is no step of decoding: a longer vector changes the hashes of all others.

    Args:
      chunk_len: queries, and keys, in a chunk.
      n_hashes: hashing rounds.
      n_buckets: as in `lsh.lsh`.
      n_chunks_before: how many chunks of keys before that at its own place a query sees.
      n_chunks_after: how many chunks of keys after it.
      count_once: True counts a key once however many rounds show it; False counts it each time.
      own: whether a position that sees nothing else attends to itself. False makes zeros of it.
      impl: as in `smyrf.smyrf`; hashing is in array operations.

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
        traits=asymmetric.TRAITS,
    )


def _plan(
    settings: Settings, params, q, k, *, segments, causal, rng, train, length=None
) -> Order | None:
    """The orders of queries and of keys in each round; None where one chunk has every key."""
    del params, causal, train
    if q.shape[1] <= settings.chunk_len:
        return None
    q, k = lax.stop_gradient((q, k))
    vectors = q, asymmetric.centred(k, segments)
    hashing, length = settings.hashing, length or q.shape[1]
    factors = hashing.factors_for(length)
    rotations = hashing.rotations_for(q, length, settings.n_hashes, rng)
    n_pad = -q.shape[1] % settings.chunk_len
    queries, keys = (
        sort_by_bucket(hash_by(rotations, x, factors), math.prod(factors), segments, n_pad).queries
        for x in vectors
    )
    return asymmetric.two_orders(queries, keys)


def _apply(settings: Settings, params, q, k, v, **call):
    del params
    sizes = ChunkSizes(settings.chunk_len, settings.n_chunks_before, settings.n_chunks_after)
    return asymmetric.attend(sizes, settings, q, k, v, **call)
