"""Attention within neighbouring chunks, as Pallas kernels for NVIDIA GPUs (Triton).

What `reformax.ops.parts.chunked` computes in array operations, one kernel a hashing round and pass:

  * rows of q, k, v are read, and results written, at the positions that the order names, so that no
    sorted copy of them exists;
  * the rounds run one after the other and carry the softmax on: a round reads the accumulator, the
    maximum and the sum that the rounds before it left at a position, and goes on from there. Each
    position has one reader and one writer a round, so sums have one order and need no atomics;
  * the backward pass recomputes scores from the maximum and the sum (Dao et al. 2022, algorithm 4);
    a program takes a block of positions first as keys and then as queries, so that it too writes
    one row for each.

These kernels wait for instructions more than for memory. So whatever is a number a row and not a
vector (segments, chunks, maxima) is put in order beforehand, where it is read side by side.

Letters as in `reformax.ops.base`; Tp is T padded to whole chunks, W words. A *place* is an index
into the order, a *position* one into the sequence. Positions of T or more are padding, which is
neither read nor written.
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

from reformax.ops.kernels.common import HIDDEN, LOG2_E, LOWEST, divided, power_of_two, product
from reformax.ops.parts.dropout import dropout_mask, seed_words
from reformax.ops.parts.normalization import length_normalize


class Tiles(NamedTuple):
    """How a kernel is cut: rows a program owns, rows it reads at a time, warps, pipeline stages."""

    own: int
    other: int
    num_warps: int
    num_stages: int


class _Inputs(NamedTuple):
    """What both passes read; None where a call has no such thing.

    Numbers of places have axes for heads and rounds of size 1 where there is no order.
    """

    q: Array  # [B, T, N, H]
    k: Array  # [B, T, N, H]
    v: Array  # [B, T, N, V]
    order: Array | None  # [B, N, R, Tp]
    seen: Array | None  # [W, B, N, R, Tp], the chunks of other rounds, in `Fields`
    segment: Array | None  # [B, N, R, Tp]
    words: Array | None  # [2], the source of dropout


class _Softmax(NamedTuple):
    """The state of a row's softmax: sum_j exp(s_j - top) v_j, and the same without v."""

    acc: Array  # [B, T, N, V]
    top: Array  # [B, N, T]
    total: Array  # [B, N, T]


class _Row(NamedTuple):
    """What the backward pass knows of each query."""

    d_out: Array  # [B, T, N, V], divided by the sum of the row's softmax, unless that is `share`
    dot: Array  # [B, N, R, Tp], the product of the output and `d_out`
    top: Array  # [B, N, R, Tp]
    total: Array  # [B, N, T]
    share: Array | None  # [B, N, R, Tp], 1 / sum; float16 has no room for a `d_out` so divided


class _Gradients(NamedTuple):
    q: Array  # [B, T, N, H]; where keys are shared, of both
    k: Array | None  # [B, T, N, H]
    v: Array  # [B, T, N, V]


class _Block(NamedTuple):
    """Some places, and what decides who sees whom there."""

    place: Array
    position: Array
    segment: Array | None
    chunk: Array
    seen: tuple[Array, ...]  # the chunks in the rounds before this, in `Fields`

    def column(self) -> _Block:
        return jax.tree.map(lambda x: x[:, None], self)

    def line(self) -> _Block:
        return jax.tree.map(lambda x: x[None, :], self)


class Fields(NamedTuple):
    """The chunks of several rounds side by side in words, where three operations compare them all.

    Numbers have `guard` bits and fields two more, so that what is added in one does not reach the
    next; the last field of a word has one more, for its carry may be lost.
    """

    guard: int  # 2^guard is above every number of a chunk and every distance that is near
    before: int
    after: int

    @classmethod
    def of(cls, chunks: Any) -> Fields:
        last = (chunks.length + chunks.padding) // chunks.chunk_len - 1
        near = chunks.n_chunks_before + chunks.n_chunks_after
        return cls(max(last, near, 1).bit_length(), chunks.n_chunks_before, chunks.n_chunks_after)

    @property
    def per_word(self) -> int:
        return 1 + (31 - self.guard) // (self.guard + 2)

    def place(self, value: int, n: int | None = None) -> np.int32:
        """A word with `value` in the first `n` fields, or in all."""
        fields = range(self.per_word if n is None else n)
        word = sum(value << i * (self.guard + 2) for i in fields) & (2**32 - 1)
        return np.uint32(word).view(np.int32)

    def pack(self, chunk: Int[Array, "B N R Tp"]) -> Int[Array, "B N Tp"]:
        """The chunks of up to `per_word` rounds in one word, the first lowest."""
        return sum(chunk[:, :, r] << r * (self.guard + 2) for r in range(chunk.shape[2]))

    def near(self, query: Array, key: Array, n: int) -> Array:
        """Whether in one of the first `n` fields the query's chunk looks at the key's."""
        # With g = 2^guard, field by field: g + d, d the distance, has its bit g if d >= 0, and
        # g + most - d has it if d <= most.
        g, most = 1 << self.guard, self.before + self.after
        up = (query + self.place(g + self.after)) - key
        down = self.place(2 * g + most) - up
        return (up & down & self.place(g, n)) != 0


class _Program(NamedTuple):
    """One program of a kernel: its static part, and how it reads, masks and writes."""

    chunks: Any  # ops.chunked.Chunks
    tiles: Tiles
    round: int
    n_rounds: int  # 0 where there is no order
    n_places: int
    batch: Any = None
    head: Any = None

    def here(self) -> _Program:
        # Asked once, outside of loops, where the interpreter does not know them.
        return self._replace(batch=pl.program_id(2), head=pl.program_id(1))

    @property
    def start(self):
        return pl.program_id(0) * self.tiles.own

    @property
    def is_last(self) -> bool:
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

    @property
    def fields(self) -> Fields:
        return Fields.of(self.chunks)

    # Reading and writing.

    def at_places(self, ref, place, exists, other, word: int | None = None) -> Array:
        """Entries of `[B, N, R, Tp]`, or of one word of `[W, B, N, R, Tp]`, at some places."""
        index = (
            self.batch,
            self.head if ref.shape[-3] > 1 else jnp.int32(0),
            jnp.int32(self.round if ref.shape[-2] > 1 else 0),
            place,
        )
        index = index if word is None else (jnp.int32(word), *index)
        return self._load(ref.at[index], exists, other)

    def _load(self, at, mask, other) -> Array:
        if self.whole:
            return pltriton.load(at)
        return pltriton.load(at, mask=mask, other=other)

    def block(self, x: _Inputs, start, size: int, stop=None) -> _Block:
        """`size` places from `start` on; those from `stop` on are padding."""
        place = start + jnp.arange(size, dtype=jnp.int32)
        exists = place < (self.n_places if stop is None else stop)
        if x.order is not None:
            position = self.at_places(x.order, place, exists, self.n_places)
        else:
            position = place if self.whole else jnp.where(exists, place, self.n_places)
        segment = None
        if x.segment is not None:
            segment = self.at_places(x.segment, place, exists, 0)
        n_words = 0 if x.seen is None else pl.cdiv(self.round, self.fields.per_word)
        seen = tuple(self.at_places(x.seen, place, exists, 0, word) for word in range(n_words))
        return _Block(place, position, segment, place // self.chunks.chunk_len, seen)

    def _rows_at(self, ref, block: _Block, width: int):
        """Where a block's rows of `[B, T, N, H]` are, and which numbers of them there are."""
        size = ref.shape[3]
        column = jnp.arange(width, dtype=jnp.int32)[None, :]
        mask = jnp.broadcast_to((block.position < ref.shape[1])[:, None], (len(block.place), width))
        mask = mask if width == size else mask & (column < size)
        return ref.at[self.batch, block.position[:, None], self.head, column], mask

    def rows(self, ref, block: _Block, some=None) -> Array:
        """A block's rows of `[B, T, N, H]`, or some; zeros where there is none, H padded."""
        width = power_of_two(ref.shape[3])
        at, mask = self._rows_at(ref, block, width)
        if some is not None:
            return pltriton.load(at, mask=mask & some[:, None], other=0.0)
        if width != ref.shape[3]:
            return pltriton.load(at, mask=mask, other=0.0)
        return self._load(at, mask, 0.0)

    def put_rows(self, ref, block: _Block, value: Array) -> None:
        at, mask = self._rows_at(ref, block, value.shape[1])
        pltriton.store(at, value.astype(ref.dtype), mask=mask)

    def numbers(self, ref, block: _Block, other: float) -> Array:
        """Entries of `[B, N, T]` at a block's positions."""
        at = ref.at[self.batch, self.head, block.position]
        return self._load(at, block.position < ref.shape[2], other)

    def put_numbers(self, ref, block: _Block, value: Array) -> None:
        at = ref.at[self.batch, self.head, block.position]
        pltriton.store(at, value.astype(ref.dtype), mask=block.position < ref.shape[2])

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
            reach = self.start - c.window + 1
            first = jnp.maximum(first, reach // self.tiles.other * self.tiles.other)
        return first, last

    def queries(self):
        """The places, from and to, of the queries that see the program's keys."""
        c = self.chunks
        first, last = self._window(c.n_chunks_after, c.n_chunks_before)
        if self.n_rounds == 0 and c.causal:
            first = self.start
        if self.n_rounds == 0 and c.window is not None:
            last = jnp.minimum(last, self.start + self.tiles.own + c.window - 1)
        return first, last

    def over(self, x: _Inputs, window, body, carry):
        """`carry = body(block, carry)` over the blocks of a window."""
        first, last = window
        size = self.tiles.other

        def step(i, carry):
            return body(self.block(x, first + i * size, size, last), carry)

        return lax.fori_loop(0, pl.cdiv(last - first, size), step, carry)

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
        n_rounds, fields = self.round, self.fields
        for query_chunks, key_chunks in zip(q.seen, k.seen, strict=True):
            mask = mask & ~fields.near(query_chunks, key_chunks, min(n_rounds, fields.per_word))
            n_rounds -= fields.per_word
        return mask

    def _near(self, query_chunk, key_chunk) -> Array:
        """Whether a key's chunk is among those that a query's chunk looks at."""
        before, after = self.chunks.n_chunks_before, self.chunks.n_chunks_after
        # One comparison for two: what is below 0 is a large number without a sign.
        distance = (query_chunk - key_chunk + after).astype(jnp.uint32)
        return distance <= jnp.uint32(before + after)

    def keep(self, x: _Inputs, query_position, key_position) -> Array | float:
        """What dropout multiplies weights by."""
        if x.words is None:
            return 1.0
        words, rate = (x.words[0], x.words[1]), self.chunks.dropout
        return dropout_mask(words, rate, self.batch, self.head, query_position, key_position)

    def lone_weight(self, x: _Inputs, block: _Block, total: Array) -> Array:
        """The weight of a position's own value, where it sees nothing else."""
        alone = (total == 0.0) & (block.position < self.chunks.length)
        if block.segment is not None:
            alone = alone & (block.segment != 0)
        return jnp.where(alone, self.keep(x, block.position, block.position), 0.0)


def _forward_kernel(x: _Inputs, before: _Softmax | None, after: _Softmax, *, program: _Program):
    here = program.here()
    own = here.block(x, here.start, here.tiles.own)
    queries = own.column()
    # What is waited for longest is asked for first.
    if before is None:
        acc = jnp.zeros((here.tiles.own, power_of_two(x.v.shape[3])), jnp.float32)
        top = jnp.full((here.tiles.own,), LOWEST, jnp.float32)
        state = acc, top, jnp.zeros_like(top)
    else:
        acc, top = here.rows(before.acc, own), here.numbers(before.top, own, LOWEST)
        state = acc, top, here.numbers(before.total, own, 0.0)
    q = here.rows(x.q, own)
    # Maxima are of the plain products: scale and base go into the exponent, one multiply-add.
    scale = LOG2_E / math.sqrt(x.q.shape[3])

    def attend(block, state):
        acc, top, total = state
        keys = block.line()
        k, v = here.rows(x.k, block), here.rows(x.v, block)
        s = jnp.where(here.visible(queries, keys), product(q, k, transpose_b=True), HIDDEN)
        both = jnp.maximum(top, jnp.max(s, axis=1))
        p = jnp.exp2(s * scale - (both * scale)[:, None])
        old = jnp.exp2((top - both) * scale)
        total = total * old + jnp.sum(p, axis=1)
        p = p * here.keep(x, queries.position, keys.position)
        acc = acc * old[:, None] + product(p.astype(v.dtype), v)
        return acc, both, total

    acc, top, total = here.over(x, here.keys(), attend, state)
    if here.is_last:
        acc = acc * (1.0 / jnp.where(total == 0.0, 1.0, total))[:, None]
        if here.chunks.shared_qk:
            lone = here.lone_weight(x, own, total)
            acc = acc + lone[:, None] * here.rows(x.v, own, lone > 0.0).astype(jnp.float32)
    here.put_rows(after.acc, own, acc)
    here.put_numbers(after.top, own, top)
    here.put_numbers(after.total, own, total)


def _backward_kernel(
    x: _Inputs, row: _Row, before: _Gradients | None, after: _Gradients, *, program: _Program
):
    here = program.here()
    own = here.block(x, here.start, here.tiles.own)
    scale = 1.0 / math.sqrt(x.q.shape[3])

    def queries(block):
        exists = block.position < here.chunks.length
        top = here.at_places(row.top, block.place, exists, 0.0) * (scale * LOG2_E)
        share = None
        if row.share is not None:
            share = here.at_places(row.share, block.place, exists, 0.0)
        dot = here.at_places(row.dot, block.place, exists, 0.0)
        return here.rows(row.d_out, block), dot, top, share

    def weights(s, mask, top, share):
        p = jnp.exp2(jnp.where(mask, s, HIDDEN) * (scale * LOG2_E) - top)
        return p if share is None else p * share

    k, v = here.rows(x.k, own), here.rows(x.v, own)

    def as_keys(block, sums):
        dk, dv = sums
        q = here.rows(x.q, block)
        d_out, dot, top, share = queries(block)
        mask = here.visible(block.line(), own.column())
        share = None if share is None else share[None, :]
        p = weights(product(k, q, transpose_b=True), mask, top[None, :], share)
        keep = here.keep(x, block.position[None, :], own.position[:, None])
        dv = dv + product((p * keep).astype(d_out.dtype), d_out)
        ds = p * (product(v, d_out, transpose_b=True) * keep - dot[None, :])
        return dk + product(ds.astype(q.dtype), q), dv

    sums = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    dk, dv = here.over(x, here.queries(), as_keys, sums)
    if here.chunks.shared_qk and here.is_last:
        lone = here.lone_weight(x, own, here.numbers(row.total, own, 1.0))
        dv = dv + lone[:, None] * here.rows(row.d_out, own, lone > 0.0).astype(jnp.float32)
    if before is not None:
        dv = dv + here.rows(before.v, own)
    here.put_rows(after.v, own, dv)

    q = here.rows(x.q, own)
    d_out, dot, top, share = queries(own)
    share = None if share is None else share[:, None]
    if here.chunks.shared_qk:
        dq = _through_normalization(q, dk, x.q.shape[3])
    else:
        here.put_rows(after.k, own, dk * scale)
        dq = jnp.zeros(q.shape, jnp.float32)

    def as_queries(block, dq):
        k, v = here.rows(x.k, block), here.rows(x.v, block)
        mask = here.visible(own.column(), block.line())
        p = weights(product(q, k, transpose_b=True), mask, top[:, None], share)
        keep = here.keep(x, own.position[:, None], block.position[None, :])
        ds = p * (product(d_out, v, transpose_b=True) * keep - dot[:, None])
        return dq + product(ds.astype(k.dtype), k)

    dq = here.over(x, here.keys(), as_queries, dq) * scale
    if before is not None:
        dq = dq + here.rows(before.q, own)
    here.put_rows(after.q, own, dq)


def _through_normalization(q: Array, dk: Array, size: int) -> Array:
    """The gradient of queries whose keys, `length_normalize` of them, have the gradient `dk`."""
    q = q.astype(jnp.float32)
    factor = lax.rsqrt(jnp.sum(q * q, axis=1) / size + 1e-6)[:, None]
    k = q * factor
    return (dk - k * (jnp.sum(k * dk, axis=1) / size)[:, None]) * factor


def _launch(kernel, program: _Program, inputs, carried, out_shape, interpret: bool):
    """One round. What the round before it left is overwritten, where the dtype allows."""
    n_batch, _, n_heads, _ = inputs[0].q.shape
    first = len(jax.tree.leaves(inputs))
    pairs = zip(jax.tree.leaves(carried), jax.tree.leaves(out_shape), strict=False)
    (result,) = pl.pallas_call(
        functools.partial(kernel, program=program),
        grid=(pl.cdiv(program.n_places, program.tiles.own), n_heads, n_batch),
        out_shape=(out_shape,),
        input_output_aliases={
            first + i: i for i, (old, new) in enumerate(pairs) if old.dtype == new.dtype
        },
        compiler_params=pltriton.CompilerParams(
            num_warps=program.tiles.num_warps, num_stages=program.tiles.num_stages
        ),
        interpret=interpret,
        name=kernel.__name__.strip("_"),
    )(*inputs, carried)
    return result


def _programs(
    chunks: Any, x: _Inputs, tiles: Tiles | None, fastest: Callable[[_Inputs, int], Tiles]
) -> list[_Program]:
    """A program for each round; one where there is no order."""
    n_places = chunks.length + chunks.padding
    n_rounds = 0 if x.order is None else x.order.shape[2]
    rounds = range(max(n_rounds, 1))
    return [_Program(chunks, tiles or fastest(x, r), r, n_rounds, n_places) for r in rounds]


def _in_order(x: Array, order: Array | None) -> Array:
    """Numbers `[B, N or 1, T]` of positions as numbers of places, `[B, N or 1, R or 1, Tp]`."""
    if order is None:
        return x[:, :, None]
    n_places = order.shape[3]
    x = jnp.pad(x, ((0, 0), (0, 0), (0, n_places - x.shape[2])))[:, :, None]
    return jnp.take_along_axis(x, order, axis=3, mode="promise_in_bounds")


def _inputs(chunks, q, k, v, order, segments, rng) -> _Inputs:
    order, slot = (None, None) if order is None else (order.order, order.slot)
    seen = segment = None
    if chunks.count_once and order is not None and order.shape[2] > 1:
        chunk, fields = slot[:, :, :-1] // chunks.chunk_len, Fields.of(chunks)
        first = range(0, chunk.shape[2], fields.per_word)
        words = (fields.pack(chunk[:, :, r : r + fields.per_word]) for r in first)
        # Behind a fence, or XLA packs again at each place what it gathers there, round by round.
        words = lax.optimization_barrier(tuple(words))
        seen = jnp.stack([_in_order(word, order) for word in words])
    if segments is not None:
        segment = _in_order(segments[:, None], order)
    words = seed_words(rng) if chunks.dropout > 0.0 else None
    return _Inputs(q, length_normalize(q) if k is None else k, v, order, seen, segment, words)


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


def _attend_forward(chunks, interpret, *inputs):
    results = forward(chunks, *inputs, interpret=interpret)
    return results[0], (inputs, results)


def _attend_backward(chunks, interpret, residuals, d_out):
    inputs, results = residuals
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
    """The attended values; of each row the largest product, and the sum of `exp(s - largest)`.

    Args:
      chunks: `ops.chunked.Chunks`.
      order: `ops.chunked.Order`, or None for the sequence as it is.
      q, k, v, segments, rng: as in `ops.chunked.chunked_attention`.
      tiles: how the kernel is cut; None is what was fastest on an H200.
      interpret: whether to run it anywhere, slowly.
    """
    inputs = _inputs(chunks, q, k, v, order, segments, rng)
    batch, length, n_heads, _ = q.shape
    number = jax.ShapeDtypeStruct((batch, n_heads, length), jnp.float32)
    state = None
    for program in _programs(chunks, inputs, tiles, _forward_tiles):
        shape = _Softmax(_like(v, program), number, number)
        state = _launch(_forward_kernel, program, (inputs,), state, shape, interpret)
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
    """The gradients of q, k (None where shared) and v, of what `forward` took and returned."""
    inputs = _inputs(chunks, q, k, v, order, segments, rng)
    d_out, dot, share = divided(d_out, out, total)
    dot, in_order_top = (_in_order(x, inputs.order) for x in (dot, top))
    share = None if share is None else _in_order(share, inputs.order)
    row = _Row(d_out, dot, in_order_top, total, share)
    gradients = None
    for program in _programs(chunks, inputs, tiles, _backward_tiles):
        shape = _Gradients(*(None if x is None else _like(x, program) for x in (q, k, v)))
        gradients = _launch(_backward_kernel, program, (inputs, row), gradients, shape, interpret)
    return tuple(gradients)


def _like(x: Array, program: _Program) -> jax.ShapeDtypeStruct:
    """What a round leaves: float32, until the last."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype if program.is_last else jnp.float32)


# What was fastest on an H200: `own` and `other` of 16 to 128, 4 and 8 warps, 1 to 9 stages. Where
# rows are found by an order, whose entries are read ahead as well, it takes five stages to have a
# block of them on its way while one is worked on; with three it is waited for at once. Of the
# forward pass's first round, which reads no state, more programs fit a processor with three.


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
    """Of a row of keys or values, whichever is wider: stages of them share a chip's memory."""
    return max(x.k.shape[3], x.v.shape[3]) * x.v.dtype.itemsize
