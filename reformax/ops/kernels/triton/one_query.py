"""Softmax attention of one query a row as a Pallas kernel for NVIDIA GPUs (Triton).

The launches of small kernels dominate a step of decoding. In array operations, the logits, their
maximum, the sum of the weights and the sum of the values are separate kernels, and XLA writes the
weighted values to memory between two of them. A program of this kernel has a head's query, and
loops over its keys once. It reads keys by an index, so they need not be gathered beforehand. The
newest key and value may be separate inputs. The first program of each key head then writes them to
the cache, and all programs read them from their inputs.

Letters as in `reformax.ops.decoding.cache`; I is the number of keys of a tile.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Bool, Float, Int

from reformax.ops.kernels.triton.common import LOWEST, launch, load, tile_side
from reformax.ops.numerics.logits import PLAIN, Logits
from reformax.ops.softmax.online import nonzero

# Tiles of 64 keys wait for memory more often: a call with 256 keys took 17 us instead of 8.
# Registers hold half as many rows of more than 128 numbers.
TILE, WARPS = 256, 16


class NewKey(NamedTuple):
    """The newest key and value of each row, and the slot of the cache that they are written to."""

    key: Float[Array, "B G H"]
    value: Float[Array, "B G V"]
    slot: Int[Array, " B"]


class OneQueryInputs(NamedTuple):
    """The arrays that a program reads."""

    q: Float[Array, "B N H"]
    keys: Float[Array, "B G S H"]
    values: Float[Array, "B G S V"]
    seen: Int[Array, "#B #N K"]  # 1 or 0
    index: Int[Array, "B N K"] | None  # the slot of each of K keys; None: the same index
    alone: Float[Array, "B N V"] | None  # the output of a query that sees no key; None: zeros
    bias: Float[Array, "#B N K"] | None
    new: NewKey | None
    sinks: Float[Array, " N"] | None  # of `softmax.learned_sinks`


class _OneQuery(NamedTuple):
    """A running program: the arrays that it reads, and its query."""

    x: OneQueryInputs
    row: Any
    head: Any
    key_head: Any
    new_slot: Any  # the slot of the newest key; None: all keys are in the cache

    @classmethod
    def located(cls, x: OneQueryInputs) -> Self:
        row, head = pl.program_id(0), pl.program_id(1)
        key_head = head // (x.q.shape[1] // x.keys.shape[1])
        new_slot = None if x.new is None else load(x.new.slot.at[row], None)
        return cls(x, row, head, key_head, new_slot)

    @property
    def tile(self) -> int:
        """Keys of a tile."""
        return TILE if max(self.x.keys.shape[3], self.x.values.shape[3]) <= 128 else TILE // 2

    @property
    def n_tiles(self) -> int:
        return pl.cdiv(self.x.seen.shape[2], self.tile)

    def entries(self, i) -> tuple[Array, Array, Array, Array]:
        """A tile of the keys' entries: their numbers, whether they exist, slots, who is seen."""
        x, entry = self.x, i * self.tile + jnp.arange(self.tile, dtype=jnp.int32)
        exists = entry < x.seen.shape[2]
        slot = entry if x.index is None else self.numbers(x.index, entry, exists, 0)
        return entry, exists, slot, self.numbers(x.seen, entry, exists, 0) > 0

    def numbers(self, ref, entry, exists, other) -> Array:
        """Numbers of `[B or 1, N or 1, K]`."""
        at = zip((self.row, self.head), ref.shape, strict=False)
        first, second = (i if n > 1 else 0 for i, n in at)
        return load(ref.at[first, second, entry], exists, other)

    def rows(self, ref, new_ref, slot, exists) -> Float[Array, "I H"]:
        """Keys or values of the cache, with the newest one."""
        column, inside = _columns(ref)
        view = ref.at[self.row, self.key_head, slot[:, None], column[None]]
        if new_ref is None:
            return load(view, exists[:, None] & inside[None], 0.0)
        is_new = slot == self.new_slot
        old_rows = load(view, (exists & ~is_new)[:, None] & inside[None], 0.0)
        new_row = load(*_vector(new_ref, self.row, self.key_head), 0.0)
        return jnp.where(is_new[:, None], new_row[None], old_rows)

    def seen_before(self, i, entry, slot) -> Bool[Array, " I"]:
        """Whether an entry before each one is seen and has its slot."""

        def among(j, found):
            other, _, slots, seen = self.entries(j)
            same = (slots[None] == slot[:, None]) & seen[None] & (other[None] < entry[:, None])
            return jnp.maximum(found, jnp.max(same.astype(jnp.int32), axis=1))

        return lax.fori_loop(0, i + 1, among, jnp.zeros(self.tile, jnp.int32)) > 0

    def put_new(self, after) -> None:
        """Writes the newest key and value to the cache, in the first program of their head."""
        x = self.x
        leads = self.head % (x.q.shape[1] // x.keys.shape[1]) == 0
        for ref, new_row in zip(after, (x.new.key, x.new.value), strict=True):
            view, inside = _vector(new_row, self.row, self.key_head)
            to, _ = _vector(ref, self.row, self.key_head, self.new_slot)
            pltriton.store(to, load(view, inside), mask=inside & leads)


def _columns(ref) -> tuple[Int[Array, " H"], Bool[Array, " H"]]:
    """The columns of a vector along the last axis, padded, and which of them exist."""
    column = jnp.arange(tile_side(ref.shape[-1]), dtype=jnp.int32)
    return column, column < ref.shape[-1]


def _vector(ref, *index) -> tuple[Any, Bool[Array, " H"]]:
    """A view of a vector along the last axis, for `load` and `store`, and its mask."""
    column, inside = _columns(ref)
    return ref.at[(*index, column)], inside


def _kernel(x: OneQueryInputs, out, after, *, logits: Logits, count_once: bool):
    program = _OneQuery.located(x)
    row, head = program.row, program.head
    q = load(*_vector(x.q, row, head), 0.0).astype(jnp.float32)

    def step(i, state):
        acc, row_max, row_sum = state
        entry, exists, slot, seen = program.entries(i)
        # Both are on their way before anything waits, for unseen entries too.
        keys = program.rows(x.keys, x.new and x.new.key, slot, exists)
        values = program.rows(x.values, x.new and x.new.value, slot, exists)
        if count_once:
            seen &= ~program.seen_before(i, entry, slot)
        keys = keys.astype(jnp.float32)
        found = logits.capped(jnp.sum(keys * q[None], axis=1) * logits.scale)
        if x.bias is not None:
            found = found + program.numbers(x.bias, entry, seen, 0.0).astype(jnp.float32)
        found = jnp.where(seen, found, -jnp.inf)
        new_max = jnp.maximum(row_max, jnp.max(found))
        weights, decay = jnp.exp(found - new_max), jnp.exp(row_max - new_max)
        values = jnp.where(seen[:, None], values.astype(jnp.float32), 0.0)  # they may be NaN
        added = jnp.sum(weights[:, None] * values, axis=0)
        return acc * decay + added, new_max, row_sum * decay + jnp.sum(weights)

    acc = jnp.zeros(tile_side(x.values.shape[3]), jnp.float32)
    start = acc, jnp.float32(LOWEST), jnp.float32(0)
    acc, of_keys_max, row_sum = lax.fori_loop(0, program.n_tiles, step, start)
    if x.sinks is not None:
        sink = load(x.sinks.at[head], None).astype(jnp.float32)
        row_max = jnp.maximum(of_keys_max, sink)
        of_keys = jnp.exp(of_keys_max - row_max)
        acc, row_sum = acc * of_keys, row_sum * of_keys + jnp.exp(sink - row_max)
    if_alone = 0.0
    if x.alone is not None:
        if_alone = load(*_vector(x.alone, row, head), 0.0).astype(jnp.float32)
    view, inside = _vector(out, row, head)
    out_row = jnp.where(row_sum == 0, if_alone, acc / nonzero(row_sum))
    pltriton.store(view, out_row.astype(out.dtype), mask=inside)
    if x.new is not None:
        program.put_new(after)


def attend(
    q: Float[Array, "B 1 N H"],
    keys: Float[Array, "B G S H"],
    values: Float[Array, "B G S V"],
    mask: Bool[Array, "#B #N K"] | Int[Array, "#B #N K"],
    interpret: bool = False,
    *,
    index: Int[Array, "B N K"] | None = None,
    alone: Float[Array, "B 1 N V"] | None = None,
    logits: Logits = PLAIN,
    bias: Float[Array, "#B N K"] | None = None,
    new: NewKey | None = None,
    sinks: Float[Array, " N"] | None = None,
    count_once: bool = False,
) -> tuple[Float[Array, "B 1 N V"], tuple[Array, Array] | None]:
    """`ops.decoding.cache.attend_to`; with `new`, also the updated keys and values."""
    inputs = OneQueryInputs(
        q[:, 0],
        keys,
        values,
        mask.astype(jnp.int32),
        index,
        None if alone is None else alone[:, 0],
        bias,
        new,
        sinks,
    )
    batch, _, n_heads, _ = q.shape
    shape = jax.ShapeDtypeStruct((batch, n_heads, values.shape[-1]), values.dtype)
    after = None
    if new is not None:
        after = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (keys, values))
    out, after = launch(
        functools.partial(_kernel, logits=logits.for_size(q.shape[-1]), count_once=count_once),
        (inputs,),
        (shape, after),
        grid=(batch, n_heads),
        num_warps=WARPS,
        num_stages=2,
        interpret=interpret,
        name="one_query",
        # Updates keys and values in place.
        aliases=None if new is None else {1: 1, 2: 2},
    )
    return out[:, None], after
