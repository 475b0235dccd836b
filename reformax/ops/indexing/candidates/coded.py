"""Candidates by codes that learn, as HATA's do.

Letters as in `base.py`.
"""

from __future__ import annotations

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from reformax.declared import Size
from reformax.ops.calls.options import options
from reformax.ops.indexing.candidates.base import Candidates, IndexedKeys, QueryChunk
from reformax.ops.indexing.learning import divergence
from reformax.ops.indexing.rule import ChoiceRule
from reformax.ops.indexing.scores import IndexQueries, scores
from reformax.ops.indexing.streaming import best_keys
from reformax.ops.masking.visibility import CAUSAL, Side, Visibility
from reformax.ops.numerics.best import best_of
from reformax.ops.softmax.online import masked_softmax


@options
class Coded(Candidates):
    """The keys whose codes have the highest scores: signs of a learnt projection.

    HATA (arXiv 2506.02572) has codes of a frozen model's queries and keys, for decoding. Here those
    of index vectors are compared as the vectors are, by the score of the indexer, and they learn by
    the indexer's own loss: the divergence of the softmax of the codes' scores, times a learnt
    scale, from that of the scores, over all keys of some queries. The gradient of a sign is that of
    a hyperbolic tangent. At first the projection is random, and codes are alike by the angle.

    Weights: `projection [D, n_bits]` and `scale []`.

    Args:
      n_bits: the length of a code.
      n_best: candidates of a query.

    Time is that of scores of `n_bits` signs for all keys, and of `T n_best` exact ones.
    """

    n_bits: Size = 128
    n_best: Size = 1024

    learns: ClassVar[bool] = True

    def init(self, rng: PRNGKeyArray, size: int) -> dict[str, Array]:
        projection = jax.random.normal(rng, (size, self.n_bits)) / math.sqrt(size)
        return {"projection": projection, "scale": jnp.asarray(math.sqrt(size), jnp.float32)}

    def codes(self, x: IndexedKeys, vectors: Float[Array, "*d D"]) -> Float[Array, "*d bits"]:
        """1 or -1 for each bit."""
        bits = vectors @ x.params["projection"].astype(vectors.dtype)
        smooth = jnp.tanh(bits)
        return smooth + lax.stop_gradient(jnp.where(bits < 0, -1, 1) - smooth)

    def _of_queries(self, x: IndexedKeys, index: IndexQueries) -> IndexQueries:
        weights = index.weights if x.score == "relu" else jnp.ones_like(index.weights[..., :1])
        return IndexQueries(self.codes(x, index.searched(x.score)), weights)

    def prepare(self, x: IndexedKeys) -> Float[Array, "B S bits"]:
        return self.codes(x, x.token_keys)

    def n_numbers(self, x: IndexedKeys, n_searched: int, n_each: int) -> int:
        return n_searched * self.n_bits + min(self.n_best, x.keys.shape[1]) * n_each

    def of(self, prepared, x: IndexedKeys, queries: QueryChunk) -> Int[Array, "B Q M"]:
        index, side = self._of_queries(x, queries.index), Side(queries.position, queries.ids)
        n_best = min(self.n_best, x.keys.shape[1])
        return best_keys(x.score, ChoiceRule(x.causal), n_best, index, prepared, side, x.ids)[1]

    def of_all(self, prepared, x: IndexedKeys, index: IndexQueries, interpret: bool):
        from reformax.ops.kernels.triton import indexer as kernel

        if x.score != "relu":
            return None
        arrays = *self._of_queries(x, index), prepared, x.segment_ids, x.segment_ids
        n_best = min(self.n_best, x.keys.shape[1])
        return kernel.choose_positions(n_best, x.causal, interpret, *arrays, dtype="bfloat16")

    def losses(self, x: IndexedKeys, queries: QueryChunk) -> Float[Array, "B Q"]:
        index, keys = lax.stop_gradient((queries.index, x.token_keys))
        position = jnp.arange(x.keys.shape[1], dtype=jnp.int32)[None, None]
        query = Side(queries.position[..., None], queries.ids[..., None])
        mask = Visibility(x.causal).sees(query, Side(position, x.ids[:, None]))
        n_heads, size = index.queries.shape[2:]
        scale = x.params["scale"].astype(keys.dtype) / (self.n_bits * math.sqrt(n_heads))
        of_codes = scores(x.score, self._of_queries(x, index), self.codes(x, keys))
        exact = scores(x.score, index, keys) / math.sqrt(n_heads * size)
        return divergence(scale * of_codes, masked_softmax(exact, mask), mask)

    def start(self, x: IndexedKeys) -> Int[Array, "B C bits"]:
        return self._held(x, x.token_keys)

    def _held(self, x: IndexedKeys, keys: Float[Array, "B T D"]) -> Int[Array, "B T bits"]:
        return self.codes(x, keys).astype(jnp.int8)

    def advance(self, state, x: IndexedKeys, key, position) -> Int[Array, "B C bits"]:
        return state.at[jnp.arange(len(position)), position].set(self._held(x, key)[:, 0])

    def of_newest(self, state, x: IndexedKeys, queries: QueryChunk) -> Int[Array, "B 1 M"]:
        position = jnp.arange(state.shape[1], dtype=jnp.int32)[None, None]
        so_far = CAUSAL.sees(Side(queries.position[..., None]), Side(position))
        index = self._of_queries(x, queries.index)
        found = scores(x.score, index, state.astype(x.keys.dtype))
        return best_of(found, so_far, min(self.n_best, state.shape[1]))
