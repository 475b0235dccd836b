"""DeepSeek sparse attention as Pallas kernels for NVIDIA GPUs (Triton).

The attention is that of `kernels.block_sparse`, over all tiles, where a bit says whether a query
has chosen a key. To gather the chosen keys would read `2 K H` numbers for each query and head, and
reads nothing twice, for heads have keys of their own: at 65,536 tokens, 16 heads of 64 and 2,048
positions 550 GB, 115 ms of an H200's memory. All tiles are 8.8 TFLOP, 22 ms at 400 TFLOP/s. The
two meet where a query chooses one of 170 positions. The bits are T^2 / 8 bytes of a row, as much as
a plan of 2,048 positions at 65,536 tokens.

The indexer has a gradient of its own (eq. 4), which the output's has no part in:

    dI_ts = softmax_s(I_t) - mean_n P_nts

  * The sums of the softmax of the scores over the chosen positions.
  * This difference, whose numbers of some queries are in memory at a time. It takes the logits of
    all heads, and three kernels would each compute them.
  * The gradients of the indexer's queries and weights by a head and some queries, and those of its
    keys by some keys: no atomics, one order of sums.

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

from reformax.derivatives import CustomDerivatives
from reformax.ops.kernels.triton import block_sparse
from reformax.ops.kernels.triton.common import (
    LOG2_E,
    LOWEST,
    chosen_bits,
    hide,
    launch,
    load,
    power_of_two,
    product,
    view_rows,
)
from reformax.ops.kernels.triton.indexer import (
    COLUMNS,
    ROWS,
    IndexerInputs,
    IndexerProgram,
    Side,
    filled,
    stages,
    starts,
    within,
)
from reformax.ops.numerics.first_order import first_order
from reformax.ops.softmax.block_lists import Everything
from reformax.ops.softmax.online import nonzero


class IndexerArrays(NamedTuple):
    """What the indexer reads of each position, float32."""

    queries: Float[Array, "B T J D"]
    weights: Float[Array, "B T J"]
    keys: Float[Array, "B T D"]


class _Softmax(NamedTuple):
    """Of rows the largest logit, before it is scaled, and the sum of `exp(logit - largest)`."""

    row_max: Array
    row_sum: Array


class _Attention(NamedTuple):
    """What the difference reads of the attention."""

    q: Array  # [B, T, N, H]
    k: Array  # [B, T, N, H]
    sums: _Softmax  # [B, N, T]


def _scale(x: IndexerInputs) -> float:
    """Of scores, in the indexer's softmax."""
    return 1.0 / math.sqrt(x.queries[0].shape[2] * x.queries[0].shape[3])


def _chosen(program: IndexerProgram, bits, query: Side, key: Side) -> Array:
    positions = query.position[:, None], key.position[None, :]
    return chosen_bits(bits, program.batch, *positions, program.visible(query, key))


def _sums_kernel(x: IndexerInputs, bits, out: _Softmax, *, causal: bool):
    tile, batch = pl.program_id(0), pl.program_id(1)
    program = IndexerProgram(x, batch, causal)
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
    x: IndexerInputs, bits, sums: _Softmax, attention: _Attention, out, *, causal
):
    """A tile of the gradient of the scaled scores."""
    tile, of_keys, batch = (pl.program_id(i) for i in range(3))
    program = IndexerProgram(x, batch, causal)
    n_heads, size = attention.q.shape[2:]
    scale, width = LOG2_E / math.sqrt(size), power_of_two(size)

    def rows(ref, side: Side, head) -> Array:
        return load(*view_rows(ref, batch, side.position, head, width, side.exists), 0.0)

    @pl.when(of_keys < program.end(tile))
    def _():
        query, key = program.queries(tile), program.keys(of_keys)
        mask = _chosen(program, bits, query, key)

        def add(head, total):
            q, k = rows(attention.q, query, head), rows(attention.k, key, head)
            logits = product(q, k, transpose_b=True)
            at = batch, head, query.position
            row_max, total_of = (load(ref.at[at], query.exists, 0.0) for ref in attention.sums)
            weights = jnp.exp2((hide(logits, mask) - row_max[:, None]) * scale)
            return total + weights * (1.0 / nonzero(total_of))[:, None]

        weights = jnp.zeros((ROWS, COLUMNS), jnp.float32)
        weights = lax.fori_loop(jnp.int32(0), jnp.int32(n_heads), add, weights)
        row_max, row_sum = (load(ref.at[batch, query.position], query.exists, 0.0) for ref in sums)
        # A score may exceed the maximum by rounding alone, which of large ones is no small number.
        scores = jnp.minimum(program.scores(query, key) - row_max[:, None], 0.0) * _scale(x)
        index = jnp.exp(hide(scores, mask)) * (1.0 / nonzero(row_sum))[:, None]
        difference = index - weights * (1.0 / n_heads)
        # A row that sees what is no number has no gradient.
        difference = jnp.where(difference == difference, difference, 0.0)
        pltriton.store(out.at[batch, *within(tile, of_keys)], difference)


def _tile_of(difference, batch, tile, of_keys) -> Array:
    return load(difference.at[batch, *within(tile, of_keys)], None)


def _queries_kernel(x: IndexerInputs, difference, gradients, *, causal: bool):
    """The gradients of some queries of an index head, and of their weights."""
    tile, head, batch = (pl.program_id(i) for i in range(3))
    program = IndexerProgram(x, batch, causal)
    query = program.queries(tile)
    (q,), weight = program.of_queries(query, head), program.weights(query, head)

    def step(i, sums):
        dq, dw = sums
        (k,), slope = program.of_keys(program.keys(i)), _tile_of(difference, batch, tile, i)
        found = product(q, k, transpose_b=True)
        active = jnp.where(found > 0, slope, 0.0)
        dw = dw + jnp.sum(active * found, axis=1)
        return dq + product(active.astype(k.dtype), k), dw

    sums = jnp.zeros(q.shape, jnp.float32), jnp.zeros((ROWS,), jnp.float32)
    dq, dw = lax.fori_loop(jnp.int32(0), program.end(tile), step, sums)
    row, scale = tile * ROWS + jnp.arange(ROWS, dtype=jnp.int32), _scale(x)
    view, mask = view_rows(gradients[0], batch, row, head, dq.shape[1], None)
    pltriton.store(view, dq * (weight * scale)[:, None], mask=mask)
    pltriton.store(gradients[1].at[batch, row, head], dw * scale)


def _keys_kernel(x: IndexerInputs, difference, out, *, causal: bool):
    """The gradient of some keys, of a chunk's queries."""
    of_keys, batch = pl.program_id(0), pl.program_id(1)
    program = IndexerProgram(x, batch, causal)
    (k,) = program.of_keys(program.keys(of_keys))
    first = jnp.int32(0)
    if causal:
        first = lax.div(jnp.maximum(of_keys * COLUMNS - x.start[0], 0), jnp.int32(ROWS))

    def step(tile, total):
        query, slope = program.queries(tile), _tile_of(difference, batch, tile, of_keys)

        def add(head, total):
            (q,), weight = program.of_queries(query, head), program.weights(query, head)
            active = jnp.where(product(q, k, transpose_b=True) > 0, slope * weight[:, None], 0.0)
            return total + product(active.T.astype(q.dtype), q)

        return lax.fori_loop(jnp.int32(0), jnp.int32(x.queries[0].shape[2]), add, total)

    n_tiles = jnp.int32(difference.shape[1] // ROWS)
    total = lax.fori_loop(first, n_tiles, step, jnp.zeros(k.shape, jnp.float32))
    place = of_keys * COLUMNS + jnp.arange(COLUMNS, dtype=jnp.int32)
    view, mask = view_rows(out, batch, place, 0, total.shape[1], None)
    pltriton.store(view, total * _scale(x), mask=mask)


def _bits(chosen: Int[Array, "B T K"]) -> Int[Array, "B T words"]:
    """The keys that each query has chosen, a bit each."""
    n_batch, length, _ = chosen.shape
    n_words = -(-length // 32)
    row, query, _ = jnp.ogrid[:n_batch, :length, :1]
    word = jnp.where(chosen < 0, n_words, chosen >> 5)
    bit = jnp.left_shift(jnp.int32(1), chosen & 31)
    # A position is chosen once, so that the sum of its bits has them all.
    return (
        jnp.zeros((n_batch, length, n_words), jnp.int32).at[row, query, word].add(bit, mode="drop")
    )


@functools.partial(CustomDerivatives, n_static=2)
def attend(
    layout: Everything,
    interpret: bool,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T N H"],
    v: Float[Array, "B T N V"],
    index: IndexerArrays,
    factor: Float[Array, ""],
    chosen: Int[Array, "B T K"],
    ids: Int[Array, "B T"] | None,
    rng: Array | None,
) -> Float[Array, "B T N V"]:
    """The attention of a plan by these kernels, with its gradient and the indexer's own.

    As by `numerics.auxiliary_loss.with_loss`, the indexer's is that of a loss beside the output's,
    and nothing shows its value.

    Args:
      layout: of all tiles.
      interpret: whether to run the kernels anywhere, slowly.
      q, k, v: queries, keys, values, zeros at padding.
      index: what the indexer reads.
      factor: of the sum of eq. 4 over queries.
      chosen: the plan.
      ids: the segments; None is one.
      rng: the source of dropout; None if there is none.
    """
    return _attend_forward(layout, interpret, q, k, v, index, factor, chosen, ids, rng)[0]


def _segments(ids, chosen) -> tuple:
    return ids, ids, None, None, _bits(chosen)


def _attend_forward(layout, interpret, q, k, v, index, factor, chosen, ids, rng):
    q, k, v, index = first_order((q, k, v, index))
    args = q, k, v, _segments(ids, chosen), rng
    results = block_sparse.forward(layout, *args, interpret=interpret)
    return results[0], ((q, k, v, index, factor, chosen, ids, rng), results)


def _attend_backward(layout, interpret, residuals, d_out):
    (q, k, v, index, factor, chosen, ids, rng), results = residuals
    results, d_out = first_order((results, d_out))
    segment_ids = _segments(ids, chosen)
    args = q, k, v, segment_ids, rng, *results, d_out
    gradients = block_sparse.backward(layout, *args, interpret=interpret)
    attention = _Attention(q, k, _Softmax(*results[1:]))
    of_index = _gradient(layout.causal, interpret, index, attention, segment_ids[-1], ids)
    of_index = jax.tree.map(lambda x: x * factor, of_index)
    return *gradients, of_index, None, None, None, None


attend.define(_attend_forward, _attend_backward)


def _gradient(
    causal, interpret, index: IndexerArrays, attention: _Attention, bits, ids
) -> IndexerArrays:
    """The gradient of the sum of eq. 4 over queries."""
    n_batch, length, n_index, size = index.queries.shape
    # Numbers of float16 may not hold the indexer's.
    narrow = jnp.float32 if attention.q.dtype == jnp.float32 else jnp.bfloat16
    queries, keys = index.queries.astype(narrow), index.keys[:, :, None].astype(narrow)
    firsts, n_tiles = starts(n_batch, length)
    n_rows, n_of_keys = n_tiles * ROWS, filled(length) // COLUMNS
    n_stages = min(stages(queries), stages(attention.q))
    run = functools.partial(_launch, interpret, causal, n_stages)

    def numbers(*shape):
        return jax.ShapeDtypeStruct((n_batch, *shape), jnp.float32)

    x = IndexerInputs((queries,), index.weights, (keys,), ids, jnp.zeros(1, jnp.int32))
    shape = _Softmax(numbers(length), numbers(length))
    (sums,) = run(_sums_kernel, (x, bits), (shape,), (-(-length // ROWS), n_batch))

    def some(d_keys, start):
        program = x._replace(start=start)
        inputs = program, bits, sums, attention
        grid = n_tiles, n_of_keys, n_batch
        difference = run(_difference_kernel, inputs, numbers(n_rows, filled(length)), grid)
        shapes = numbers(n_rows, n_index, size), numbers(n_rows, n_index)
        grid = n_tiles, n_index, n_batch
        (of_queries,) = run(_queries_kernel, (program, difference), (shapes,), grid)
        shape = numbers(filled(length), 1, size)
        of_keys = run(_keys_kernel, (program, difference), shape, (n_of_keys, n_batch))
        return d_keys + of_keys[:, :length, 0], of_queries

    d_keys, of_queries = lax.scan(some, jnp.zeros_like(index.keys), firsts)
    d_queries, d_weights = (
        jnp.moveaxis(d, 0, 1).reshape(n_batch, -1, *d.shape[3:])[:, :length] for d in of_queries
    )
    return IndexerArrays(d_queries, d_weights, d_keys)


def _launch(interpret, causal, n_stages, kernel, inputs, shapes, grid):
    return launch(
        functools.partial(kernel, causal=causal),
        inputs,
        shapes,
        grid=grid,
        num_warps=4,
        num_stages=n_stages,
        interpret=interpret,
        name=f"dsa{kernel.__name__.removesuffix('_kernel')}",
    )
