"""Attention within neighbouring chunks, as Pallas kernels for NVIDIA GPUs (Triton).

They compute the function of `reformax.ops.softmax.chunked`, one kernel for each hashing round and
pass:

  * Kernels read rows of q, k and v, and write results, at the positions that the order names. There
    is no sorted copy of them.
  * The rounds run one after the other and share one softmax: a round reads the accumulator, the
    maximum and the sum that the rounds before it left at a position, and goes on from there. A
    round reads and writes each position once, so sums have one order and need no atomics.
  * The backward pass computes logits again from the maximum and the sum (Dao et al. 2022, algorithm
    4). A program takes a block of places first as keys and then as queries, so that it, too,
    writes each row once. Keys may stand there in an order of their own.

These kernels wait for instructions more than for memory. Row statistics (segments, chunks, maxima)
are therefore put in order beforehand, and a block reads them side by side.

Letters as in `reformax.ops.base`; Tp is T padded to whole chunks, W the packs of `PackedChunks`.
A program is in `kernels.chunk_programs`, which has places, positions and who sees whom.
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
from jaxtyping import Array, Float, Int

from reformax.ops.kernels.triton.chunk_programs import Inputs, Program, Tiles
from reformax.ops.kernels.triton.common import (
    LOG2_E,
    LOWEST,
    QueryRows,
    column,
    empty_softmax,
    hide,
    launch,
    line,
    product,
    query_rows,
    recompute_weights,
    softmax_step,
)
from reformax.ops.kernels.triton.packed_chunks import PackedChunks
from reformax.ops.masking.masks import SegmentIds, segment_pair
from reformax.ops.numerics.first_order import first_order
from reformax.ops.numerics.normalization import length_normalize
from reformax.ops.softmax.dropout import seed_words
from reformax.ops.softmax.online import Softmax, nonzero


class _Gradients(NamedTuple):
    """The gradients of the inputs."""

    q: Array  # [B, T, N, H]; where keys are shared, theirs included
    k: Array | None  # [B, T, N, H]
    v: Array  # [B, T, N, V]


def _forward_kernel(x: Inputs, before: Softmax | None, after: Softmax, *, program: Program):
    here = program.here()
    own = here.block(x, here.start, here.tiles.own)
    queries = column(own)
    # The longest wait comes first.
    if before is None:
        state = empty_softmax(here.tiles.own, x.v.shape[3])
    else:
        acc, row_max = here.rows(before.acc, own), here.statistics(before.row_max, own, LOWEST)
        state = Softmax(acc, row_max, here.statistics(before.row_sum, own, 0.0))
    q = here.rows(x.q, own)

    def attend(block, state):
        keys = line(block)
        k, v = here.rows(x.k, block), here.tokens(x.v, block)
        logits = hide(product(q, k, transpose_b=True), here.visible(queries, keys))
        return softmax_step(state, logits, v, x.q.shape[3], here.dropped(x, queries, keys))

    acc, row_max, row_sum = here.over(x.at_keys(), here.keys(), attend, state, of_keys=True)
    if here.is_last:
        acc = acc * (1.0 / nonzero(row_sum))[:, None]
        if here.chunks.sees_itself:
            lone = here.lone_weight(x, own, row_sum)
            acc = acc + lone[:, None] * here.rows(x.v, own, lone > 0.0).astype(jnp.float32)
    here.put_rows(after.acc, own, acc)
    here.put_statistics(after.row_max, own, row_max)
    here.put_statistics(after.row_sum, own, row_sum)


def _backward_kernel(
    x: Inputs, row: QueryRows, before: _Gradients | None, after: _Gradients, *, program: Program
):
    here = program.here()
    queries_own = here.block(x, here.start, here.tiles.own)
    own = queries_own
    if x.key_order is not None:
        own = here.block(x.at_keys(), here.start, here.tiles.own, of_keys=True)
    size = x.q.shape[3]
    scale = 1.0 / math.sqrt(size)

    def queries(block):
        exists = block.position < here.chunks.length
        row_max = here.load_places(row.row_max, block.place, exists, 0.0) * (scale * LOG2_E)
        inverse_sum = here.load_places(row.inverse_sum, block.place, exists, 0.0)
        dot = here.load_places(row.dot, block.place, exists, 0.0)
        return here.rows(row.d_out, block), dot, row_max, inverse_sum

    k, v = here.rows(x.k, own), here.tokens(x.v, own)

    def as_keys(block, sums):
        dk, dv = sums
        q = here.tokens(x.q, block)
        d_out, dot, row_max, inverse_sum = queries(block)
        query, key = line(block), column(own)
        logits = hide(product(k, q, transpose_b=True), here.visible(query, key))
        p = recompute_weights(logits, row_max[None, :], line(inverse_sum), size)
        dropped = here.dropped(x, query, key)
        dv = dv + product((p * dropped).astype(d_out.dtype), d_out)
        ds = p * (product(v, d_out, transpose_b=True) * dropped - dot[None, :])
        return dk + product(ds.astype(q.dtype), q), dv

    sums = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    dk, dv = here.over(x, here.queries(), as_keys, sums)
    if here.chunks.sees_itself and here.is_last:
        lone = here.lone_weight(x, own, here.statistics(row.row_sum, own, 1.0))
        dv = dv + lone[:, None] * here.rows(row.d_out, own, lone > 0.0).astype(jnp.float32)
    if before is not None:
        dv = dv + here.rows(before.v, own)
    here.put_rows(after.v, own, dv)
    if not here.chunks.shared_qk:
        dk = dk * scale
        if before is not None:
            dk = dk + here.rows(before.k, own)
        here.put_rows(after.k, own, dk)

    own = queries_own
    q = here.tokens(x.q, own)
    d_out, dot, row_max, inverse_sum = queries(own)
    if here.chunks.shared_qk:
        dq = _through_normalization(q, dk, size)
    else:
        dq = jnp.zeros(q.shape, jnp.float32)

    def as_queries(block, dq):
        k, v = here.tokens(x.k, block), here.tokens(x.v, block)
        query, key = column(own), line(block)
        logits = hide(product(q, k, transpose_b=True), here.visible(query, key))
        p = recompute_weights(logits, row_max[:, None], column(inverse_sum), size)
        dropped = here.dropped(x, query, key)
        ds = p * (product(d_out, v, transpose_b=True) * dropped - dot[:, None])
        return dq + product(ds.astype(k.dtype), k)

    dq = here.over(x.at_keys(), here.keys(), as_queries, dq, of_keys=True) * scale
    if before is not None:
        dq = dq + here.rows(before.q, own)
    here.put_rows(after.q, own, dq)


def _through_normalization(q: Array, dk: Array, size: int) -> Array:
    """The gradient of queries whose keys, `length_normalize` of them, have the gradient `dk`."""
    q = q.astype(jnp.float32)
    factor = lax.rsqrt(jnp.sum(q * q, axis=1) / size + 1e-6)[:, None]
    k = q * factor
    return (dk - k * (jnp.sum(k * dk, axis=1) / size)[:, None]) * factor


def _launch_round(kernel, program: Program, inputs, carried, out_shape, interpret: bool):
    """One round. It overwrites the results of the round before, where the dtype allows."""
    n_batch, _, n_heads, _ = inputs[0].q.shape
    first = len(jax.tree.leaves(inputs))
    pairs = zip(jax.tree.leaves(carried), jax.tree.leaves(out_shape), strict=False)
    (result,) = launch(
        functools.partial(kernel, program=program),
        (*inputs, carried),
        (out_shape,),
        grid=(pl.cdiv(program.n_places, program.tiles.own), n_heads, n_batch),
        num_warps=program.tiles.num_warps,
        num_stages=program.tiles.num_stages,
        interpret=interpret,
        name=kernel.__name__.strip("_"),
        aliases={first + i: i for i, (old, new) in enumerate(pairs) if old.dtype == new.dtype},
    )
    return result


def _programs(
    chunks: Any, x: Inputs, tiles: Tiles | None, fastest: Callable[[Inputs, int], Tiles]
) -> list[Program]:
    """A program for each round, or the only one where there is no order."""
    n_places = chunks.length + chunks.padding if x.order is None else x.order.shape[3]
    n_rounds = 0 if x.order is None else x.order.shape[2]
    rounds = range(max(n_rounds, 1))
    return [Program(chunks, tiles or fastest(x, r), r, n_rounds, n_places) for r in rounds]


def _in_order(x: Array, order: Array | None) -> Array:
    """From `[B, N or 1, T]`, by position, to `[B, N or 1, R or 1, Tp]`, by place."""
    if order is None:
        return x[:, :, None]
    n_places = order.shape[3]
    x = jnp.pad(x, ((0, 0), (0, 0), (0, n_places - x.shape[2])))[:, :, None]
    return jnp.take_along_axis(x, order, axis=3, mode="promise_in_bounds")


def _inputs(chunks, q, k, v, order, segment_ids, rng) -> Inputs:
    packs = segment = key_order = key_packs = key_segment = None
    two_orders = order is not None and chunks.two_orders
    if chunks.count_once and order is not None and order.queries.shape[2] > 1:
        order = order.with_places(chunks.two_orders)
        packs = _packs(chunks, order.places // chunks.query_chunk_len, order.queries)
        if two_orders:
            key_packs = _packs(chunks, order.key_places // chunks.chunk_len, order.keys)
    if two_orders:
        key_order = order.keys
    order = None if order is None else order.queries
    if segment_ids is not None:
        of_query, of_key = (x[:, None] for x in segment_pair(segment_ids))
        segment = _in_order(of_query, order)
        key_segment = _in_order(of_key, key_order) if two_orders else None
    seed = seed_words(rng, len(q)) if chunks.dropout > 0.0 else None
    k = length_normalize(q) if k is None else k
    return Inputs(q, k, v, order, packs, segment, seed, key_order, key_packs, key_segment)


def _packs(
    chunks: Any, chunk: Int[Array, "B N R Tp"], order: Int[Array, "B N R Tp"]
) -> Int[Array, "W B N R Tp"]:
    """The chunks of the position at each place in all rounds but the last, given by position."""
    chunk, packed = chunk[:, :, :-1], PackedChunks.of(chunks)
    first = range(0, chunk.shape[2], packed.per_pack)
    packs = (packed.pack(chunk[:, :, r : r + packed.per_pack]) for r in first)
    # Without a barrier XLA packs again wherever it gathers, round by round.
    packs = lax.optimization_barrier(tuple(packs))
    return jnp.stack([_in_order(pack, order) for pack in packs])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend(
    chunks: Any,
    interpret: bool,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T N H"] | None,
    v: Float[Array, "B T N V"],
    order: Any,
    segment_ids: SegmentIds | None,
    rng: Array | None,
) -> Float[Array, "B T N V"]:
    """`ops.softmax.chunked.chunked_attention` by these kernels, with its gradient.

    Arguments are those of `forward`.
    """
    return _attend_forward(chunks, interpret, q, k, v, order, segment_ids, rng)[0]


def _attend_forward(chunks, interpret, q, k, v, *others):
    inputs = *first_order((q, k, v)), *others
    results = forward(chunks, *inputs, interpret=interpret)
    return results[0], (inputs, results)


def _attend_backward(chunks, interpret, residuals, d_out):
    inputs, results = residuals
    results, d_out = first_order((results, d_out))
    dq, dk, dv = backward(chunks, *inputs, *results, d_out, interpret=interpret)
    return dq, dk, dv, None, None, None


attend.defvjp(_attend_forward, _attend_backward)


def forward(
    chunks: Any,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T N H"] | None,
    v: Float[Array, "B T N V"],
    order: Any,
    segment_ids: SegmentIds | None,
    rng: Array | None,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B N T"], Float[Array, "B N T"]]:
    """The attended values; for each row the largest logit and the sum of `exp(logit - largest)`.

    The largest logit is that of the products of queries and keys, before they are scaled.

    Args:
      chunks, order: as in `ops.softmax.chunked.chunked_attention`.
      q, k, v, rng: as there.
      segment_ids: as there, padded to whole chunks with 0.
      tiles: how the kernel is cut; None: as was fastest on an H200.
      interpret: whether to run it anywhere, slowly.
    """
    inputs = _inputs(chunks, q, k, v, order, segment_ids, rng)
    batch, length, n_heads, _ = q.shape
    statistic = jax.ShapeDtypeStruct((batch, n_heads, length), jnp.float32)
    state = None
    for program in _programs(chunks, inputs, tiles, _forward_tiles):
        # As many rows as queries.
        shape = Softmax(
            _like(v, program).update(shape=(*q.shape[:3], v.shape[3])), statistic, statistic
        )
        state = _launch_round(_forward_kernel, program, (inputs,), state, shape, interpret)
    return tuple(state)


def backward(
    chunks: Any,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T N H"] | None,
    v: Float[Array, "B T N V"],
    order: Any,
    segment_ids: SegmentIds | None,
    rng: Array | None,
    out: Float[Array, "B T N V"],
    row_max: Float[Array, "B N T"],
    row_sum: Float[Array, "B N T"],
    d_out: Float[Array, "B T N V"],
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> tuple[Array, Array | None, Array]:
    """The gradients of q, k (None where keys are shared) and v.

    Args:
      chunks, q, k, v, order, segment_ids, rng: as in `forward`.
      out, row_max, row_sum: what it returned.
      d_out: the gradient of `out`.
      tiles, interpret: as in `forward`.
    """
    inputs = _inputs(chunks, q, k, v, order, segment_ids, rng)
    ids = None if segment_ids is None else segment_pair(segment_ids)[0][:, : q.shape[1]]
    row = query_rows(d_out, out, row_max, row_sum, ids)
    dot, row_max = (_in_order(x, inputs.order) for x in (row.dot, row.row_max))
    inverse_sum = None if row.inverse_sum is None else _in_order(row.inverse_sum, inputs.order)
    row = QueryRows(row.d_out, dot, row_max, row_sum, inverse_sum)
    gradients = None
    for program in _programs(chunks, inputs, tiles, _backward_tiles):
        shape = _Gradients(*(None if x is None else _like(x, program) for x in (q, k, v)))
        inputs_and_rows = inputs, row
        gradients = _launch_round(
            _backward_kernel, program, inputs_and_rows, gradients, shape, interpret
        )
    return tuple(gradients)


def _like(x: Array, program: Program) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a round's result: float32, except in the last round."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype if program.is_last else jnp.float32)


# The fastest on an H200, of `own` and `other` of 16 to 128, 4 and 8 warps, 1 to 9 stages. An order
# is read ahead too, so it takes five stages to load one block of rows while computing with another;
# with three, a block is waited for at once. The forward pass's first round reads no state: with
# three stages more of its programs fit a processor.


def _forward_tiles(x: Inputs, round_: int) -> Tiles:
    if x.order is None:
        return Tiles(64, 64, 4, 3)
    if _row_bytes(x) > 128:
        return Tiles(64, 32, 4, 5)
    return Tiles(64, 64, 4, 5 if round_ else 3)


def _backward_tiles(x: Inputs, round_: int) -> Tiles:
    del round_
    if x.order is None:
        return Tiles(64, 64, 4, 1)
    return Tiles(64, 64 if _row_bytes(x) <= 128 else 32, 4, 5)


def _row_bytes(x: Inputs) -> int:
    """Bytes of a row of keys or of values, the wider. Rows of all stages share a chip's memory."""
    return max(x.k.shape[3], x.v.shape[3]) * x.v.dtype.itemsize
