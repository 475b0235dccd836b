"""The scores of keys for queries, from the small vectors of an indexer.

A query has several index heads, each with a vector and a weight. A key has one vector.

    "relu"     I_ts = sum_j w_tj ReLU(q_tj . k_s)      DeepSeek-AI 2025, DeepSeek-V3.2-Exp, eq. 1
    "product"  I_ts = (sum_j w_tj q_tj) . k_s          one inner product, which hashes can find

Letters besides those of `reformax.ops.base`: J index heads of size D, Q queries of a chunk, K keys
that were gathered for each query.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

Score = Literal["relu", "product"]


class IndexQueries(NamedTuple):
    """The indexer's queries and weights."""

    queries: Float[Array, "B T J D"]
    weights: Float[Array, "B T J"]

    def searched(self, score: Score) -> Float[Array, "B T J D"]:
        """The vectors whose inner products with a key make its score, J or one for each query."""
        if score == "relu":
            return self.queries
        return jnp.einsum("bqjd,bqj->bqd", self.queries, self.weights)[:, :, None]


class Indexed(NamedTuple):
    """The vectors of an indexer: its queries, and its keys `[B, S, D]`; weights of candidates."""

    queries: IndexQueries
    keys: Float[Array, "B S D"]
    params: Any = ()


def scores(score: Score, index: IndexQueries, keys: Float[Array, "B S D"]) -> Array:
    """The scores of all keys, `[B, Q, S]`."""
    return _summed(score, index, jnp.einsum("bqjd,bsd->bqjs", index.searched(score), keys))


def gathered(x: Array, index: Int[Array, "B Q K"]) -> Array:
    """`x[b, index[b]]` of `[B, S, ...]`: each query's rows, `[B, Q, K, ...]`."""
    return jax.vmap(lambda x, at: x[at])(x, index)


def scores_of_gathered(
    score: Score, index: IndexQueries, keys: Float[Array, "B Q K D"]
) -> Float[Array, "B Q K"]:
    """The scores of each query's keys."""
    return _summed(score, index, jnp.einsum("bqjd,bqkd->bqjk", index.searched(score), keys))


def _summed(score: Score, index: IndexQueries, products: Float[Array, "B Q J S"]) -> Array:
    if score == "product":
        return _one_zero(products[:, :, 0])
    return _one_zero(jnp.einsum("bqjs,bqj->bqs", jax.nn.relu(products), index.weights))


def _one_zero(x: Array) -> Array:
    """Makes -0 0, of slope 1. A negative weight times ReLU's 0 is -0, which sorts before 0."""
    return jnp.where(x == 0, x - lax.stop_gradient(x), x)
