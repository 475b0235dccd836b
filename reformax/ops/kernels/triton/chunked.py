"""Attention within neighbouring chunks, as Pallas kernels for NVIDIA GPUs (Triton).

They compute the function of `reformax.ops.softmax.chunked`, one kernel for each hash and pass:

  * Kernels read rows of q, k and v, and write results, at the positions that the order names. There
    is no sorted copy of them.
  * The hashes run one after the other and accumulate one softmax. The kernel of a hash starts from
    the accumulator, the maximum and the sum of the earlier hashes at each position. It reads and
    writes each position once, so sums have one order and need no atomics.
  * The backward pass recomputes logits from the maximum and the sum (Dao et al. 2022, algorithm 4).
    A program takes a block of slots first as keys and then as queries, so that it, too, writes each
    row once. Keys may have a different order from queries.

Instructions limit these kernels more than memory does. Row statistics (segments, chunks, maxima)
are therefore sorted beforehand, and a block reads consecutive numbers.

Letters as in `reformax.ops.base`; Tp is T padded to whole chunks, W the packs of `PackedChunks`.
`kernels.chunk_programs` has the program: its slots, its positions and its mask.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from reformax.ops.kernels.triton import flash
from reformax.ops.kernels.triton.chunk_programs import ChunkInputs, ChunkProgram, ChunkTiles
from reformax.ops.kernels.triton.common import (
    LOWEST,
    QueryRows,
    launch,
    softmax_shapes,
)
from reformax.ops.kernels.triton.packed_chunks import PackedChunks
from reformax.ops.masking.masks import TokensFirst, segment_pair
from reformax.ops.masking.visibility import is_token
from reformax.ops.numerics.normalization import EPSILON, length_normalize
from reformax.ops.softmax.learned_sinks import Results
from reformax.ops.softmax.online import Softmax, nonzero
from reformax.ops.softmax.orders import Chunking, Order, UnsortedInputs


class ChunkGradients(NamedTuple):
    """The gradients of the inputs."""

    q: Array  # [B, T, N, H]; with shared keys, their gradient included
    k: Array | None  # [B, T, N, H]
    v: Array  # [B, T, N, V]


def _forward_kernel(
    x: ChunkInputs, before: Softmax | None, after: Softmax, *, program: ChunkProgram
):
    program = program.located(x)
    queries = program.queries()
    # The loads with the longest latency come first.
    state = None
    if before is not None:
        acc = program.rows(before.acc, queries)
        row_max = program.numbers(before.row_max, queries, LOWEST)
        state = Softmax(acc, row_max, program.numbers(before.row_sum, queries, 0.0))
    acc, row_max, row_sum = flash.forward(program, queries, state)
    if program.is_last:
        row_max = row_max * program.scale
        inverse_sum = 1.0 / nonzero(row_sum)
        if x.count is not None:  # padding sees what tokens see
            inverse_sum = jnp.where(is_token(queries.segment), inverse_sum, 0.0)
        acc = acc * inverse_sum[:, None]
        if program.chunks.sees_itself:
            lone = program.alone_weight(queries, row_sum)
            alone_rows = program.rows(x.v, queries, lone > 0.0)
            acc = acc + lone[:, None] * alone_rows.astype(jnp.float32)
    program.put_rows(after.acc, queries, acc)
    program.put_numbers(after.row_max, queries, row_max)
    program.put_numbers(after.row_sum, queries, row_sum)


def _backward_kernel(
    x: ChunkInputs,
    row: QueryRows,
    before: ChunkGradients | None,
    after: ChunkGradients,
    *,
    program: ChunkProgram,
):
    program = program.located(x, row)
    queries = program.queries()
    keys = queries if x.key_order is None else program.keys()

    dk, dv = flash.d_keys(program, keys)
    if program.chunks.sees_itself and program.is_last:
        lone = program.alone_weight(keys, program.numbers(row.row_sum, keys, 1.0))
        dv = dv + lone[:, None] * program.rows(row.d_out, keys, lone > 0.0).astype(jnp.float32)
    if before is not None:
        dv = dv + program.rows(before.v, keys)
    program.put_rows(after.v, keys, dv)
    if not program.chunks.shared_qk:
        dk = dk * program.scale
        if before is not None:
            dk = dk + program.rows(before.k, keys)
        program.put_rows(after.k, keys, dk)

    q, dq = program.tokens(x.q, queries), None
    if program.chunks.shared_qk:
        dq = _through_normalization(q, dk, x.q.shape[3])
    dq = flash.d_queries(program, queries, q, dq) * program.scale
    if before is not None:
        dq = dq + program.rows(before.q, queries)
    program.put_rows(after.q, queries, dq)


def _through_normalization(q: Array, dk: Array, size: int) -> Array:
    """The gradient of queries, by the gradient `dk` of their keys `length_normalize(q)`."""
    q = q.astype(jnp.float32)
    factor = lax.rsqrt(jnp.sum(q * q, axis=1) / size + EPSILON)[:, None]
    k = q * factor
    return (dk - k * (jnp.sum(k * dk, axis=1) / size)[:, None]) * factor


def _launch_hash(kernel, program: ChunkProgram, inputs, previous, out_shape, interpret: bool):
    """Runs the kernel of one hash, over the `previous` hash's results where dtypes are equal."""
    n_batch, _, n_heads, _ = inputs[0].q.shape
    first = len(jax.tree.leaves(inputs))
    pairs = zip(jax.tree.leaves(previous), jax.tree.leaves(out_shape), strict=False)
    (result,) = launch(
        functools.partial(kernel, program=program),
        (*inputs, previous),
        (out_shape,),
        grid=(pl.cdiv(program.n_slots, program.tiles.rows), n_heads, n_batch),
        num_warps=program.tiles.num_warps,
        num_stages=program.tiles.num_stages,
        interpret=interpret,
        name=kernel.__name__.strip("_"),
        aliases={first + i: i for i, (old, new) in enumerate(pairs) if old.dtype == new.dtype},
    )
    return result


def _programs(
    chunks: Any,
    x: ChunkInputs,
    tiles: ChunkTiles | None,
    fastest: Callable[[ChunkInputs, int], ChunkTiles],
) -> list[ChunkProgram]:
    """A program for each hash; one without an order."""
    n_slots = chunks.length + chunks.padding if x.order is None else x.order.shape[3]
    n_hashes = 0 if x.order is None else x.order.shape[2]
    hashes = range(max(n_hashes, 1))
    return [ChunkProgram(chunks, tiles or fastest(x, r), r, n_hashes, n_slots) for r in hashes]


def _in_order(x: Array, order: Array | None) -> Array:
    """Sorts `[B, N or 1, T]`, by position, into `[B, N or 1, R or 1, Tp]`, by slot."""
    if order is None:
        return x[:, :, None]
    n_slots = order.shape[3]
    x = jnp.pad(x, ((0, 0), (0, 0), (0, n_slots - x.shape[2])))[:, :, None]
    return jnp.take_along_axis(x, order, axis=3, mode="promise_in_bounds")


def chunk_inputs(chunks: Chunking, x: UnsortedInputs) -> ChunkInputs:
    """The arrays that kernels of both passes read, sorted."""
    q, k, v, order, segment_ids, seed = x
    packs = segment = first = positions = count = None
    of_keys = None, None, None  # where keys have the queries' order
    if isinstance(segment_ids, TokensFirst):
        segment_ids, count = None, segment_ids.count
    two_orders = order is not None and chunks.two_orders
    if order is not None:
        once = chunks.count_once and order.query_positions.shape[2] > 1
        order = order.with_slots(chunks.two_orders) if once else order
        positions = order.query_positions
        if order.first_slot is not None:
            first = _first_slots(order.first_slot, positions)
        packs, key_packs = _earlier_hashes(chunks, order) if once else (None, None)
    if segment_ids is not None:
        of_query, of_key = (x[:, None] for x in segment_pair(segment_ids))
        segment = _in_order(of_query, positions)
    if two_orders:
        key_segment = None if segment_ids is None else _in_order(of_key, order.key_positions)
        of_keys = order.key_positions, key_packs, key_segment
    k = length_normalize(q) if k is None else k
    return ChunkInputs(q, k, v, positions, packs, segment, seed, *of_keys, count, first)


def _earlier_hashes(
    chunks: Chunking, order: Order
) -> tuple[Int[Array, "W B N R Tp"], Int[Array, "W B N R Tp"] | None]:
    """`ChunkInputs.packs` and `key_packs`, by which a key that an earlier hash shows is hidden."""
    if order.first_slot is not None:
        by_hash = (jnp.moveaxis(x, 2, 0)[:-1] for x in (order.query_slots, order.first_slot))
        slots = (x for pair in zip(*by_hash, strict=True) for x in pair)
        return jnp.stack([_in_order(x, order.query_positions) for x in slots]), None
    packs = _packs(chunks, order.query_slots // chunks.query_chunk_len, order.query_positions)
    if not chunks.two_orders:
        return packs, None
    return packs, _packs(chunks, order.key_slots // chunks.chunk_len, order.key_positions)


def _first_slots(first: Int[Array, "B N R _"], order: Int[Array, "B N R Tp"]) -> Array:
    """The first slots that queries see, by slot."""
    first = jnp.pad(first, ((0, 0),) * 3 + ((0, order.shape[3] - first.shape[3]),))
    return jnp.take_along_axis(first, order, axis=3, mode="promise_in_bounds")


def _packs(
    chunks: Any, chunk: Int[Array, "B N R Tp"], order: Int[Array, "B N R Tp"]
) -> Int[Array, "W B N R Tp"]:
    """The chunks of each slot's position by all hashes but the last; `chunk` is by position."""
    chunk, packed = chunk[:, :, :-1], PackedChunks.of(chunks)
    first = range(0, chunk.shape[2], packed.per_pack)
    packs = (packed.pack(chunk[:, :, r : r + packed.per_pack]) for r in first)
    # Without the barrier XLA repeats the packing in the gather of each hash.
    packs = lax.optimization_barrier(tuple(packs))
    return jnp.stack([_in_order(pack, order) for pack in packs])


def forward(
    chunks: Chunking, x: UnsortedInputs, tiles: ChunkTiles | None = None, interpret: bool = False
) -> Results:
    """The results of `flash.attention`.

    Args:
      chunks: as in `ops.softmax.chunked.chunked_attention`.
      tiles: the kernel's tiles; None: the fastest on an H200.
    """
    inputs, q, v = chunk_inputs(chunks, x), x.q, x.v
    shapes, state = softmax_shapes(q, v), None
    for program in _programs(chunks, inputs, tiles, _forward_tiles):
        shape = shapes._replace(acc=_like(shapes.acc, program))
        state = _launch_hash(_forward_kernel, program, (inputs,), state, shape, interpret)
    return tuple(state)


def backward(
    chunks: Chunking,
    x: UnsortedInputs,
    results: Results,
    d_out: Float[Array, "B T N V"],
    tiles: ChunkTiles | None = None,
    interpret: bool = False,
) -> tuple[Array, Array | None, Array]:
    """The gradients of q, k (None where keys are shared) and v.

    Args:
      chunks, x, tiles, interpret: as in `forward`, whose `results` follow.
    """
    inputs, ids = chunk_inputs(chunks, x), x.segment_ids
    ids = ids.segment_ids if isinstance(ids, TokensFirst) else segment_pair(ids)[0]
    ids = None if ids is None else ids[:, : x.q.shape[1]]
    row = QueryRows.of(d_out, results, ids)
    dot, row_max = (_in_order(y, inputs.order) for y in (row.dot, row.row_max))
    inverse_sum = None if row.inverse_sum is None else _in_order(row.inverse_sum, inputs.order)
    row = QueryRows(row.d_out, dot, row_max, results[2], inverse_sum)
    gradients = None
    for program in _programs(chunks, inputs, tiles, _backward_tiles):
        shape = ChunkGradients(*(None if y is None else _like(y, program) for y in x[:3]))
        inputs_and_rows = inputs, row
        gradients = _launch_hash(
            _backward_kernel, program, inputs_and_rows, gradients, shape, interpret
        )
    return tuple(gradients)


# `ops.softmax.chunked.chunked_attention` by these kernels.
attend = flash.attention(forward, backward)


def _like(x: Array, program: ChunkProgram) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a hash's result: float32, except of the last hash."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype if program.is_last else jnp.float32)


# The fastest on an H200, of 16 to 128 `rows` and `loop_rows`, 4 and 8 warps, 1 to 9 stages. The
# loop prefetches the order too, so it takes five stages to load one block of rows while computing
# with another. With three, a program waits for each block. The forward pass of the first hash reads
# no state: with three stages, more of its programs fit on a processor.


def _forward_tiles(x: ChunkInputs, hash_index: int) -> ChunkTiles:
    if _is_wide(x):
        return ChunkTiles(64, 32, 8, 2) if x.v.dtype.itemsize == 2 else ChunkTiles(32, 32, 8, 1)
    if x.order is None:
        return ChunkTiles(64, 64, 4, 3)
    if _row_bytes(x) > 128:
        return ChunkTiles(64, 32, 4, 5)
    return ChunkTiles(64, 64, 4, 5 if hash_index else 3)


def _backward_tiles(x: ChunkInputs, hash_index: int) -> ChunkTiles:
    if _is_wide(x):
        return ChunkTiles(32, 32, 8, 2 if x.v.dtype.itemsize == 2 else 1)
    if x.order is None:
        return ChunkTiles(64, 64, 4, 1)
    return ChunkTiles(64, 64 if _row_bytes(x) <= 128 else 32, 4, 5)


def _is_wide(x: ChunkInputs) -> bool:
    """Whether sums of 64 rows would take more registers than programs have."""
    return max(x.k.shape[3], x.v.shape[3]) > 128


def _row_bytes(x: ChunkInputs) -> int:
    """Bytes of the wider row, of keys or of values. A chip holds the rows of all stages."""
    return max(x.k.shape[3], x.v.shape[3]) * x.v.dtype.itemsize
