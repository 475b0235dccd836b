"""The gradient of the indexer's loss as Pallas kernels for NVIDIA GPUs (Triton).

It comes from the loss (DeepSeek-V3.2-Exp, eq. 4) alone, and not from the attention's output:

    dI_ts = softmax_s(I_t) - mean_n P_nts

Where lists are short, a program has one query and reads the keys of its list
(`indexer_gradient_lists`). It writes this difference into a row of zeros. A program with all keys
reads each once for many queries, so lists do not pay where they are long, or where many key heads
each have few query heads. Then

  * one kernel computes the sums of the softmax of the scores over the chosen positions;
  * one writes the difference, a tile at a time;
  * one computes the gradients of the indexer's queries and weights, for a head and a tile of
    queries.

In both cases the last kernel computes the gradient of the indexer's keys from the difference, for a
tile of keys: no atomics, one order of sums. It visits all pairs. Where lists have few of the keys,
a query's program writes instead what it adds to the gradients of its keys, which `kernels.listed`
sums as those of the attention: no array has a number for each pair. All this is for a chunk of
queries at a time.

Letters as in `kernels.indexer`; K positions of a list, N query heads of G key heads.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from reformax.ops.kernels.triton import listed
from reformax.ops.kernels.triton.common import (
    LOG2_E,
    LOWEST,
    bits_of,
    column,
    hide,
    launch,
    line,
    load,
    matmul,
    name_of,
    recompute_weights,
    tile_bits,
    tile_side,
    view_rows,
)
from reformax.ops.kernels.triton.indexer import (
    COLUMNS,
    ROWS,
    SCORE_COLUMNS,
    IndexerInputs,
    IndexerProgram,
    chunk_starts,
    n_stages_for,
    padded_length,
    tile_index,
)
from reformax.ops.kernels.triton.indexer_gradient_lists import (
    AttentionInputs,
    GradientOutputs,
    KeyRule,
    ListInputs,
    lists_kernel,
)
from reformax.ops.masking.visibility import Side
from reformax.ops.numerics.query_chunks import join_chunks
from reformax.ops.softmax.online import nonzero

# Lists are read where they cost less than tiles. A listed key of a key head costs about as much as
# this many pairs of a tile with one head; those of an indexer cost as much as 8 heads.
LISTED_COST, INDEXER_HEADS = 128, 8
# The keys to a listed one from which on contributions of lists take less than a visit of all pairs:
# 128 bytes written and read and an entry of a sort, at about 0.12 ns, against 3 ps.
SUMMED_COST = 64
# The widest heads of tiles of more keys, which read queries less often.
NARROW = 128
# Pipeline stages of programs of lists: reads of a list, then those of its keys, then products.
LIST_STAGES = 3


class IndexerArrays(NamedTuple):
    """The indexer's queries, weights and keys, float32."""

    queries: Float[Array, "B T J D"]
    weights: Float[Array, "B T J"]
    keys: Float[Array, "B S D"]


class _SoftmaxSums(NamedTuple):
    """For each row the largest unscaled score, and the sum of the softmax.

    Scores are as large as 1e27, whose maximum keeps its weight of 1 because nothing rounds it.
    """

    row_max: Array
    row_sum: Array


def _chosen(program: IndexerProgram, bits, query: Side, key_tile: Any, key: Side) -> Array:
    """Which visible keys of a tile each query chose."""
    sides, n_keys = (column(query), line(key)), program.columns
    chosen = tile_bits(bits, program.batch, *sides, key_tile * n_keys, n_keys)
    return chosen & program.visible(query, key)


def _sums_kernel(x: IndexerInputs, bits, out: _SoftmaxSums, *, rule: KeyRule):
    tile, batch = pl.program_id(0), pl.program_id(1)
    program = rule.program(x, batch)
    query, scale = program.queries(tile), x.softmax_scale

    def step(i, state):
        row_max, row_sum = state
        key = program.keys(i)
        scores = hide(program.scores(query, key), _chosen(program, bits, query, i, key))
        new = jnp.maximum(row_max, jnp.max(scores, axis=1))
        weights = jnp.exp((scores - new[:, None]) * scale)
        return new, row_sum * jnp.exp((row_max - new) * scale) + jnp.sum(weights, axis=1)

    state = jnp.full((ROWS,), LOWEST, jnp.float32), jnp.zeros((ROWS,), jnp.float32)
    state = lax.fori_loop(jnp.int32(0), program.end(tile), step, state)
    position = jnp.where(query.exists, query.position, out.row_max.shape[1])
    for ref, value in zip(out, state, strict=True):
        pltriton.store(ref.at[batch, position], value, mask=query.exists)


def _difference_kernel(
    x: IndexerInputs,
    bits,
    sums: _SoftmaxSums,
    attention: AttentionInputs,
    out,
    *,
    rule: KeyRule,
    columns: int,
):
    """A tile of the gradient of the scaled scores."""
    tile, key_tile, batch = (pl.program_id(i) for i in range(3))
    program = rule.program(x, batch, columns)
    n_heads, size = attention.q.shape[2:]
    width, group = tile_side(size), n_heads // attention.k.shape[2]

    def rows(ref, side: Side, head) -> Array:
        return load(*view_rows(ref, batch, side.position, head, width, side.exists), 0.0)

    @pl.when(key_tile < program.end(tile))
    def _():
        query, key = program.queries(tile), program.keys(key_tile)
        mask = _chosen(program, bits, query, key_tile, key)

        def add(head, total):
            of_keys = head if group == 1 else lax.div(head, jnp.int32(group))
            q, k = rows(attention.q, query, head), rows(attention.k, key, of_keys)
            logits = rule.logits.capped(matmul(q, k, transpose_b=True), math.sqrt(size))
            index = batch, head, query.position
            row_max, head_sum = (load(ref.at[index], query.exists, 0.0) for ref in attention[2:4])
            weights = recompute_weights(hide(logits, mask), (row_max * LOG2_E)[:, None], None, size)
            return total + weights * (1.0 / nonzero(head_sum))[:, None]

        weights = jnp.zeros((ROWS, columns), jnp.float32)
        weights = lax.fori_loop(jnp.int32(0), jnp.int32(n_heads), add, weights)
        row_max, row_sum = (load(ref.at[batch, query.position], query.exists, 0.0) for ref in sums)
        # A score may exceed the maximum by rounding, which for large scores is not small.
        scores = jnp.minimum(program.scores(query, key) - row_max[:, None], 0.0) * x.softmax_scale
        index_weights = jnp.exp(hide(scores, mask)) * (1.0 / nonzero(row_sum))[:, None]
        if attention.total is None:
            difference = index_weights - weights * (1.0 / n_heads)
        else:  # a query that gives these keys no weight has nothing to learn
            total = load(attention.total.at[batch, query.position], query.exists, 0.0)[:, None]
            difference = jnp.where(total > 0, index_weights - weights / nonzero(total), 0.0)
        # A row that sees NaN has no gradient.
        difference = jnp.where(difference == difference, difference, 0.0)
        view = out.at[batch, *tile_index(tile, key_tile, columns)]
        pltriton.store(view, difference.astype(out.dtype))


def _tile_of(difference, batch, tile, key_tile) -> Float[Array, "I C"]:
    return load(difference.at[batch, *tile_index(tile, key_tile)], None).astype(jnp.float32)


def _queries_kernel(x: IndexerInputs, difference, gradients, *, rule: KeyRule):
    """The gradients of a tile of queries of an index head, and of their weights."""
    tile, head, batch = (pl.program_id(i) for i in range(3))
    program = rule.program(x, batch)
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
    row, scale = tile * ROWS + jnp.arange(ROWS, dtype=jnp.int32), x.softmax_scale
    view, mask = view_rows(gradients[0], batch, row, head, dq.shape[1], None)
    pltriton.store(view, dq * (weight * scale)[:, None], mask=mask)
    pltriton.store(gradients[1].at[batch, row, head], dw * scale)


def _keys_kernel(x: IndexerInputs, difference, out, *, rule: KeyRule):
    """The gradient of a tile of keys, summed over a chunk's queries."""
    key_tile, batch = pl.program_id(0), pl.program_id(1)
    program = rule.program(x, batch)
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
    pltriton.store(view, total * x.softmax_scale, mask=mask)


def reads_lists(n_chosen: int, n_keys: int, n_heads: int, n_kv: int) -> bool:
    """Whether the programs read lists."""
    return LISTED_COST * n_chosen * n_kv <= n_keys * (n_heads + INDEXER_HEADS)


def indexer_gradient(
    rule: KeyRule,
    interpret: bool,
    index: IndexerArrays,
    attention: AttentionInputs,
    chosen: Int[Array, "B T K"],
    ids: Int[Array, "B T"] | None,
    key_ids: Int[Array, "B S"] | None,
) -> IndexerArrays:
    """The gradient of the sum of eq. 4 over queries.

    Args:
      attention: queries and keys of the attention, and its softmax.
      chosen: the keys of each query, each once; -1 is none.
    """
    n_batch, length, n_index, size = index.queries.shape
    n_keys = index.keys.shape[1]
    # Float16 may not hold the indexer's values.
    dtype = jnp.float32 if attention.q.dtype == jnp.float32 else jnp.bfloat16
    queries, keys = index.queries.astype(dtype), index.keys[:, :, None].astype(dtype)
    n_stages = min(n_stages_for(queries), n_stages_for(attention.q))
    run = functools.partial(_launch, interpret, rule, n_stages)
    x = IndexerInputs((queries,), index.weights, (keys,), ids, key_ids, jnp.zeros(1, jnp.int32))
    sizes = chosen.shape[2], n_keys, attention.q.shape[2], attention.k.shape[2]
    sums_lists = reads_lists(*sizes) and SUMMED_COST * chosen.shape[2] <= n_keys
    starts, n_tiles = chunk_starts(n_batch, length, n_keys, chosen.shape[2])
    if sums_lists:
        n_bytes = size * jnp.dtype(dtype).itemsize
        n_tiles = listed.n_in_chunk(n_batch, chosen.shape[2], n_keys, n_bytes) // ROWS
        n_tiles = min(max(1, n_tiles), -(-length // ROWS))
        starts = jnp.arange(0, length, n_tiles * ROWS, dtype=jnp.int32)[:, None]

    def shape(*of: int, of_dtype=jnp.float32):
        return jax.ShapeDtypeStruct((n_batch, *of), of_dtype)

    n_rows = n_tiles * ROWS
    shapes = GradientOutputs(shape(n_rows, n_index, size), shape(n_rows, n_index), None, None)
    if sums_lists:  # in the dtype of their products, as is the difference, which is multiplied
        last = shape(1, n_rows, chosen.shape[2], size, of_dtype=dtype)
        shapes = shapes._replace(contributions=last)
    else:
        last = shape(n_rows, padded_length(n_keys), of_dtype=dtype)
        shapes = shapes._replace(difference=last)
    if reads_lists(*sizes):
        gradients_of = _by_lists(interpret, rule, n_stages, attention, chosen, shapes)
    else:
        gradients_of = _by_tiles(run, attention, chosen, x, shapes)
    behind = (0, 0), (0, -length % n_rows), (0, 0)
    padded = jnp.pad(chosen, behind, constant_values=-1) if sums_lists else None

    def of_chunk(d_keys, start):
        chunk = x._replace(start=start)
        found = gradients_of(chunk)
        if sums_lists:
            some = lax.dynamic_slice_in_dim(padded, start[0], n_rows, axis=1)
            (d_keys,) = listed.added((d_keys,), (found.contributions,), some, 1, interpret)
            return d_keys, found[:2]
        of_keys = shape(padded_length(n_keys), 1, size)
        grid = of_keys.shape[1] // COLUMNS, n_batch
        n_warps = 4 if dtype == jnp.float32 else 8
        of_keys = run(_keys_kernel, (chunk, found.difference), of_keys, grid, n_warps)
        return d_keys + of_keys[:, :n_keys], found[:2]

    d_keys = jnp.zeros((n_batch, n_keys, 1, size), jnp.float32)
    d_keys, of_queries = lax.scan(of_chunk, d_keys, starts)
    d_queries, d_weights = (join_chunks(d, length) for d in of_queries)
    return IndexerArrays(d_queries, d_weights, d_keys[:, :, 0])


def _by_lists(interpret, rule, n_stages, attention, chosen, shapes: GradientOutputs) -> Callable:
    """The outputs of a chunk, of programs that read lists."""
    barrier = (lambda: None) if interpret else pltriton.debug_barrier
    kernel = functools.partial(lists_kernel, barrier=barrier)
    grid = shapes.queries.shape[1], len(chosen)
    stages = LIST_STAGES if n_stages > 1 else 1

    def gradients_of(chunk: IndexerInputs) -> GradientOutputs:
        inputs = (ListInputs(chunk, attention, chosen),)
        return _launch(interpret, rule, stages, kernel, inputs, (shapes,), grid)[0]

    return gradients_of


def _by_tiles(run, attention, chosen, x: IndexerInputs, shapes: GradientOutputs) -> Callable:
    """The outputs of a chunk, of programs with tiles of all keys."""
    (n_batch, length, _), (keys,) = chosen.shape, x.keys
    bits = bits_of(chosen, keys.shape[1])
    row = jax.ShapeDtypeStruct((n_batch, length), jnp.float32)
    sums = _SoftmaxSums(row, row)
    (sums,) = run(_sums_kernel, (x, bits), (sums,), (-(-length // ROWS), n_batch))
    is_narrow = keys.dtype == jnp.bfloat16 and attention.q.shape[3] <= NARROW
    columns = SCORE_COLUMNS if is_narrow else COLUMNS
    n_tiles, n_columns = shapes.difference.shape[1] // ROWS, shapes.difference.shape[2]

    def gradients_of(chunk: IndexerInputs) -> GradientOutputs:
        kernel = functools.partial(_difference_kernel, columns=columns)
        grid = n_tiles, n_columns // columns, n_batch
        inputs = chunk, bits, sums, attention
        difference = run(kernel, inputs, shapes.difference, grid, columns // 16)
        grid = n_tiles, shapes.queries.shape[2], n_batch
        (found,) = run(_queries_kernel, (chunk, difference), (tuple(shapes[:2]),), grid)
        return GradientOutputs(*found, difference, None)

    return gradients_of


def _launch(interpret, rule, n_stages, kernel, inputs, shapes, grid, n_warps=4):
    return launch(
        functools.partial(kernel, rule=rule),
        inputs,
        shapes,
        grid=grid,
        num_warps=n_warps,
        num_stages=n_stages,
        interpret=interpret,
        name=f"dsa_{name_of(kernel)}",
    )
