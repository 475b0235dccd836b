"""The orders of a sequence and their chunks: the plan of chunked attention.

A *position* is an index into the sequence, a *slot* an index into an order of it. R is the number
of hashes, each of which has an order. Without hashes there is one order.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple, Self

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from reformax.declared import Bounds
from reformax.ops.calls.call import Call
from reformax.ops.masking.masks import SegmentIds, TokensFirst
from reformax.ops.masking.visibility import Visibility
from reformax.ops.numerics.logits import PLAIN, Logits

# All chunks that a query sees are in memory at once.
ChunkCount = Annotated[int, Bounds(0, 4096)]
PadChunks = Annotated[int, Bounds(1, 4096)]


class ChunkSizes(NamedTuple):
    """The length of a chunk, and how many chunks before and after its own a query sees."""

    chunk_len: int
    n_chunks_before: int
    n_chunks_after: int

    def within(self, length: int, circle: bool = False) -> ChunkSizes:
        """Sizes no larger than a sequence of `length` needs. A query sees the same keys.

        In a `circle` the numbers of chunks stay, because chunks may repeat.
        """
        chunk_len = min(self.chunk_len, length)
        if circle:
            return self._replace(chunk_len=chunk_len)
        most = -(-length // chunk_len)
        return ChunkSizes(chunk_len, *(min(n, most) for n in self[1:]))

    def cut(self, call: Call, length: int, circle: bool = False, **options: Any) -> Chunking:
        """The `Chunking` of a sequence of `length`, with its other `options`."""
        return Chunking.of(call, length, *self.within(length, circle), **options)


class Chunking(NamedTuple):
    """The static part of chunked attention: which keys a query sees, and with what weight."""

    length: int  # the number of positions, before padding
    chunk_len: int  # positions in a chunk, L
    n_chunks_before: int  # the number of chunks before its own that a query sees
    n_chunks_after: int  # the number of chunks after its own that a query sees
    causal: bool  # whether later positions are hidden, whatever their slots
    # Whether keys are the length-normalised queries, hidden from themselves.
    shared_qk: bool = False
    # For `shared_qk` and `two_orders`, whether a position that sees nothing else sees itself.
    attend_self_if_alone: bool = True
    window: int | None = None  # if set, keys `window` or more positions away are hidden
    # Whether a key that is visible in several hashes counts once (the paper's N_ij) or each time.
    count_once: bool = True
    dropout: float = 0.0
    logits: Logits = PLAIN
    # Whether keys have another order than queries, so that a query's chunk may lack the key of its
    # position.
    two_orders: bool = False
    # The number of keys where they are another sequence than the queries; None: they are the same.
    n_keys: int | None = None
    ratio: int = 1  # slots of queries for each slot of keys, in an order and in a chunk

    @classmethod
    def of(cls, call: Call, length: int, *sizes: int, **options: Any) -> Self:
        """The chunking of a call by `ChunkSizes`; a `window` is cut to the sequence."""
        of_call = dict(causal=call.causal, dropout=call.dropout, logits=call.logits)
        if (window := options.get("window")) is not None:
            options["window"] = min(window, length)
        return cls(length, *sizes, **of_call, **options)

    @property
    def rule(self) -> Visibility:
        """Which keys of its chunks a query sees."""
        return Visibility(self.causal, self.window, exclude_self=self.shared_qk)

    @property
    def query_chunk_len(self) -> int:
        """Slots of queries in a chunk."""
        return self.ratio * self.chunk_len

    @property
    def key_length(self) -> int:
        """The number of positions of keys."""
        return self.length if self.n_keys is None else self.n_keys

    @property
    def max_chunks(self) -> int:
        """The most chunks that an order has. An order of a single sequence has as many."""
        return -(-(-(-self.length // self.ratio) + (self.n_keys or 0)) // self.chunk_len)

    @property
    def sees_itself(self) -> bool:
        """Whether a position that sees nothing else sees itself."""
        return (
            self.attend_self_if_alone
            and self.n_keys is None
            and (self.shared_qk or self.two_orders)
        )

    @property
    def padding(self) -> int:
        """The number of positions that fill up the last chunk."""
        return -self.length % self.chunk_len


class Order(NamedTuple):
    """The orders in which each hash sorts the queries and the keys of a padded sequence, or of two.

    Positions from the sequence's length on are padding. The slots of queries are cut into chunks.
    A query sees the keys of `n_chunks_before` chunks before its own chunk, of its own, and of
    `n_chunks_after` chunks after it.

    Attributes:
      query_positions: the position of the query in each slot.
      query_slots: the slot of each position's query, the inverse of `query_positions`. None leaves
        it to `with_slots`.
      key_positions: the position of the key in each slot, from `n_chunks_before` chunks before the
        first query to `n_chunks_after` after the last query. None: a key has the slot of its
        query, and there are no keys before or after these slots.
      first_slot: the first slot whose key each position's query sees. The query then sees no key
        after its own slot. None: a query sees all chunks in reach.
      key_slots: the slot of each position's key, where keys have another order than queries.
        `key_positions` then has as many chunks as `query_positions`, with no key before or after
        them. None leaves it to `with_slots`, or a key has the slot of its query.
    """

    query_positions: Int[Array, "B N R T"]
    query_slots: Int[Array, "B N R T"] | None = None
    key_positions: Int[Array, "B N R K"] | None = None
    first_slot: Int[Array, "B N R T"] | None = None
    key_slots: Int[Array, "B N R T"] | None = None

    def with_slots(self, two_orders: bool = False) -> Order:
        """The order with the slot of each position's query, and of its key for `two_orders`."""
        if self.query_slots is not None:
            return self
        key_slots = inverse_permutation(self.key_positions) if two_orders else None
        return self._replace(
            query_slots=inverse_permutation(self.query_positions), key_slots=key_slots
        )

    def for_impl(self, impl: str, count_once: bool, two_orders: bool = False) -> Order:
        """The order, `with_slots` where the implementation needs them.

        A kernel needs them only to find the keys that are visible in an earlier hash.
        """
        needed = impl == "xla" or (self.query_positions.shape[2] > 1 and count_once)
        return self.with_slots(two_orders) if needed else self


def inverse_permutation(order: Int[Array, "*d T"]) -> Int[Array, "*d T"]:
    """The inverse of each permutation along the last axis."""
    slot = jnp.broadcast_to(jnp.arange(order.shape[-1], dtype=order.dtype), order.shape)
    slots = jnp.zeros_like(order)
    return jnp.put_along_axis(slots, order, slot, axis=-1, inplace=False, mode="promise_in_bounds")


class UnsortedInputs(NamedTuple):
    """The arrays of kernels of chunks, by position."""

    # Keys are None where queries are keys too.
    q: Float[Array, "B T N H"]
    k: Float[Array, "B T N H"] | None
    v: Float[Array, "B T N V"]
    order: Order | None  # as in `softmax.chunked.chunked_attention`
    # Padded to whole chunks with 0.
    segment_ids: SegmentIds | TokensFirst | None
    seed: Int[Array, 6] | None
