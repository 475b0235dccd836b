"""The keys of a chunk of queries in array operations: all with a mask, or the chosen ones alone.

Keys are positions, or summaries of `span` positions each, which are seen from their last one on.

Letters besides those of `reformax.ops.base`: M query heads of a key head, S keys, J index heads of
size D, Q queries of a chunk, K keys of a query.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from reformax.ops.calls.call import Call
from reformax.ops.indexing.learning import is_chosen
from reformax.ops.indexing.scores import IndexQueries, Score, gathered, scores, scores_of_gathered
from reformax.ops.masking.visibility import Side, Visibility
from reformax.ops.numerics.precision import accum_dtype

# Array operations gather the chosen keys where they are at most one of so many: on a CPU, both
# passes of 4,096 tokens that choose 256 take a sixth of those over all keys.
GATHERED = 4


class KeysOfQueries(NamedTuple):
    """A chunk of queries and its keys, all of them or those that each query chose."""

    logits: Float[Array, "B G M Q K"] | Float[Array, "B G Q K"]  # of the attention
    mask: Bool[Array, "B Q K"]
    axes: str  # of the product of weights and values, `[B, G, M, Q, V]` or `[B, Q, G, V]`
    values: Array
    key: Int[Array, "#B #Q K"]  # the numbers of the keys
    scores: Float[Array, "B Q K"]  # of the indexer


class KeyReader(NamedTuple):
    """The keys that queries read, `span` positions apart, with the vectors `index` of an indexer.

    It takes chunks of queries `[B, Q, G, M, H]`, or `[B, Q, G, H]` with a key head each, and what
    they chose, `[B, Q, K]`.
    """

    call: Call
    score: Score
    span: int
    keys: Float[Array, "B S G H"]
    values: Float[Array, "B S G V"]
    ids: Int[Array, "B S"]
    index: Float[Array, "B S D"]

    def best_for(self, n_chosen: int) -> Callable[..., KeysOfQueries]:
        """`of_chosen`, or `of_all` where queries choose many of the keys."""
        if not gathers(n_chosen, self.keys.shape[1]):
            return self.of_all
        # From wide copies, to which the gradient adds the keys of each query.
        dtypes = self.keys.dtype, self.values.dtype
        keys, values = (x.astype(accum_dtype(x.dtype)) for x in (self.keys, self.values))
        reader = self._replace(keys=keys, values=values)
        return functools.partial(reader.of_chosen, dtypes=dtypes)

    def of_all(self, q, chosen, query: Side, index: IndexQueries) -> KeysOfQueries:
        number = jnp.arange(self.keys.shape[1], dtype=jnp.int32)[None, None]
        key = self._side(number, self.ids[:, None])
        m, out = ("m", "bgmqv") if q.ndim > 4 else ("", "bqgv")
        return KeysOfQueries(
            self.call.logits.of(f"bqg{m}h,bsgh->bg{m}qs", q, self.keys),
            is_chosen(chosen, number.shape[2]) & Visibility(self.call.causal).sees(query, key),
            f"bg{m}qs,bsgv->{out}",
            self.values,
            number,
            scores(self.score, index, self.index),
        )

    def of_chosen(
        self, q, chosen, query: Side, index: IndexQueries, dtypes: tuple[Any, Any] | None = None
    ) -> KeysOfQueries:
        """`dtypes`: what gathered keys and values are rounded to; None: they have theirs."""
        number = jnp.maximum(chosen, 0)
        keys, values, ids, index_keys = (gathered(y, number) for y in self[3:])
        if dtypes is not None:
            keys, values = keys.astype(dtypes[0]), values.astype(dtypes[1])
        key = self._side(number, ids)._replace(exists=chosen >= 0)
        m, out = ("m", "bgmqv") if q.ndim > 4 else ("", "bqgv")
        return KeysOfQueries(
            self.call.logits.of(f"bqg{m}h,bqkgh->bg{m}qk", q, keys),
            Visibility(self.call.causal).sees(query, key),
            f"bg{m}qk,bqkgv->{out}",
            values,
            number,
            scores_of_gathered(self.score, index, index_keys),
        )

    def _side(self, number: Int[Array, "*d"], ids: Array) -> Side:
        return Side(number if self.span == 1 else number * self.span + (self.span - 1), ids)


def gathers(n_chosen: int, n_keys: int) -> bool:
    """Whether array operations gather the chosen keys."""
    return n_chosen * GATHERED <= n_keys
