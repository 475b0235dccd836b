"""The choice among a query's candidates as a Pallas kernel for NVIDIA GPUs (Triton).

A program has one query. It reads the index keys of its candidates by their positions, a tile at a
time, and writes their scores as integers of the same order. No array holds the keys of each query.
The kernel of `indexer` then selects the best.

Letters as in `ops.indexing.candidates.base`; I index heads and C candidates of a tile.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from reformax.ops.kernels.triton.common import (
    launch,
    load,
    matmul_in_parts,
    tile_side,
    view_rows,
)
from reformax.ops.kernels.triton.indexer import COLUMNS, in_order, padded_length
from reformax.ops.kernels.triton.top_k import HIDDEN, RowRule, top_k
from reformax.ops.numerics.best import taken
from reformax.ops.numerics.precision import IndexDtype, in_three


class CandidateInputs(NamedTuple):
    """The arrays that the kernel reads."""

    queries: tuple[Array, ...]  # [B, Q, J, D] each; their sum is the queries
    weights: Array  # [B, Q, J]
    keys: tuple[Array, ...]  # [B, S, 1, D] each; their sum is the keys
    candidates: Array  # [B, Q, M]


def _scores_kernel(x: CandidateInputs, out):
    """The scores of a query's candidates."""
    query, batch = pl.program_id(0), pl.program_id(1)
    n_heads, size = x.queries[0].shape[2:]
    n_candidates, width = x.candidates.shape[2], tile_side(size)
    head = jnp.arange(tile_side(n_heads), dtype=jnp.int32)
    number, exists = jnp.arange(width, dtype=jnp.int32)[None, :], head < n_heads
    mask = jnp.broadcast_to(exists[:, None] & (number < size), (head.size, width))
    q = tuple(load(y.at[batch, query, head[:, None], number], mask, 0.0) for y in x.queries)
    weights = load(x.weights.at[batch, query, head], exists, 0.0)[:, None]

    def score(i, _):
        slot = i * COLUMNS + jnp.arange(COLUMNS, dtype=jnp.int32)
        exists = slot < n_candidates
        key = load(x.candidates.at[batch, query, jnp.where(exists, slot, 0)], exists, -1)
        found, key = key >= 0, jnp.maximum(key, 0)
        keys = tuple(load(*view_rows(y, batch, key, 0, width, found), 0.0) for y in x.keys)
        products = jnp.maximum(matmul_in_parts(q, keys), 0.0)
        total = jnp.sum(weights * products, axis=0)
        bits = in_order(jnp.where(total == 0, 0.0, total))  # not -0, which sorts before 0
        pltriton.store(out.at[batch, query, slot], jnp.where(found, bits, jnp.int32(HIDDEN)))

    lax.fori_loop(jnp.int32(0), jnp.int32(-(-n_candidates // COLUMNS)), score, None)


def parts_of(x: Float[Array, "*d D"], dtype: IndexDtype) -> tuple[Float[Array, "*d D"], ...]:
    """Float32 vectors as sums of parts of bfloat16: tensor cores have no float32 products.

    Three parts hold any, and one what was rounded to bfloat16.
    """
    return (x.astype(jnp.bfloat16),) if dtype == "bfloat16" else in_three(x, jnp.bfloat16)


def choose(
    n_best: int,
    interpret: bool,
    queries: tuple[Array, ...],
    weights: Float[Array, "B Q J"],
    keys: tuple[Array, ...],
    candidates: Int[Array, "B Q M"],
) -> Int[Array, "B Q K"]:
    """The candidates with the highest weighted sums of ReLUs, in their order; -1 is none.

    Products are exact to float32. Of equal scores the first ones are chosen.

    Args:
      n_best: K.
      queries, keys: from `parts_of`; keys have one head.
      weights: the indexer's, float32.
      candidates: positions of keys; -1 is none.
    """
    n_batch, n_queries, n_candidates = candidates.shape
    shape = n_batch, n_queries, padded_length(n_candidates)
    scores = launch(
        _scores_kernel,
        (CandidateInputs(queries, weights, keys, candidates),),
        jax.ShapeDtypeStruct(shape, jnp.int32),
        grid=(n_queries, n_batch),
        num_warps=2,
        num_stages=2,
        interpret=interpret,
        name="dsa_candidates",
    )
    return taken(candidates, top_k(n_best, interpret, scores, RowRule(n_queries, n_candidates)))
