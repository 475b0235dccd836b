"""The weights of an indexer that reads an attention's queries, and the loss that it learns by.

Letters besides those of `reformax.ops.base`: J index heads of size D, Q queries of a chunk, K keys
of a query.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from reformax.ops.indexing.scores import IndexQueries
from reformax.ops.numerics.precision import accum_dtype
from reformax.ops.softmax.online import largest, masked_exp, nonzero

# An indexer clips its inputs to this magnitude. A score is a product of three inputs.
MAX_INPUT = 1e9


def init_queries(
    rng: PRNGKeyArray, key: Float[Array, "N H D"], n_index: int
) -> dict[str, Float[Array, "N H J *D"]]:
    """The weights `query [N, H, J, D]` and `weight [N, H, J]`.

    Index head j projects the queries of the attention heads n with `n mod J = j` by the same matrix
    as their keys. Scores then resemble the sum of these heads' products.
    """
    n_heads, size, _ = key.shape
    head, index = jnp.arange(n_heads)[:, None], jnp.arange(n_index)[None]
    shares_key = (head % n_index == index) | (index % n_heads == head)  # [N, J]
    weight = jax.random.normal(rng, (n_heads, size, n_index))
    return {
        "query": jnp.where(shares_key[:, None, :, None], key[:, :, None], 0),
        "weight": 0.1 * weight / math.sqrt(n_heads * size),
    }


def index_queries(params, q: Float[Array, "B T N H"]) -> IndexQueries:
    """Index queries, and their weights, to whose products 1 is added."""
    q = clipped(q)
    weights = 1 + jnp.einsum("btnh,nhj->btj", q, params["weight"].astype(q.dtype))
    return IndexQueries(jnp.einsum("btnh,nhjd->btjd", q, params["query"].astype(q.dtype)), weights)


def no_queries(x: Float[Array, "B T N H"]) -> IndexQueries:
    """Zeros, of an attention that has no indexer: nothing of a loss of them remains."""
    zeros = jnp.zeros((*x.shape[:2], 1, 16), accum_dtype(x.dtype))
    return IndexQueries(zeros, zeros[..., 0])


def clipped(x: Array) -> Array:
    """Clips vectors, in float32 or wider, so that scores do not overflow. They have no gradient."""
    x = lax.stop_gradient(x).astype(accum_dtype(x.dtype))
    return jnp.clip(x, -MAX_INPUT, MAX_INPUT)


def is_chosen(chosen: Int[Array, "B Q K"], length: int) -> Bool[Array, "B Q S"]:
    """Whether each query chose each of `length` keys."""
    row, query, _ = jnp.ogrid[: chosen.shape[0], : chosen.shape[1], :1]
    position = jnp.where(chosen < 0, length, chosen)
    none = jnp.zeros((*chosen.shape[:2], length), bool)
    return none.at[row, query, position].set(True, mode="drop")


def divergence(
    scores: Float[Array, "B Q S"], attention: Float[Array, "B Q S"], mask: Bool[Array, "B Q S"]
) -> Float[Array, "B Q"]:
    """`KL(attention || softmax(scores))` of each query over the keys that it sees.

    DeepSeek-AI 2025, DeepSeek-V3.2-Exp, eq. 4.
    """
    scores = scores - largest(scores, mask, axis=-1)
    # A score may exceed the maximum by rounding, which for large scores is not small.
    scores = scores - jnp.where(mask, lax.stop_gradient(jnp.maximum(scores, 0)), 0)
    row_sum = masked_exp(scores, mask, jnp.zeros_like(scores[..., :1])).sum(axis=-1, keepdims=True)
    log_ratio = jnp.log(jnp.where(attention > 0, attention, 1)) - scores + jnp.log(nonzero(row_sum))
    return jnp.where(mask, attention * log_ratio, 0).sum(axis=-1)
