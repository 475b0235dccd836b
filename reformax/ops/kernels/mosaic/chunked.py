"""The forward pass of attention within neighbouring chunks, for Hopper GPUs.

It computes the function of `reformax.ops.softmax.chunked` as `kernels.triton.chunked` does, whose
backward pass it takes:

  * A warpgroup holds 64 queries and visits blocks of 64 keys. Copies of the next blocks run while
    it computes. Without an order the chip's unit for bulk copies reads blocks; in an order, threads
    read rows by position.
  * Each hash writes its output by slot, divided by its sum, in the dtype of the values. Array code
    merges the hashes by position. Hashes thus wait for none, and no kernel writes rows by index.

Letters and words as in `kernels.triton.chunked`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from reformax.ops.kernels.mosaic.common import ROWS, Warpgroup, launch, tiles
from reformax.ops.kernels.triton import chunked as triton
from reformax.ops.kernels.triton import flash
from reformax.ops.kernels.triton.chunk_programs import (
    ChunkBlock,
    ChunkInputs,
    ChunkProgram,
    ChunkTiles,
)
from reformax.ops.kernels.triton.common import LOG2_E, LOWEST
from reformax.ops.kernels.triton.packed_chunks import PackedChunks
from reformax.ops.masking.masks import TokensFirst, segment_pair
from reformax.ops.masking.padding import tokens_only
from reformax.ops.masking.visibility import is_token
from reformax.ops.softmax.learned_sinks import Results
from reformax.ops.softmax.online import Softmax, nonzero
from reformax.ops.softmax.orders import Chunking, UnsortedInputs

# Blocks of keys on their way or in use.
STAGES = 2
TILE = ROWS, ROWS


@dataclasses.dataclass(frozen=True, eq=False)
class HopperProgram(ChunkProgram):
    """The slots that a warpgroup visits, and its mask, on whole tiles."""

    warpgroup: Warpgroup = Warpgroup(False)
    tile: Any = None  # the index of its queries' tile

    @property
    def start(self):
        return self.tile * ROWS

    def side_of(self, start: Any, axis: int, stop: Any) -> ChunkBlock:
        """The slots from `start` along an axis of a tile: of queries 0, of keys 1."""
        x, of_slots = self.x, functools.partial(self._of_slots, start, axis)
        slot = self.warpgroup.indices(TILE, axis) + start
        position = slot if x.order is None else of_slots(x.order)
        exists = (position < self.chunks.length) & (slot < stop)
        position = jnp.where(exists, position, self.n_slots)
        per_pack = PackedChunks.of(self.chunks).per_pack
        n_packs = 0 if x.packs is None else pl.cdiv(self.hash_index, per_pack)
        packs = tuple(of_slots(x.packs, pack) for pack in range(n_packs))
        segment = None if x.segment is None else of_slots(x.segment)
        chunk = lax.div(slot, jnp.int32(self.chunks.chunk_len))
        return ChunkBlock(slot, position, exists, segment, chunk, packs)

    def _of_slots(self, start: Any, axis: int, ref: Any, pack: int | None = None) -> Array:
        """Entries of `[B, N, R, Tp]`, or of a pack of `[W, B, N, R, Tp]`."""
        *_, n_heads, n_hashes, _ = ref.shape
        index = (
            self.batch,
            self.head if n_heads > 1 else 0,
            self.hash_index if n_hashes > 1 else 0,
            pl.ds(start, ROWS),
        )
        index = index if pack is None else (pack, *index)
        return self.warpgroup.along(ref, index, TILE, axis)


def _kernel(*refs: Any, structure: Any, program: HopperProgram) -> None:
    n_inputs = structure.num_leaves
    x = jax.tree.unflatten(structure, refs[:n_inputs])
    out, row_max, row_sum, q, k, v, statistics, q_barrier, barriers = refs[n_inputs:]
    axes = dict(batch=lax.axis_index("b"), head=lax.axis_index("n"), tile=lax.axis_index("i"))
    program, warpgroup = dataclasses.replace(program, x=x, **axes), program.warpgroup
    batch, head, start = program.batch, program.head, program.start
    first, last = program.key_slots()
    n_blocks = lax.div(last - first + (ROWS - 1), jnp.int32(ROWS))

    def read(slot: Any, arrays: Any, to: Any, barrier: Any) -> None:
        if x.order is None:
            for ref, tile in zip(arrays, to, strict=True):
                plgpu.copy_gmem_to_smem(ref.at[batch, pl.ds(slot, ROWS), head], tile, barrier)
            return
        rows = [ref.at[batch, :, head] for ref in arrays]
        positions = x.order.at[batch, head, program.hash_index, pl.ds(slot, ROWS)]
        warpgroup.gather(to, rows, positions)

    def begin(block: Any) -> None:
        stage = lax.rem(block, jnp.int32(STAGES))

        @pl.when(block < n_blocks)
        def _():
            to = k.at[stage], v.at[stage]
            read(first + block * ROWS, (x.k, x.v), to, barriers.at[stage])

        if x.order is not None:
            warpgroup.commit()

    def arrived(barrier: Any) -> None:
        if x.order is None:
            plgpu.barrier_wait(barrier)
        else:
            warpgroup.wait(STAGES - 1)

    read(start, (x.q,), (q.at[0],), q_barrier)
    for block in range(STAGES):
        begin(jnp.int32(block))
    if x.order is None:
        plgpu.barrier_wait(q_barrier)
    size, queries = x.q.shape[3], program.side_of(start, 0, program.n_slots)
    scale = LOG2_E / math.sqrt(size)

    def visit(block: Any, state: Softmax) -> Softmax:
        stage = lax.rem(block, jnp.int32(STAGES))
        arrived(barriers.at[stage])
        keys = program.side_of(first + block * ROWS, 1, last)
        products = warpgroup.product(q.at[0], k.at[stage], transpose_b=True)
        products = program.logits.capped(products, program.unit)
        logits = jnp.where(program.visible(queries, keys), products * scale, -jnp.inf)
        row_max = jnp.maximum(state.row_max, jnp.max(logits, axis=1))
        weights = jnp.exp2(logits - lax.broadcast_in_dim(row_max, TILE, [0]))
        decay = jnp.exp2(state.row_max - row_max)
        row_sum = state.row_sum * decay + jnp.sum(weights, axis=1)
        acc = state.acc * lax.broadcast_in_dim(decay, state.acc.shape, [0])
        acc = acc + warpgroup.product(weights.astype(v.dtype), v.at[stage])
        begin(block + STAGES)
        return Softmax(acc, row_max, row_sum)

    empty = Softmax(
        warpgroup.full((ROWS, x.v.shape[3]), 0.0),
        warpgroup.full((ROWS,), LOWEST),
        warpgroup.full((ROWS,), 0.0),
    )
    state = lax.fori_loop(jnp.int32(0), n_blocks, visit, empty)
    inverse = lax.broadcast_in_dim(1.0 / nonzero(state.row_sum), state.acc.shape, [0])
    v[0] = (state.acc * inverse).astype(v.dtype)
    statistics[0], statistics[1] = state.row_max * (1.0 / LOG2_E), state.row_sum
    plgpu.commit_smem()
    slots = pl.ds(start, ROWS)
    at = (batch, slots, head) if x.order is None else (batch, head, slots)
    plgpu.copy_smem_to_gmem(v.at[0], out.at[at])
    for i, ref in enumerate((row_max, row_sum)):
        plgpu.copy_smem_to_gmem(statistics.at[i], ref.at[batch, head, slots])
    plgpu.wait_smem_to_gmem(0)


def forward(chunks: Chunking, x: UnsortedInputs, interpret: bool = False) -> Results:
    """The results of `flash.attention`; `obstacle` says which arrays a call may not have."""
    q, k, v, order, segment_ids, seed = x
    if isinstance(segment_ids, TokensFirst):
        segment_ids = segment_ids.segment_ids
    ids = None if segment_ids is None else segment_pair(segment_ids)[0][:, : q.shape[1]]
    if ids is not None:  # padding may be NaN, and 0 times NaN is NaN
        q, k, v = (None if y is None else tokens_only(y, ids) for y in (q, k, v))
    x = triton.chunk_inputs(chunks, UnsortedInputs(q, k, v, order, segment_ids, seed))
    run = functools.partial(_launch, chunks, _with_whole_tiles(x, interpret), interpret)
    if order is None:
        out, row_max, row_sum = run(0)
        return out[:, : q.shape[1]], row_max, row_sum
    n_hashes = order.query_positions.shape[2]
    slots = order.with_slots().query_slots[..., : q.shape[1]]
    parts = (_by_position(run(r), slots[:, :, r]) for r in range(n_hashes))
    state = functools.reduce(Softmax.merge, (Softmax.of_output(*part) for part in parts))
    out, (_, row_max, row_sum) = state.output(), state
    if chunks.sees_itself:
        lone = row_sum == 0.0
        if ids is not None:
            lone = lone & is_token(ids)[:, None]
        out = jnp.where(lone[..., None], jnp.swapaxes(v, 1, 2).astype(out.dtype), out)
    return jnp.swapaxes(out, 1, 2).astype(v.dtype), row_max, row_sum


# `ops.softmax.chunked.chunked_attention` by this forward pass.
attend = flash.attention(forward, triton.backward)


def _with_whole_tiles(x: ChunkInputs, interpret: bool) -> ChunkInputs:
    """Sorted integers padded by more than a tile, so that all reads of tiles are within them.

    Bulk copies of rows that do not exist are zeros, but not those of all of JAX's interpreters.
    """

    def pad(array: Array | None, value: int = 0, axis: int = -1) -> Array | None:
        if array is None:
            return None
        widths = [(0, 0)] * array.ndim
        widths[axis] = 0, -array.shape[axis] % ROWS + ROWS
        return jnp.pad(array, widths, constant_values=value)

    order = None if x.order is None else pad(x.order, x.order.shape[3])
    x = x._replace(order=order, packs=pad(x.packs), segment=pad(x.segment))
    if interpret and order is None:
        x = x._replace(**{name: pad(getattr(x, name), axis=1) for name in "qkv"})
    return x


def _launch(
    chunks: Any, x: ChunkInputs, interpret: bool, hash_index: int
) -> tuple[Array, Float[Array, "B N T"], Float[Array, "B N T"]]:
    """The kernel of a hash: its results by slot or, without an order, by position."""
    (batch, n_rows, n_heads, size), length = x.q.shape, chunks.length
    dtype, d_v, n_slots = x.v.dtype, x.v.shape[3], length + chunks.padding
    n_hashes = 0 if x.order is None else x.order.shape[2]
    if x.order is not None:
        n_slots = x.order.shape[3] // ROWS * ROWS - ROWS
    n_tiles = pl.cdiv(n_slots, ROWS)
    program = HopperProgram(
        *(chunks, ChunkTiles(ROWS, ROWS, 4, STAGES), hash_index, n_hashes, n_slots),
        warpgroup=Warpgroup(interpret),
    )
    by_slot = batch, n_heads, n_tiles * ROWS
    statistic = jax.ShapeDtypeStruct(by_slot, jnp.float32)
    out = (*by_slot, d_v) if n_hashes else (batch, n_rows, n_heads, d_v)
    leaves, structure = jax.tree.flatten(x)
    out, row_max, row_sum = launch(
        functools.partial(_kernel, structure=structure, program=program),
        leaves,
        [jax.ShapeDtypeStruct(out, dtype), statistic, statistic],
        [
            tiles(1, size, dtype),
            tiles(STAGES, size, dtype),
            tiles(STAGES, d_v, dtype),
            plgpu.SMEM((2, ROWS), jnp.float32),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        ],
        grid=dict(i=n_tiles, n=n_heads, b=batch),
        interpret=interpret,
        name="mosaic_chunked_forward",
    )
    return out, row_max[..., :length], row_sum[..., :length]


def _by_position(results: tuple[Array, ...], slots: Int[Array, "B N T"]) -> list[Array]:
    """Results of a hash, `[B, N, Tp, ...]`, by position."""

    def take(x: Array) -> Array:
        index = slots if x.ndim == 3 else slots[..., None]
        return jnp.take_along_axis(x, index, axis=2, mode="promise_in_bounds")

    return [take(x) for x in results]
