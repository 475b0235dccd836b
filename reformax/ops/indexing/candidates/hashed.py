"""Candidates in a query's hash buckets.

Letters as in `base.py`, and those of `by_code.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from reformax.declared import Size
from reformax.ops.calls.options import options
from reformax.ops.decoding.cache import SharedByBatch
from reformax.ops.hashing.angular import auto_buckets, bucket_factors, draw_rotations, hash_by
from reformax.ops.hashing.centring import centred
from reformax.ops.indexing.candidates.base import Candidates, IndexedKeys, QueryChunk
from reformax.ops.indexing.candidates.by_code import (
    SortedKeys,
    nearest_of_code,
    newest_of_code,
    sorted_by_code,
)


@options
class Hashed(Candidates):
    """The keys of a query's hash buckets.

    Angular hashes (Andoni et al. 2015) of the searched vectors and of the keys: with the score
    "product" of one vector of a query, with "relu" of each index head, because a sum of ReLUs is no
    inner product. Keys are sorted by bucket and position. The candidates are those of the query's
    bucket that are the nearest before the query, in a call that is not causal also after it.

    Args:
      n_hashes: hashes of each vector. More of them miss fewer keys.
      n_buckets: even, or even factors of the number; None: about two buckets to `n_nearest` keys.
      n_nearest: keys of a bucket.
      centre: whether the mean of the earlier keys is subtracted from a key before it is hashed. The
        order of a query's products stays. Use it where all keys point to one side.

    Time is `T n_hashes` times the size of the hash, and `n_nearest` scores.
    """

    n_hashes: Size = 4
    n_buckets: Size | Sequence[Size] | None = None
    n_nearest: Size = 64
    centre: bool = True

    draws: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        if self.n_buckets is not None:
            object.__setattr__(self, "n_buckets", bucket_factors(self.n_buckets))

    def rotations(self, x: IndexedKeys) -> Float[Array, "1 D R F"]:
        """The rotations of all hashes, which queries and keys share."""
        return draw_rotations(x.keys[:, :, None], self._factors(x), self.n_hashes, x.rng)

    def _factors(self, x: IndexedKeys) -> tuple[int, ...]:
        return self.n_buckets or auto_buckets(x.length, self.n_nearest)

    def codes(
        self, rotations: Float[Array, "1 D R F"], x: IndexedKeys, vectors: Float[Array, "B T J D"]
    ) -> Int[Array, "B J R T"]:
        """The buckets of vectors."""
        rotations = jnp.broadcast_to(rotations, (vectors.shape[2], *rotations.shape[1:]))
        return hash_by(rotations, vectors, self._factors(x), "xla")

    def prepare(self, x: IndexedKeys) -> HashedKeys:
        rotations = self.rotations(x)
        keys = x.token_keys[:, :, None]
        if self.centre:
            keys = centred(keys, x.segment_ids, x.causal)
        codes = self.codes(rotations, x, keys)
        n_buckets = math.prod(self._factors(x))
        return HashedKeys(rotations, sorted_by_code(codes, n_buckets, x))

    def n_numbers(self, x: IndexedKeys, n_searched: int, n_each: int) -> int:
        n_codes = n_searched * self.n_hashes
        n_found = n_codes * min(self.n_nearest, x.keys.shape[1])
        return n_codes * sum(self._factors(x)) // 2 + n_found * n_each

    def of(self, prepared: HashedKeys, x: IndexedKeys, queries: QueryChunk) -> Int[Array, "B Q M"]:
        codes = self.codes(prepared.rotations, x, queries.index.searched(x.score))
        return nearest_of_code(prepared.sorted, x, codes, queries, self.n_nearest)

    def start(self, x: IndexedKeys) -> HashedState:
        rotations = self.rotations(x)
        keys = x.token_keys
        hashed = keys[:, :, None]
        if self.centre:
            hashed = centred(hashed, None, causal=True)
        codes = self.codes(rotations, x, hashed)[:, 0]
        return HashedState(codes, keys.sum(axis=1), SharedByBatch(rotations))

    def advance(self, state: HashedState, x: IndexedKeys, key, position) -> HashedState:
        codes, total, (rotations,) = state
        n_before = jnp.maximum(position, 1)[:, None, None].astype(key.dtype)
        hashed = key - total[:, None] / n_before if self.centre else key
        code = self.codes(rotations, x, hashed[:, :, None])[:, 0, :, 0]
        codes = codes.at[jnp.arange(len(position)), :, position].set(code)
        return HashedState(codes, total + key[:, 0], state.rotations)

    def of_newest(self, state: HashedState, x: IndexedKeys, queries: QueryChunk):
        codes = self.codes(state.rotations.value, x, queries.index.searched(x.score))
        return newest_of_code(state.codes, codes, queries, self.n_nearest)


class HashedState(NamedTuple):
    """The keys' buckets by position, the sum of the keys, and the rotations."""

    codes: Int[Array, "B R C"]
    total: Float[Array, "B D"]
    rotations: SharedByBatch  # [1, D, R, F]


class HashedKeys(NamedTuple):
    """The rotations, and the keys in the order of buckets."""

    rotations: Float[Array, "1 D R F"]
    sorted: SortedKeys
