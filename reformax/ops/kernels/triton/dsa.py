"""The gradient of DeepSeek sparse attention's indexer: Pallas kernels for NVIDIA GPUs (Triton).

It comes from the indexer's loss (eq. 4) alone, and not from the output of `kernels.chosen`:

    dI_ts = softmax_s(I_t) - mean_n P_nts

  * The first kernel computes the sums of the softmax of the scores over the chosen positions.
  * The second writes this difference, for a chunk of queries at a time. It needs the logits of all
    heads, which the next two kernels would otherwise each recompute.
  * The third computes the gradients of the indexer's queries and weights, for a head and a tile of
    queries. The fourth computes those of its keys, for a tile of keys: no atomics, one order of
    sums.

Letters as in `kernels.indexer`.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from reformax.ops.kernels.triton.common import (
    LOG2_E,
    LOWEST,
    chosen_bits,
    hide,
    launch,
    load,
    matmul,
    power_of_two,
    recompute_weights,
    view_rows,
)
from reformax.ops.kernels.triton.indexer import (
    COLUMNS,
    ROWS,
    IndexerInputs,
    IndexerProgram,
    chunk_starts,
    n_stages_for,
    padded_length,
    tile_index,
)
from reformax.ops.masking.visibility import Side
from reformax.ops.numerics.logits import Logits
from reformax.ops.softmax.online import nonzero


class IndexerArrays(NamedTuple):
    """The indexer's queries, weights and keys, float32."""

    queries: Float[Array, "B T J D"]
    weights: Float[Array, "B T J"]
    keys: Float[Array, "B S D"]


class KeyRule(NamedTuple):
    """The static settings of the indexer's gradient.

    Attributes:
      causal: whether later keys are hidden.
      logits: how the attention's products become logits.
      span: positions of a key, which is seen from the last one on.
    """

    causal: bool
    logits: Logits
    span: int = 1


class _SoftmaxSums(NamedTuple):
    """For each row the largest unscaled score, and the sum of the softmax.

    Scores are as large as 1e27, whose maximum keeps its weight of 1 because nothing rounds it.
    """

    row_max: Array
    row_sum: Array


class AttentionInputs(NamedTuple):
    """The arrays of the attention that the difference reads."""

    q: Array  # [B, T, N, H]
    k: Array  # [B, S, G, H]
    row_max: Array  # [B, N, T], of `Softmax`
    row_sum: Array
    # [B, T]: the sum of all heads' weights of these keys; None: N, as there are no others
    total: Array | None = None


def _scale(x: IndexerInputs) -> float:
    """The scale of scores in the indexer's softmax."""
    return 1.0 / math.sqrt(x.queries[0].shape[2] * x.queries[0].shape[3])


def _chosen(program: IndexerProgram, bits, query: Side, key: Side) -> Array:
    positions = query.position[:, None], key.position[None, :]
    return chosen_bits(bits, program.batch, *positions, program.visible(query, key))


def _sums_kernel(x: IndexerInputs, bits, out: _SoftmaxSums, *, rule: KeyRule):
    tile, batch = pl.program_id(0), pl.program_id(1)
    program = IndexerProgram(x, batch, rule.causal, rule.span)
    query, scale = program.queries(tile), _scale(x)

    def step(i, state):
        row_max, row_sum = state
        key = program.keys(i)
        scores = hide(program.scores(query, key), _chosen(program, bits, query, key))
        new = jnp.maximum(row_max, jnp.max(scores, axis=1))
        weights = jnp.exp((scores - new[:, None]) * scale)
        return new, row_sum * jnp.exp((row_max - new) * scale) + jnp.sum(weights, axis=1)

    state = jnp.full((ROWS,), LOWEST, jnp.float32), jnp.zeros((ROWS,), jnp.float32)
    state = lax.fori_loop(jnp.int32(0), program.end(tile), step, state)
    position = jnp.where(query.exists, query.position, out.row_max.shape[1])
    for ref, value in zip(out, state, strict=True):
        pltriton.store(ref.at[batch, position], value, mask=query.exists)


def _difference_kernel(
    x: IndexerInputs, bits, sums: _SoftmaxSums, attention: AttentionInputs, out, *, rule: KeyRule
):
    """A tile of the gradient of the scaled scores."""
    tile, key_tile, batch = (pl.program_id(i) for i in range(3))
    program = IndexerProgram(x, batch, rule.causal, rule.span)
    n_heads, size = attention.q.shape[2:]
    width, group = power_of_two(size), n_heads // attention.k.shape[2]

    def rows(ref, side: Side, head) -> Array:
        return load(*view_rows(ref, batch, side.position, head, width, side.exists), 0.0)

    @pl.when(key_tile < program.end(tile))
    def _():
        query, key = program.queries(tile), program.keys(key_tile)
        mask = _chosen(program, bits, query, key)

        def add(head, total):
            of_keys = head if group == 1 else lax.div(head, jnp.int32(group))
            q, k = rows(attention.q, query, head), rows(attention.k, key, of_keys)
            logits = rule.logits.capped(matmul(q, k, transpose_b=True), math.sqrt(size))
            index = batch, head, query.position
            row_max, head_sum = (load(ref.at[index], query.exists, 0.0) for ref in attention[2:4])
            weights = recompute_weights(hide(logits, mask), (row_max * LOG2_E)[:, None], None, size)
            return total + weights * (1.0 / nonzero(head_sum))[:, None]

        weights = jnp.zeros((ROWS, COLUMNS), jnp.float32)
        weights = lax.fori_loop(jnp.int32(0), jnp.int32(n_heads), add, weights)
        row_max, row_sum = (load(ref.at[batch, query.position], query.exists, 0.0) for ref in sums)
        # A score may exceed the maximum by rounding, which for large scores is not small.
        scores = jnp.minimum(program.scores(query, key) - row_max[:, None], 0.0) * _scale(x)
        index_weights = jnp.exp(hide(scores, mask)) * (1.0 / nonzero(row_sum))[:, None]
        if attention.total is None:
            difference = index_weights - weights * (1.0 / n_heads)
        else:  # a query that gives these keys no weight has nothing to learn
            total = load(attention.total.at[batch, query.position], query.exists, 0.0)[:, None]
            difference = jnp.where(total > 0, index_weights - weights / nonzero(total), 0.0)
        # A row that sees NaN has no gradient.
        difference = jnp.where(difference == difference, difference, 0.0)
        pltriton.store(out.at[batch, *tile_index(tile, key_tile)], difference)


def _tile_of(difference, batch, tile, key_tile) -> Array:
    return load(difference.at[batch, *tile_index(tile, key_tile)], None)


def _queries_kernel(x: IndexerInputs, difference, gradients, *, rule: KeyRule):
    """The gradients of a tile of queries of an index head, and of their weights."""
    tile, head, batch = (pl.program_id(i) for i in range(3))
    program = IndexerProgram(x, batch, rule.causal, rule.span)
    query = program.queries(tile)
    (q,), weight = program.of_queries(query, head), program.weights(query, head)

    def step(i, sums):
        dq, dw = sums
        (k,), slope = program.of_keys(program.keys(i)), _tile_of(difference, batch, tile, i)
        products = matmul(q, k, transpose_b=True)
        active = jnp.where(products > 0, slope, 0.0)
        dw = dw + jnp.sum(active * products, axis=1)
        return dq + matmul(active.astype(k.dtype), k), dw

    sums = jnp.zeros(q.shape, jnp.float32), jnp.zeros((ROWS,), jnp.float32)
    dq, dw = lax.fori_loop(jnp.int32(0), program.end(tile), step, sums)
    row, scale = tile * ROWS + jnp.arange(ROWS, dtype=jnp.int32), _scale(x)
    view, mask = view_rows(gradients[0], batch, row, head, dq.shape[1], None)
    pltriton.store(view, dq * (weight * scale)[:, None], mask=mask)
    pltriton.store(gradients[1].at[batch, row, head], dw * scale)


def _keys_kernel(x: IndexerInputs, difference, out, *, rule: KeyRule):
    """The gradient of a tile of keys, summed over a chunk's queries."""
    key_tile, batch = pl.program_id(0), pl.program_id(1)
    program = IndexerProgram(x, batch, rule.causal, rule.span)
    (k,) = program.of_keys(program.keys(key_tile))
    first = program.first_query_tile(key_tile)

    def step(tile, total):
        query, slope = program.queries(tile), _tile_of(difference, batch, tile, key_tile)

        def add(head, total):
            (q,), weight = program.of_queries(query, head), program.weights(query, head)
            active = jnp.where(matmul(q, k, transpose_b=True) > 0, slope * weight[:, None], 0.0)
            return total + matmul(active.T.astype(q.dtype), q)

        return lax.fori_loop(jnp.int32(0), jnp.int32(x.queries[0].shape[2]), add, total)

    n_tiles = jnp.int32(difference.shape[1] // ROWS)
    total = lax.fori_loop(first, n_tiles, step, jnp.zeros(k.shape, jnp.float32))
    position = key_tile * COLUMNS + jnp.arange(COLUMNS, dtype=jnp.int32)
    view, mask = view_rows(out, batch, position, 0, total.shape[1], None)
    pltriton.store(view, total * _scale(x), mask=mask)


def bits_of(chosen: Int[Array, "B T K"], n_keys: int) -> Int[Array, "B T words"]:
    """Words with a bit for each key, set where the query chose it."""
    n_batch, length, _ = chosen.shape
    n_words = -(-n_keys // 32)
    row, query, _ = jnp.ogrid[:n_batch, :length, :1]
    word = jnp.where(chosen < 0, n_words, chosen >> 5)
    bit = jnp.left_shift(jnp.int32(1), chosen & 31)
    # Each position is chosen at most once, so the sum of the bits is their union.
    return (
        jnp.zeros((n_batch, length, n_words), jnp.int32).at[row, query, word].add(bit, mode="drop")
    )


def indexer_gradient(
    rule: KeyRule,
    interpret: bool,
    index: IndexerArrays,
    attention: AttentionInputs,
    bits: Int[Array, "B T words"],
    ids: Int[Array, "B T"] | None,
    key_ids: Int[Array, "B S"] | None,
) -> IndexerArrays:
    """The gradient of the sum of eq. 4 over queries."""
    n_batch, length, n_index, size = index.queries.shape
    n_columns = padded_length(index.keys.shape[1])
    # Float16 may not hold the indexer's values.
    dtype = jnp.float32 if attention.q.dtype == jnp.float32 else jnp.bfloat16
    queries, keys = index.queries.astype(dtype), index.keys[:, :, None].astype(dtype)
    starts, n_tiles = chunk_starts(n_batch, length, index.keys.shape[1])
    n_rows, n_key_tiles = n_tiles * ROWS, n_columns // COLUMNS
    n_stages = min(n_stages_for(queries), n_stages_for(attention.q))
    run = functools.partial(_launch, interpret, rule, n_stages)

    def float32_shape(*shape):
        return jax.ShapeDtypeStruct((n_batch, *shape), jnp.float32)

    x = IndexerInputs((queries,), index.weights, (keys,), ids, key_ids, jnp.zeros(1, jnp.int32))
    shape = _SoftmaxSums(float32_shape(length), float32_shape(length))
    (sums,) = run(_sums_kernel, (x, bits), (shape,), (-(-length // ROWS), n_batch))

    def of_chunk(d_keys, start):
        chunk = x._replace(start=start)
        inputs = chunk, bits, sums, attention
        grid = n_tiles, n_key_tiles, n_batch
        difference = run(_difference_kernel, inputs, float32_shape(n_rows, n_columns), grid)
        shapes = float32_shape(n_rows, n_index, size), float32_shape(n_rows, n_index)
        grid = n_tiles, n_index, n_batch
        (of_queries,) = run(_queries_kernel, (chunk, difference), (shapes,), grid)
        shape = float32_shape(n_columns, 1, size)
        of_keys = run(_keys_kernel, (chunk, difference), shape, (n_key_tiles, n_batch))
        return d_keys + of_keys[:, : d_keys.shape[1], 0], of_queries

    d_keys, of_queries = lax.scan(of_chunk, jnp.zeros_like(index.keys), starts)
    d_queries, d_weights = (
        jnp.moveaxis(d, 0, 1).reshape(n_batch, -1, *d.shape[3:])[:, :length] for d in of_queries
    )
    return IndexerArrays(d_queries, d_weights, d_keys)


def _launch(interpret, rule, n_stages, kernel, inputs, shapes, grid):
    return launch(
        functools.partial(kernel, rule=rule),
        inputs,
        shapes,
        grid=grid,
        num_warps=4,
        num_stages=n_stages,
        interpret=interpret,
        name=f"dsa{kernel.__name__.removesuffix('_kernel')}",
    )
