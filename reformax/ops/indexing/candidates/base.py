"""The base class of ways to find candidates, and the arrays that they read.

Letters besides those of `reformax.ops.base`: J index heads of size D, Q queries of a chunk, M
candidates of a query, C blocks, or positions of a cache.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from reformax.ops.calls.options import Options, options
from reformax.ops.indexing.scores import IndexQueries, Score
from reformax.ops.masking.masks import ids_or_ones
from reformax.ops.masking.padding import tokens_only


class IndexedKeys(NamedTuple):
    """The keys of a call as its indexer reads them."""

    keys: Float[Array, "B S D"]
    segment_ids: Int[Array, "B S"] | None
    score: Score
    causal: bool
    length: int  # that settings depend on
    rng: PRNGKeyArray | None
    params: Any = ()  # the weights of the candidates

    @property
    def ids(self) -> Int[Array, "B S"]:
        """The segments."""
        return ids_or_ones(self.segment_ids, self.keys)

    @property
    def token_keys(self) -> Float[Array, "B S D"]:
        """The keys with zeros at padding, which may be NaN: sums multiply hidden keys by 0."""
        return tokens_only(self.keys, self.ids)


class QueryChunk(NamedTuple):
    """Some queries: their vectors, positions and segments."""

    index: IndexQueries
    position: Int[Array, "#B Q"]
    ids: Int[Array, "B Q"]


@options
class Candidates(Options):
    """A way to find candidates: `prepare` reads all keys once, `of` finds those of some queries.

    Attributes:
      draws: whether it draws at random, and needs an rng.
      learns: whether it has weights, from `init`, and a loss, `losses`.
      repeats: whether `of` finds a position several times, or not in order.
    """

    draws: ClassVar[bool] = False
    learns: ClassVar[bool] = False
    repeats: ClassVar[bool] = True

    def init(self, rng: PRNGKeyArray, size: int) -> dict[str, Array]:
        """The weights, for index vectors of so many features."""
        return {}

    def losses(self, x: IndexedKeys, queries: QueryChunk) -> Float[Array, "B Q"]:
        """The loss of each query where it `learns`, with a gradient of the weights alone."""
        raise NotImplementedError

    def prepare(self, x: IndexedKeys) -> Any:
        """The arrays that `of` reads, made of the keys once."""
        raise NotImplementedError

    def n_numbers(self, x: IndexedKeys, n_searched: int, n_each: int) -> int:
        """How many numbers a query takes in memory until its candidates are scored.

        Args:
          n_searched: vectors of a query that are searched.
          n_each: numbers that a candidate takes.
        """
        raise NotImplementedError

    def of(self, prepared: Any, x: IndexedKeys, queries: QueryChunk) -> Int[Array, "B Q M"]:
        """The positions of the candidates; -1 is none. In order, each once, unless it `repeats`."""
        raise NotImplementedError

    def of_all(
        self, prepared: Any, x: IndexedKeys, index: IndexQueries, interpret: bool
    ) -> Int[Array, "B T M"] | None:
        """`of` for the queries of all positions in kernels; None where there are none."""

    # Decoding. The keys are the cache's, of C positions, and all queries are causal.

    def start(self, x: IndexedKeys) -> Any:
        """The state after the tokens of each row, which are the positions of segment 1."""
        raise NotImplementedError

    def advance(
        self, state: Any, x: IndexedKeys, key: Float[Array, "B 1 D"], position: Int[Array, " B"]
    ) -> Any:
        """The state with the key of one more position."""
        raise NotImplementedError

    def of_newest(self, state: Any, x: IndexedKeys, queries: QueryChunk) -> Int[Array, "B 1 M"]:
        """`of` for one query a row."""
        raise NotImplementedError

    def in_order(self, found: Int[Array, "B Q M"]) -> Int[Array, "B Q M"]:
        """Sorts the positions that `of`, `of_all` or `of_newest` found, each once."""
        return without_repeats(found) if self.repeats else found


def without_repeats(position: Int[Array, "*d M"]) -> Int[Array, "*d M"]:
    """The positions in order, with -1 for each that was there before."""
    position = jnp.sort(position, axis=-1)
    none = jnp.full_like(position[..., :1], -1)
    before = jnp.concatenate([none, position[..., :-1]], axis=-1)
    return jnp.where(position == before, -1, position)
