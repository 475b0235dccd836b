"""A chunk of a linear recurrence: how the programs of `kernels.recurrence` read and write it.

Decays by feature are relative to the middle of two halves. Where all decays of a tile are near its
middle's, one product has all pairs. Elsewhere it has the pairs across the middle, whose exponents
are at most 0, and halves of 16 rows, of 8 and so on to one follow, until their decays are near.
Triton cannot slice a tile: each product is of the whole chunk, and a mask keeps its pairs.

Letters as in `reformax.ops.base`; L is 64, Tp is T padded to whole groups of chunks.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Bool, Float, Int

from reformax.ops.kernels.triton.common import load, tile_product, tile_side
from reformax.ops.masking.visibility import same_segment

L = 64  # rows of a chunk
BITS = 6  # of the index of a row
# Decays near a middle, by the dtype of products: numbers and their products with factors of
# e^40 have room in bfloat16 and in float32, where the exponent's rounding allows less. Float16 has
# no room.
NEAR = {"bfloat16": 40.0, "float32": 16.0, "float16": 0.0}


class RecurrenceArrays(NamedTuple):
    """The arrays that the kernels read, or references to them."""

    q: Array  # [B, T, N, H]
    k: Array  # [B, T, N, H]
    v: Array  # [B, T, N, V]
    decay: Array | None  # cumulative in a chunk, in the rows' order, [B, Tp, N] or [B, Tp, N, H]
    beta: Array | None  # [B, T, N]
    ids: Array | None  # [B, Tp] in the rows' order, in which those of one id are contiguous
    order: Array | None  # [B, Tp], the position of each row; None: its own
    # With decays by feature, operands of the scans over chunks, in the dtype of products.
    old_q: Array | None = None  # [B, T, N, H], queries decayed since the state before the chunk
    new_k: Array | None = None  # [B, T, N, H], keys decayed until the state after it


class RecurrenceStates(NamedTuple):
    """The states of chunks or of groups, or a program's block of one."""

    outer: Any  # [B, N, C, H, V], sums of k v^T
    keys: Any = None  # [B, N, C, H], sums of k for means, in float32


class SolvedDelta(NamedTuple):
    """The delta rule as a recurrence: row t writes `b_t x_t`, where `x = values - reads S`.

    x is what the state lacks of a row's value. It has no factor b, so that the gradient of b, also
    of a b of 0, is the product of x and its own gradient.
    """

    reads: Array  # [B, T, N, H]
    values: Array  # [B, T, N, V]
    inverse: Array | None  # [B, N, Tp, L], (1 + M)^-1, for the gradients
    solution: Array | None = None  # [B, N, Tp, L], (1 + P b)^-1, for the backward pass


class RecurrencePlan(NamedTuple):
    """The static settings of all kernels."""

    length: int
    n_groups: int
    n_chunks: int  # chunks of a group
    mean: bool  # whether states have the sums of keys too
    dtype: Any  # the dtype of products' inputs
    interpret: bool

    @property
    def padded(self) -> int:
        return self.n_groups * self.n_chunks * L


class ChunkRows(NamedTuple):
    """A chunk of one head, as a program reads it.

    Where segments are not contiguous, its rows are not: programs gather and scatter them, and only
    ids and decays lie in the rows' order.
    """

    plan: RecurrencePlan
    x: RecurrenceArrays
    batch: Any
    head: Any
    start: Any  # its first row
    positions: Any  # of its rows, [L]
    known: dict[str, Any] | None = None  # numbers that are loaded; None: each is at its use

    @classmethod
    def of(cls, plan: RecurrencePlan, x: RecurrenceArrays, batch, head, start) -> ChunkRows:
        return cls(plan, x, batch, head, start, None).at(start)

    def at(self, start) -> ChunkRows:
        """The chunk that starts at this row."""
        rows = self._replace(start=start)
        positions = rows.index()
        if self.x.order is not None:
            positions = pltriton.load(self.x.order.at[self.batch, positions])
        return rows._replace(positions=positions)

    def index(self) -> Int[Array, " L"]:
        return self.start + jnp.arange(L, dtype=jnp.int32)

    def exists(self) -> Bool[Array, " L"] | None:
        return None if self.plan.length == self.plan.padded else self.index() < self.plan.length

    def read(self, ref, columns=None) -> Float[Array, "L J"]:
        """Rows of `[B, T, N, J]`."""
        return load(*self._view(ref, columns))

    def write(self, ref, tile, columns=None) -> None:
        view, mask = self._view(ref, columns)
        pltriton.store(view, tile.astype(ref.dtype), mask=mask)

    def _view(self, ref, columns):
        columns = columns_of(ref.shape[3]) if columns is None else columns
        exists = self.exists()
        view = ref.at[self.batch, self.positions[:, None], self.head, columns[None, :]]
        mask = None if exists is None else exists[:, None]
        return view, joint_mask(mask, column_mask(columns, ref.shape[3], 0), (L, len(columns)))

    # Numbers of rows and of the chunk.

    def load_numbers(self) -> ChunkRows:
        """Loads them now: loaded at its use, after a product, each costs its whole latency."""
        names = ["beta"] if self.x.beta is not None else []
        names += ["decay", "end_decay"] if self.by_head else []
        names += ["ids", "last_id", "end_id"] if self.x.ids is not None else []
        return self._replace(known={name: self._load(name) for name in names})

    def _number(self, name: str) -> Array:
        return self._load(name) if self.known is None else self.known[name]

    def _load(self, name: str) -> Array:
        match name:
            case "beta":  # [L]
                return self.numbers(self.x.beta)
            case "decay":  # of the head, [L]
                return pltriton.load(self.x.decay.at[self.batch, self.index(), self.head])
            case "end_decay":  # of the head over the whole chunk, [1]
                return pltriton.load(self.x.decay.at[self.batch, self._at(L - 1), self.head])
            case "ids":  # [L]
                return pltriton.load(self.x.ids.at[self.batch, self.index()])
            case "last_id":  # of the row before the chunk; for the first chunk, of its first row
                before = jnp.full((1,), jnp.maximum(self.start - 1, 0), jnp.int32)
                return pltriton.load(self.x.ids.at[self.batch, before])
            case "end_id":  # of the last row, [1]
                return pltriton.load(self.x.ids.at[self.batch, self._at(L - 1)])
        raise ValueError(name)

    def _at(self, t: int) -> Int[Array, " 1"]:
        return jnp.full((1,), self.start + t, jnp.int32)

    # Tiles of pairs of rows, and scalars of rows.

    def pairs(self, ref) -> Float[Array, "L L"]:
        """The chunk's tile of `[B, N, Tp, L]`."""
        return pltriton.load(self._square(ref))

    def put_pairs(self, ref, tile) -> None:
        pltriton.store(self._square(ref), tile.astype(ref.dtype))

    def _square(self, ref):
        columns = jnp.arange(L, dtype=jnp.int32)
        return ref.at[self.batch, self.head, self.index()[:, None], columns[None, :]]

    def numbers(self, ref) -> Float[Array, " L"]:
        """Rows of `[B, T, N]`."""
        return load(*self._numbers(ref))

    def put_numbers(self, ref, x) -> None:
        view, mask = self._numbers(ref)
        pltriton.store(view, x.astype(ref.dtype), mask=mask)

    def _numbers(self, ref):
        return ref.at[self.batch, self.positions, self.head], self.exists()

    # Decays, cumulative from the start of the chunk.

    @property
    def by_feature(self) -> bool:
        return self.x.decay is not None and len(self.x.decay.shape) == 4

    def decay(self, columns=None) -> Float[Array, "L _"]:
        if self.by_feature:
            return self._decays(self.index(), columns)
        return self._number("decay")[:, None]

    def put_decays(self, ref, tile) -> None:
        """Writes all of a chunk's decays, `[B, Tp, N, H]`."""
        view, mask = self._decay_view(ref, self.index(), columns_of(ref.shape[3]))
        pltriton.store(view, tile, mask=mask)

    def _decays(self, index, columns) -> Float[Array, "I J"]:
        return load(*self._decay_view(self.x.decay, index, columns))

    def _decay_view(self, ref, index, columns):
        view = ref.at[self.batch, index[:, None], self.head, columns[None, :]]
        inside = column_mask(columns, ref.shape[3], 0)
        return view, joint_mask(None, inside, (len(index), len(columns)))

    @property
    def by_head(self) -> bool:
        return self.x.decay is not None and not self.by_feature

    def _each_middle(self, columns, add, initial):
        """`add(pairs, late, early, sums)` for halves of 32 rows, of 16 and so on, from `initial`.

        `pairs` is the mask of a product. `late` is `exp(c_i - c_m)`, and `early` its inverse, m
        being the last row of the earlier half. The first halves whose decays are all near have all
        pairs that are left, and are the last.
        """
        c, row, (i, j) = self.decay(columns), jnp.arange(L, dtype=jnp.int32), sides()
        most = np.float32(NEAR[jnp.dtype(self.plan.dtype).name])

        def step(carry):
            bit, sums = carry
            middle = ((row >> (bit + 1)) << (bit + 1)) + (jnp.left_shift(np.int32(1), bit) - 1)
            since = c - self._decays(self.start + middle, columns)
            # Decays that are no numbers are not near.
            near = jnp.max(jnp.where(jnp.abs(since) <= most, 0, 1)) == 0
            apart = (i ^ j) >> bit  # 1 across the middle, 0 in one half
            pairs = (i > j) & ((apart == 1) | ((apart == 0) & near))
            # Rows of no such pair, and rows of different segments, may have any exponent.
            largest = jnp.where(near, most, np.float32(0))
            late, early = (jnp.exp(jnp.minimum(x, largest)) for x in (since, -since))
            return jnp.where(near, np.int32(-1), bit - 1), add(pairs, late, early, sums)

        # A loop, because programs that hold all halves at once are slow.
        return lax.while_loop(lambda x: x[0] >= 0, step, (np.int32(BITS - 1), initial))[1]

    def end_decay(self, columns=None) -> Float[Array, "1 _"]:
        """The decay of the whole chunk."""
        if self.by_feature:
            return self._decays(self._at(L - 1), columns)
        return self._number("end_decay")[:, None]

    # Segments.

    def seen(self, exclude_self: bool = False) -> Bool[Array, "L L"]:
        """Which rows of its chunk each row sees."""
        i, j = sides()
        mask = j < i if exclude_self else j <= i
        if self.x.ids is not None:
            ids = self._number("ids")
            mask = mask & same_segment(ids[:, None], ids[None, :])
        return mask

    # Factors of decay and of the delta rule. Those of a head belong to rows: they multiply products
    # of rows, so that queries and keys are operands as they lie in memory. Those of features
    # multiply queries and keys.

    def from_old(self, x, columns=None) -> Float[Array, "L H"]:
        """Queries or keys that read the state before the chunk, decayed by feature."""
        return x * jnp.exp(self.decay(columns=columns)) if self.by_feature else x

    def old_rows(self, y) -> Float[Array, "L J"]:
        """Products of rows `from_old`, decayed by head; zeros at rows that do not see the state."""
        if self.by_head:
            y = y * jnp.exp(self.decay())
        return y if self.x.ids is None else jnp.where(self._old()[:, None], y, 0)

    def old_columns(self, pairs) -> Float[Array, "L L"]:
        """`old_rows` of the right side of a product with these pairs."""
        if self.by_head:
            pairs = pairs * jnp.exp(self._number("decay"))[None, :]
        return pairs if self.x.ids is None else jnp.where(self._old()[None, :], pairs, 0)

    def _old(self) -> Bool[Array, " L"]:
        return same_segment(self._number("ids"), self._number("last_id"))

    def to_new(self, x, columns=None) -> Float[Array, "L H"]:
        """Keys that are written to the state after the chunk, decayed by feature."""
        if not self.by_feature:
            return x
        return x * jnp.exp(jnp.minimum(self.end_decay(columns) - self.decay(columns), 0))

    def read_new(self, columns) -> Float[Array, "L H"]:
        """Keys `to_new`."""
        return self.read(self.x.k if self.x.new_k is None else self.x.new_k, columns)

    def new_rows(self, y) -> Float[Array, "L J"]:
        """Values or products of keys `to_new`, decayed by head; zeros at forgotten rows."""
        if self.by_head:
            y = y * jnp.exp(jnp.minimum(self.end_decay() - self.decay(), 0))
        if self.x.ids is None:
            return y
        return jnp.where(same_segment(self._number("ids"), self._number("end_id"))[:, None], y, 0)

    def times_beta(self, y) -> Float[Array, "L J"]:
        """Rows times the delta rule's factor."""
        return y if self.x.beta is None else y * self._number("beta")[:, None]

    def beta_columns(self, pairs) -> Float[Array, "L L"]:
        """`times_beta` of the right side of a product with these pairs."""
        return pairs if self.x.beta is None else pairs * self._number("beta")[None, :]

    def forget(self, state: RecurrenceStates, columns) -> RecurrenceStates:
        """The state decayed over the chunk; zeros where none is left, even of an infinite state."""
        keys = None if state.keys is None else self._left(state.keys[:, None], columns)[:, 0]
        return RecurrenceStates(self._left(state.outer, columns), keys)

    def _left(self, state: Float[Array, "H V"], columns) -> Float[Array, "H V"]:
        if self.x.decay is not None:
            kept = jnp.exp(self._end(columns))
            state = jnp.where(kept > 0, kept * state, 0)
        if self.x.ids is None:
            return state
        one_segment = same_segment(self._number("last_id"), self._number("end_id"))
        return jnp.where(one_segment[:, None], state, 0)

    def _end(self, columns) -> Float[Array, "_ 1"]:
        """The decay of the whole chunk, as a column."""
        if not self.by_feature:
            return self.end_decay()
        index = jnp.full((1, 1), self.start + L - 1, jnp.int32)
        view = self.x.decay.at[self.batch, index, self.head, columns[:, None]]
        inside = column_mask(columns, self.x.decay.shape[3], 1)
        return load(view, joint_mask(None, inside, (len(columns), 1)))

    def state(self, refs: RecurrenceStates, chunk, h, v) -> RecurrenceStates:
        """The blocks `[H, V]` and `[H]` of a chunk's state."""
        outer = load(*self._state(refs.outer, chunk, h, v))
        keys = None if refs.keys is None else load(*self._keys(refs.keys, chunk, h))
        return RecurrenceStates(outer, keys)

    def put_state(self, refs: RecurrenceStates, chunk, h, v, state: RecurrenceStates) -> None:
        view, mask = self._state(refs.outer, chunk, h, v)
        pltriton.store(view, state.outer.astype(refs.outer.dtype), mask=mask)
        if refs.keys is not None:
            view, mask = self._keys(refs.keys, chunk, h)
            pltriton.store(view, state.keys, mask=mask)

    def _state(self, ref, chunk, h, v):
        view = ref.at[self.batch, self.head, chunk, h[:, None], v[None, :]]
        mask, shape = column_mask(h, ref.shape[3], 1), (len(h), len(v))
        return view, joint_mask(mask, column_mask(v, ref.shape[4], 0), shape)

    def _keys(self, ref, chunk, h):
        mask = None if ref.shape[3] % len(h) == 0 else h < ref.shape[3]
        return ref.at[self.batch, self.head, chunk, h], mask

    # Products.

    def rounded(self, x) -> Float[Array, "*d"]:
        """Rounds to the dtype of products' inputs, as float32."""
        return to_float32(x.astype(self.plan.dtype))

    def product(self, a, b, contract: str = "10") -> Float[Array, "I K"]:
        """`tile_product` in the dtype of products' inputs, summed in float32."""
        return tile_product(a.astype(self.plan.dtype), b.astype(self.plan.dtype), contract)

    def products_of(self, x, y, columns=None) -> Float[Array, "L L"]:
        """`weighted` makes `sum_h x_ih y_jh exp(c_ih - c_jh)` of it.

        Args:
          columns: their features, a block of all; products of blocks add up. None: all.
        """
        if not self.by_feature:
            return self.product(x, y, "11")
        i, j = sides()

        def add(pairs, late, early, total):
            return total + jnp.where(pairs, self.product(x * late, y * early, "11"), 0)

        diagonal = jnp.where(i == j, jnp.sum(to_float32(x) * to_float32(y), axis=1)[:, None], 0)
        return self._each_middle(columns, add, diagonal)

    def pairs_vjp(self, d, x, y, columns=None) -> tuple[Float[Array, "L H"], Float[Array, "L H"]]:
        """The gradients of x and y, by `weighted` ones of their products."""
        if not self.by_feature:
            return self.product(d, y), self.product(d, x, "00")
        i, j = sides()
        diagonal = jnp.sum(jnp.where(i == j, d, 0), axis=1)[:, None]

        def add(pairs, late, early, sums):
            d_pairs = jnp.where(pairs, d, 0)
            dx = sums[0] + self.product(d_pairs, y * early) * late
            return dx, sums[1] + self.product(d_pairs, x * late, "00") * early

        return self._each_middle(columns, add, (diagonal * to_float32(y), diagonal * to_float32(x)))

    def weighted(self, pairs, seen) -> Float[Array, "L L"]:
        """Products of pairs that see each other, times the decay of their head."""
        if self.by_head:
            c = self._number("decay")
            between = c[:, None] - c[None, :]
            pairs = pairs * jnp.exp(jnp.where(seen, between, 0))
        return jnp.where(seen, pairs, 0)


def parts_of(x: Float[Array, "I J"], n: int) -> list[Float[Array, "I J"]]:
    """Splits numbers into sums of n bfloat16 parts; three parts are exact."""
    parts, rest = [], x.astype(jnp.float32)
    for _ in range(n):
        # The upper half of a float32 is a bfloat16. Compilers may remove casts to it and back.
        bits = lax.bitcast_convert_type(rest, jnp.int32) & np.int32(-(1 << 16))
        part = lax.bitcast_convert_type(bits, jnp.float32)
        parts.append(part.astype(jnp.bfloat16))
        rest = rest - part
    return parts


def to_float32(x) -> Float[Array, "*d"]:
    """Casts to float32."""
    return x.astype(jnp.float32)


def sides() -> tuple[Int[Array, "L 1"], Int[Array, "1 L"]]:
    """Indices of the rows of a chunk, as the sides of a tile of pairs."""
    row = jnp.arange(L, dtype=jnp.int32)
    return row[:, None], row[None, :]


def across(bit: Any) -> Bool[Array, "L L"]:
    """Whether row i is in the later and j in the earlier half of a block of 2^(bit + 1) rows."""
    i, j = sides()
    return (((i ^ j) >> bit) == 1) & (i > j)


def columns_of(size: int, first: Any = 0, width: int | None = None) -> Int[Array, " J"]:
    """Indices of columns, padded to a power of two."""
    return first + jnp.arange(width or tile_side(size), dtype=jnp.int32)


def column_mask(columns, size: int, axis: int) -> Bool[Array, "*d"] | None:
    """Which columns exist, as a side of a tile; None: all columns exist."""
    if size % len(columns) == 0:
        return None
    inside = columns < size
    return inside[:, None] if axis else inside[None, :]


def joint_mask(mask, other, shape) -> Bool[Array, "*d"] | None:
    """The conjunction of two masks, in this shape; None: all True."""
    masks = [jnp.broadcast_to(m, shape) for m in (mask, other) if m is not None]
    return functools.reduce(jnp.logical_and, masks) if masks else None


def chunk_of(plan: RecurrencePlan, x: RecurrenceArrays) -> ChunkRows:
    """The chunk of a program of the grid (C, N, B), and its numbers."""
    batch, head, chunk = pl.program_id(2), pl.program_id(1), pl.program_id(0)
    return ChunkRows.of(plan, x, batch, head, chunk * L).load_numbers()
