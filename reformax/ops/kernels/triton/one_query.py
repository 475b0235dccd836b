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
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Bool, Float, Int

from reformax.ops.kernels.triton.common import LOWEST, launch, load, power_of_two
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


def _kernel(inputs: OneQueryInputs, out, after, *, logits: Logits, count_once: bool):
    row, head = pl.program_id(0), pl.program_id(1)
    n_entries, n_heads = inputs.seen.shape[2], inputs.q.shape[1]
    group_size = n_heads // inputs.keys.shape[1]
    group, new = head // group_size, inputs.new
    new_slot = None if new is None else load(new.slot.at[row], None)

    def vector(ref, *index, size: int):
        """A view of vectors along a last axis of `size`, and the mask of its columns."""
        column = jnp.arange(power_of_two(size), dtype=jnp.int32)
        view = ref.at[(*index, column[None] if len(index) == 3 else column)]
        return view, column < size

    size, d_v = inputs.q.shape[2], inputs.values.shape[3]
    tile = TILE if max(size, d_v) <= 128 else TILE // 2
    q = load(*vector(inputs.q, row, head, size=size), 0.0).astype(jnp.float32)

    def of_entry(ref, entry, exists, other):
        first, second = (i if n > 1 else 0 for i, n in zip((row, head), ref.shape, strict=False))
        return load(ref.at[first, second, entry], exists, other)

    def rows(ref, new_ref, slot, exists, size):
        view, inside = vector(ref, row, group, slot[:, None], size=size)
        if new_ref is None:
            return load(view, exists[:, None] & inside[None], 0.0)
        is_new = slot == new_slot
        out_row = load(view, (exists & ~is_new)[:, None] & inside[None], 0.0)
        new_row = load(*vector(new_ref, row, group, size=size), 0.0)
        return jnp.where(is_new[:, None], new_row[None], out_row)

    def entries(i):
        entry = i * tile + jnp.arange(tile, dtype=jnp.int32)
        exists = entry < n_entries
        slot = entry if inputs.index is None else of_entry(inputs.index, entry, exists, 0)
        return entry, exists, slot, of_entry(inputs.seen, entry, exists, 0) > 0

    def seen_before(i, entry, slot):
        """Whether an entry before each one is seen and has its slot."""

        def among(j, found):
            other, _, slots, seen = entries(j)
            same = (slots[None] == slot[:, None]) & seen[None] & (other[None] < entry[:, None])
            return jnp.maximum(found, jnp.max(same.astype(jnp.int32), axis=1))

        return lax.fori_loop(0, i + 1, among, jnp.zeros(tile, jnp.int32)) > 0

    def step(i, state):
        acc, row_max, row_sum = state
        entry, exists, slot, seen = entries(i)
        # Both are on their way before anything waits, for unseen entries too.
        keys = rows(inputs.keys, new and new.key, slot, exists, size)
        values = rows(inputs.values, new and new.value, slot, exists, d_v)
        if count_once:
            seen &= ~seen_before(i, entry, slot)
        keys = keys.astype(jnp.float32)
        found = logits.capped(jnp.sum(keys * q[None], axis=1) * logits.scale)
        if inputs.bias is not None:
            found = found + of_entry(inputs.bias, entry, seen, 0.0).astype(jnp.float32)
        found = jnp.where(seen, found, -jnp.inf)
        new_max = jnp.maximum(row_max, jnp.max(found))
        weights, decay = jnp.exp(found - new_max), jnp.exp(row_max - new_max)
        values = jnp.where(seen[:, None], values.astype(jnp.float32), 0.0)  # they may be NaN
        added = jnp.sum(weights[:, None] * values, axis=0)
        return acc * decay + added, new_max, row_sum * decay + jnp.sum(weights)

    width = power_of_two(d_v)
    start = jnp.zeros(width, jnp.float32), jnp.float32(LOWEST), jnp.float32(0)
    acc, of_keys_max, row_sum = lax.fori_loop(0, pl.cdiv(n_entries, tile), step, start)
    if inputs.sinks is not None:
        sink = load(inputs.sinks.at[head], None).astype(jnp.float32)
        row_max = jnp.maximum(of_keys_max, sink)
        of_keys = jnp.exp(of_keys_max - row_max)
        acc, row_sum = acc * of_keys, row_sum * of_keys + jnp.exp(sink - row_max)
    if_alone = 0.0
    if inputs.alone is not None:
        if_alone = load(*vector(inputs.alone, row, head, size=d_v), 0.0).astype(jnp.float32)
    view, inside = vector(out, row, head, size=d_v)
    out_row = jnp.where(row_sum == 0, if_alone, acc / nonzero(row_sum))
    pltriton.store(view, out_row.astype(out.dtype), mask=inside)
    if new is not None:
        for ref, new_row, width in zip(after, (new.key, new.value), (size, d_v), strict=True):
            view, inside = vector(new_row, row, group, size=width)
            column = jnp.arange(power_of_two(width), dtype=jnp.int32)
            first = inside & (head % group_size == 0)
            pltriton.store(ref.at[row, group, new_slot, column], load(view, inside), mask=first)


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
