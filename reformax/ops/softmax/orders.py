"""Orders of a sequence and the chunks they are cut into: the data of chunked attention.

A *position* is an index into the sequence, a *place* one into an order of it.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from reformax.declared import Bounds

# The chunks that a query sees are read together.
ChunkCount = Annotated[int, Bounds(0, 4096)]
PadChunks = Annotated[int, Bounds(1, 4096)]


class ChunkSizes(NamedTuple):
    """A chunk's length, and how many chunks before and after its own a query sees."""

    chunk_len: int
    n_chunks_before: int
    n_chunks_after: int

    def within(self, length: int, circle: bool = False) -> ChunkSizes:
        """Sizes by which a query sees the same of so many positions.

        More chunks than there are go around a `circle`, and are left out elsewhere.
        """
        chunk_len = min(self.chunk_len, length)
        if circle:
            return self._replace(chunk_len=chunk_len)
        most = -(-length // chunk_len)
        return ChunkSizes(chunk_len, *(min(n, most) for n in self[1:]))

    def cut(
        self, length: int, circle: bool = False, window: int | None = None, **options: Any
    ) -> Chunks:
        """The `Chunks` of a sequence, with further `options` of theirs; one if it is shorter."""
        window = None if window is None else min(window, length)
        return Chunks(length, *self.within(length, circle), window=window, **options)


class Chunks(NamedTuple):
    """The static part of a chunked attention: which keys a query sees, and with what weight.

    Attributes:
      length: the number of positions; those behind them are padding.
      chunk_len: positions in a chunk, L.
      n_chunks_before: how many chunks before its own a query sees.
      n_chunks_after: how many chunks after its own a query sees.
      causal: whether the future is hidden, by original position.
      shared_qk: whether keys are the length-normalised queries, hidden from themselves.
      attend_self_if_alone: for `shared_qk` and `two_orders`, whether a position that sees nothing
        else sees itself.
      window: if set, keys `window` or more positions away are hidden.
      count_once: whether a key that several rounds show counts once (the paper's N_ij) or each
        time.
      dropout: the rate at which attention weights are dropped.
      two_orders: whether keys stand in an order of their own, in which a query's own chunk need not
        hold its own key.
      n_keys: the number of keys, of another sequence than the queries; None: they are of one.
      ratio: how many places of queries there are to each place of keys, in an order and in a chunk.
    """

    length: int
    chunk_len: int
    n_chunks_before: int
    n_chunks_after: int
    causal: bool
    shared_qk: bool
    attend_self_if_alone: bool = True
    window: int | None = None
    count_once: bool = True
    dropout: float = 0.0
    two_orders: bool = False
    n_keys: int | None = None
    ratio: int = 1

    @property
    def query_chunk_len(self) -> int:
        """Places of queries in a chunk."""
        return self.ratio * self.chunk_len

    @property
    def key_length(self) -> int:
        """The number of positions of keys."""
        return self.length if self.n_keys is None else self.n_keys

    @property
    def most_chunks(self) -> int:
        """No order has more chunks; one of a single sequence has as many."""
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
        """The padding that makes whole chunks."""
        return -self.length % self.chunk_len


class Order(NamedTuple):
    """Where the queries and the keys of a padded sequence, or of two, stand in each round.

    A number from the sequence's length on is padding. The places of queries are cut into chunks.
    Around them stand the keys: a query's chunk sees the `n_chunks_before` chunks of keys before it,
    its own, and `n_chunks_after` chunks behind it.

    Attributes:
      queries: the position whose query stands at each place.
      places: the place of each position's query, the inverse of `queries`. None leaves it to
        `with_places`.
      keys: the position whose key stands at each place, from `n_chunks_before` chunks before the
        first query's to `n_chunks_after` behind the last query's. None is `queries`, with no key
        before or behind them.
      key_places: the place of each position's key, where the keys have an order of their own:
        `keys` then has as many chunks as `queries`, with no key before or behind them. None leaves
        it to `with_places`, or keys stand where their queries do.
      first: the first place whose key a position's query sees; it then sees none after its own
        place either. None shows it all chunks in reach.
    """

    queries: Int[Array, "B N R T"]
    places: Int[Array, "B N R T"] | None = None
    keys: Int[Array, "B N R K"] | None = None
    first: Int[Array, "B N R T"] | None = None
    key_places: Int[Array, "B N R T"] | None = None

    def with_places(self, two_orders: bool = False) -> Order:
        """The order with the place of each position, and of its key if that has its own."""
        if self.places is not None:
            return self
        key_places = inverse(self.keys) if two_orders else None
        return self._replace(places=inverse(self.queries), key_places=key_places)

    def as_asked(self, impl: str, count_once: bool, two_orders: bool = False) -> Order:
        """With places if the implementation asks for them.

        A kernel does only to tell which keys an earlier round has shown.
        """
        asks = impl == "xla" or (self.queries.shape[2] > 1 and count_once)
        return self.with_places(two_orders) if asks else self


def inverse(order: Int[Array, "*d T"]) -> Int[Array, "*d T"]:
    """The inverse of each permutation along the last axis."""
    place = jnp.broadcast_to(jnp.arange(order.shape[-1], dtype=order.dtype), order.shape)
    places = jnp.zeros_like(order)
    return jnp.put_along_axis(
        places, order, place, axis=-1, inplace=False, mode="promise_in_bounds"
    )
