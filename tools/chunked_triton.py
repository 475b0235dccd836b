"""Attention within neighbouring chunks in Triton's own language, called by jax-triton.

The function of `reformax.ops.kernels.triton.chunked`, from the same inputs and by the same plan: a
kernel for each hash and pass, rows read and written where they are in the sequence, a softmax
carried over the hashes, one writer for each row. All sizes are constants of the compiled kernel.
Names are those of `kernels.chunk_programs`.

With `TRITON_INTERPRET=1` set before Triton is imported, `interpret=True` runs the kernels on a CPU.
"""

from __future__ import annotations

import dataclasses
import math
import types
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl

from reformax.ops.kernels.triton import chunked
from reformax.ops.kernels.triton.chunk_programs import ChunkInputs, ChunkProgram, ChunkTiles
from reformax.ops.kernels.triton.common import LOG2_E, LOWEST, power_of_two, query_rows
from reformax.ops.kernels.triton.packed_chunks import PackedChunks


@dataclasses.dataclass(frozen=True)
class Constants:
    """What a kernel is compiled for. Sizes of tiles are powers of two."""

    length: int
    n_slots: int
    n_heads: int
    size: int
    v_size: int
    width: int
    v_width: int
    n_hashes: int
    hash_index: int
    rows: int
    loop_rows: int
    chunk_len: int
    before: int
    after: int
    window: int  # 0: none
    causal: bool
    shared_qk: bool
    sees_itself: bool
    ordered: bool
    two_orders: bool
    segment_ids: bool
    n_packs: int  # of `PackedChunks`, and three of its constants
    packs_size: int
    up: int
    down: int
    bits: int
    last_bits: int
    dropout: bool
    threshold: int
    kept: float
    first: bool  # whether no hash came before
    last: bool
    aligned: bool
    unmasked: bool
    wide: bool  # whether an index of a number needs 64 bits
    lowest: float
    scale: float  # of logits, for the exponential of base 2
    root: float
    inverse_sum: bool
    n_statistics: int  # the last axis of statistics in order
    precision: str

    @property
    def unmasked_tokens(self) -> bool:
        """Whether every slot has a token, so that loads of tokens need no mask."""
        return self.unmasked and not self.segment_ids


# Reading and writing.


@triton.jit
def _load(view, exists, other, unmasked: tl.constexpr):
    return tl.load(view) if unmasked else tl.load(view, mask=exists, other=other)


@triton.jit
def _view_rows(ref, position, size: tl.constexpr, width: tl.constexpr, c: tl.constexpr):
    if c.wide:
        position = position.to(tl.int64)
    return ref + position[:, None] * (c.n_heads * size) + tl.arange(0, width)[None, :]


@triton.jit
def _rows(
    ref,
    position,
    exists,
    size: tl.constexpr,
    width: tl.constexpr,
    unmasked: tl.constexpr,
    c: tl.constexpr,
):
    view = _view_rows(ref, position, size, width, c)
    if size != width:
        x = tl.load(view, mask=exists[:, None] & (tl.arange(0, width) < size)[None, :], other=0.0)
    else:
        x = _load(view, exists[:, None], 0.0, unmasked)
    return x


@triton.jit
def _put_rows(ref, position, value, size: tl.constexpr, width: tl.constexpr, c: tl.constexpr):
    mask = (position < c.length)[:, None]
    if size != width:
        mask = mask & (tl.arange(0, width) < size)[None, :]
    view = _view_rows(ref, position, size, width, c)
    tl.store(view, value.to(ref.dtype.element_ty), mask=mask)


@triton.jit
def _block(order, segment, pack, at, start, stop, n: tl.constexpr, c: tl.constexpr):
    """`n` slots: numbers, positions, segments, chunks by earlier hashes, and which exist."""
    slot = start + tl.arange(0, n)
    exists = slot < stop
    position, ids, packed = slot, slot, slot
    if c.ordered:
        position = _load(order + (at + slot), exists, c.n_slots, c.unmasked)
    elif not c.unmasked:
        position = tl.where(exists, slot, c.n_slots)
    if c.segment_ids:
        ids = _load(segment + slot, exists, 0, c.unmasked)
    if c.n_packs > 0:
        packed = _load(pack + (at + slot), exists, 0, c.unmasked)
    return slot, position, ids, packed, exists


@triton.jit
def _token(position, segment, c: tl.constexpr):
    token = position < c.length
    if c.segment_ids:
        token = token & (segment != 0)
    return token


# Which keys a query sees.


@triton.jit
def _near(query, key, bits: tl.constexpr, c: tl.constexpr):
    up = (query + c.up) - key
    return (up & (c.down - up) & bits) != 0


@triton.jit
def _visible(queries, keys, lines: tl.constexpr, pack, key_pack, at, c: tl.constexpr):
    """Which keys queries see, two blocks; queries are the lines of the tile, or its columns."""
    slot, position, segment, packed, exists = queries
    key_slot, key_position, key_segment, key_packed, key_exists = keys
    if lines:
        slot, position, segment = slot[:, None], position[:, None], segment[:, None]
        packed, exists = packed[:, None], exists[:, None]
        key_slot, key_position = key_slot[None, :], key_position[None, :]
        key_segment, key_packed = key_segment[None, :], key_packed[None, :]
        key_exists = key_exists[None, :]
    else:
        slot, position, segment = slot[None, :], position[None, :], segment[None, :]
        packed, exists = packed[None, :], exists[None, :]
        key_slot, key_position = key_slot[:, None], key_position[:, None]
        key_segment, key_packed = key_segment[:, None], key_packed[:, None]
        key_exists = key_exists[:, None]
    if c.causal:
        mask = key_position < position if c.shared_qk else key_position <= position
    elif c.shared_qk:
        mask = (key_position < c.length) & (key_position != position)
    else:
        mask = (key_position < c.length) & (position == position)
    if c.window > 0:
        mask = mask & (tl.abs(position - key_position) < c.window)
    if c.segment_ids:
        mask = mask & (segment == key_segment) & (key_segment != 0)
    if not c.aligned:
        distance = slot // c.chunk_len - key_slot // c.chunk_len + c.after
        mask = mask & (distance.to(tl.uint32, bitcast=True) <= c.before + c.after)
    if c.n_packs > 0:
        first = c.last_bits if c.n_packs == 1 else c.bits
        mask = mask & ~_near(packed, key_packed, first, c)
    for i in tl.static_range(1, tl.constexpr(c.n_packs)):
        query = _load(pack + i * c.packs_size + (at + slot), exists, 0, c.unmasked)
        key = _load(key_pack + i * c.packs_size + (at + key_slot), key_exists, 0, c.unmasked)
        mask = mask & ~_near(query, key, c.last_bits if i == c.n_packs - 1 else c.bits, c)
    return mask


@triton.jit
def _window(start, before: tl.constexpr, after: tl.constexpr, c: tl.constexpr):
    first = (start // c.chunk_len - before) * c.chunk_len
    last = ((start + c.rows - 1) // c.chunk_len + 1 + after) * c.chunk_len
    first, last = tl.maximum(first, 0), tl.minimum(last, c.n_slots)
    if c.window > 0 and not c.ordered:
        reach = tl.maximum(start - c.window + 1, 0) // c.loop_rows * c.loop_rows
        first = tl.maximum(first, reach)
        last = tl.minimum(last, start + c.rows + c.window - 1)
    return first, last


@triton.jit
def _keys(start, c: tl.constexpr):
    first, last = _window(start, c.before, c.after, c)
    if c.causal and not c.ordered:
        last = tl.minimum(last, start + c.rows)
    return first, last


@triton.jit
def _queries(start, c: tl.constexpr):
    first, last = _window(start, c.after, c.before, c)
    if c.causal and not c.ordered:
        first = tl.maximum(first, start)
    return first, last


# Dropout, as `ops.softmax.dropout` draws it.


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _dropped(seed, batch, head, query, key, c: tl.constexpr):
    batch = batch.to(tl.uint32) + tl.load(seed + 2)
    head = head.to(tl.uint32) + tl.load(seed + 3)
    query = query.to(tl.uint32) + tl.load(seed + 4)
    key = key.to(tl.uint32) + tl.load(seed + 5)
    row = _mix(query ^ _mix(head ^ _mix(batch ^ tl.load(seed))))
    bits = _mix(row ^ _mix(key ^ tl.load(seed + 1)))
    return tl.where(bits >= c.threshold, c.kept, 0.0)


@triton.jit
def _alone_weight(seed, batch, head, position, segment, row_sum, c: tl.constexpr):
    alone = (row_sum == 0.0) & _token(position, segment, c)
    weight = tl.where(alone, 1.0, 0.0)
    if c.dropout:
        weight = weight * _dropped(seed, batch, head, position, position, c)
    return weight


# The two passes.


@triton.jit
def forward_kernel(
    q,
    k,
    v,
    order,
    pack,
    segment,
    seed,
    key_order,
    key_pack,
    key_segment,
    acc_before,
    max_before,
    sum_before,
    acc_after,
    max_after,
    sum_after,
    c: tl.constexpr,
):
    rows: tl.constexpr = c.rows
    width: tl.constexpr = c.width
    v_width: tl.constexpr = c.v_width
    start, head, batch = tl.program_id(0) * rows, tl.program_id(1), tl.program_id(2)
    far = batch.to(tl.int64)
    to_rows = far * (c.length * c.n_heads * c.size) + head * c.size
    to_values = far * (c.length * c.n_heads * c.v_size) + head * c.v_size
    q, k, v = q + to_rows, k + to_rows, v + to_values
    acc_before, acc_after = acc_before + to_values, acc_after + to_values
    to_row = (far * c.n_heads + head) * c.length
    max_before, sum_before = max_before + to_row, sum_before + to_row
    max_after, sum_after = max_after + to_row, sum_after + to_row
    at = (head * c.n_hashes + c.hash_index) * c.n_slots
    to_order = far * (c.n_heads * c.n_hashes * c.n_slots)
    order, key_order = order + to_order, key_order + to_order
    pack, key_pack = pack + to_order, key_pack + to_order
    to_segment = to_order + at if c.ordered else far * c.n_slots
    segment, key_segment = segment + to_segment, key_segment + to_segment

    block = _block(order, segment, pack, at, start, c.n_slots, rows, c)
    slot, position, ids, packed, exists = block
    real = position < c.length
    if c.first:
        acc = tl.zeros((rows, v_width), tl.float32)
        row_max = tl.full((rows,), c.lowest, tl.float32)
        row_sum = tl.zeros((rows,), tl.float32)
    else:
        acc = _rows(acc_before, position, real, c.v_size, v_width, c.unmasked, c)
        row_max = _load(max_before + position, real, c.lowest, c.unmasked)
        row_sum = _load(sum_before + position, real, 0.0, c.unmasked)
    queries = _rows(q, position, real, c.size, width, c.unmasked, c)

    first, last = _keys(start, c)
    for begin in range(first, last, c.loop_rows):
        key_block = _block(key_order, key_segment, key_pack, at, begin, last, c.loop_rows, c)
        _, key, key_ids, _, _ = key_block
        keys = _rows(k, key, key < c.length, c.size, width, c.unmasked, c)
        token = _token(key, key_ids, c)
        values = _rows(v, key, token, c.v_size, v_width, c.unmasked_tokens, c)
        mask = _visible(block, key_block, True, pack, key_pack, at, c)
        logits = tl.dot(queries, tl.trans(keys), input_precision=c.precision)
        logits = tl.where(mask, logits, float("-inf"))
        best = tl.maximum(row_max, tl.max(logits, 1))
        weights = tl.math.exp2(logits * c.scale - (best * c.scale)[:, None])
        decay = tl.math.exp2((row_max - best) * c.scale)
        row_sum = row_sum * decay + tl.sum(weights, 1)
        if c.dropout:
            weights = weights * _dropped(seed, batch, head, position[:, None], key[None, :], c)
        weights = weights.to(values.dtype)
        acc = tl.dot(weights, values, acc=acc * decay[:, None], input_precision=c.precision)
        row_max = best

    if c.last:
        acc = acc * (1.0 / tl.where(row_sum == 0.0, 1.0, row_sum))[:, None]
        if c.sees_itself:
            lone = _alone_weight(seed, batch, head, position, ids, row_sum, c)
            alone_rows = _rows(v, position, real & (lone > 0.0), c.v_size, v_width, False, c)
            acc += lone[:, None] * alone_rows.to(tl.float32)
    _put_rows(acc_after, position, acc, c.v_size, v_width, c)
    tl.store(max_after + position, row_max, mask=real)
    tl.store(sum_after + position, row_sum, mask=real)


@triton.jit
def backward_kernel(
    q,
    k,
    v,
    order,
    pack,
    segment,
    seed,
    key_order,
    key_pack,
    key_segment,
    d_out,
    dot,
    row_max,
    row_sum,
    inverse_sum,
    dq_before,
    dk_before,
    dv_before,
    dq_after,
    dk_after,
    dv_after,
    c: tl.constexpr,
):
    rows: tl.constexpr = c.rows
    width: tl.constexpr = c.width
    v_width: tl.constexpr = c.v_width
    start, head, batch = tl.program_id(0) * rows, tl.program_id(1), tl.program_id(2)
    far = batch.to(tl.int64)
    to_rows = far * (c.length * c.n_heads * c.size) + head * c.size
    to_values = far * (c.length * c.n_heads * c.v_size) + head * c.v_size
    q, k, v, d_out = q + to_rows, k + to_rows, v + to_values, d_out + to_values
    dq_before, dk_before, dv_before = (
        dq_before + to_rows,
        dk_before + to_rows,
        dv_before + to_values,
    )
    dq_after, dk_after, dv_after = dq_after + to_rows, dk_after + to_rows, dv_after + to_values
    row_sum += (far * c.n_heads + head) * c.length
    at_row = (head * c.n_hashes + c.hash_index) * c.n_statistics
    to_row = far * (c.n_heads * c.n_hashes * c.n_statistics)
    dot, row_max, inverse_sum = dot + to_row, row_max + to_row, inverse_sum + to_row
    at = (head * c.n_hashes + c.hash_index) * c.n_slots
    to_order = far * (c.n_heads * c.n_hashes * c.n_slots)
    order, key_order = order + to_order, key_order + to_order
    pack, key_pack = pack + to_order, key_pack + to_order
    to_segment = to_order + at if c.ordered else far * c.n_slots
    segment, key_segment = segment + to_segment, key_segment + to_segment

    # The program's slots as keys.
    block = _block(key_order, key_segment, key_pack, at, start, c.n_slots, rows, c)
    slot, position, ids, packed, exists = block
    real, token = position < c.length, _token(position, ids, c)
    block_keys = _rows(k, position, real, c.size, width, c.unmasked, c)
    block_values = _rows(v, position, token, c.v_size, v_width, c.unmasked_tokens, c)
    dk = tl.zeros((rows, width), tl.float32)
    dv = tl.zeros((rows, v_width), tl.float32)
    first, last = _queries(start, c)
    for begin in range(first, last, c.loop_rows):
        query_block = _block(order, segment, pack, at, begin, last, c.loop_rows, c)
        query_slot, query, query_ids, _, _ = query_block
        there = query < c.length
        queries = _rows(q, query, _token(query, query_ids, c), c.size, width, c.unmasked_tokens, c)
        d_rows = _rows(d_out, query, there, c.v_size, v_width, c.unmasked, c)
        row_maxes = _load(row_max + (at_row + query_slot), there, 0.0, c.unmasked) * c.scale
        dots = _load(dot + (at_row + query_slot), there, 0.0, c.unmasked)
        mask = _visible(query_block, block, False, pack, key_pack, at, c)
        logits = tl.dot(block_keys, tl.trans(queries), input_precision=c.precision)
        p = tl.math.exp2(tl.where(mask, logits, float("-inf")) * c.scale - row_maxes[None, :])
        if c.inverse_sum:
            p = p * _load(inverse_sum + (at_row + query_slot), there, 0.0, c.unmasked)[None, :]
        # Before the other product, which would take more registers.
        if c.dropout:
            dropped = _dropped(seed, batch, head, query[None, :], position[:, None], c)
            kept = (p * dropped).to(d_rows.dtype)
        else:
            kept = p.to(d_rows.dtype)
        dv = tl.dot(kept, d_rows, acc=dv, input_precision=c.precision)
        dp = tl.dot(block_values, tl.trans(d_rows), input_precision=c.precision)
        if c.dropout:
            dp = dp * dropped
        ds = p * (dp - dots[None, :])
        dk = tl.dot(ds.to(queries.dtype), queries, acc=dk, input_precision=c.precision)
    if c.sees_itself and c.last:
        sums = _load(row_sum + position, real, 1.0, c.unmasked)
        lone = _alone_weight(seed, batch, head, position, ids, sums, c)
        alone_rows = _rows(d_out, position, real & (lone > 0.0), c.v_size, v_width, False, c)
        dv += lone[:, None] * alone_rows.to(tl.float32)
    if not c.first:
        dv += _rows(dv_before, position, real, c.v_size, v_width, c.unmasked, c)
    _put_rows(dv_after, position, dv, c.v_size, v_width, c)
    if not c.shared_qk:
        dk = dk * c.root
        if not c.first:
            dk += _rows(dk_before, position, real, c.size, width, c.unmasked, c)
        _put_rows(dk_after, position, dk, c.size, width, c)

    # The program's slots as queries.
    if c.two_orders:
        block = _block(order, segment, pack, at, start, c.n_slots, rows, c)
        slot, position, ids, packed, exists = block
        real, token = position < c.length, _token(position, ids, c)
    block_queries = _rows(q, position, token, c.size, width, c.unmasked_tokens, c)
    block_d_rows = _rows(d_out, position, real, c.v_size, v_width, c.unmasked, c)
    block_top = _load(row_max + (at_row + slot), real, 0.0, c.unmasked) * c.scale
    block_dot = _load(dot + (at_row + slot), real, 0.0, c.unmasked)
    if c.shared_qk:
        # Through the normalization that makes keys of queries.
        x = block_queries.to(tl.float32)
        factor = tl.rsqrt(tl.sum(x * x, 1) / c.size + 1e-6)[:, None]
        unit = x * factor
        dq = (dk - unit * (tl.sum(unit * dk, 1) / c.size)[:, None]) * factor
    else:
        dq = tl.zeros((rows, width), tl.float32)
    first, last = _keys(start, c)
    for begin in range(first, last, c.loop_rows):
        key_block = _block(key_order, key_segment, key_pack, at, begin, last, c.loop_rows, c)
        _, key, key_ids, _, _ = key_block
        key_token = _token(key, key_ids, c)
        keys = _rows(k, key, key_token, c.size, width, c.unmasked_tokens, c)
        values = _rows(v, key, key_token, c.v_size, v_width, c.unmasked_tokens, c)
        seen = _visible(block, key_block, True, pack, key_pack, at, c)
        products = tl.dot(block_queries, tl.trans(keys), input_precision=c.precision)
        weights = tl.where(seen, products, float("-inf")) * c.scale - block_top[:, None]
        weights = tl.math.exp2(weights)
        if c.inverse_sum:
            weights = weights * _load(inverse_sum + (at_row + slot), real, 0.0, c.unmasked)[:, None]
        d_weights = tl.dot(block_d_rows, tl.trans(values), input_precision=c.precision)
        if c.dropout:
            d_weights = d_weights * _dropped(seed, batch, head, position[:, None], key[None, :], c)
        d_logits = (weights * (d_weights - block_dot[:, None])).to(keys.dtype)
        dq = tl.dot(d_logits, keys, acc=dq, input_precision=c.precision)
    dq = dq * c.root
    if not c.first:
        dq += _rows(dq_before, position, real, c.size, width, c.unmasked, c)
    _put_rows(dq_after, position, dq, c.size, width, c)


# Launching.


def _constants(
    program: ChunkProgram, x: ChunkInputs, first: bool, precision: str, **others: Any
) -> Constants:
    chunks, tiles, packed = program.chunks, program.tiles, PackedChunks.of(program.chunks)
    batch, length, n_heads, size = x.q.shape
    v_size, n_hashes, guard = x.v.shape[3], max(program.n_hashes, 1), 1 << packed.guard
    n_packs = 0 if x.packs is None else -(-program.hash_index // packed.per_pack)
    left = program.hash_index - packed.per_pack * max(n_packs - 1, 0)
    return Constants(
        length=length,
        n_slots=program.n_slots,
        n_heads=n_heads,
        size=size,
        v_size=v_size,
        width=power_of_two(size),
        v_width=power_of_two(v_size),
        n_hashes=n_hashes,
        hash_index=program.hash_index,
        rows=tiles.rows,
        loop_rows=tiles.loop_rows,
        chunk_len=chunks.chunk_len,
        before=chunks.n_chunks_before,
        after=chunks.n_chunks_after,
        window=chunks.window or 0,
        causal=chunks.causal,
        shared_qk=chunks.shared_qk,
        sees_itself=chunks.sees_itself,
        ordered=x.order is not None,
        two_orders=x.key_order is not None,
        segment_ids=x.segment is not None,
        n_packs=n_packs,
        packs_size=batch * n_heads * n_hashes * program.n_slots,
        up=int(packed.repeated(guard + packed.after)),
        down=int(packed.repeated(2 * guard + packed.before + packed.after)),
        bits=int(packed.repeated(guard)),
        last_bits=int(packed.repeated(guard, left)),
        dropout=x.seed is not None,
        threshold=min(round(chunks.dropout * 2**32), 2**32 - 1),
        kept=float(np.float32(1 / (1 - chunks.dropout))),
        first=first,
        last=program.is_last,
        aligned=program.aligned,
        unmasked=program.unmasked,
        wide=length * n_heads * max(size, v_size) >= 2**31,
        lowest=float(LOWEST),
        scale=LOG2_E / math.sqrt(size),
        root=1 / math.sqrt(size),
        precision=precision,
        **{"inverse_sum": False, "n_statistics": 0, **others},
    )


def _pointers(x: ChunkInputs) -> list[jax.Array]:
    """What a kernel reads first. Queries stand for what a call does not have."""
    keys = x.at_keys()
    of_keys = keys.order, keys.packs, keys.segment
    pointers = x.q, x.k, x.v, x.order, x.packs, x.segment, x.seed, *of_keys
    return [x.q if pointer is None else pointer for pointer in pointers]


def _launch(
    kernel, arrays, out_shape, program: ChunkProgram, constants: Constants, interpret: bool
):
    n_batch, _, n_heads, _ = arrays[0].shape
    grid = (-(-program.n_slots // program.tiles.rows), n_heads, n_batch)
    if interpret:
        return _interpreted(kernel, arrays, out_shape, grid, constants)
    import jax_triton

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return jax_triton.triton_call(
            *arrays,
            kernel=kernel,
            out_shape=out_shape,
            grid=grid,
            name=kernel.fn.__name__,
            num_warps=program.tiles.num_warps,
            num_stages=program.tiles.num_stages,
            compute_capability=COMPUTE_CAPABILITY,
            c=constants,
        )


COMPUTE_CAPABILITY: int | None = None  # the device's; where there is none, 90 for H100 and H200


def _interpreted(kernel, arrays, out_shape, grid, constants: Constants):
    """The same by Triton's interpreter, for which an array must look like a tensor of PyTorch."""

    def tensor(array: np.ndarray) -> Any:
        names = dict(float32="fp32", float16="fp16", int32="i32", uint32="u32")
        x = types.SimpleNamespace(array=array, dtype=names[str(array.dtype)])
        x.data_ptr = lambda: array.ctypes.data
        x.untyped_storage = x.cpu = x.new_empty = lambda *_, **__: x
        x.set_ = x.copy_ = x.storage_offset = x.size = x.stride = lambda *_: None
        return x

    def run(*arrays: Any) -> list[np.ndarray]:
        outputs = [np.zeros(shape.shape, shape.dtype) for shape in out_shape]
        inputs = [np.array(array) for array in arrays]
        kernel[grid](*map(tensor, inputs + outputs), c=constants)
        return outputs

    return jax.pure_callback(run, out_shape, *arrays)


def forward(
    chunks,
    q,
    k,
    v,
    order,
    segment_ids,
    seed,
    tiles: ChunkTiles | None = None,
    interpret: bool = False,
    precision: str = "tf32",
):
    """`kernels.chunked.forward`; `precision` of products of float32 is as Triton names it."""
    x = chunked._inputs(chunks, q, k, v, order, segment_ids, seed)
    batch, length, n_heads, _ = q.shape
    statistic = jax.ShapeDtypeStruct((batch, n_heads, length), jnp.float32)
    state = None
    for program in chunked._programs(chunks, x, tiles, chunked._forward_tiles):
        constants = _constants(program, x, state is None, precision)
        arrays = _pointers(x) + ([x.v, x.q, x.q] if state is None else list(state))
        shapes = [chunked._like(v, program), statistic, statistic]
        state = _launch(forward_kernel, arrays, shapes, program, constants, interpret)
    return tuple(state)


def backward(
    chunks,
    q,
    k,
    v,
    order,
    segment_ids,
    seed,
    out,
    row_max,
    row_sum,
    d_out,
    tiles: ChunkTiles | None = None,
    interpret: bool = False,
    precision: str = "tf32",
):
    """`kernels.chunked.backward`; `precision` as in `forward`."""
    x = chunked._inputs(chunks, q, k, v, order, segment_ids, seed)
    row = query_rows(
        d_out, out, row_max, row_sum, None if segment_ids is None else segment_ids[:, : len(q[0])]
    )
    dot, row_max, inverse_sum = (
        None if a is None else chunked._in_order(a, x.order)
        for a in (row.dot, row.row_max, row.inverse_sum)
    )
    rows = [row.d_out, dot, row_max, row_sum, dot if inverse_sum is None else inverse_sum]
    # Keys that are shared have no gradient of their own; something small stands for it.
    nothing = jax.ShapeDtypeStruct((16,), jnp.float32)
    gradients = None
    for program in chunked._programs(chunks, x, tiles, chunked._backward_tiles):
        constants = _constants(
            program,
            x,
            gradients is None,
            precision,
            inverse_sum=inverse_sum is not None,
            n_statistics=dot.shape[3],
        )
        before = [x.q] * 3 if gradients is None else list(gradients)
        shapes = [nothing if a is None else chunked._like(a, program) for a in (q, k, v)]
        arrays = _pointers(x) + rows + before
        gradients = _launch(backward_kernel, arrays, shapes, program, constants, interpret)
    dq, dk, dv = gradients
    return dq, None if k is None else dk, dv
