"""Linear recurrences, chunk by chunk, as Pallas kernels for NVIDIA GPUs (Triton).

They compute the function of `reformax.ops.parts.recurrence`, whose equations they follow (Yang et
al. 2023, "Gated Linear Attention", sec. 4; Yang et al. 2024, "Gated Delta Networks", sec. 3.3):

  * `states` goes from chunk to chunk and writes the state before each. A program has a block of the
    state, which it keeps in float32. Where heads and blocks are few, groups of chunks run side by
    side: once from zeros, then again from the state that the groups before them left.
  * All other kernels have a program for each chunk.
  * Decays by feature meet at borders of sixteen rows (sec. 4.3), so that no exponent is above 0.
  * The delta rule's triangular system is inverted once for each chunk, by blocks of sixteen rows.
    Triton cannot cut a tile, so that products of pairs and inverses pass through memory.

Letters as in `reformax.ops.base`; L is 64, Tp is T padded to whole groups of chunks.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Bool, Float, Int

from reformax.ops.kernels.common import launch, load, power_of_two
from reformax.ops.parts.containment import finite
from reformax.ops.parts.recurrence import Inputs

L = 64  # rows of a chunk
SUB = 16  # rows of a part of it
# Programs that fill a GPU of 132 processors; how many chunks a group has at least.
PROGRAMS, LEAST_CHUNKS = 264, 16


class _Read(NamedTuple):
    """What the kernels read, arrays or references to them."""

    q: Array  # [B, T, N, H]
    k: Array  # [B, T, N, H]
    v: Array  # [B, T, N, V]
    decay: Array | None  # log decays summed up in a chunk, [B, N, Tp], or [B, Tp, N, H] by feature
    beta: Array | None  # [B, N, Tp]
    ids: Array | None  # [B, Tp]; rows of one id are side by side


class _Solved(NamedTuple):
    """The delta rule as a recurrence of other values: `u = values - reads S`."""

    pairs: Array  # [B, N, Tp, L], e^(c_i - c_j) k_i . k_j below the diagonal
    inverse: Array  # [B, N, Tp, L], (1 + M)^-1
    reads: Array  # [B, T, N, H]
    values: Array  # [B, T, N, V]


class _Plan(NamedTuple):
    """The static part of all kernels."""

    length: int
    n_groups: int
    n_chunks: int  # of a group
    strict: bool
    dtype: Any  # of products
    interpret: bool

    @property
    def padded(self) -> int:
        return self.n_groups * self.n_chunks * L


class _Rows(NamedTuple):
    """A chunk of one head, as a program reads it."""

    plan: _Plan
    x: _Read
    batch: Any
    head: Any
    start: Any  # its first position

    def place(self, first: Any = 0, n: int = L) -> Int[Array, " L"]:
        return self.start + first + jnp.arange(n, dtype=jnp.int32)

    def exists(self, place) -> Bool[Array, " L"] | None:
        return None if self.plan.length == self.plan.padded else place < self.plan.length

    def read(self, ref, first: Any = 0, n: int = L, columns=None) -> Float[Array, "L J"]:
        """Rows of `[B, T, N, J]`, of which zeros stand for what is not finite."""
        view, mask = self._view(ref, self.place(first, n), columns)
        return _finite(load(view, mask))

    def write(self, ref, tile, columns=None) -> None:
        view, mask = self._view(ref, self.place(), columns)
        pltriton.store(view, tile.astype(ref.dtype), mask=mask)

    def _view(self, ref, place, columns):
        columns = _columns(ref.shape[3]) if columns is None else columns
        exists = self.exists(place) if ref.shape[1] == self.plan.length else None
        view = ref.at[self.batch, place[:, None], self.head, columns[None, :]]
        mask = None if exists is None else exists[:, None]
        return view, _and(mask, _inside(columns, ref.shape[3], 0), (len(place), len(columns)))

    # Tiles of pairs of rows, and numbers of rows.

    def pairs(self, ref, row: int = 0, column: int = 0, n: int = L) -> Float[Array, "L L"]:
        """A square of `[B, N, Tp, L]`."""
        return pltriton.load(self._square(ref, row, column, n))

    def put_pairs(self, ref, tile, row: int = 0, column: int = 0) -> None:
        view = self._square(ref, row, column, len(tile))
        pltriton.store(view, tile.astype(ref.dtype))

    def _square(self, ref, row, column, n):
        columns = column + jnp.arange(n, dtype=jnp.int32)
        return ref.at[self.batch, self.head, self.place(row, n)[:, None], columns[None, :]]

    def numbers(self, ref, first: Any = 0, n: int = L) -> Float[Array, "L 1"]:
        """Rows of `[B, N, Tp]`."""
        return pltriton.load(ref.at[self.batch, self.head, self.place(first, n)])[:, None]

    # Decays, from the chunk's begin on.

    @property
    def by_feature(self) -> bool:
        return self.x.decay is not None and len(self.x.decay.shape) == 4

    def decay(self, first: Any = 0, n: int = L, columns=None) -> Float[Array, "L _"]:
        if self.by_feature:
            return self.read(self.x.decay, first, n, columns)
        return self.numbers(self.x.decay, first, n)

    def row(self, ref, t: Any) -> Float[Array, "1 J"]:
        """One row, as a tile."""
        place = jnp.full((1,), self.start + t, jnp.int32)
        view, mask = self._view(ref, place, None)
        return _finite(load(view, mask))

    def decay_at(self, t: int, columns=None) -> Float[Array, "1 _"]:
        place = jnp.full((1,), self.start + t, jnp.int32)
        if not self.by_feature:
            return pltriton.load(self.x.decay.at[self.batch, self.head, place])[:, None]
        view, mask = self._view(self.x.decay, place, columns)
        return load(view, mask)

    # Segments.

    def id_at(self, place) -> Int[Array, " 1"]:
        return pltriton.load(self.x.ids.at[self.batch, jnp.full((1,), place, jnp.int32)])

    def ids(self, first: Any = 0, n: int = L) -> Int[Array, " L"]:
        return pltriton.load(self.x.ids.at[self.batch, self.place(first, n)])

    def seen(self, strict: bool, row: int = 0, column: int = 0, n: int = L) -> Bool[Array, "L L"]:
        """Whether a row sees another one of its chunk."""
        i, j = (jnp.arange(n, dtype=jnp.int32) + first for first in (row, column))
        i, j = i[:, None], j[None, :]
        mask = j < i if strict else j <= i
        if self.x.ids is not None:
            mask = mask & (self.ids(row, n)[:, None] == self.ids(column, n)[None, :])
        return mask

    def _last(self):
        """The id of the row before the chunk; before the first row, its own."""
        return self.id_at(jnp.maximum(self.start - 1, 0))

    def from_old(self, x, columns=None) -> Float[Array, "L H"]:
        """As `ops.parts.recurrence._Chunks.from_old`; so are the next two."""
        if self.x.decay is not None:
            x = x.astype(jnp.float32) * jnp.exp(self.decay(columns=columns))
        return self.old_only(x)

    def old_only(self, x):
        if self.x.ids is None:
            return x
        return jnp.where((self.ids() == self._last())[:, None], x, 0)

    def to_new(self, x, columns=None) -> Float[Array, "L H"]:
        if self.x.decay is not None:
            left = self.decay_at(L - 1, columns) - self.decay(columns=columns)
            x = x.astype(jnp.float32) * jnp.exp(jnp.minimum(left, 0))
        if self.x.ids is None:
            return x
        return jnp.where((self.ids() == self.id_at(self.start + L - 1))[:, None], x, 0)

    def forget(self, state: Float[Array, "H V"], columns) -> Float[Array, "H V"]:
        """What is left of a state after the chunk; nothing of what is not finite."""
        if self.x.decay is not None:
            kept = jnp.exp(self._end(columns))
            state = jnp.where(kept > 0, kept * state, 0)
        if self.x.ids is None:
            return state
        whole = self._last() == self.id_at(self.start + L - 1)
        return jnp.where(whole[:, None], state, 0)

    def _end(self, columns) -> Float[Array, "_ 1"]:
        """The decay of the whole chunk, as a column."""
        if not self.by_feature:
            return self.decay_at(L - 1)
        place = jnp.full((1, 1), self.start + L - 1, jnp.int32)
        view = self.x.decay.at[self.batch, place, self.head, columns[:, None]]
        inside = _inside(columns, self.x.decay.shape[3], 1)
        return load(view, _and(None, inside, (len(columns), 1)))

    def state(self, ref, chunk, h, v) -> Float[Array, "H V"]:
        """A block of `[B, N, C, H, V]`."""
        return load(*self._state(ref, chunk, h, v))

    def put_state(self, ref, chunk, h, v, tile) -> None:
        view, mask = self._state(ref, chunk, h, v)
        pltriton.store(view, tile.astype(ref.dtype), mask=mask)

    def _state(self, ref, chunk, h, v):
        view = ref.at[self.batch, self.head, chunk, h[:, None], v[None, :]]
        mask, shape = _inside(h, ref.shape[3], 1), (len(h), len(v))
        return view, _and(mask, _inside(v, ref.shape[4], 0), shape)

    # Products.

    def product(self, a, b, contract: str = "10") -> Float[Array, "I K"]:
        """`a b` by the axes that are summed over, in the inputs' dtype, summed in float32."""
        return _product(a.astype(self.plan.dtype), b.astype(self.plan.dtype), contract)

    def weighted(self, pairs, seen) -> Float[Array, "L L"]:
        """Products of pairs by the decay of their head."""
        if self.x.decay is not None:
            c = pltriton.load(self.x.decay.at[self.batch, self.head, self.place()])
            between = c[:, None] - c[None, :]
            pairs = pairs * jnp.exp(jnp.where(seen, between, 0))
        return jnp.where(seen, pairs, 0)


def _product(a, b, contract: str = "10", precision=None):
    dims = (((int(contract[0]),), (int(contract[1]),)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def _exact(a, b):
    return _product(a, b, precision=lax.Precision.HIGHEST)


def _finite(x):
    return jnp.where(jnp.abs(x) < jnp.inf, x, 0)


def _columns(size: int, first: Any = 0, width: int | None = None) -> Int[Array, " J"]:
    return first + jnp.arange(width or power_of_two(size), dtype=jnp.int32)


def _inside(columns, size: int, axis: int) -> Bool[Array, "*d"] | None:
    """Which columns exist, as a side of a tile; None: all do."""
    if size % len(columns) == 0:
        return None
    inside = columns < size
    return inside[:, None] if axis else inside[None, :]


def _and(mask, other, shape):
    masks = [jnp.broadcast_to(m, shape) for m in (mask, other) if m is not None]
    return functools.reduce(jnp.logical_and, masks) if masks else None


def _chunk(plan: _Plan, x: _Read) -> _Rows:
    """The chunk of a program of the grid (C, N, B)."""
    batch, head, chunk = pl.program_id(2), pl.program_id(1), pl.program_id(0)
    return _Rows(plan, x, batch, head, chunk * L)


# The states.


class _Blocks(NamedTuple):
    """The block of a state that a program has."""

    h: int
    v: int

    @classmethod
    def of(cls, d_k: int, d_v: int, whole: bool) -> _Blocks:
        h, v = power_of_two(d_k), power_of_two(d_v)
        return cls(h if whole else min(h, 64), min(v, 64 if h <= 64 or not whole else 32))

    def grid(self, d_k: int, d_v: int) -> int:
        return pl.cdiv(d_k, self.h) * pl.cdiv(d_v, self.v)


def _block(plan: _Plan, x: _Read, blocks: _Blocks):
    """The first chunk of a program of the grid (blocks, N, B x groups), and its block."""
    n = pl.cdiv(x.v.shape[3], blocks.v)
    block, last = pl.program_id(0), pl.program_id(2)
    group = lax.rem(last, np.int32(plan.n_groups))
    here = _Rows(plan, x, lax.div(last, np.int32(plan.n_groups)), pl.program_id(1), 0)
    h = _columns(0, lax.div(block, np.int32(n)) * blocks.h, blocks.h)
    v = _columns(0, lax.rem(block, np.int32(n)) * blocks.v, blocks.v)
    return here, group, h, v


def _states_kernel(x, solved, begins, states, values, ends, *, plan, blocks):
    here, group, h, v = _block(plan, x, blocks)

    def step(i, state):
        chunk = group * plan.n_chunks + i
        rows = here._replace(start=chunk * L)
        if states is not None:
            rows.put_state(states, chunk, h, v, state)
        keys = rows.to_new(rows.read(x.k, columns=h), h)
        if solved is None:
            written = rows.read(x.v, columns=v)
        else:
            held = rows.product(rows.read(solved.reads, columns=h), state)
            written = rows.read(solved.values, columns=v) - rows.old_only(held)
            rows.write(values, written, v)
            written = _finite(written)
        return rows.forget(state, h) + rows.product(keys, written, "00")

    state = jnp.zeros((blocks.h, blocks.v), jnp.float32)
    if begins is not None:
        state = here.state(begins, group, h, v)
    state = lax.fori_loop(np.int32(0), np.int32(plan.n_chunks), step, state)
    if ends is not None:
        here.put_state(ends, group, h, v, state)


def _d_states_kernel(x, solved, begins, d_out, given, states, d_values, ends, *, plan, blocks):
    here, group, h, v = _block(plan, x, blocks)

    def step(i, state):
        chunk = group * plan.n_chunks + (plan.n_chunks - 1 - i)
        rows = here._replace(start=chunk * L)
        if states is not None:
            rows.put_state(states, chunk, h, v, state)
        q = rows.from_old(rows.read(x.q, columns=h), h)
        after = rows.forget(state, h) + rows.product(q, rows.read(d_out, columns=v), "00")
        if solved is not None:
            keys = rows.to_new(rows.read(x.k, columns=h), h)
            d = rows.read(given, columns=v) + rows.product(keys, state)
            rows.write(d_values, d, v)
            after = after - rows.product(rows.read(solved.reads, columns=h), d, "00")
        return after

    state = jnp.zeros((blocks.h, blocks.v), jnp.float32)
    if begins is not None:
        state = here.state(begins, group, h, v)
    state = lax.fori_loop(np.int32(0), np.int32(plan.n_chunks), step, state)
    if ends is not None:
        here.put_state(ends, group, h, v, state)


# A chunk: pairs of rows.


def _pairs_kernel(x, one, other, out, *, plan, strict):
    """`sum_h one_ih other_jh exp(c_ih - c_jh)` of pairs of rows that see each other."""
    rows = _chunk(plan, x)
    if not rows.by_feature:
        pairs = rows.product(rows.read(one), rows.read(other), "11")
        rows.put_pairs(out, rows.weighted(pairs, rows.seen(strict)))
        return
    for i in range(0, L, SUB):
        late = rows.read(one, i, SUB).astype(jnp.float32)
        c = rows.decay(i, SUB)
        if i:
            border = rows.decay_at(i - 1)
            met = late * jnp.exp(jnp.minimum(c - border, 0))
        for j in range(0, L, SUB):
            if j > i:
                tile = jnp.zeros((SUB, SUB), jnp.float32)
            elif j < i:
                left = jnp.exp(jnp.minimum(border - rows.decay(j, SUB), 0))
                tile = rows.product(met, rows.read(other, j, SUB) * left, "11")
                tile = jnp.where(rows.seen(strict, i, j, SUB), tile, 0)
            else:
                tile = _diagonal(rows, late, c, other, i)
                tile = jnp.where(rows.seen(strict, i, i, SUB), tile, 0)
            rows.put_pairs(out, tile, i, j)


def _diagonal(rows, late, c, other, first):
    """Pairs of the rows of one part, a column at a time."""
    column = jnp.arange(SUB, dtype=jnp.int32)[None, :]

    def step(t, tile):
        since = jnp.exp(jnp.minimum(c - rows.row(rows.x.decay, first + t), 0))
        one = jnp.sum(late * rows.row(other, first + t).astype(jnp.float32) * since, axis=1)
        return tile + jnp.where(column == t, one[:, None], 0)

    zeros = jnp.zeros((SUB, SUB), jnp.float32)
    return lax.fori_loop(np.int32(0), np.int32(SUB), step, zeros)


def _pairs_vjp_kernel(x, one, other, d_pairs, d_one, d_other, *, plan):
    """The gradients of `one` and `other`; `d_pairs` is 0 where rows do not see each other."""
    rows = _chunk(plan, x)
    if not rows.by_feature:
        d = rows.weighted(rows.pairs(d_pairs), rows.seen(False))
        rows.write(d_one, rows.product(d, rows.read(other)))
        rows.write(d_other, rows.product(d, rows.read(one), "00"))
        return
    for i in range(0, L, SUB):
        c = rows.decay(i, SUB)
        dx, dy = _diagonal_vjp(rows, one, other, d_pairs, c, i)
        if i:
            border, sums = rows.decay_at(i - 1), jnp.zeros_like(dx)
            for j in range(0, i, SUB):
                left = jnp.exp(jnp.minimum(border - rows.decay(j, SUB), 0))
                d = rows.pairs(d_pairs, i, j, SUB)
                sums = sums + rows.product(d, rows.read(other, j, SUB) * left)
            dx = dx + sums * jnp.exp(jnp.minimum(c - border, 0))
        for j in range(i + SUB, L, SUB):
            border = rows.decay_at(j - 1)
            late = rows.read(one, j, SUB) * jnp.exp(jnp.minimum(rows.decay(j, SUB) - border, 0))
            d = rows.product(rows.pairs(d_pairs, j, i, SUB), late, "00")
            dy = dy + d * jnp.exp(jnp.minimum(border - c, 0))
        _write_part(rows, d_one, dx, i)
        _write_part(rows, d_other, dy, i)


def _write_part(rows, ref, tile, first):
    view, mask = rows._view(ref, rows.place(first, SUB), None)
    pltriton.store(view, tile.astype(ref.dtype), mask=mask)


def _diagonal_vjp(rows, one, other, d_pairs, c, first):
    own = rows.place(first, SUB)
    columns = first + jnp.arange(SUB, dtype=jnp.int32)

    def step(t, sums):
        dx, dy = sums
        between = c - rows.row(rows.x.decay, first + t)
        at = d_pairs.at[rows.batch, rows.head, own, first + t]
        y, x = (rows.row(ref, first + t).astype(jnp.float32) for ref in (other, one))
        dx = dx + pltriton.load(at)[:, None] * y * jnp.exp(jnp.minimum(between, 0))
        at = d_pairs.at[rows.batch, rows.head, rows.start + first + t, columns]
        dy = dy + pltriton.load(at)[:, None] * x * jnp.exp(jnp.minimum(-between, 0))
        return dx, dy

    zeros = jnp.zeros((SUB, power_of_two(one.shape[3])), jnp.float32)
    return lax.fori_loop(np.int32(0), np.int32(SUB), step, (zeros, zeros))


# A chunk: the delta rule.


def _inverse_kernel(x, pairs, inverse, *, plan):
    """`(1 + M)^-1` with `M = beta pairs`, by blocks of sixteen rows and columns."""
    rows = _chunk(plan, x)
    parts = range(L // SUB)
    below, done = {}, {}
    for i in parts:
        beta = rows.numbers(x.beta, i * SUB, SUB)
        for j in range(i + 1):
            below[i, j] = beta * rows.pairs(pairs, i * SUB, j * SUB, SUB)
    for i in parts:
        done[i, i] = _small_inverse(below[i, i])
        for j in range(i):
            sums = _exact(below[i, j], done[j, j])
            for m in range(j + 1, i):
                sums = sums + _exact(below[i, m], done[m, j])
            done[i, j] = -_exact(done[i, i], sums)
    for i in parts:
        for j in parts:
            tile = done[i, j] if j <= i else jnp.zeros((SUB, SUB), jnp.float32)
            rows.put_pairs(inverse, tile, i * SUB, j * SUB)


def _small_inverse(below):
    """By halves, as `ops.parts.chunk_products.inverse`: all blocks of a size at once."""
    row = jnp.arange(SUB, dtype=jnp.int32)[:, None]
    column = jnp.arange(SUB, dtype=jnp.int32)[None, :]
    result = jnp.where(row == column, 1.0, 0.0)
    for bits in range(4):
        of_row, of_column = row >> bits, column >> bits
        corner = ((of_row & 1) == 1) & (of_column == of_row - 1)
        corner = jnp.where(corner, below, 0)
        result = result - (corner if bits == 0 else _exact(_exact(result, corner), result))
    return result


def _solve_kernel(x, inverse, reads, values, *, plan):
    rows = _chunk(plan, x)
    inverse, beta = rows.pairs(inverse), rows.numbers(x.beta)
    rows.write(reads, rows.product(inverse, beta * rows.from_old(rows.read(x.k))))
    rows.write(values, rows.product(inverse, beta * rows.read(x.v)))


def _solved_vjp_kernel(x, solved, states, values, d_values, dv, d_beta, d_pairs, *, plan):
    rows = _chunk(plan, x)
    h, v = _columns(x.k.shape[3]), _columns(x.v.shape[3])
    beta = rows.numbers(x.beta)
    d_right = rows.product(rows.pairs(solved.inverse), rows.read(d_values), "00")
    state = _finite(rows.state(states, pl.program_id(0), h, v))
    held = rows.product(rows.from_old(rows.read(x.k)), state)
    left = rows.read(x.v) - held
    d_below = -rows.product(d_right, rows.read(values), "11")
    d_below = jnp.where(rows.seen(True), d_below, 0)
    sums = jnp.sum(d_right * left, axis=1) + jnp.sum(d_below * rows.pairs(solved.pairs), axis=1)
    pltriton.store(d_beta.at[rows.batch, rows.head, rows.place()], sums)
    rows.put_pairs(d_pairs, beta * d_below)
    rows.write(dv, beta * d_right)


# A chunk: outputs and gradients.


def _read_pairs(rows, pairs):
    """What each query reads of each key."""
    if pairs is not None:
        return rows.pairs(pairs)
    seen = rows.seen(rows.plan.strict)
    return rows.weighted(rows.product(rows.read(rows.x.q), rows.read(rows.x.k), "11"), seen)


def _output_kernel(x, pairs, states, values, out, *, plan):
    rows = _chunk(plan, x)
    h, v = _columns(x.k.shape[3]), _columns(x.v.shape[3])
    state = rows.state(states, pl.program_id(0), h, v)
    new = rows.product(_read_pairs(rows, pairs), rows.read(values))
    old = rows.product(rows.from_old(rows.read(x.q)), state)
    rows.write(out, new + rows.old_only(old))


def _d_values_kernel(x, pairs, d_out, d_values, *, plan):
    rows = _chunk(plan, x)
    rows.write(d_values, rows.product(_read_pairs(rows, pairs), rows.read(d_out), "00"))


def _d_pairs_kernel(x, values, d_out, d_pairs, *, plan):
    rows = _chunk(plan, x)
    d = rows.product(rows.read(d_out), rows.read(values), "11")
    rows.put_pairs(d_pairs, jnp.where(rows.seen(plan.strict), d, 0))


class _Given(NamedTuple):
    """What a backward pass has computed before its last kernel; None: the kernel does."""

    pairs: Array | None  # of queries and keys
    dq: Array | None  # by pairs of a chunk
    dk: Array | None
    read: Array | None  # the gradients of keys by the delta rule's pairs
    written: Array | None
    dv: Array | None


def _gradients_kernel(x, given, states, d_states, values, d_out, out, d_decay, *, plan):
    rows, chunk = _chunk(plan, x), pl.program_id(0)
    h, v = _columns(x.k.shape[3]), _columns(x.v.shape[3])
    state = _finite(rows.state(states, chunk, h, v))
    d_state = _finite(rows.state(d_states, chunk, h, v))
    q, k = rows.read(x.q), rows.read(x.k)
    u, d = rows.read(values), rows.read(d_out)
    if given.dv is None:
        keys = rows.product(rows.to_new(k), d_state)
        rows.write(out.v, rows.product(_read_pairs(rows, given.pairs), d, "00") + keys)
    if given.dq is None:
        seen = rows.seen(plan.strict)
        d_pairs = rows.weighted(rows.product(d, u, "11"), seen)
        dq, dk = rows.product(d_pairs, k), rows.product(d_pairs, q, "00")
    else:
        dq, dk = rows.read(given.dq), rows.read(given.dk)
    dq = dq + rows.from_old(rows.product(d, state, "11"))
    dk_new = rows.to_new(rows.product(u, d_state, "11"))
    dk = dk + dk_new
    rows.write(out.q, dq)
    q, k = q.astype(jnp.float32), k.astype(jnp.float32)
    dc = q * dq - k * dk
    if given.read is not None:
        held = rows.from_old(rows.product(rows.read(given.dv), state, "11"))
        read, written = rows.read(given.read) - held, rows.read(given.written)
        dk = dk + read + written
        dc = dc + k * (read - written)
    rows.write(out.k, dk)
    if d_decay is None:
        return
    kept = jnp.sum(rows.forget(state.astype(jnp.float32) * d_state, h), axis=1)
    at_end = jnp.sum(k * dk_new, axis=0) + kept
    row = jnp.arange(L, dtype=jnp.int32)[:, None]
    dc = dc + jnp.where(row == L - 1, at_end[None, :], 0)
    if rows.by_feature:
        rows.write(d_decay, dc)
    else:
        place = rows.place()
        pltriton.store(d_decay.at[rows.batch, rows.head, place], jnp.sum(dc, axis=1))


# Launches.


def _plan(x: Inputs, strict: bool, interpret: bool, groups: int | None) -> _Plan:
    (batch, length, n_heads, size), d_v, delta = x.k.shape, x.v.shape[3], x.beta is not None
    n_chunks = pl.cdiv(length, L)
    blocks = _Blocks.of(size, d_v, delta).grid(size, d_v)
    if groups is None:
        groups = max(1, min(PROGRAMS // (batch * n_heads * blocks), n_chunks // LEAST_CHUNKS))
    # A state of the delta rule passes a group by a matrix: its chunks go one after the other.
    groups = 1 if delta else groups
    dtype = jnp.result_type(x.q, x.k, x.v)
    n_chunks = pl.cdiv(n_chunks, groups)
    return _Plan(length, groups, n_chunks, strict, dtype, interpret)


def _read(plan: _Plan, x: Inputs, ids) -> _Read:
    more = plan.padded - plan.length

    def numbers(x):
        x = jnp.moveaxis(finite(x.astype(jnp.float32))[..., 0], 1, 2)
        return jnp.pad(x, ((0, 0), (0, 0), (0, more)))

    ids = None if ids is None else jnp.pad(ids, ((0, 0), (0, more)), mode="edge")
    decay = None
    if x.log_decay is not None:
        # As in `ops.parts.recurrence`.
        least = math.log(jnp.finfo(jnp.float32).smallest_subnormal) - 1
        decay = jnp.maximum(finite(x.log_decay.astype(jnp.float32)), least)
        decay = jnp.pad(decay, ((0, 0), (0, more), (0, 0), (0, 0)))
        decay = _summed(decay, ids, "ij,jnh->inh")
        decay = decay if x.log_decay.shape[3] > 1 else jnp.moveaxis(decay[..., 0], 1, 2)
    return _Read(x.q, x.k, x.v, decay, None if x.beta is None else numbers(x.beta), ids)


def _summed(x: Float[Array, "B Tp N _"], ids, spec: str) -> Float[Array, "B Tp N _"]:
    """Sums over the rows of a chunk up to each row, within its segment; or their transpose."""
    so_far = jnp.tril(jnp.ones((1, 1, L, L), bool))
    if ids is not None:
        ids = ids.reshape(len(ids), -1, L)
        so_far = so_far & (ids[..., None] == ids[..., None, :])
    so_far = jnp.broadcast_to(so_far, (*so_far.shape[:2], L, L)).astype(jnp.float32)
    if ids is None:
        so_far, matrix = so_far[0, 0], ""
    else:
        matrix = "bc"
    rows, result = spec.split("->")
    one, other = rows.split(",")
    spec = f"{matrix}{one},bc{other}->bc{result}"
    chunks = x.reshape(x.shape[0], -1, L, *x.shape[2:])
    return jnp.einsum(spec, so_far, chunks, precision=lax.Precision.HIGHEST).reshape(x.shape)


def _run(kernel, plan: _Plan, grid, warps: int, inputs, out_shape, stages: int = 2, **static):
    return launch(
        functools.partial(kernel, plan=plan, **static),
        inputs,
        out_shape,
        grid=grid,
        num_warps=warps,
        num_stages=stages,
        interpret=plan.interpret,
        name="recurrence" + kernel.__name__.removesuffix("_kernel"),
    )


class _Launches(NamedTuple):
    """The kernels of a call."""

    plan: _Plan
    x: _Read

    @property
    def _chunks(self):
        batch, _, n_heads, _ = self.x.k.shape
        return self.plan.n_groups * self.plan.n_chunks, n_heads, batch

    def _shape(self, *shape, dtype=None):
        return jax.ShapeDtypeStruct(shape, dtype or self.plan.dtype)

    def _square(self, dtype=None):
        batch, _, n_heads, _ = self.x.k.shape
        return self._shape(batch, n_heads, self.plan.padded, L, dtype=dtype)

    def _like(self, x, dtype=None):
        return self._shape(*x.shape, dtype=dtype)

    def _each(self, kernel, inputs, out_shape, warps=4, **static):
        return _run(kernel, self.plan, self._chunks, warps, (self.x, *inputs), out_shape, **static)

    @property
    def by_feature(self) -> bool:
        return self.x.decay is not None and self.x.decay.ndim == 4

    def pairs(self) -> Array | None:
        """Of queries and keys, where the decay is by feature; else kernels compute them."""
        if not self.by_feature:
            return None
        return self._each(
            _pairs_kernel, (self.x.q, self.x.k), (self._square(),), strict=self.plan.strict
        )[0]

    def solved(self) -> _Solved | None:
        x = self.x
        if x.beta is None:
            return None
        square = self._square(jnp.float32)
        (pairs,) = self._each(_pairs_kernel, (x.k, x.k), (square,), strict=True)
        (inverse,) = self._each(_inverse_kernel, (pairs,), (self._square(),), warps=1)
        shapes = self._like(x.k), self._like(x.v)
        return _Solved(pairs, inverse, *self._each(_solve_kernel, (inverse,), shapes))

    def states(self, solved) -> tuple[Array, Array]:
        """The state before each chunk, `[B, N, C, H, V]`, and the values that are written."""

        def run(begins, states, ends):
            values = None if solved is None else self._like(self.x.v)
            return self._scan(
                _states_kernel, (self.x, solved, begins), (states, values, ends), states
            )

        states, values = self._grouped(run, reverse=False)
        return states, self.x.v if solved is None else values

    def d_states(self, solved, d_out, given) -> tuple[Array, Array | None]:
        """The gradient of the state after each chunk, and of the values of the delta rule."""

        def run(begins, states, ends):
            d_values = None if solved is None else self._like(self.x.v)
            inputs = self.x, solved, begins, d_out, given
            return self._scan(_d_states_kernel, inputs, (states, d_values, ends), states)

        return self._grouped(run, reverse=True)

    def _scan(self, kernel, inputs, out_shape, states):
        (batch, _, n_heads, d_k), d_v = self.x.k.shape, self.x.v.shape[3]
        blocks = _Blocks.of(d_k, d_v, self.x.beta is not None)
        grid = blocks.grid(d_k, d_v), n_heads, batch * self.plan.n_groups
        return _run(kernel, self.plan, grid, 4, inputs, out_shape, 3, blocks=blocks)

    def _grouped(self, run, reverse: bool):
        plan, (batch, _, n_heads, d_k) = self.plan, self.x.k.shape
        state = d_k, self.x.v.shape[3]
        states = self._shape(batch, n_heads, plan.n_groups * plan.n_chunks, *state)
        if plan.n_groups == 1:
            return run(None, states, None)[:2]
        ends = self._shape(batch, n_heads, plan.n_groups, *state, dtype=jnp.float32)
        ends = run(None, None, ends)[2]
        kept = jnp.broadcast_to(self._kept(), (*ends.shape[:4], 1))

        def step(state, group):
            end, kept = group
            return jnp.where(kept > 0, kept * state, 0) + end, state

        groups = jax.tree.map(lambda a: jnp.moveaxis(a, 2, 0), (ends, kept))
        zeros = jnp.zeros_like(groups[0][0])
        begins = lax.scan(step, zeros, groups, reverse=reverse)[1]
        return run(jnp.moveaxis(begins, 0, 2), states, None)[:2]

    def _kept(self) -> Float[Array, "B N G _ 1"]:
        """How much of a state is left after each group."""
        plan, x = self.plan, self.x
        batch, _, n_heads, _ = x.k.shape
        kept = jnp.ones((batch, n_heads, plan.n_groups, 1, 1))
        if x.decay is not None:
            axis = 1 if self.by_feature else 2
            ends = lax.slice_in_dim(x.decay, L - 1, None, L, axis)
            if not self.by_feature:
                ends = jnp.moveaxis(ends, 2, 1)[..., None]
            ends = ends.reshape(batch, plan.n_groups, plan.n_chunks, n_heads, -1).sum(axis=2)
            kept = jnp.exp(jnp.moveaxis(ends, 1, 2))[..., None]
        if x.ids is not None:
            groups = x.ids.reshape(batch, plan.n_groups, -1)
            last = jnp.concatenate([groups[:, :1, 0], groups[:, :-1, -1]], axis=1)
            whole = last == groups[:, :, -1]
            kept = jnp.where(whole[:, None, :, None, None], kept, 0)
        return kept

    def output(self, states, values) -> Float[Array, "B T N V"]:
        shape = self._like(self.x.v, jnp.float32)
        return self._each(_output_kernel, (self.pairs(), states, values), (shape,))[0]

    def gradients(self, d_out) -> Inputs:
        """Those of the inputs, that of the decays `[B, Tp, N, _]` and of beta `[B, N, Tp]`."""
        x, wide = self.x, jnp.float32
        d_out = d_out.astype(self.plan.dtype)
        solved, pairs = self.solved(), self.pairs()
        states, values = self.states(solved)
        given = None
        if solved is not None:
            (given,) = self._each(_d_values_kernel, (pairs, d_out), (self._like(x.v),))
        d_states, d_values = self.d_states(solved, d_out, given)
        dv = d_beta = read = written = dq = dk = None
        both = self._like(x.k, wide), self._like(x.k, wide)
        if solved is not None:
            shapes = self._like(x.v), self._numbers(), self._square(wide)
            inputs = solved, states, values, d_values
            dv, d_beta, d_pairs = self._each(_solved_vjp_kernel, inputs, shapes)
            read, written = self._each(_pairs_vjp_kernel, (x.k, x.k, d_pairs), both)
        if self.by_feature:
            (d_pairs,) = self._each(_d_pairs_kernel, (values, d_out), (self._square(wide),))
            dq, dk = self._each(_pairs_vjp_kernel, (x.q, x.k, d_pairs), both)
        of_values = None if dv is not None else self._like(x.v, x.v.dtype)
        out = _Of(self._like(x.q, x.q.dtype), self._like(x.k, x.k.dtype), of_values)
        d_decay = None
        if x.decay is not None:
            d_decay = self._like(x.decay, wide) if self.by_feature else self._numbers()
        inputs = _Given(pairs, dq, dk, read, written, dv), states, d_states, values, d_out
        out, dc = self._each(_gradients_kernel, inputs, (out, d_decay), warps=8)
        if dc is not None:
            dc = dc if self.by_feature else jnp.moveaxis(dc, 1, 2)[..., None]
            dc = _summed(dc, x.ids, "ij,inh->jnh")
        return Inputs(out.q, out.k, dv if out.v is None else out.v, dc, d_beta)

    def _numbers(self):
        batch, _, n_heads, _ = self.x.k.shape
        return self._shape(batch, n_heads, self.plan.padded, dtype=jnp.float32)


class _Of(NamedTuple):
    """Arrays like the inputs."""

    q: Any
    k: Any
    v: Any


def _launches(x: Inputs, ids, strict: bool, interpret: bool, groups: int | None) -> _Launches:
    plan = _plan(x, strict, interpret, groups)
    return _Launches(plan, _read(plan, x, ids))


def forward(
    x: Inputs,
    ids: Int[Array, "B T"] | None,
    *,
    strict: bool,
    interpret: bool = False,
    groups: int | None = None,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N V"]]:
    """The outputs, in float32, and the values that are written.

    Zeros stand for what is not finite.

    Args:
      x, strict: as in `ops.parts.recurrence.recurrence`.
      ids: segments, each of them side by side.
      interpret: whether to run it anywhere, slowly.
      groups: of chunks, side by side; None: as many as fill a GPU.
    """
    launches = _launches(x, ids, strict, interpret, groups)
    states, values = launches.states(launches.solved())
    return launches.output(states, values), values


def backward(
    x: Inputs,
    ids: Int[Array, "B T"] | None,
    d_out: Float[Array, "B T N V"],
    *,
    strict: bool,
    interpret: bool = False,
    groups: int | None = None,
) -> Inputs:
    """The gradients of `x`; arguments as in `forward`, `d_out` that of the outputs."""
    gradients = _launches(x, ids, strict, interpret, groups).gradients(d_out)
    length = x.q.shape[1]
    if gradients.log_decay is not None:
        gradients = gradients._replace(log_decay=gradients.log_decay[:, :length])
    if gradients.beta is not None:
        beta = jnp.moveaxis(gradients.beta[:, :, :length], 1, 2)[..., None]
        gradients = gradients._replace(beta=beta)
    return gradients
