"""LSH attention with separate queries and keys.

Angular hashing (Kitaev, Kaiser, Levskaya 2020, "Reformer", sec. 2) gives buckets to the queries
and to the keys minus their mean: a vector that all keys have in common cancels in the softmax, but
would decide most hashes. In a causal call it is the mean of the earlier keys. Each hash sorts
queries and keys by bucket, separately. Both orders are cut into chunks. The queries of a chunk see
the keys of the chunk with the same number and of its neighbours. Time is
O(n_hashes * T * chunk_len), besides sorting.

Smyrf's asymmetric transformations (Daras et al. 2020, sec. 3.1) do not suit an angular hash: they
add a number to a query where a key has a zero, so a query and a key of one length are never closer
than 60 degrees. `smyrf` is the same algorithm with another `QueryKeyHash`.

Queries and keys may be of two sequences. A query's slot is then the middle of the slots of its
bucket's keys (`ops.hashing.alignment`), and time is O(n_hashes * (T + S) * chunk_len).
"""

from __future__ import annotations

import functools
import math
from typing import Any, ClassVar, NamedTuple, Protocol

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from reformax.declared import Size
from reformax.ops import flash
from reformax.ops.base import AttentionOp, options
from reformax.ops.calls.call import Call
from reformax.ops.calls.dispatch import KERNELS, choose_impl
from reformax.ops.calls.obstacles import kernel_obstacles
from reformax.ops.decoding.cache import KeyValues, SharedByBatch, add_to_ring, attend_to, fill_ring
from reformax.ops.decoding.sorted_order import (
    arange_last,
    insert_newest,
    with_bucket,
)
from reformax.ops.hashing.alignment import aligned_orders
from reformax.ops.hashing.angular import AngularHashing, hash_by
from reformax.ops.hashing.centring import centred
from reformax.ops.hashing.sorting import n_sorted, sort_by_bucket
from reformax.ops.lsh import Buckets, HashCount
from reformax.ops.masking.masks import segment_pair
from reformax.ops.masking.padding import tokens_only
from reformax.ops.masking.visibility import CAUSAL, Side
from reformax.ops.softmax.chunked import chunked_attention
from reformax.ops.softmax.orders import ChunkCount, Chunking, ChunkSizes, Order


class HashCodes(NamedTuple):
    """The numbers that queries and keys are sorted by."""

    queries: Int[Array, "B N R T"] | Float[Array, "B N R T"]
    keys: Int[Array, "B N R S"] | Float[Array, "B N R S"]
    n_codes: int  # integers are below it


class QueryKeyHash(Protocol):
    """How queries `[B, T, N, H]` and keys `[B, S, N, H]` are hashed."""

    def codes(self, call: Call, q, k, cross: bool) -> HashCodes:
        """The hash codes of queries and keys. Only `cross`, of two sequences, may have floats."""
        ...

    def start(self, call: Call, q, k) -> Any:
        """The decoding state after the first `call.lengths` positions of each row."""
        ...

    def advance(self, state, q, k, *, position: Int[Array, " B"], capacity: int) -> tuple:
        """The state after one more position; the keys' order [B, N, R, C]; the query's slot."""
        ...


@options
class SortedByHash(AttentionOp):
    """Attention in chunks of queries and of keys, each sorted by a hash.

    The algorithm and options of `asymmetric_lsh` and `smyrf`, which say how they hash and cut the
    orders.
    """

    chunk_len: Size = 64
    n_hashes: HashCount = 4
    count_once: bool = True
    attend_self_if_alone: bool = True
    impl: str = "auto"

    cross = True
    plan_needs = "rng"
    shards = ("heads",)
    chooses_keys = True
    _hides_padding = True
    _impls = KERNELS

    _hashing: ClassVar[QueryKeyHash]
    _chunks: ClassVar[ChunkSizes]

    def _choose_impl(self, call: Call, q: Array, k: Array, v: Array | None = None) -> str:
        """`choose_impl` of a call, whose values may not be known yet."""
        return choose_impl(self.impl, pallas=kernel_obstacles(q, k, v, call.logits))

    def _plan(self, call, params, q, k) -> Order | None:
        """The orders of queries and of keys by each hash; None where one chunk has every key."""
        chunk_len, segment_ids = self._chunks.chunk_len, call.segment_ids
        if k.shape[1] <= chunk_len:
            return None
        q, k = lax.stop_gradient((q, k))
        cross = _crosses(q, k, segment_ids)
        codes = self._hashing.codes(call, q, k, cross)
        if cross:
            ratio = _ratio(q.shape[1], k.shape[1])
            return aligned_orders(codes.queries, codes.keys, segment_ids, chunk_len, ratio)
        n_pad = -q.shape[1] % chunk_len
        masks = segment_ids, n_pad, call.one_segment
        queries, keys = (
            sort_by_bucket(x, codes.n_codes, *masks).query_positions for x in codes[:2]
        )
        order = Order(queries, key_positions=keys)
        return order.for_impl(self._choose_impl(call, q, k), self.count_once, two_orders=True)

    def _apply(self, call, params, q, k, v, plan) -> Float[Array, "B T N V"]:
        """Softmax attention over the chunks of all orders (`lsh` says which keys are seen)."""
        segment_ids = call.segment_ids
        options = dict(
            attend_self_if_alone=self.attend_self_if_alone,
            count_once=self.count_once,
            two_orders=True,
        )
        if not _crosses(q, k, segment_ids):
            chunks = self._chunks.cut(call, q.shape[1], **options)
            n_tokens = None if plan is None else n_sorted(call)
        elif plan is None:
            return flash.flash(impl=self.impl).attend(call, (), q, k, v)
        else:
            n_tokens = None
            options |= dict(n_keys=k.shape[1], ratio=_ratio(q.shape[1], k.shape[1]))
            chunks = Chunking.of(call, q.shape[1], *self._chunks, **options)
        impl = self._choose_impl(call, q, k, v)
        masks = segment_ids, call.seed
        return chunked_attention(q, k, v, chunks, plan, *masks, impl, n_tokens=n_tokens)

    def _init_cache(self, call, params, q, k, v, plan) -> SortedCache:
        # A plan has no hashes.
        hashes = self._hashing.start(call, q, k)
        return SortedCache(fill_ring(k, v, call.lengths, call.length), hashes)

    def _step(self, call, params, q, k, v, cache: SortedCache):
        position = call.position
        memory = add_to_ring(cache.memory, k, v, position)
        newest, capacity = position[:, None, None, None], memory.keys.shape[2]
        advance = functools.partial(self._hashing.advance, position=position, capacity=capacity)
        hashes, order, query_slot = advance(cache.hashes, q, k)
        # The query sees the keys in the slots of its chunk and of the chunks around it.
        chunk_len, n_chunks_before, n_chunks_after = self._chunks.within(capacity)
        n_slots = (n_chunks_before + 1 + n_chunks_after) * chunk_len
        slot = (query_slot // chunk_len - n_chunks_before) * chunk_len + arange_last(n_slots)
        seen = jnp.take_along_axis(order, jnp.clip(slot, 0, capacity - 1), axis=-1)
        exists = (slot >= 0) & (slot <= newest)
        index = seen.reshape(*seen.shape[:2], -1)
        options = dict(index=index, count_once=self.count_once and seen.shape[2] > 1)
        out = attend_to(call, q, *memory, exists.reshape(index.shape), self.impl, **options)
        return out, SortedCache(memory, hashes)


@options
class asymmetric_lsh(SortedByHash):
    """LSH attention whose queries and keys have separate projections.

    It is exact attention over the union of a query's chunks, which each hash chooses. Where one
    chunk covers the length, this is `dense.dense()`. A bucket's queries and its keys may have
    different slots; chunks on both sides make up for some of that.

    In a causal call later tokens decide what is in a chunk, and it may hold no key that a query may
    see. A step of decoding computes the last row of attention over the tokens so far.

    Across two sequences, of different lengths or with a pair of segment ids, a query sees the
    chunks around its bucket's keys. Queries that want one slot take the slots around it. Where one
    chunk covers the keys, a query sees them all.

    Args:
      chunk_len: queries, and keys, in a chunk; across sequences keys, and some may be missing.
      n_hashes: hashes.
      n_buckets: as in `lsh.lsh`.
      n_chunks_before: how many chunks of keys before the chunk of its number a query sees.
      n_chunks_after: how many chunks of keys after it.
      count_once: True counts a key once in all; False once for each hash that chooses its chunk.
      attend_self_if_alone: whether a position that sees nothing else attends to itself. False makes
        its output zeros. Across two sequences it is always zeros: no key has a query's position.
      impl: as in `smyrf.smyrf`.

    Raises:
      ValueError: sizes out of range or an unknown `impl`.
      NotImplementedError: at the call, when `impl="pallas"` is asked for what it cannot do.
    """

    n_buckets: Buckets = "auto"
    n_chunks_before: ChunkCount = 1
    n_chunks_after: ChunkCount = 1

    @property
    def _hashing(self) -> QueryKeyHash:
        hashing = AngularHashing.of(self.n_buckets, self.chunk_len)
        return CentredAngularHash(hashing, self.n_hashes, self.impl)

    @property
    def _chunks(self) -> ChunkSizes:
        return ChunkSizes(self.chunk_len, self.n_chunks_before, self.n_chunks_after)

    def _check(self) -> None:
        AngularHashing.of(self.n_buckets, self.chunk_len)


def _crosses(q: Float[Array, "B T N H"], k: Float[Array, "B S N H"], segment_ids) -> bool:
    """Whether queries and keys are of two sequences, as their lengths or segments say."""
    return q.shape[1] != k.shape[1] or isinstance(segment_ids, tuple)


def _ratio(n_queries: int, n_keys: int) -> int:
    """Slots of queries to each slot of keys, in orders of two sequences."""
    return max(1, round(n_queries / n_keys))


# Decoding. C is the capacity.


class SortedCache(NamedTuple):
    """Keys and values by position, and the hash's state."""

    memory: KeyValues
    hashes: Any


# The angular hash of queries and of centred keys.


class AsymmetricLshState(NamedTuple):
    """The decoding state; entries of positions without a token are arbitrary."""

    sum: Float[Array, "B N H"]  # of all keys; their mean is subtracted from the next key
    query_buckets: Int[Array, "B N R C"]  # by position
    key_buckets: Int[Array, "B N R C"]
    order: Int[Array, "B N R C"]  # positions, sorted by their key's bucket and position
    rotations: SharedByBatch  # [N, H, R, F]


class CentredAngularHash(NamedTuple):
    """The `QueryKeyHash` of `asymmetric_lsh`."""

    hashing: AngularHashing
    n_hashes: int
    impl: str

    def _buckets(self, rotations, factors, *vectors) -> list[Int[Array, "B N R T"]]:
        return [hash_by(rotations, x, factors, self.impl) for x in vectors]

    def codes(self, call: Call, q, k, cross: bool) -> HashCodes:
        segment_ids, length = call.segment_ids, call.length or k.shape[1]
        if segment_ids is not None and not call.one_segment:
            ids = segment_pair(segment_ids)
            q, k = (tokens_only(x, of_x) for x, of_x in zip((q, k), ids, strict=True))
        keys = centred(k, segment_pair(segment_ids)[1], call.causal, call.one_segment)
        factors = self.hashing.factors_for(length)
        rotations = self.hashing.rotations_for(q, length, self.n_hashes, call.rng, call.shard)
        return HashCodes(*self._buckets(rotations, factors, q, keys), math.prod(factors))

    def start(self, call: Call, q, k) -> AsymmetricLshState:
        lengths, capacity, length = call.lengths, call.length, q.shape[1]
        factors = self.hashing.factors_for(capacity)
        rotations = self.hashing.rotations_for(q, capacity, self.n_hashes, call.rng)
        is_token, last = arange_last(length) < lengths[:, None, None, None], math.prod(factors)
        tokens = jnp.where(jnp.swapaxes(is_token, 1, 3), k, 0)
        keys = centred(tokens, None, causal=True)
        of_queries, of_keys = self._buckets(rotations, factors, q, keys)
        order = sort_by_bucket(jnp.where(is_token, of_keys, last), last + 1, None, 0)
        n_free = ((0, 0), (0, 0), (0, 0), (0, capacity - length))
        return AsymmetricLshState(
            tokens.astype(jnp.float32).sum(axis=1),
            *(jnp.pad(x, n_free) for x in (of_queries, of_keys, order.query_positions)),
            SharedByBatch(rotations),
        )

    def advance(self, state: AsymmetricLshState, q, k, *, position, capacity):
        total, of_queries, of_keys, order, (rotations,) = state
        newest = position[:, None, None, None]
        factors = self.hashing.factors_for(capacity)
        key = k.astype(jnp.float32)
        mean = total[:, None] / jnp.maximum(newest, 1).astype(total.dtype)
        of_query, of_key = self._buckets(rotations, factors, q, (key - mean).astype(k.dtype))
        of_queries = with_bucket(of_queries, of_query, position)
        of_keys = with_bucket(of_keys, of_key, position)
        order, _, _ = insert_newest(order, of_keys, of_key, newest)
        # Equal buckets are sorted by position, so the newest query comes last.
        so_far = CAUSAL.sees(Side(newest), Side(arange_last(capacity)))
        up_to = (of_queries <= of_query) & so_far
        query_slot = up_to.sum(axis=-1, keepdims=True) - 1
        new = AsymmetricLshState(
            total + key[:, 0], of_queries, of_keys, order, SharedByBatch(rotations)
        )
        return new, order, query_slot
