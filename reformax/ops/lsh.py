"""Locality-sensitive hashing attention (Kitaev, Kaiser, Levskaya 2020, "Reformer", sec. 2).

One projection serves as query and, length-normalised, as key. Each of R hashes puts every
vector in a bucket: vectors at a small angle share one with high probability. Each hash sorts the
sequence by bucket and cuts it into chunks. A query sees the keys of its own chunk and of the chunk
before it in sorted order; in a causal call, those of earlier positions alone. Several hashes make
it unlikely that all of them miss a key. Time is O(n_hashes * T * chunk_len), besides sorting.

The file follows the computation:

1. `lsh`: the options.
2. `_plan`: hash, sort by bucket. The plan is each hash's order of the positions.
3. `_apply`: softmax attention in the chunks of these orders. The hashes' results are merged by
   `Softmax.merge` in `_forward` of `softmax/chunked.py`, by log-sum-exp as in the paper.
4. `_init_cache`, `_step`: decoding.

Which keys a query sees is decided in two steps: the candidates, which are in reach, then the mask.

* in arrays `visible_keys` of `softmax/chunked.py`, of `keys_in_reach` of
  `softmax/chunk_layout.py`;
* in kernels `over_keys` and `visible` of `ChunkProgram` in `kernels/triton/chunk_programs.py`;
* in decoding `slots_in_reach`, for arrays and kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from reformax.declared import Bounds, Called, SettingError, Size
from reformax.ops.base import AttentionOp, options
from reformax.ops.calls.call import Call
from reformax.ops.calls.dispatch import INTERPRETED, KERNELS, choose_impl
from reformax.ops.calls.obstacles import MAX_TILE, kernel_obstacles, mosaic_obstacles
from reformax.ops.decoding.cache import (
    KeyValues,
    SharedByBatch,
    add_and_attend,
    fill_ring,
    replace_in_memory,
)
from reformax.ops.decoding.sorted_order import (
    arange_last,
    insert_newest,
    with_bucket,
)
from reformax.ops.hashing import circle
from reformax.ops.hashing.angular import AngularHashing, hash_by
from reformax.ops.hashing.sorting import n_sorted, sort_by_bucket, take_last, within_buckets
from reformax.ops.numerics.normalization import length_normalize
from reformax.ops.softmax.chunked import chunked_attention
from reformax.ops.softmax.orders import ChunkCount, ChunkSizes, Order, PadChunks

# Every hash sorts the whole sequence.
HashCount = Annotated[int, Bounds(1, 1024)]
Buckets = Annotated[int | Sequence[int] | str, Called("'auto', or even numbers")]


@options
class lsh(AttentionOp):
    """LSH attention with its hyperparameters fixed.

    It is exact shared-QK attention over the union of the chunks that the hashes show each query.
    Where one chunk covers the length, these are all keys, as in `shared_qk.shared_qk()`. The first
    chunk has no chunk before it, unless `wrap` is set.

    A step of decoding computes the last row of attention over the tokens so far. In one call over
    all positions, later tokens may move the border of a chunk, so an earlier row may see other keys
    than in its own step. With `strictly_causal`, no later token decides what a position sees, and
    decoding computes the same function as one call.

    Args:
      chunk_len: positions in a chunk of the sorted sequence.
      n_hashes: hashes in training, the paper's hashing rounds.
      n_hashes_eval: hashes at evaluation; by default as many as in training.
      n_buckets: an even number, a sequence of even factors, or "auto". Each factor has its own
        rotation, and a bucket is the mixed-radix number of their hashes, the first factor's digit
        the least: two factors a and b cost a + b in place of a * b. "auto" makes about two buckets
        a chunk, above 128 in two factors. It counts the chunks of the sequence, padding included;
        in decoding those of the capacity.
      n_chunks_before: how many chunks before its own, in sorted order, a query sees.
      n_chunks_after: how many chunks after its own.
      count_once: True counts a key once however many hashes show it, as the paper's N_ij does
        (appendix A); False counts it each time, as Trax does.
      strictly_causal: True shows a query, in each hash's order, only the keys of its own bucket
        that are among the `chunk_len * n_chunks_before` slots before the query's. For causal
        attention. The plan then also has the first slot that each position sees.
      wrap: True joins the hashes' chunks to a circle, as Trax and Hugging Face do: before a hash's
        first chunk comes the last chunk of the hash before, and before the first hash the last one.
        Needs `count_once=False`.
      pad_chunks: with `wrap`, the sequence is padded to a multiple of so many chunks.
      attend_self_if_alone: whether a position that sees nothing else attends to itself. False makes
        its output zeros.
      self_score: the score that Trax and Hugging Face give a position's own key, -1e5. Float32 is
        coarse among scores so large: a position that sees nothing else gets its own value times a
        number up to half a percent off 1. This reproduces it. With None, and in a step of decoding,
        the number is 1.
      rotations: the rotations to hash with; None draws them from the rng. N heads of size H, at
        least as many hashes R as are used, and F half the sum of the factors of `n_buckets`.
      impl: `"xla"` runs everywhere. `"pallas"` are kernels for NVIDIA GPUs of Ampere or later and
        heads of 256 or less, without `wrap` and `self_score`. `"auto"` takes them where they run.
        `"mosaic"` is another forward pass for Hopper GPUs, which `"auto"` does not take: heads of
        64 or 128 in 16 bits, also without dropout and `strictly_causal`.

    Raises:
      ValueError: sizes out of range, an unknown `impl`, or options that exclude each other.
      NotImplementedError: at the call, when a kernel is asked for what it cannot do.
    """

    chunk_len: Size = 64
    n_hashes: HashCount = 4
    n_hashes_eval: HashCount | None = None
    n_buckets: Buckets = "auto"
    n_chunks_before: ChunkCount = 1
    n_chunks_after: ChunkCount = 0
    count_once: bool = True
    strictly_causal: bool = False
    wrap: bool = False
    pad_chunks: PadChunks = 1
    attend_self_if_alone: bool = True
    self_score: float | None = None
    rotations: Float[ArrayLike, "N H R F"] | None = None
    impl: str = "auto"

    shared_qk = True
    shards = ("heads",)
    chooses_keys = True
    _hides_padding = True
    _impls = (*KERNELS, "mosaic")
    _replace_value = staticmethod(replace_in_memory)

    @property
    def plan_needs(self) -> str:
        return "rng" if self.rotations is None else "inputs"

    @property
    def causality(self) -> str:
        return "only" if self.strictly_causal else "either"

    @property
    def _chunks(self) -> ChunkSizes:
        """A chunk's length, and how many chunks around its own a query sees."""
        return ChunkSizes(self.chunk_len, self.n_chunks_before, self.n_chunks_after)

    @property
    def _hashing(self) -> AngularHashing:
        """The numbers of buckets and the rotations."""
        return AngularHashing.of(self.n_buckets, self.chunk_len, self.rotations)

    def _n_hashes_in(self, train: bool) -> int:
        """The number of hashes in training or at evaluation."""
        return self.n_hashes if train or self.n_hashes_eval is None else self.n_hashes_eval

    def _check(self) -> None:
        if self.pad_chunks > 1 and not self.wrap:
            raise SettingError(
                f"pad_chunks is {self.pad_chunks} and wrap is False: set wrap=True or leave it out"
            )
        if self.wrap and self.count_once:
            raise SettingError("wrap is True and count_once is True: set count_once=False")
        factors = self._hashing.factors
        if self.strictly_causal and (self.n_chunks_before < 1 or self.n_chunks_after > 0):
            raise SettingError(
                f"strictly_causal=True with n_chunks_before={self.n_chunks_before} and "
                f"n_chunks_after={self.n_chunks_after}: set n_chunks_before to at least 1 and "
                "n_chunks_after=0"
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

    def _choose_impl(self, call: Call, q: Array, v: Array | None = None) -> str:
        """`choose_impl` of a call, whose values may not be known yet."""
        arrays = q, None, v, call.logits
        refused = dict(wrap=self.wrap, self_score=self.self_score)
        by_mosaic = dict(dropout=call.dropout, strictly_causal=self.strictly_causal)
        return choose_impl(
            self.impl,
            pallas=kernel_obstacles(*arrays, **refused),
            mosaic=mosaic_obstacles(*arrays, **refused, **by_mosaic),
        )

    @property
    def _impl_of_others(self) -> str:
        """`impl` for hashing and for a step of decoding."""
        return "auto" if self.impl == "mosaic" else self.impl

    def _plan(self, call, params, q, k) -> Order | None:
        """The order by bucket of each hash; None where one chunk has all keys."""
        one_chunk = q.shape[1] <= self.chunk_len
        if one_chunk and not self.strictly_causal:  # which hides keys of other buckets even there
            return None
        # Hash: a random rotation for each hash, a bucket [B, N, R, T] for each position.
        vectors = lax.stop_gradient(q)
        length, n_hashes = call.length or q.shape[1], self._n_hashes_in(call.train)
        factors = self._hashing.factors_for(length)
        rotations = self._hashing.rotations_for(vectors, length, n_hashes, call.rng, call.shard)
        buckets = hash_by(rotations, vectors, factors, self._impl_of_others)
        # Sort: by segment, bucket and position, padded to whole chunks.
        pad_multiple = self.chunk_len * (self.pad_chunks if self.wrap else 1)
        n_pad = 0 if one_chunk else -q.shape[1] % pad_multiple
        order = sort_by_bucket(
            buckets, math.prod(factors), call.segment_ids, n_pad, call.one_segment
        )
        if self.strictly_causal:
            return within_buckets(order, buckets, self.chunk_len * self.n_chunks_before)
        if self.wrap:
            order = circle.in_a_circle(order, self._chunks)
        return order.for_impl(self._choose_impl(call, q), self.count_once)

    def _apply(self, call, params, q, k, v, plan):
        """Softmax attention over the chunks of all hashes' orders."""
        # How the orders are cut, and which keys of the chunks in reach are hidden.
        chunking = self._chunks.cut(
            call,
            q.shape[1],
            circle=self.wrap,
            shared_qk=True,
            attend_self_if_alone=self.attend_self_if_alone,
            count_once=self.count_once,
        )
        self_weight = None
        if self.self_score is not None and plan is not None:
            self_weight = circle.self_weight(self.self_score, plan, self._chunks)
        arrays = q, k, v, chunking, plan, call.segment_ids, call.seed
        return chunked_attention(
            *arrays,
            impl=self._choose_impl(call, q, v),
            self_weight=self_weight,
            n_tokens=None if plan is None else n_sorted(call),
        )

    def _init_cache(self, call, params, q, k, v, plan) -> LshCache:
        """The cache after the first `call.lengths` positions of each row."""
        # Decoding keeps buckets, which a plan does not have.
        lengths, capacity, length = call.lengths, call.length, q.shape[1]
        factors, n_hashes = self._hashing.factors_for(capacity), self._n_hashes_in(call.train)
        rotations = self._hashing.rotations_for(q, capacity, n_hashes, call.rng)
        buckets = hash_by(rotations, q, factors, self._impl_of_others)
        is_token = arange_last(length) < lengths[:, None, None, None]
        n_buckets = math.prod(factors)  # also the bucket of positions without a token
        of_tokens = jnp.where(is_token, buckets, n_buckets)
        order = sort_by_bucket(of_tokens, n_buckets + 1, None, 0).query_positions
        n_free = ((0, 0), (0, 0), (0, 0), (0, capacity - length))
        return LshCache(
            fill_ring(length_normalize(q), v, lengths, capacity),
            jnp.pad(buckets, n_free),
            jnp.pad(order, n_free),
            SharedByBatch(rotations),
        )

    def _step(self, call, params, q, k, v, cache: LshCache):
        """Attention of one more position of each row, and the cache with it."""
        impl = self._impl_of_insert(q, v, cache.order.shape[-1])
        if impl == "xla":
            found = self._insert(q, call.position, cache)
        else:
            found = self._insert_in_kernel(impl == INTERPRETED, q, call.position, cache)
        buckets, order, key, index, mask = found

        # One softmax over the positions that it sees in all hashes' orders, [B, N, R * M].
        count_once = self.count_once and index.shape[2] > 1
        index, mask = (x.reshape(*x.shape[:2], -1) for x in (index, mask))
        options = dict(index=index, count_once=count_once)
        options |= dict(alone=v if self.attend_self_if_alone else None)
        given = call, q, cache.memory, KeyValues(key, v), mask, self._impl_of_others
        out, memory = add_and_attend(*given, **options)
        return out, LshCache(memory, buckets, order, cache.rotations)

    def _impl_of_insert(self, q, v, capacity: int) -> str:
        """`choose_impl` of `_insert`; no kernel joins the hashes' chunks to a circle."""
        if self.wrap:
            return "xla"
        found, n_slots = kernel_obstacles(q, None, v), self._n_in_reach(capacity)
        if n_slots > MAX_TILE:
            found = found._replace(chip=f"{n_slots:,} slots in reach, which is above {MAX_TILE:,}")
        return choose_impl(self._impl_of_others, pallas=found)

    def _insert(self, q: Float[Array, "B 1 N H"], position: Int[Array, " B"], cache: LshCache):
        """Inserts the newest query's position in each hash's order.

        Returns:
          The buckets and the order with it; the query as a key; the positions in its reach and
          which of them it sees, `[B, N, R, M]`. Its own is never one of them: `_step` falls back to
          its value if the mask is empty.
        """
        factors = self._hashing.factors_for(cache.order.shape[-1])
        bucket = hash_by(cache.rotations.value, q, factors, self._impl_of_others)
        newest = position[:, None, None, None]
        buckets = with_bucket(cache.buckets, bucket, position)
        order, bucket_start, query_slot = insert_newest(cache.order, buckets, bucket, newest)
        capacity = order.shape[-1]
        index = arange_last(self._n_in_reach(capacity))
        slot, exists = self.slots_in_reach(capacity, index, query_slot, bucket_start, newest)
        if self.wrap:
            pad_multiple = self._chunks.within(capacity, circle=True).chunk_len * self.pad_chunks
            seen, exists = _across_hashes(order, slot, newest, pad_multiple)
        else:
            seen = take_last(order, jnp.clip(slot, 0, capacity - 1))
        mask = exists & (seen != newest)
        return buckets, order, length_normalize(q), jnp.where(mask, seen, 0), mask

    def _insert_in_kernel(self, interpret: bool, q, position, cache: LshCache):
        """`_insert` in one kernel."""
        from reformax.ops.kernels.triton import sorted_order as kernel

        capacity = cache.order.shape[-1]
        options = kernel.InsertOptions(
            tuple(self._hashing.factors_for(capacity)),
            self._n_in_reach(capacity),
            self,
            interpret,
        )
        arrays = q[:, 0], cache.rotations.value, position, cache.buckets, cache.order
        found = kernel.insert_newest(options, kernel.InsertInputs(*arrays))
        return found._replace(key=found.key[:, None])

    def _n_in_reach(self, capacity: int) -> int:
        """M, the number of slots in reach of a query."""
        chunk_len, n_before, n_after = self._chunks.within(capacity, circle=self.wrap)
        return chunk_len * (n_before if self.strictly_causal else n_before + 1 + n_after)

    def slots_in_reach(
        self,
        capacity: int,
        index: Int[Array, "*d"],
        query_slot: Int[Array, "*d"],
        bucket_start: Int[Array, "*d"],
        newest: Int[Array, "*d"],
    ) -> tuple[Int[Array, "*d"], Bool[Array, "*d"]]:
        """The slots of the query's chunks in a hash's order, and whether each has a position.

        Args:
          capacity: C.
          index: of each slot, below M.
          query_slot: the query's slot.
          bucket_start: the slot where the query's bucket begins.
          newest: the query's position.
        """
        sizes = self._chunks.within(capacity, circle=self.wrap)
        if self.strictly_causal:
            slot = query_slot - sizes.chunk_len * sizes.n_chunks_before + index
            return slot, slot >= bucket_start
        chunk = lax.div(query_slot, jnp.int32(sizes.chunk_len))
        slot = (chunk - sizes.n_chunks_before) * sizes.chunk_len + index
        return slot, (slot >= 0) & (slot <= newest)  # newest + 1 slots are filled


# Decoding. C is the capacity, M the slots that a query sees in one hash's order. A *position* is an
# index into the sequence, a *slot* one into a hash's sorted order.


class LshCache(NamedTuple):
    """The cache of LSH attention; entries of positions without a token are arbitrary."""

    memory: KeyValues  # by position
    buckets: Int[Array, "B N R C"]  # by position
    order: Int[Array, "B N R C"]  # positions, sorted by bucket and position
    rotations: SharedByBatch  # [N, H, R, F]


def _across_hashes(
    order: Int[Array, "B N R C"],
    slot: Int[Array, "B N R M"],
    newest: Int[Array, "B 1 1 1"],
    pad_multiple: int,
) -> tuple[Int[Array, "B N R M"], Bool[Array, "B N R M"]]:
    """Positions at slots of the circle of all orders, and whether each exists.

    A slot after a hash's order is in the next hash's. Orders are padded to a multiple of
    `pad_multiple` slots.
    """
    n_hashes, capacity = order.shape[2:]
    length = (newest // pad_multiple + 1) * pad_multiple
    slot = jnp.arange(n_hashes)[None, None, :, None] * length + slot
    index, slot = jnp.divmod(slot % (n_hashes * length), length)
    index = index * capacity + jnp.minimum(slot, capacity - 1)
    shape = (*order.shape[:2], -1)
    seen = take_last(order.reshape(shape), index.reshape(shape)).reshape(index.shape)
    return seen, slot <= newest
