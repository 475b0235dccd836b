"""A step of LSH decoding before its softmax, as a Pallas kernel for NVIDIA GPUs (Triton).

Array operations hash the newest query, insert it in the order by bucket and find the keys in its
reach by a dozen small kernels, whose launches take longer than their work. A program of this kernel
does all of it for one hash of a head. It writes the caches in place: the slots after the newest
position's move by one.

Letters as in `reformax.ops.decoding.sorted_order`; M is the number of slots in reach.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from reformax.ops.kernels.triton import angular_hash
from reformax.ops.kernels.triton.common import launch, load, tile_side
from reformax.ops.numerics.normalization import EPSILON

# Positions that a program counts at a time: a text of so many waits for memory once.
TILE, WARPS = 16_384, 16


class InsertInputs(NamedTuple):
    """The arrays that a program reads."""

    q: Float[Array, "B N H"]
    rotations: Float[Array, "N H R F"]
    position: Int[Array, " B"]
    buckets: Int[Array, "B N R C"]
    order: Int[Array, "B N R C"]


class Inserted(NamedTuple):
    """The caches with the newest position, its key, and what its query sees."""

    buckets: Int[Array, "B N R C"]
    order: Int[Array, "B N R C"]
    key: Float[Array, "B N H"]  # the query, length-normalised
    index: Int[Array, "B N R M"]  # the positions in reach
    seen: Int[Array, "B N R M"]  # 1 or 0: whether there is one


class InsertOptions(NamedTuple):
    """The static part of a call.

    Attributes:
      factors: of the number of buckets.
      n_slots: M.
      op: its `slots_in_reach` are what a query sees. Equal ops make equal options, and their bound
        methods would not.
      interpret: whether to run anywhere, slowly.
    """

    factors: Sequence[int]
    n_slots: int
    op: Any
    interpret: bool = False


def _kernel(inputs: InsertInputs, out: Inserted, *, options: InsertOptions):
    at_hash = tuple(pl.program_id(i) for i in range(3))  # row, head, hash
    row, head, hash_index = at_hash
    size, capacity = inputs.q.shape[2], inputs.order.shape[3]
    # Reading several positions steps rows that have ended on, past the cache's end.
    newest = jnp.minimum(load(inputs.position.at[row], None), capacity - 1)
    feature = jnp.arange(tile_side(size), dtype=jnp.int32)
    q = load(inputs.q.at[row, head, feature], feature < size, 0.0)

    def rotation(line, index):
        return inputs.rotations.at[head, line, hash_index, index]

    # Products of tiles have 16 rows, which are all the query here.
    rows = jnp.broadcast_to(q[None], (16, q.shape[0]))
    bucket = jnp.max(angular_hash.bucket_of(rows, size, rotation, options.factors))
    tile = min(TILE, tile_side(capacity))
    start, slot = _slots_of_bucket(inputs.buckets, at_hash, bucket, newest, tile)
    index = jnp.arange(tile_side(options.n_slots), dtype=jnp.int32)
    at, exists = options.op.slots_in_reach(capacity, index, slot, start, newest)
    exists = exists & (at != slot) & (index < options.n_slots)
    before = jnp.where(at > slot, at - 1, at)  # the order that is read lacks the newest position
    found = load(inputs.order.at[(*at_hash, before)], exists, 0)
    for ref, x in ((out.index, found), (out.seen, exists.astype(jnp.int32))):
        pltriton.store(ref.at[(*at_hash, index)], x, mask=index < options.n_slots)
    x = q.astype(jnp.float32)
    key = x * lax.rsqrt(jnp.sum(x * x) * (1.0 / size) + EPSILON)
    pltriton.store(
        out.key.at[row, head, feature],
        key.astype(out.key.dtype),
        mask=(feature < size) & (hash_index == 0),
    )
    pltriton.store(out.buckets.at[(*at_hash, newest)], bucket)
    _insert(inputs.order, out.order, at_hash, slot, newest, tile, options.interpret)


def _slots_of_bucket(buckets, at_hash, bucket, newest, tile: int) -> tuple[Array, Array]:
    """The slot where a bucket begins, and the one after its last position before `newest`."""

    def count(i, counts):
        at = i * tile + jnp.arange(tile, dtype=jnp.int32)
        counted = at < newest
        of = load(buckets.at[(*at_hash, at)], counted, 0)
        more = (jnp.sum(counted & x, dtype=jnp.int32) for x in (of < bucket, of <= bucket))
        return tuple(n + m for n, m in zip(counts, more, strict=True))

    zero = jnp.int32(0)
    if buckets.shape[3] <= tile:
        return count(0, (zero, zero))
    return lax.fori_loop(
        zero, lax.div(newest + np.int32(tile - 1), np.int32(tile)), count, (zero, zero)
    )


def _insert(order, after, at_hash, slot, newest, tile: int, interpret: bool) -> None:
    """Puts `newest` in its slot, and what was there and later one slot further."""

    def move(first):
        at = first + jnp.arange(tile, dtype=jnp.int32)
        moves = (at >= slot) & (at <= newest)
        earlier = load(order.at[(*at_hash, at - 1)], moves & (at > slot), 0)
        if not interpret:  # all have read before one writes
            pltriton.debug_barrier()
        pltriton.store(after.at[(*at_hash, at)], jnp.where(at == slot, newest, earlier), mask=moves)

    if order.shape[3] <= tile:
        move(0)
        return
    last = lax.div(newest, np.int32(tile))  # the last tile first: it reads of the one before

    def body(i, _):
        move((last - i) * tile)

    lax.fori_loop(jnp.int32(0), last - lax.div(slot, np.int32(tile)) + 1, body, None)


def insert_newest(options: InsertOptions, inputs: InsertInputs) -> Inserted:
    """Hashes each row's newest query and inserts its position; updates the caches in place."""
    batch, n_heads, n_hashes, _ = inputs.order.shape
    of_reach = jax.ShapeDtypeStruct((batch, n_heads, n_hashes, options.n_slots), jnp.int32)
    like = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (inputs.buckets, inputs.order))
    key = jax.ShapeDtypeStruct(inputs.q.shape, inputs.q.dtype)
    (out,) = launch(
        functools.partial(_kernel, options=options),
        (inputs,),
        (Inserted(*like, key, of_reach, of_reach),),
        grid=(batch, n_heads, n_hashes),
        num_warps=WARPS,
        num_stages=1,
        interpret=options.interpret,
        name="insert_newest",
        aliases={3: 0, 4: 1},
    )
    return out
