"""Softmax attention of one query a row as a Pallas kernel for NVIDIA GPUs (Triton).

A step of decoding waits for its small kernels. In array operations the logits, their
maximum, the sum of the weights and that of the values are kernels of their own, and XLA writes the
weighted values to memory between two of them. Here a program has a head's query and goes over its
keys once. An index may say where they lie, so that nothing is gathered beforehand. The newest key
and its value may come beside the others: the first program of each of their heads then also writes
them to their place, and all read them from where they are.

Letters as in `reformax.ops.decoding.cache`; I is the number of keys of a tile.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Bool, Float, Int

from reformax.ops.kernels.triton.common import LOWEST, launch, load, power_of_two
from reformax.ops.softmax.online import nonzero

# Tiles of 64 keys waited for memory more often: of 256 keys a call took 17 us in the place of 8.
TILE, WARPS = 256, 16


class New(NamedTuple):
    """A key and a value, and the place that they get."""

    key: Float[Array, "B G H"]
    value: Float[Array, "B G V"]
    place: Int[Array, " B"]


class Inputs(NamedTuple):
    """The arrays that a program reads."""

    q: Float[Array, "B N H"]
    keys: Float[Array, "B G S H"]
    values: Float[Array, "B G S V"]
    seen: Int[Array, "#B #N K"]  # 1 or 0
    index: Int[Array, "B N K"] | None  # the key of each place; None: place k has key k
    alone: Float[Array, "B N V"] | None  # the value of a query that sees itself alone; None: zeros
    bias: Float[Array, "#B N K"] | None
    new: New | None


def _kernel(inputs: Inputs, out, after, *, scale: float):
    row, head = pl.program_id(0), pl.program_id(1)
    n_places, n_heads = inputs.seen.shape[2], inputs.q.shape[1]
    n_sharing = n_heads // inputs.keys.shape[1]
    group, new = head // n_sharing, inputs.new
    new_place = None if new is None else load(new.place.at[row], None)

    def line(ref, *at, size: int):
        """Numbers along a last axis of `size`, float32, zeros behind the end."""
        column = jnp.arange(power_of_two(size), dtype=jnp.int32)
        view = ref.at[(*at, column[None] if len(at) == 3 else column)]
        return view, column < size

    size, d_v = inputs.q.shape[2], inputs.values.shape[3]
    q = load(*line(inputs.q, row, head, size=size), 0.0).astype(jnp.float32)

    def of_place(ref, place, exists, other):
        first, second = (at if n > 1 else 0 for at, n in zip((row, head), ref.shape, strict=False))
        return load(ref.at[first, second, place], exists, other)

    def rows(ref, new_ref, place, seen, size):
        view, inside = line(ref, row, group, place[:, None], size=size)
        if new_ref is None:
            return load(view, seen[:, None] & inside[None], 0.0).astype(jnp.float32)
        is_new = place == new_place
        found = load(view, (seen & ~is_new)[:, None] & inside[None], 0.0)
        own = load(*line(new_ref, row, group, size=size), 0.0)
        return jnp.where((seen & is_new)[:, None], own[None], found).astype(jnp.float32)

    def step(i, state):
        acc, row_max, row_sum = state
        place = i * TILE + jnp.arange(TILE, dtype=jnp.int32)
        exists = place < n_places
        seen = of_place(inputs.seen, place, exists, 0) > 0
        key = place if inputs.index is None else of_place(inputs.index, place, seen, 0)
        keys = rows(inputs.keys, new and new.key, key, seen, size)
        logits = jnp.sum(keys * q[None], axis=1) * scale
        if inputs.bias is not None:
            logits = logits + of_place(inputs.bias, place, seen, 0.0).astype(jnp.float32)
        logits = jnp.where(seen, logits, -jnp.inf)
        new_top = jnp.maximum(row_max, jnp.max(logits))
        weights, decay = jnp.exp(logits - new_top), jnp.exp(row_max - new_top)
        values = rows(inputs.values, new and new.value, key, seen, d_v)
        added = jnp.sum(weights[:, None] * values, axis=0)
        return acc * decay + added, new_top, row_sum * decay + jnp.sum(weights)

    width = power_of_two(d_v)
    start = jnp.zeros(width, jnp.float32), jnp.float32(LOWEST), jnp.float32(0)
    acc, _, row_sum = lax.fori_loop(0, pl.cdiv(n_places, TILE), step, start)
    nothing = 0.0
    if inputs.alone is not None:
        nothing = load(*line(inputs.alone, row, head, size=d_v), 0.0).astype(jnp.float32)
    view, inside = line(out, row, head, size=d_v)
    found = jnp.where(row_sum == 0, nothing, acc / nonzero(row_sum))
    pltriton.store(view, found.astype(out.dtype), mask=inside)
    if new is not None:
        for ref, own, width in zip(after, (new.key, new.value), (size, d_v), strict=True):
            number, inside = line(own, row, group, size=width)
            column = jnp.arange(power_of_two(width), dtype=jnp.int32)
            first = inside & (head % n_sharing == 0)
            pltriton.store(ref.at[row, group, new_place, column], load(number, inside), mask=first)


def attend(
    q: Float[Array, "B 1 N H"],
    keys: Float[Array, "B G S H"],
    values: Float[Array, "B G S V"],
    mask: Bool[Array, "#B #N K"],
    interpret: bool = False,
    *,
    index: Int[Array, "B N K"] | None = None,
    alone: Float[Array, "B 1 N V"] | None = None,
    scale: float | None = None,
    bias: Float[Array, "#B N K"] | None = None,
    new: New | None = None,
) -> tuple[Float[Array, "B 1 N V"], tuple[Array, Array] | None]:
    """`ops.decoding.cache.attend_to`, and with a new key the keys and the values with it."""
    inputs = Inputs(
        q[:, 0],
        keys,
        values,
        mask.astype(jnp.int32),
        index,
        None if alone is None else alone[:, 0],
        bias,
        new,
    )
    batch, _, n_heads, _ = q.shape
    shape = jax.ShapeDtypeStruct((batch, n_heads, values.shape[-1]), values.dtype)
    after = None
    if new is not None:
        after = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (keys, values))
    out, after = launch(
        functools.partial(_kernel, scale=1 / math.sqrt(q.shape[-1]) if scale is None else scale),
        (inputs,),
        (shape, after),
        grid=(batch, n_heads),
        num_warps=WARPS,
        num_stages=2,
        interpret=interpret,
        name="one_query",
        # Keys and values, behind q and the output, stay where they are.
        aliases=None if new is None else {1: 1, 2: 2},
    )
    return out[:, None], after
