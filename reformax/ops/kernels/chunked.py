"""Attention within neighbouring chunks, as Pallas kernels for NVIDIA GPUs (Triton).

They compute the function of `reformax.ops.parts.chunked`, one kernel for each hashing round and
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

Letters as in `reformax.ops.base`; Tp is T padded to whole chunks, W the packs of `PackedChunks`. A
*place* is an index into the order, a *position* one into the sequence. Positions of T or more are
neither read nor written. What stands at positions of segment 0 is not read either, or hidden.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from reformax.ops.kernels.common import (
    LOG2_E,
    LOWEST,
    QueryRows,
    column,
    dropout_mask,
    empty_softmax,
    hide,
    launch,
    line,
    load,
    power_of_two,
    product,
    query_rows,
    recompute_weights,
    softmax_step,
    view_rows,
)
from reformax.ops.parts.dropout import seed_words
from reformax.ops.parts.first_order import first_order
from reformax.ops.parts.normalization import length_normalize
from reformax.ops.parts.softmax import Softmax, nonzero


class Tiles(NamedTuple):
    """The sizes of a kernel: rows of a program, rows it reads at a time, warps, pipeline stages."""

    own: int
    other: int
    num_warps: int
    num_stages: int


class _Inputs(NamedTuple):
    """The arrays that both passes read; None for those that a call does not have.

    Without an order, the axes of heads and rounds have size 1. What is said of keys alone is None
    where they stand at the places of their queries.
    """

    q: Array  # [B, T, N, H]
    k: Array  # [B, T, N, H]
    v: Array  # [B, T, N, V]
    order: Array | None  # [B, N, R, Tp]
    packs: Array | None  # [W, B, N, R, Tp], `PackedChunks` of all rounds but the last
    segment: Array | None  # [B, N, R, Tp]
    seed: Array | None  # [6], of dropout
    key_order: Array | None = None  # [B, N, R, Tp]
    key_packs: Array | None = None  # [W, B, N, R, Tp]
    key_segment: Array | None = None  # [B, N, R, Tp]

    def at_keys(self) -> _Inputs:
        """The inputs whose order is that of the keys."""
        if self.key_order is None:
            return self
        return self._replace(order=self.key_order, packs=self.key_packs, segment=self.key_segment)


class _Gradients(NamedTuple):
    """The gradients of the inputs."""

    q: Array  # [B, T, N, H]; where keys are shared, theirs included
    k: Array | None  # [B, T, N, H]
    v: Array  # [B, T, N, V]


class _Block(NamedTuple):
    """Some places, and what decides which of them see each other."""

    place: Array
    position: Array
    segment: Array | None
    chunk: Array
    packs: tuple[Array, ...]  # the chunks in the rounds before this one


class PackedChunks(NamedTuple):
    """The chunks of a position in several rounds, packed in one integer of 32 bits.

    Three operations then compare two positions in all of these rounds. A chunk's number has `guard`
    bits and its field two more, so that no sum reaches the next field. The last field needs only
    one more, because its carry may be lost.
    """

    guard: int  # 2^guard is above the number of every chunk and every distance that is near
    before: int
    after: int

    @classmethod
    def of(cls, chunks: Any) -> PackedChunks:
        last = (chunks.length + chunks.padding) // chunks.chunk_len - 1
        near = chunks.n_chunks_before + chunks.n_chunks_after
        return cls(max(last, near, 1).bit_length(), chunks.n_chunks_before, chunks.n_chunks_after)

    @property
    def per_pack(self) -> int:
        """Rounds in a pack."""
        return 1 + (31 - self.guard) // (self.guard + 2)

    def repeated(self, value: int, n: int | None = None) -> np.int32:
        """A pack with `value` in the first `n` fields, or in all."""
        fields = range(self.per_pack if n is None else n)
        pack = sum(value << i * (self.guard + 2) for i in fields) & (2**32 - 1)
        return np.uint32(pack).view(np.int32)

    def pack(self, chunk: Int[Array, "B N R Tp"]) -> Int[Array, "B N Tp"]:
        """The chunks in up to `per_pack` rounds, the first in the lowest bits."""
        return sum(chunk[:, :, r] << r * (self.guard + 2) for r in range(chunk.shape[2]))

    def near(self, query: Array, key: Array, n: int) -> Array:
        """Whether the query's chunk looks at the key's in one of the first `n` rounds of a pack."""
        # With g = 2^guard, field by field: g + d, d the distance, has its bit g if d >= 0, and
        # g + most - d has it if d <= most.
        g, most = 1 << self.guard, self.before + self.after
        up = (query + self.repeated(g + self.after)) - key
        down = self.repeated(2 * g + most) - up
        return (up & down & self.repeated(g, n)) != 0


class _Program(NamedTuple):
    """One program of a kernel: its static part, and how it reads, masks and writes.

    `batch` and `head` are known within a kernel only.
    """

    chunks: Any  # ops.parts.orders.Chunks
    tiles: Tiles
    round: int
    n_rounds: int  # 0 where there is no order
    n_places: int
    batch: Any = None
    head: Any = None

    def here(self) -> _Program:
        """The program that runs."""
        # Outside of loops, where the interpreter does not know the numbers of a program.
        return self._replace(batch=pl.program_id(2), head=pl.program_id(1))

    @property
    def start(self):
        """The first place of the program's own block."""
        return pl.program_id(0) * self.tiles.own

    @property
    def is_last(self) -> bool:
        """Whether this round completes the softmax."""
        return self.round + 1 >= self.n_rounds

    @property
    def aligned(self) -> bool:
        """Whether every block lies within one chunk."""
        length = self.chunks.chunk_len
        return length % self.tiles.own == 0 and length % self.tiles.other == 0

    @property
    def whole(self) -> bool:
        """Whether every place of every block has a position, so that loads need no mask."""
        tiled = self.tiles.own % self.tiles.other == 0
        return tiled and self.aligned and self.n_places == self.chunks.length

    # Reading and writing.

    def load_places(self, ref, place, exists, other, pack: int | None = None) -> Array | None:
        """Entries of `[B, N, R, Tp]`, or of one pack of `[W, B, N, R, Tp]`; None of None."""
        if ref is None:
            return None
        index = (
            self.batch,
            self.head if ref.shape[-3] > 1 else jnp.int32(0),
            jnp.int32(self.round if ref.shape[-2] > 1 else 0),
            place,
        )
        index = index if pack is None else (jnp.int32(pack), *index)
        return self._load(ref.at[index], exists, other)

    def _load(self, view, exists, other) -> Array:
        return load(view, None if self.whole else exists, other)

    def block(self, x: _Inputs, start, size: int, stop=None) -> _Block:
        """`size` places from `start` on; those from `stop` on are padding."""
        place = start + jnp.arange(size, dtype=jnp.int32)
        exists = place < (self.n_places if stop is None else stop)
        if x.order is not None:
            position = self.load_places(x.order, place, exists, self.n_places)
        else:
            position = place if self.whole else jnp.where(exists, place, self.n_places)
        segment = self.load_places(x.segment, place, exists, 0)
        per_pack = PackedChunks.of(self.chunks).per_pack
        n_packs = 0 if x.packs is None else pl.cdiv(self.round, per_pack)
        packs = tuple(self.load_places(x.packs, place, exists, 0, pack) for pack in range(n_packs))
        return _Block(place, position, segment, place // self.chunks.chunk_len, packs)

    def rows(self, ref, block: _Block, some=None) -> Array:
        """A block's rows of `[B, T, N, H]`, or some; zeros where there is none, H padded."""
        width = power_of_two(ref.shape[3])
        view, exists = self._view_rows(ref, block, width)
        if some is not None:
            return load(view, exists & some[:, None], 0.0)
        if width != ref.shape[3]:
            return load(view, exists, 0.0)
        return self._load(view, exists, 0.0)

    def tokens(self, ref, block: _Block) -> Array:
        """A block's rows with zeros at padding too, for products that hide nothing.

        Weights of 0 keep nothing out of them, for 0 times NaN is NaN.
        """
        return self.rows(ref, block, None if block.segment is None else block.segment != 0)

    def put_rows(self, ref, block: _Block, value: Array) -> None:
        """Writes a block's rows of `[B, T, N, H]`."""
        view, exists = self._view_rows(ref, block, value.shape[1])
        pltriton.store(view, value.astype(ref.dtype), mask=exists)

    def _view_rows(self, ref, block: _Block, width: int):
        exists = block.position < ref.shape[1]
        return view_rows(ref, self.batch, block.position, self.head, width, exists)

    def statistics(self, ref, block: _Block, other: float) -> Array:
        """A block's entries of `[B, N, T]`."""
        view = ref.at[self.batch, self.head, block.position]
        return self._load(view, block.position < ref.shape[2], other)

    def put_statistics(self, ref, block: _Block, value: Array) -> None:
        """Writes a block's entries of `[B, N, T]`."""
        view = ref.at[self.batch, self.head, block.position]
        pltriton.store(view, value.astype(ref.dtype), mask=block.position < ref.shape[2])

    # Who sees whom.

    def _window(self, before: int, after: int):
        """The places within so many chunks of the program's own."""
        length = self.chunks.chunk_len
        first = (self.start // length - before) * length
        last = ((self.start + self.tiles.own - 1) // length + 1 + after) * length
        return jnp.maximum(first, 0), jnp.minimum(last, self.n_places)

    def keys(self):
        """The places, from and to, of the keys that the program's queries see."""
        c = self.chunks
        first, last = self._window(c.n_chunks_before, c.n_chunks_after)
        if self.n_rounds == 0 and c.causal:
            last = jnp.minimum(last, self.start + self.tiles.own)
        if self.n_rounds == 0 and c.window is not None:
            first, last = self._within_reach(first, last)
        return first, last

    def queries(self):
        """The places, from and to, of the queries that see the program's keys."""
        c = self.chunks
        first, last = self._window(c.n_chunks_after, c.n_chunks_before)
        if self.n_rounds == 0 and c.causal:
            first = self.start
        if self.n_rounds == 0 and c.window is not None:
            first, last = self._within_reach(first, last)
        return first, last

    def _within_reach(self, first, last):
        """The places, of those from `first` to `last`, within a window of the program's own."""
        reach = self.start - self.chunks.window + 1
        first = jnp.maximum(first, reach // self.tiles.other * self.tiles.other)
        return first, jnp.minimum(last, self.start + self.tiles.own + self.chunks.window - 1)

    def over(self, x: _Inputs, window, body, carry):
        """`carry = body(block, carry)` over the blocks of a window."""
        first, last = window
        size = self.tiles.other

        def step(i, carry):
            return body(self.block(x, first + i * size, size, last), carry)

        n = lax.div(last - first + np.int32(size - 1), np.int32(size))
        return lax.fori_loop(np.int32(0), n, step, carry)

    def visible(self, q: _Block, k: _Block) -> Array:
        """Which key, `[1, K]`, each query, `[Q, 1]`, sees in this round; or both transposed."""
        c = self.chunks
        if c.causal:
            mask = k.position < q.position if c.shared_qk else k.position <= q.position
        else:
            shape = jnp.broadcast_shapes(q.position.shape, k.position.shape)
            mask = jnp.broadcast_to(k.position < c.length, shape)
            mask = mask & (k.position != q.position) if c.shared_qk else mask
        if c.window is not None:
            mask = mask & (jnp.abs(q.position - k.position) < c.window)
        if q.segment is not None:
            mask = mask & (q.segment == k.segment) & (k.segment != 0)
        if not self.aligned:
            mask = mask & self._near(q.chunk, k.chunk)
        # A key counts in the first round that shows it (the paper's N_ij).
        n_rounds, packed = self.round, PackedChunks.of(self.chunks)
        for query_pack, key_pack in zip(q.packs, k.packs, strict=True):
            mask = mask & ~packed.near(query_pack, key_pack, min(n_rounds, packed.per_pack))
            n_rounds -= packed.per_pack
        return mask

    def _near(self, query_chunk, key_chunk) -> Array:
        """Whether a key's chunk is among those that a query's chunk looks at."""
        before, after = self.chunks.n_chunks_before, self.chunks.n_chunks_after
        # One comparison in place of two: below 0 is a large number without a sign.
        distance = (query_chunk - key_chunk + after).astype(jnp.uint32)
        return distance <= jnp.uint32(before + after)

    def dropped(self, x: _Inputs, query: _Block, key: _Block) -> Array | float:
        """The dropout mask of the weights of a query, or queries, on keys."""
        rate = self.chunks.dropout
        return dropout_mask(x.seed, rate, self.batch, self.head, query.position, key.position)

    def lone_weight(self, x: _Inputs, block: _Block, total: Array) -> Array:
        """The weight of a position's own value: 0 if it sees another, or its dropout mask."""
        alone = (total == 0.0) & (block.position < self.chunks.length)
        if block.segment is not None:
            alone = alone & (block.segment != 0)
        return jnp.where(alone, self.dropped(x, block, block), 0.0)


def _forward_kernel(x: _Inputs, before: Softmax | None, after: Softmax, *, program: _Program):
    here = program.here()
    own = here.block(x, here.start, here.tiles.own)
    queries = column(own)
    # The longest wait comes first.
    if before is None:
        state = empty_softmax(here.tiles.own, x.v.shape[3])
    else:
        acc, top = here.rows(before.acc, own), here.statistics(before.top, own, LOWEST)
        state = Softmax(acc, top, here.statistics(before.total, own, 0.0))
    q = here.rows(x.q, own)

    def attend(block, state):
        keys = line(block)
        k, v = here.rows(x.k, block), here.tokens(x.v, block)
        logits = hide(product(q, k, transpose_b=True), here.visible(queries, keys))
        return softmax_step(state, logits, v, x.q.shape[3], here.dropped(x, queries, keys))

    acc, top, total = here.over(x.at_keys(), here.keys(), attend, state)
    if here.is_last:
        acc = acc * (1.0 / nonzero(total))[:, None]
        if here.chunks.sees_itself:
            lone = here.lone_weight(x, own, total)
            acc = acc + lone[:, None] * here.rows(x.v, own, lone > 0.0).astype(jnp.float32)
    here.put_rows(after.acc, own, acc)
    here.put_statistics(after.top, own, top)
    here.put_statistics(after.total, own, total)


def _backward_kernel(
    x: _Inputs, row: QueryRows, before: _Gradients | None, after: _Gradients, *, program: _Program
):
    here = program.here()
    queries_own = here.block(x, here.start, here.tiles.own)
    own = queries_own
    if x.key_order is not None:
        own = here.block(x.at_keys(), here.start, here.tiles.own)
    size = x.q.shape[3]
    scale = 1.0 / math.sqrt(size)

    def queries(block):
        exists = block.position < here.chunks.length
        top = here.load_places(row.top, block.place, exists, 0.0) * (scale * LOG2_E)
        share = here.load_places(row.share, block.place, exists, 0.0)
        dot = here.load_places(row.dot, block.place, exists, 0.0)
        return here.rows(row.d_out, block), dot, top, share

    k, v = here.rows(x.k, own), here.tokens(x.v, own)

    def as_keys(block, sums):
        dk, dv = sums
        q = here.tokens(x.q, block)
        d_out, dot, top, share = queries(block)
        query, key = line(block), column(own)
        logits = hide(product(k, q, transpose_b=True), here.visible(query, key))
        p = recompute_weights(logits, top[None, :], line(share), size)
        dropped = here.dropped(x, query, key)
        dv = dv + product((p * dropped).astype(d_out.dtype), d_out)
        ds = p * (product(v, d_out, transpose_b=True) * dropped - dot[None, :])
        return dk + product(ds.astype(q.dtype), q), dv

    sums = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    dk, dv = here.over(x, here.queries(), as_keys, sums)
    if here.chunks.sees_itself and here.is_last:
        lone = here.lone_weight(x, own, here.statistics(row.total, own, 1.0))
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
    d_out, dot, top, share = queries(own)
    if here.chunks.shared_qk:
        dq = _through_normalization(q, dk, size)
    else:
        dq = jnp.zeros(q.shape, jnp.float32)

    def as_queries(block, dq):
        k, v = here.tokens(x.k, block), here.tokens(x.v, block)
        query, key = column(own), line(block)
        logits = hide(product(q, k, transpose_b=True), here.visible(query, key))
        p = recompute_weights(logits, top[:, None], column(share), size)
        dropped = here.dropped(x, query, key)
        ds = p * (product(d_out, v, transpose_b=True) * dropped - dot[:, None])
        return dq + product(ds.astype(k.dtype), k)

    dq = here.over(x.at_keys(), here.keys(), as_queries, dq) * scale
    if before is not None:
        dq = dq + here.rows(before.q, own)
    here.put_rows(after.q, own, dq)


def _through_normalization(q: Array, dk: Array, size: int) -> Array:
    """The gradient of queries whose keys, `length_normalize` of them, have the gradient `dk`."""
    q = q.astype(jnp.float32)
    factor = lax.rsqrt(jnp.sum(q * q, axis=1) / size + 1e-6)[:, None]
    k = q * factor
    return (dk - k * (jnp.sum(k * dk, axis=1) / size)[:, None]) * factor


def _launch_round(kernel, program: _Program, inputs, carried, out_shape, interpret: bool):
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
    chunks: Any, x: _Inputs, tiles: Tiles | None, fastest: Callable[[_Inputs, int], Tiles]
) -> list[_Program]:
    """A program for each round, or the only one where there is no order."""
    n_places = chunks.length + chunks.padding
    n_rounds = 0 if x.order is None else x.order.shape[2]
    rounds = range(max(n_rounds, 1))
    return [_Program(chunks, tiles or fastest(x, r), r, n_rounds, n_places) for r in rounds]


def _in_order(x: Array, order: Array | None) -> Array:
    """From `[B, N or 1, T]`, by position, to `[B, N or 1, R or 1, Tp]`, by place."""
    if order is None:
        return x[:, :, None]
    n_places = order.shape[3]
    x = jnp.pad(x, ((0, 0), (0, 0), (0, n_places - x.shape[2])))[:, :, None]
    return jnp.take_along_axis(x, order, axis=3, mode="promise_in_bounds")


def _inputs(chunks, q, k, v, order, segments, rng) -> _Inputs:
    packs = segment = key_order = key_packs = key_segment = None
    two_orders = order is not None and order.key_places is not None
    if chunks.count_once and order is not None and order.queries.shape[2] > 1:
        packs = _packs(chunks, order.with_places().places, order.queries)
        if two_orders:
            key_packs = _packs(chunks, order.key_places, order.keys)
    if two_orders:
        key_order = order.keys
    order = None if order is None else order.queries
    if segments is not None:
        segment = _in_order(segments[:, None], order)
        key_segment = _in_order(segments[:, None], key_order) if two_orders else None
    seed = seed_words(rng, len(q)) if chunks.dropout > 0.0 else None
    k = length_normalize(q) if k is None else k
    return _Inputs(q, k, v, order, packs, segment, seed, key_order, key_packs, key_segment)


def _packs(
    chunks: Any, places: Int[Array, "B N R Tp"], order: Int[Array, "B N R Tp"]
) -> Int[Array, "W B N R Tp"]:
    """The chunks of the position at each place in all rounds but the last."""
    chunk, packed = places[:, :, :-1] // chunks.chunk_len, PackedChunks.of(chunks)
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
    segments: Int[Array, "B Tp"] | None,
    rng: Array | None,
) -> Float[Array, "B T N V"]:
    """`ops.parts.chunked.chunked_attention` by these kernels, with its gradient.

    Arguments are those of `forward`.
    """
    return _attend_forward(chunks, interpret, q, k, v, order, segments, rng)[0]


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
    segments: Int[Array, "B Tp"] | None,
    rng: Array | None,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B N T"], Float[Array, "B N T"]]:
    """The attended values; for each row the largest logit and the sum of `exp(logit - largest)`.

    The largest logit is that of the products of queries and keys, before they are scaled.

    Args:
      chunks, order: as in `ops.parts.chunked.chunked_attention`.
      q, k, v, rng: as there.
      segments: as there, padded to whole chunks with 0.
      tiles: how the kernel is cut; None: as was fastest on an H200.
      interpret: whether to run it anywhere, slowly.
    """
    inputs = _inputs(chunks, q, k, v, order, segments, rng)
    batch, length, n_heads, _ = q.shape
    statistic = jax.ShapeDtypeStruct((batch, n_heads, length), jnp.float32)
    state = None
    for program in _programs(chunks, inputs, tiles, _forward_tiles):
        shape = Softmax(_like(v, program), statistic, statistic)
        state = _launch_round(_forward_kernel, program, (inputs,), state, shape, interpret)
    return tuple(state)


def backward(
    chunks: Any,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T N H"] | None,
    v: Float[Array, "B T N V"],
    order: Any,
    segments: Int[Array, "B Tp"] | None,
    rng: Array | None,
    out: Float[Array, "B T N V"],
    top: Float[Array, "B N T"],
    total: Float[Array, "B N T"],
    d_out: Float[Array, "B T N V"],
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> tuple[Array, Array | None, Array]:
    """The gradients of q, k (None where keys are shared) and v.

    Args:
      chunks, q, k, v, order, segments, rng: as in `forward`.
      out, top, total: what it returned.
      d_out: the gradient of `out`.
      tiles, interpret: as in `forward`.
    """
    inputs = _inputs(chunks, q, k, v, order, segments, rng)
    ids = None if segments is None else segments[:, : q.shape[1]]
    row = query_rows(d_out, out, top, total, ids)
    dot, top = (_in_order(x, inputs.order) for x in (row.dot, row.top))
    share = None if row.share is None else _in_order(row.share, inputs.order)
    row = QueryRows(row.d_out, dot, top, total, share)
    gradients = None
    for program in _programs(chunks, inputs, tiles, _backward_tiles):
        shape = _Gradients(*(None if x is None else _like(x, program) for x in (q, k, v)))
        inputs_and_rows = inputs, row
        gradients = _launch_round(
            _backward_kernel, program, inputs_and_rows, gradients, shape, interpret
        )
    return tuple(gradients)


def _like(x: Array, program: _Program) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a round's result: float32, except in the last round."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype if program.is_last else jnp.float32)


# The fastest on an H200, of `own` and `other` of 16 to 128, 4 and 8 warps, 1 to 9 stages. An order
# is read ahead too, so it takes five stages to load one block of rows while computing with another;
# with three, a block is waited for at once. The forward pass's first round reads no state: with
# three stages more of its programs fit a processor.


def _forward_tiles(x: _Inputs, round_: int) -> Tiles:
    if x.order is None:
        return Tiles(64, 64, 4, 3)
    if _row_bytes(x) > 128:
        return Tiles(64, 32, 4, 5)
    return Tiles(64, 64, 4, 5 if round_ else 3)


def _backward_tiles(x: _Inputs, round_: int) -> Tiles:
    del round_
    if x.order is None:
        return Tiles(64, 64, 4, 1)
    return Tiles(64, 64 if _row_bytes(x) <= 128 else 32, 4, 5)


def _row_bytes(x: _Inputs) -> int:
    """Bytes of a row of keys or of values, the wider. Rows of all stages share a chip's memory."""
    return max(x.k.shape[3], x.v.shape[3]) * x.v.dtype.itemsize
