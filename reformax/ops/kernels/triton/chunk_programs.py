"""One program of `kernels.chunked`: which places it reads, who sees whom there, where it writes.

A *place* is an index into the order, a *position* one into the sequence. Positions of T or more are
neither read nor written. What stands at positions of segment 0 is not read either, or hidden.
Letters as in `kernels.chunked`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array

from reformax.ops.kernels.triton.common import dropout_mask, load, power_of_two, view_rows
from reformax.ops.kernels.triton.packed_chunks import PackedChunks


class Tiles(NamedTuple):
    """The sizes of a kernel: rows of a program, rows it reads at a time, warps, pipeline stages."""

    own: int
    other: int
    num_warps: int
    num_stages: int


class Inputs(NamedTuple):
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

    def at_keys(self) -> Inputs:
        """The inputs whose order is that of the keys."""
        if self.key_order is None:
            return self
        return self._replace(order=self.key_order, packs=self.key_packs, segment=self.key_segment)


class Block(NamedTuple):
    """Some places, and what decides which of them see each other."""

    place: Array
    position: Array
    segment: Array | None
    chunk: Array
    packs: tuple[Array, ...]  # the chunks in the rounds before this one


class Program(NamedTuple):
    """One program of a kernel: its static part, and how it reads, masks and writes.

    `batch` and `head` are known within a kernel only.
    """

    chunks: Any  # ops.softmax.orders.Chunks
    tiles: Tiles
    round: int
    n_rounds: int  # 0 where there is no order
    n_places: int
    batch: Any = None
    head: Any = None

    def here(self) -> Program:
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
        c = self.chunks
        # With a ratio there is no key for the last programs.
        return tiled and self.aligned and c.ratio == 1 and self.n_places == c.length == c.key_length

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

    def side(self, of_keys: bool) -> tuple[int, int]:
        """The length of a chunk of queries or of keys, and the number of places."""
        if of_keys:
            return self.chunks.chunk_len, self.n_places // self.chunks.ratio
        return self.chunks.query_chunk_len, self.n_places

    def block(self, x: Inputs, start, size: int, stop=None, of_keys: bool = False) -> Block:
        """`size` places from `start` on; those from `stop` on are padding."""
        chunk_len, n_places = self.side(of_keys)
        place = start + jnp.arange(size, dtype=jnp.int32)
        exists = place < (n_places if stop is None else stop)
        if x.order is not None:
            position = self.load_places(x.order, place, exists, self.n_places)
        else:
            position = place if self.whole else jnp.where(exists, place, self.n_places)
        segment = self.load_places(x.segment, place, exists, 0)
        per_pack = PackedChunks.of(self.chunks).per_pack
        n_packs = 0 if x.packs is None else pl.cdiv(self.round, per_pack)
        packs = tuple(self.load_places(x.packs, place, exists, 0, pack) for pack in range(n_packs))
        return Block(place, position, segment, place // chunk_len, packs)

    def rows(self, ref, block: Block, some=None) -> Array:
        """A block's rows of `[B, T, N, H]`, or some; zeros where there is none, H padded."""
        width = power_of_two(ref.shape[3])
        view, exists = self._view_rows(ref, block, width)
        if some is not None:
            return load(view, exists & some[:, None], 0.0)
        if width != ref.shape[3]:
            return load(view, exists, 0.0)
        return self._load(view, exists, 0.0)

    def tokens(self, ref, block: Block) -> Array:
        """A block's rows with zeros at padding too, for products that hide nothing.

        Weights of 0 keep nothing out of them, for 0 times NaN is NaN.
        """
        return self.rows(ref, block, None if block.segment is None else block.segment != 0)

    def put_rows(self, ref, block: Block, value: Array) -> None:
        """Writes a block's rows of `[B, T, N, H]`."""
        view, exists = self._view_rows(ref, block, value.shape[1])
        pltriton.store(view, value.astype(ref.dtype), mask=exists)

    def _view_rows(self, ref, block: Block, width: int):
        exists = block.position < ref.shape[1]
        return view_rows(ref, self.batch, block.position, self.head, width, exists)

    def statistics(self, ref, block: Block, other: float) -> Array:
        """A block's entries of `[B, N, T]`."""
        view = ref.at[self.batch, self.head, block.position]
        return self._load(view, block.position < ref.shape[2], other)

    def put_statistics(self, ref, block: Block, value: Array) -> None:
        """Writes a block's entries of `[B, N, T]`."""
        view = ref.at[self.batch, self.head, block.position]
        pltriton.store(view, value.astype(ref.dtype), mask=block.position < ref.shape[2])

    # Who sees whom.

    def _window(self, before: int, after: int, of_keys: bool):
        """The places, of keys or of queries, within so many chunks of the program's own."""
        own, _ = self.side(not of_keys)
        length, n_places = self.side(of_keys)
        first = (self.start // own - before) * length
        last = ((self.start + self.tiles.own - 1) // own + 1 + after) * length
        return jnp.maximum(first, 0), jnp.minimum(last, n_places)

    def keys(self):
        """The places, from and to, of the keys that the program's queries see."""
        c = self.chunks
        first, last = self._window(c.n_chunks_before, c.n_chunks_after, of_keys=True)
        if self.n_rounds == 0 and c.causal:
            last = jnp.minimum(last, self.start + self.tiles.own)
        if self.n_rounds == 0 and c.window is not None:
            first, last = self._within_reach(first, last)
        return first, last

    def queries(self):
        """The places, from and to, of the queries that see the program's keys."""
        c = self.chunks
        first, last = self._window(c.n_chunks_after, c.n_chunks_before, of_keys=False)
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

    def over(self, x: Inputs, window, body, carry, of_keys: bool = False):
        """`carry = body(block, carry)` over the blocks of a window."""
        first, last = window
        size = self.tiles.other

        def step(i, carry):
            return body(self.block(x, first + i * size, size, last, of_keys), carry)

        n = lax.div(last - first + np.int32(size - 1), np.int32(size))
        return lax.fori_loop(np.int32(0), n, step, carry)

    def visible(self, q: Block, k: Block) -> Array:
        """Which key, `[1, K]`, each query, `[Q, 1]`, sees in this round; or both transposed."""
        c = self.chunks
        if c.causal:
            mask = k.position < q.position if c.shared_qk else k.position <= q.position
            mask = mask if c.n_keys is None else mask & (k.position < c.n_keys)
        else:
            shape = jnp.broadcast_shapes(q.position.shape, k.position.shape)
            mask = jnp.broadcast_to(k.position < c.key_length, shape)
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

    def dropped(self, x: Inputs, query: Block, key: Block) -> Array | float:
        """The dropout mask of the weights of a query, or queries, on keys."""
        rate = self.chunks.dropout
        return dropout_mask(x.seed, rate, self.batch, self.head, query.position, key.position)

    def lone_weight(self, x: Inputs, block: Block, total: Array) -> Array:
        """The weight of a position's own value: 0 if it sees another, or its dropout mask."""
        alone = (total == 0.0) & (block.position < self.chunks.length)
        if block.segment is not None:
            alone = alone & (block.segment != 0)
        return jnp.where(alone, self.dropped(x, block, block), 0.0)
