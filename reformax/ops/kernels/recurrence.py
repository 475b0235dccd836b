"""Linear recurrences, chunk by chunk, as Pallas kernels for NVIDIA GPUs (Triton).

They compute the function of `reformax.ops.parts.recurrence`, whose equations they follow (Yang et
al. 2023, "Gated Linear Attention", sec. 4; Yang et al. 2024, "Gated Delta Networks", sec. 3.3):

  * `states` goes from chunk to chunk and writes the state before each. A program has a block of the
    state, which it keeps in float32. Where heads and blocks are few, groups of chunks run side by
    side: once from zeros, then again from the state that the groups before them left. What a group
    makes of a state is a product: with a number of each feature, or, with the delta rule, with a
    matrix, which is what the group makes of the identity.
  * All other kernels have a program for each chunk.
  * Decays by feature meet in the middle of halves, of 32 rows, of 16 and so on to one, so that no
    exponent is above 0. Triton cannot cut a tile: a product is of the whole chunk, and a mask keeps
    the pairs whose middle it is.
  * The delta rule's triangular system is inverted once for each chunk, by the same halves.

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
from reformax.ops.parts.recurrence import Inputs

L = 64  # rows of a chunk
BITS = 6  # of the number of a row
# Programs that fill a GPU of 132 processors; how many chunks a group has at least.
PROGRAMS, LEAST_CHUNKS = 264, 16
# Columns of a block of a state; warps of a program.
COLUMNS = 64
WARPS = dict(sums=4, solve=4, states=4, begins=8, d_states=4, output=4, d_values=4, gradients=8)
STAGES = 3  # of the kernels that go from chunk to chunk


class _Read(NamedTuple):
    """What the kernels read, arrays or references to them."""

    q: Array  # [B, T, N, H]
    k: Array  # [B, T, N, H]
    v: Array  # [B, T, N, V]
    decay: Array | None  # log decays summed up in a chunk, [B, Tp, N], or [B, Tp, N, H] by feature
    beta: Array | None  # [B, T, N]
    ids: Array | None  # [B, Tp]; rows of one id are side by side


class _Solved(NamedTuple):
    """The delta rule as a recurrence of other values: `u = values - reads S`."""

    reads: Array  # [B, T, N, H]
    values: Array  # [B, T, N, V]
    inverse: Array | None  # [B, N, Tp, L], (1 + M)^-1, for the backward pass


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

    def place(self) -> Int[Array, " L"]:
        return self.start + jnp.arange(L, dtype=jnp.int32)

    def exists(self, place) -> Bool[Array, " L"] | None:
        return None if self.plan.length == self.plan.padded else place < self.plan.length

    def read(self, ref, columns=None) -> Float[Array, "L J"]:
        """Rows of `[B, T, N, J]`, of which zeros stand for what is not finite."""
        view, mask = self._view(ref, self.place(), columns)
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

    def pairs(self, ref) -> Float[Array, "L L"]:
        """The square of `[B, N, Tp, L]`."""
        return pltriton.load(self._square(ref))

    def put_pairs(self, ref, tile) -> None:
        pltriton.store(self._square(ref), tile.astype(ref.dtype))

    def _square(self, ref):
        columns = jnp.arange(L, dtype=jnp.int32)
        return ref.at[self.batch, self.head, self.place()[:, None], columns[None, :]]

    def numbers(self, ref) -> Float[Array, " L"]:
        """Rows of `[B, T, N]`."""
        return _finite(load(*self._numbers(ref)))

    def put_numbers(self, ref, x) -> None:
        view, mask = self._numbers(ref)
        pltriton.store(view, x.astype(ref.dtype), mask=mask)

    def _numbers(self, ref):
        place = self.place()
        exists = self.exists(place) if ref.shape[1] == self.plan.length else None
        return ref.at[self.batch, place, self.head], exists

    # Decays, from the chunk's begin on.

    @property
    def by_feature(self) -> bool:
        return self.x.decay is not None and len(self.x.decay.shape) == 4

    def decay(self, columns=None) -> Float[Array, "L _"]:
        if self.by_feature:
            return self.read(self.x.decay, columns)
        return self.numbers(self.x.decay)[:, None]

    def _half(self, c, step) -> tuple[Bool[Array, "L L"], Float[Array, "L H"]]:
        """For halves of 32 rows, of 16 and so on: their pairs, and what is left at the middle.

        That is `exp(c_i - c_m)` of the later rows and `exp(c_m - c_i)` of the earlier ones, m being
        the last of these.
        """
        bit = np.int32(BITS - 1) - step
        row = jnp.arange(L, dtype=jnp.int32)
        middle = ((row >> (bit + 1)) << (bit + 1)) + (jnp.left_shift(np.int32(1), bit) - 1)
        view, mask = self._view(self.x.decay, self.start + middle, None)
        # Rows of other segments have no decay between them.
        return _across(bit), jnp.exp(-jnp.abs(c - load(view, mask)))

    def decay_at(self, t: int, columns=None) -> Float[Array, "1 _"]:
        place = jnp.full((1,), self.start + t, jnp.int32)
        if not self.by_feature:
            return pltriton.load(self.x.decay.at[self.batch, place, self.head])[:, None]
        view, mask = self._view(self.x.decay, place, columns)
        return load(view, mask)

    # Segments.

    def id_at(self, place) -> Int[Array, " 1"]:
        return pltriton.load(self.x.ids.at[self.batch, jnp.full((1,), place, jnp.int32)])

    def ids(self) -> Int[Array, " L"]:
        return pltriton.load(self.x.ids.at[self.batch, self.place()])

    def seen(self, strict: bool) -> Bool[Array, "L L"]:
        """Whether a row sees another one of its chunk."""
        i, j = _sides()
        mask = j < i if strict else j <= i
        if self.x.ids is not None:
            mask = mask & (self.ids()[:, None] == self.ids()[None, :])
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

    def pairs_of(self, x, y, seen) -> Float[Array, "L L"]:
        """`sum_h x_ih y_jh exp(c_ih - c_jh)` of pairs of rows that see each other."""
        if not self.by_feature:
            return self._weighted(self.product(x, y, "11"), seen)
        i, j = _sides()
        c = self.decay()

        def step(bit, total):  # a loop, for programs that hold all halves at once are slow
            across, left = self._half(c, bit)
            return total + jnp.where(across, self.product(x * left, y * left, "11"), 0)

        own = jnp.where(i == j, jnp.sum(_wide(x) * _wide(y), axis=1)[:, None], 0)
        return jnp.where(seen, lax.fori_loop(np.int32(0), np.int32(BITS), step, own), 0)

    def pairs_vjp(self, d, x, y, seen) -> tuple[Float[Array, "L H"], Float[Array, "L H"]]:
        """The gradients of x and y of `pairs_of`."""
        if not self.by_feature:
            d = self._weighted(d, seen)
            return self.product(d, y), self.product(d, x, "00")
        i, j = _sides()
        d = jnp.where(seen, d, 0)
        own = jnp.sum(jnp.where(i == j, d, 0), axis=1)[:, None]
        c = self.decay()

        def step(bit, sums):
            across, left = self._half(c, bit)
            here = jnp.where(across, d, 0)
            dx = sums[0] + self.product(here, y * left) * left
            return dx, sums[1] + self.product(here, x * left, "00") * left

        begin = own * _wide(y), own * _wide(x)
        return lax.fori_loop(np.int32(0), np.int32(BITS), step, begin)

    def _weighted(self, pairs, seen) -> Float[Array, "L L"]:
        """Products of pairs by the decay of their head."""
        if self.x.decay is not None:
            c = self.numbers(self.x.decay)
            between = c[:, None] - c[None, :]
            pairs = pairs * jnp.exp(jnp.where(seen, between, 0))
        return jnp.where(seen, pairs, 0)


def _product(a, b, contract: str = "10"):
    dims = (((int(contract[0]),), (int(contract[1]),)), ((), ()))
    return lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def _precise(a, b, contract: str = "10", n: int = 2):
    """A product of float32 in n parts of bfloat16 each; of three it is as exact as float32."""
    one, other = _parts(a, n), _parts(b, n)
    terms = [(i, j) for i in range(n) for j in range(n) if i + j < n]
    terms.sort(key=sum, reverse=True)  # the smallest first
    return sum(_product(one[i], other[j], contract) for i, j in terms)


def _parts(x: Float[Array, "I J"], n: int) -> list[Float[Array, "I J"]]:
    """Numbers as sums of bfloat16: of three they are exact."""
    parts, rest = [], x.astype(jnp.float32)
    for _ in range(n):
        # The upper half of a float32 is a bfloat16. Compilers may leave out casts there and back.
        bits = lax.bitcast_convert_type(rest, jnp.int32) & np.int32(-(1 << 16))
        part = lax.bitcast_convert_type(bits, jnp.float32)
        parts.append(part.astype(jnp.bfloat16))
        rest = rest - part
    return parts


def _wide(x):
    return x.astype(jnp.float32)


def _sides() -> tuple[Int[Array, "L 1"], Int[Array, "1 L"]]:
    """Numbers of the rows of a chunk, as the sides of a tile of pairs."""
    row = jnp.arange(L, dtype=jnp.int32)
    return row[:, None], row[None, :]


def _across(bit: Any) -> Bool[Array, "L L"]:
    """Whether row i is in the later and j in the earlier half of one block of 2^(bit + 1) rows."""
    i, j = _sides()
    return (((i ^ j) >> bit) == 1) & (i > j)


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


# Decays.


def _sums_kernel(x, log_decay, out, *, plan):
    """Log decays summed up from the chunk's begin, within segments, `[B, T, N, H]`."""
    rows = _chunk(plan, x)
    # As in `ops.parts.recurrence`.
    least = math.log(jnp.finfo(jnp.float32).smallest_subnormal) - 1
    each = jnp.maximum(_wide(rows.read(log_decay)), least)
    rows.write(out, _sums(rows, each))


def _sums(rows, x, contract: str = "10") -> Float[Array, "L H"]:
    """Sums over the rows of a segment up to each; or, with "00", from each on."""
    so_far = jnp.where(rows.seen(False), 1.0, 0.0).astype(jnp.bfloat16)
    return sum(_product(so_far, part, contract) for part in reversed(_parts(x, 3)))


# The states.


class _Blocks(NamedTuple):
    """The block of a state that a program has."""

    h: int
    v: int

    @classmethod
    def of(cls, d_k: int, d_v: int, whole: bool) -> _Blocks:
        h, v = power_of_two(d_k), power_of_two(d_v)
        return cls(h if whole else min(h, 64), min(v, COLUMNS if h <= 64 or not whole else 32))

    def grid(self, d_k: int, d_v: int) -> int:
        return pl.cdiv(d_k, self.h) * pl.cdiv(d_v, self.v)


def _block(plan: _Plan, x: _Read, blocks: _Blocks):
    """The rows of a program of the grid (blocks, N, B x groups), its group and its block."""
    n = pl.cdiv(x.v.shape[3], blocks.v)
    block, last = pl.program_id(0), pl.program_id(2)
    group = lax.rem(last, np.int32(plan.n_groups))
    here = _Rows(plan, x, lax.div(last, np.int32(plan.n_groups)), pl.program_id(1), 0)
    if x.beta is not None:  # blocks of all features; those after the values are a transition's
        return here, group, _columns(0, 0, blocks.h), _columns(0, block * blocks.v, blocks.v)
    h = _columns(0, lax.div(block, np.int32(n)) * blocks.h, blocks.h)
    v = _columns(0, lax.rem(block, np.int32(n)) * blocks.v, blocks.v)
    return here, group, h, v


def _states_kernel(x, solved, begins, states, values, ends, *, plan, blocks):
    """From group to group `begins` is given; else groups begin with zeros, and write their ends."""
    here, group, h, v = _block(plan, x, blocks)
    state = jnp.zeros((blocks.h, blocks.v), jnp.float32)
    columns, transition = v, None
    if begins is not None:
        state = here.state(begins, group, h, v)
    elif solved is not None and ends is not None:
        width = pl.cdiv(x.v.shape[3], blocks.v) * blocks.v
        transition = pl.program_id(0) * blocks.v >= width
        columns = jnp.where(transition, _columns(0, 0, blocks.v), v)
        state = jnp.where(h[:, None] == v[None, :] - width, 1.0, 0.0)

    def step(i, state):
        chunk = group * plan.n_chunks + i
        rows = here._replace(start=chunk * L)
        if states is not None:
            rows.put_state(states, chunk, h, v, state)
        keys = rows.to_new(rows.read(x.k, h), h)
        if solved is None:
            written = rows.read(x.v, v)
        else:
            held = rows.product(rows.read(solved.reads, h), state)
            written = _wide(rows.read(solved.values, columns))
            if transition is not None:
                written = jnp.where(transition, 0, written)
            written = written - rows.old_only(held)
            if values is not None:
                rows.write(values, written, v)
            written = _finite(written)
        return rows.forget(state, h) + rows.product(keys, written, "00")

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
        q = rows.from_old(rows.read(x.q, h), h)
        after = rows.forget(state, h) + rows.product(q, rows.read(d_out, v), "00")
        if solved is not None:
            keys = rows.to_new(rows.read(x.k, h), h)
            d = rows.read(given, v) + rows.product(keys, state)
            if d_values is not None:
                rows.write(d_values, d, v)
            after = after - rows.product(rows.read(solved.reads, h), _finite(d), "00")
        return after

    state = jnp.zeros((blocks.h, blocks.v), jnp.float32)
    if begins is not None:
        state = here.state(begins, group, h, v)
    state = lax.fori_loop(np.int32(0), np.int32(plan.n_chunks), step, state)
    if ends is not None:
        here.put_state(ends, group, h, v, state)


def _begins_kernel(x, kept, ends, passed, begins, *, plan, blocks, reverse):
    """The state before each group, or with `reverse` the gradient of that after it.

    Args:
      kept: `[B, N, G, H]`, how much of a state is left after a group; with the delta rule, whether
        any is.
      ends: what a group makes of zeros.
      passed: None, or for the delta rule `[B, N, G, H, W + H]`, whose last H columns are what a
        group makes of the identity.
    """
    n = pl.cdiv(x.v.shape[3], blocks.v)
    block = pl.program_id(0)
    here = _Rows(plan, x, pl.program_id(2), pl.program_id(1), 0)
    h = _columns(0, lax.div(block, np.int32(n)) * blocks.h, blocks.h)
    v = _columns(0, lax.rem(block, np.int32(n)) * blocks.v, blocks.v)

    def step(i, state):
        group = plan.n_groups - 1 - i if reverse else i
        here.put_state(begins, group, h, v, state)
        left = kept.at[here.batch, here.head, group, h[:, None]]
        left = load(left, _and(None, _inside(h, kept.shape[3], 1), (len(h), 1)))
        after = left * state
        if passed is not None:
            matrix = here.state(passed, group, h, n * blocks.v + h)
            after = _precise(_finite(matrix), state, "00" if reverse else "10")
            # An overflow is kept, but for a state of zeros.
            after = after + jnp.where(jnp.sum(jnp.abs(state)) == 0, 0, jnp.sum(matrix * 0))
        return jnp.where(left > 0, after, 0) + here.state(ends, group, h, v)

    state = jnp.zeros((blocks.h, blocks.v), jnp.float32)
    lax.fori_loop(np.int32(0), np.int32(plan.n_groups), step, state)


# A chunk: the delta rule.


def _solve_kernel(x, reads, values, inverse, *, plan):
    rows = _chunk(plan, x)
    k, beta = rows.read(x.k), rows.numbers(x.beta)[:, None]
    solution = _inverse(rows, beta * rows.pairs_of(k, k, rows.seen(True)))
    if inverse is not None:
        rows.put_pairs(inverse, solution)
    rows.write(reads, rows.product(solution, beta * rows.from_old(k)))
    rows.write(values, rows.product(solution, beta * rows.read(x.v)))


def _inverse(rows, below: Float[Array, "L L"]) -> Float[Array, "L L"]:
    """`(1 + below)^-1`, as `ops.parts.chunk_products.inverse`: all blocks of a size at once.

    Newton's iteration, of precise residuals, takes out what products of few digits left.
    """
    i, j = _sides()
    one = jnp.where(i == j, 1.0, 0.0)
    result = one - jnp.where(_across(0), below, 0)
    for bit in range(1, BITS):
        corner = jnp.where(_across(bit), below, 0)
        result = result - rows.product(rows.product(result, corner), result)
    wide = rows.plan.dtype == jnp.float32
    for _ in range(2 if wide else 1):
        residual = one - result - _precise(below, result, n=3 if wide else 2)
        result = result + rows.product(result, residual)
    return result


class _Delta(NamedTuple):
    """Gradients of a chunk by the delta rule's own pairs and reads."""

    v: Float[Array, "L V"]
    beta: Float[Array, " L"]
    read: Float[Array, "L H"]  # of the keys as they read
    written: Float[Array, "L H"]  # and as they are written


def _delta_vjp(rows, k, state, inverse, values, d_values) -> _Delta:
    beta, below = rows.numbers(rows.x.beta)[:, None], rows.seen(True)
    d_right = rows.product(rows.pairs(inverse), rows.read(d_values), "00")
    d_below = -rows.product(d_right, values, "11")
    d_below = jnp.where(below, d_below, 0)
    d_beta = jnp.sum(d_below * rows.pairs_of(k, k, below), axis=1)
    left = rows.read(rows.x.v) - rows.product(rows.from_old(k), state)
    d_beta = d_beta + jnp.sum(d_right * left, axis=1)
    dv = beta * d_right
    read, written = rows.pairs_vjp(beta * d_below, k, k, below)
    return _Delta(dv, d_beta, read - rows.from_old(rows.product(dv, state, "11")), written)


# A chunk: outputs and gradients.


def _output_kernel(x, states, values, out, *, plan):
    rows = _chunk(plan, x)
    h, v = _columns(x.k.shape[3]), _columns(x.v.shape[3])
    q = rows.read(x.q)
    pairs = rows.pairs_of(q, rows.read(x.k), rows.seen(plan.strict))
    new = rows.product(pairs, rows.read(values))
    state = rows.state(states, pl.program_id(0), h, v)
    rows.write(out, new + rows.old_only(rows.product(rows.from_old(q), state)))


def _d_values_kernel(x, d_out, d_values, *, plan):
    rows = _chunk(plan, x)
    pairs = rows.pairs_of(rows.read(x.q), rows.read(x.k), rows.seen(plan.strict))
    rows.write(d_values, rows.product(pairs, rows.read(d_out), "00"))


class _Of(NamedTuple):
    """Arrays of gradients."""

    q: Any
    k: Any
    v: Any
    decay: Any  # [B, T, N], or [B, T, N, H] by feature
    beta: Any  # [B, T, N]


def _gradients_kernel(x, inverse, states, d_states, values, d_values, d_out, out, *, plan):
    rows, chunk = _chunk(plan, x), pl.program_id(0)
    h, v = _columns(x.k.shape[3]), _columns(x.v.shape[3])
    seen = rows.seen(plan.strict)
    q, k, u, d = (rows.read(ref) for ref in (x.q, x.k, values, d_out))
    state = _finite(rows.state(states, chunk, h, v))
    delta = None
    if x.beta is not None:
        delta = _delta_vjp(rows, k, state, inverse, u, d_values)
        rows.write(out.v, delta.v)
        rows.put_numbers(out.beta, delta.beta)
    d_state = _finite(rows.state(d_states, chunk, h, v))
    if delta is None:
        dv = rows.product(rows.pairs_of(q, k, seen), d, "00")
        rows.write(out.v, dv + rows.product(rows.to_new(k), d_state))
    dq, dk = rows.pairs_vjp(rows.product(d, u, "11"), q, k, seen)
    dq = dq + rows.from_old(rows.product(d, state, "11"))
    rows.write(out.q, dq)
    dk_new = rows.to_new(rows.product(u, d_state, "11"))
    dk = dk + dk_new
    q, k = _wide(q), _wide(k)
    dc = q * dq - k * dk
    if delta is not None:
        dk = dk + delta.read + delta.written
        dc = dc + k * (delta.read - delta.written)
    rows.write(out.k, dk)
    if x.decay is None:
        return
    kept = jnp.sum(rows.forget(_wide(state) * d_state, h), axis=1)
    at_end = jnp.sum(k * dk_new, axis=0) + kept
    dc = dc + jnp.where(_sides()[0] == L - 1, at_end[None, :], 0)
    if rows.by_feature:
        rows.write(out.decay, _sums(rows, dc, "00"))
    else:
        from_here = jnp.where(rows.seen(False), jnp.sum(dc, axis=1)[:, None], 0)
        rows.put_numbers(out.decay, jnp.sum(from_here, axis=0))


# Launches.


def _plan(x: Inputs, strict: bool, interpret: bool, groups: int | None) -> _Plan:
    (batch, length, n_heads, size), d_v, delta = x.k.shape, x.v.shape[3], x.beta is not None
    n_chunks = pl.cdiv(length, L)
    blocks = _Blocks.of(size, d_v, delta).grid(size, d_v)
    if groups is None:
        groups = min(PROGRAMS // (batch * n_heads * blocks), n_chunks // LEAST_CHUNKS)
        # Groups read all twice, with the delta rule for a matrix more.
        groups = groups if groups > (3 if delta else 1) else 1
    dtype = jnp.result_type(x.q, x.k, x.v)
    n_chunks = pl.cdiv(n_chunks, groups)
    return _Plan(length, groups, n_chunks, strict, dtype, interpret)


def _read(plan: _Plan, x: Inputs, ids) -> _Read:
    more = plan.padded - plan.length
    ids = None if ids is None else jnp.pad(ids, ((0, 0), (0, more)), mode="edge")
    beta = None if x.beta is None else x.beta[..., 0]
    read = _Read(x.q, x.k, x.v, None, beta, ids)
    if x.log_decay is None:
        return read
    batch, _, n_heads, size = x.log_decay.shape
    # Decays of heads are those of as many features.
    decay = x.log_decay if size > 1 else jnp.swapaxes(x.log_decay, 2, 3)
    shape = jax.ShapeDtypeStruct((batch, plan.padded, *decay.shape[2:]), jnp.float32)
    grid = plan.padded // L, decay.shape[2], batch
    (summed,) = _run(_sums_kernel, plan, grid, (read, decay), (shape,))
    return read._replace(decay=summed if size > 1 else summed[:, :, 0])


def _run(kernel, plan: _Plan, grid, inputs, out_shape, stages: int = 2, **static):
    name = kernel.__name__.removesuffix("_kernel")
    return launch(
        functools.partial(kernel, plan=plan, **static),
        inputs,
        out_shape,
        grid=grid,
        num_warps=WARPS[name.removeprefix("_")],
        num_stages=stages,
        interpret=plan.interpret,
        name="recurrence" + name,
    )


class _Launches(NamedTuple):
    """The kernels of a call."""

    plan: _Plan
    x: _Read

    def _shape(self, *shape, dtype=None):
        return jax.ShapeDtypeStruct(shape, dtype or self.plan.dtype)

    def _like(self, x, dtype=None):
        return self._shape(*x.shape, dtype=dtype)

    def _each(self, kernel, inputs, out_shape, **static):
        batch, _, n_heads, _ = self.x.k.shape
        grid = self.plan.n_groups * self.plan.n_chunks, n_heads, batch
        return _run(kernel, self.plan, grid, (self.x, *inputs), out_shape, **static)

    @property
    def by_feature(self) -> bool:
        return self.x.decay is not None and self.x.decay.ndim == 4

    def solved(self, keep: bool = False) -> _Solved | None:
        """keep: whether the inverse is written too."""
        x = self.x
        if x.beta is None:
            return None
        batch, _, n_heads, _ = x.k.shape
        inverse = self._shape(batch, n_heads, self.plan.padded, L) if keep else None
        return _Solved(*self._each(_solve_kernel, (), (self._like(x.k), self._like(x.v), inverse)))

    def states(self, solved) -> tuple[Array, Array, Array | None]:
        """The state before each chunk, `[B, N, C, H, V]`, and the values that are written.

        The third is what the delta rule makes of a state in each group, or None.
        """

        def run(begins, states, ends):
            values = None if solved is None or states is None else self._like(self.x.v)
            inputs, n = (self.x, solved, begins), 0
            if solved is not None and states is None:
                blocks = self._blocks
                n = pl.cdiv(blocks.h, blocks.v)
                width = (pl.cdiv(self.x.v.shape[3], blocks.v) + n) * blocks.v
                ends = self._shape(*ends.shape[:4], width, dtype=ends.dtype)
            return self._scan(_states_kernel, inputs, (states, values, ends), n)

        (states, values, _), ends = self._grouped(run, None, reverse=False)
        return (states, self.x.v, None) if solved is None else (states, values, ends)

    def d_states(self, solved, d_out, given, ends) -> tuple[Array, Array | None]:
        """The gradient of the state after each chunk, and of the values of the delta rule.

        ends: the third of `states`.
        """

        def run(begins, states, ends):
            d_values = None if solved is None or states is None else self._like(self.x.v)
            inputs = self.x, solved, begins, d_out, given
            return self._scan(_d_states_kernel, inputs, (states, d_values, ends))

        return self._grouped(run, ends, reverse=True)[0][:2]

    @property
    def _blocks(self) -> _Blocks:
        return _Blocks.of(self.x.k.shape[3], self.x.v.shape[3], self.x.beta is not None)

    def _scan(self, kernel, inputs, out_shape, more_blocks: int = 0):
        (batch, _, n_heads, d_k), d_v = self.x.k.shape, self.x.v.shape[3]
        blocks = self._blocks
        grid = blocks.grid(d_k, d_v) + more_blocks, n_heads, batch * self.plan.n_groups
        return _run(kernel, self.plan, grid, inputs, out_shape, STAGES, blocks=blocks)

    def _grouped(self, run, passed, reverse: bool):
        plan, (batch, _, n_heads, d_k) = self.plan, self.x.k.shape
        state = d_k, self.x.v.shape[3]
        states = self._shape(batch, n_heads, plan.n_groups * plan.n_chunks, *state)
        if plan.n_groups == 1:
            return run(None, states, None), None
        shape = self._shape(batch, n_heads, plan.n_groups, *state, dtype=jnp.float32)
        ends = run(None, None, shape)[2]
        if self.x.beta is not None and passed is None:
            passed = ends
        blocks = self._blocks
        (begins,) = _run(
            _begins_kernel,
            plan,
            (blocks.grid(*state), n_heads, batch),
            (self.x, self._kept(), ends, passed),
            (shape,),
            blocks=blocks,
            reverse=reverse,
        )
        return run(begins, states, None), ends

    def _kept(self) -> Float[Array, "B N G H"]:
        """How much of a state is left after each group; with the delta rule, whether any is."""
        plan, x = self.plan, self.x
        batch, _, n_heads, size = x.k.shape
        kept = jnp.ones((batch, n_heads, plan.n_groups, 1))
        if x.decay is not None and x.beta is None:
            ends = lax.slice_in_dim(x.decay, L - 1, None, L, 1)
            ends = ends.reshape(batch, plan.n_groups, plan.n_chunks, n_heads, -1).sum(axis=2)
            kept = jnp.exp(jnp.moveaxis(ends, 1, 2))
        if x.ids is not None:
            groups = x.ids.reshape(batch, plan.n_groups, -1)
            last = jnp.concatenate([groups[:, :1, 0], groups[:, :-1, -1]], axis=1)
            whole = last == groups[:, :, -1]
            kept = jnp.where(whole[:, None, :, None], kept, 0)
        return jnp.broadcast_to(kept, (*kept.shape[:3], size))

    def output(self, states, values) -> Float[Array, "B T N V"]:
        shape = self._like(self.x.v, jnp.float32)
        return self._each(_output_kernel, (states, values), (shape,))[0]

    def gradients(self, d_out) -> Inputs:
        """Those of the inputs."""
        x = self.x
        d_out = d_out.astype(self.plan.dtype)
        solved = self.solved(keep=True)
        states, values, ends = self.states(solved)
        given = inverse = None
        if solved is not None:
            (given,) = self._each(_d_values_kernel, (d_out,), (self._like(x.v),))
            inverse = solved.inverse
        d_states, d_values = self.d_states(solved, d_out, given, ends)
        numbers = self._shape(*x.k.shape[:3], dtype=jnp.float32)
        decay = None
        if x.decay is not None:
            decay = self._like(x.k, jnp.float32) if self.by_feature else numbers
        qkv = (self._like(a, a.dtype) for a in x[:3])
        shapes = _Of(*qkv, decay, None if x.beta is None else numbers)
        inputs = inverse, states, d_states, values, d_values, d_out
        (out,) = self._each(_gradients_kernel, inputs, (shapes,))
        decay = out.decay if decay is not numbers else out.decay[..., None]
        return Inputs(out.q, out.k, out.v, decay, None if out.beta is None else out.beta[..., None])


def _aligned(x: Inputs) -> Inputs:
    """Values whose rows begin at multiples of 16 bytes: of others each number is a load."""
    return x._replace(v=_wider(x.v))


def _wider(v: Float[Array, "B T N V"]) -> Float[Array, "B T N V8"]:
    """Columns of zeros added, up to a multiple of 8."""
    return jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, -v.shape[3] % 8)))


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
    launches = _launches(_aligned(x), ids, strict, interpret, groups)
    states, values, _ = launches.states(launches.solved())
    size = x.v.shape[3]
    return launches.output(states, values)[..., :size], values[..., :size]


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
    found = _launches(_aligned(x), ids, strict, interpret, groups).gradients(_wider(d_out))
    return found._replace(v=found.v[..., : x.v.shape[3]])
