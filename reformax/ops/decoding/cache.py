"""The cache of keys and values in decoding, and a query's attention to it.

Letters besides those of `reformax.ops.base`: S slots of a ring, K keys that one query sees.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from reformax.ops.calls.call import Call
from reformax.ops.calls.dispatch import INTERPRETED, choose_impl
from reformax.ops.calls.heads import grouped
from reformax.ops.calls.obstacles import kernel_obstacles
from reformax.ops.masking.visibility import Side, Visibility
from reformax.ops.numerics.precision import accum_dtype
from reformax.ops.softmax.online import Softmax, softmax_over

# The most keys and rows for which "auto" takes the kernel, in which one program reads all keys of a
# head.
MAX_KERNEL_KEYS, MAX_KERNEL_ROWS = 1024, 64


class KeyValues(NamedTuple):
    """Keys and values in a ring: position p is in slot p % S, where it replaces position p - S."""

    keys: Float[Array, "B N S H"]
    values: Float[Array, "B N S V"]

    def at(self, slot: Int[Array, "#B #N K"]) -> KeyValues:
        """The keys and values in some slots, `[B, N, K, ...]`."""
        return KeyValues(*(jnp.take_along_axis(x, slot[..., None], axis=2) for x in self))

    def joined(self, others: KeyValues) -> KeyValues:
        """Concatenates the slots of others, of the same rows and heads."""
        return KeyValues(*(jnp.concatenate(x, axis=2) for x in zip(self, others, strict=True)))


class SharedByBatch(NamedTuple):
    """A part of a cache that is the same for all rows of the batch."""

    value: Any


def take_rows(cache: Any, rows: Int[Array, " R"]) -> Any:
    """The cache of the rows with these indices, in their order. An index may repeat."""
    return jax.tree.map(
        lambda x: x if isinstance(x, SharedByBatch) else x[rows],
        cache,
        is_leaf=lambda x: isinstance(x, SharedByBatch),
    )


def where_rows(mask: Bool[Array, " B"], cache: Any, other: Any) -> Any:
    """The rows of `cache` where the mask is True, and of `other` elsewhere."""

    def chosen(x, y):
        if isinstance(x, SharedByBatch):
            return x
        return jnp.where(mask.reshape(-1, *[1] * (x.ndim - 1)), x, y)

    return jax.tree.map(chosen, cache, other, is_leaf=lambda x: isinstance(x, SharedByBatch))


def fill_ring(
    k: Float[Array, "B T N H"], v: Float[Array, "B T N V"], lengths: Int[Array, " B"], n_slots: int
) -> KeyValues:
    """The ring after each row's first `lengths` positions."""
    positions = positions_by_slot(lengths - 1, n_slots)[:, None, :, None]
    index = jnp.clip(positions, 0, k.shape[1] - 1)
    each = (jnp.take_along_axis(jnp.swapaxes(x, 1, 2), index, axis=2) for x in (k, v))
    # Zeros in slots that hold no position yet: padding may be NaN, and 0 * NaN is NaN.
    return KeyValues(*(jnp.where(positions >= 0, x, 0) for x in each))


def add_to_ring(
    ring: KeyValues,
    k: Float[Array, "B 1 N H"],
    v: Float[Array, "B 1 N V"],
    position: Int[Array, " B"],
) -> KeyValues:
    """The ring with the key and the value of each row's `position` added."""
    slot = position % ring.keys.shape[2]
    return KeyValues(*(put(x, new[:, 0], slot) for x, new in zip(ring, (k, v), strict=True)))


def replace_value(
    ring: KeyValues, v: Float[Array, "B 1 N V"], position: Int[Array, " B"]
) -> KeyValues:
    """The ring with the value of each row's `position` replaced. The ring holds that position."""
    slot = position % ring.values.shape[2]
    return ring._replace(values=put(ring.values, v[:, 0], slot))


def replace_in_memory(cache: Any, v: Float[Array, "B 1 N V"], position: Int[Array, " B"]) -> Any:
    """`replace_value` for a cache whose keys and values are its field `memory`."""
    return cache._replace(memory=replace_value(cache.memory, v, position))


def put(
    x: Float[Array, "B N S J"], new: Float[Array, "B N J"], slot: Int[Array, " B"]
) -> Float[Array, "B N S J"]:
    """`x` with `new` in a slot of each row."""
    if len(slot) == 1:  # one kernel; XLA makes three of a scatter
        return jax.lax.dynamic_update_slice_in_dim(x, new[:, :, None], slot[0], axis=2)
    options = dict(mode="promise_in_bounds", unique_indices=True)
    return x.at[jnp.arange(len(slot)), :, slot].set(new, **options)


def positions_by_slot(last: Int[Array, " B"], n_slots: int) -> Int[Array, "B S"]:
    """The position in each slot if `last` is the newest one; below 0 in empty slots."""
    return last[:, None] - (last[:, None] - jnp.arange(n_slots)[None]) % n_slots


def seen_in_ring(
    rule: Visibility, ring: KeyValues, position: Int[Array, " B"]
) -> Bool[Array, "B S"]:
    """Which slots of a ring with the newest `position` the query there sees."""
    held = positions_by_slot(position, ring.keys.shape[2])
    return rule.sees(Side(position[:, None]), Side(held, exists=held >= 0))


def attend_to(
    call: Call,
    q: Float[Array, "B 1 N H"],
    keys: Float[Array, "B G S H"],
    values: Float[Array, "B G S V"],
    mask: Bool[Array, "#B #N K"] | Int[Array, "#B #N K"],
    impl: str,
    alone: Float[Array, "B 1 N V"] | None = None,
    bias: Float[Array, "#B N K"] | None = None,
    index: Int[Array, "B N K"] | None = None,
    count_once: bool = False,
) -> Float[Array, "B 1 N V"]:
    """Softmax attention of one query a row.

    Args:
      call: of the op, which says how logits are made.
      keys, values: the cache's.
      mask: which keys a query sees; as integers 1 or 0.
      impl: the op's. "xla" runs everywhere; "pallas" is one kernel for NVIDIA GPUs of Ampere or
        later and heads of 256 or less. "auto" takes the kernel on such a GPU for up to
        `MAX_KERNEL_ROWS` rows of up to `MAX_KERNEL_KEYS` keys.
      alone: the output of a query that sees no key: the value at its own position; None is zeros.
      bias: added to the logits.
      index: the slots of the K keys that each head may see, each within the cache; None: all slots.
      count_once: whether a slot that is seen several times counts once.

    Raises:
      NotImplementedError: an `impl` that cannot compute the call.
    """
    impl = _choose_impl(impl, q, keys, values, mask)
    if impl != "xla":
        from reformax.ops.kernels.triton import one_query as kernel

        options = dict(alone=alone, logits=call.logits, bias=bias, index=index, sinks=call.sinks)
        options |= dict(count_once=count_once)
        return kernel.attend(q, keys, values, mask, impl == INTERPRETED, **options)[0]
    mask = mask.astype(bool)
    if count_once:
        mask = mask & ~_seen_before(index, mask)
    if index is not None:
        take = functools.partial(jnp.take_along_axis, axis=2, mode="promise_in_bounds")
        keys, values = (take(x, index[..., None]) for x in (keys, values))
    dtype = accum_dtype(q.dtype, values.dtype)
    n_kv = keys.shape[1]
    heads = grouped(q[:, 0], n_kv, 1).astype(dtype)
    bias = None if bias is None else grouped(bias, n_kv, 1)
    logits = call.logits.of("bgmh,bgkh->bgmk", heads, keys.astype(dtype), bias)
    mask = mask[:, :, None] if mask.shape[1] == 1 else grouped(mask, n_kv, 1)
    whole = softmax_over(logits, mask, "bgmk,bgkv->bgmv", values)
    if call.sinks is not None:
        whole = whole.with_sinks(grouped(call.sinks, n_kv, 0))
    return _output(whole, alone, q).astype(values.dtype)


def _seen_before(index: Int[Array, "B N K"], mask: Bool[Array, "B N K"]) -> Bool[Array, "B N K"]:
    """Whether an earlier key of the same slot is seen."""
    same = (index[..., None] == index[..., None, :]) & mask[..., None, :]
    return jnp.any(jnp.tril(same, -1), axis=-1)


def _output(
    whole: Softmax, alone: Float[Array, "B 1 N V"] | None, q: Float[Array, "B 1 N H"]
) -> Float[Array, "B 1 N V"]:
    """The attended values of the queries `q`, and `alone` where a query sees no key."""
    out, row_sum = (x.reshape(*q.shape[:3], -1) for x in (whole.output(), whole.row_sum))
    return jnp.where(row_sum == 0, 0.0 if alone is None else alone.astype(out.dtype), out)


def _choose_impl(impl: str, q, keys, values, mask) -> str:
    """`choose_impl` of a call of `attend_to`."""
    pays = q.shape[0] <= MAX_KERNEL_ROWS and mask.shape[-1] <= MAX_KERNEL_KEYS
    return choose_impl(impl, pays, pallas=kernel_obstacles(q, keys, values))


def add_and_attend(
    call: Call,
    q: Float[Array, "B 1 N H"],
    ring: KeyValues,
    new: KeyValues,
    mask: Bool[Array, "#B #N K"] | Int[Array, "#B #N K"],
    impl: str,
    **options: Any,
) -> tuple[Float[Array, "B 1 N V"], KeyValues]:
    """`add_to_ring`, then `attend_to`: the output and the ring. A kernel does both at once.

    Args:
      ring: the keys and values of earlier positions.
      new: the keys and values of the queries' positions, `[B, 1, N, H]` and `[B, 1, N, V]`.
      mask, impl, **options: as in `attend_to`.
    """
    impl = _choose_impl(impl, q, *ring, mask)
    if impl == "xla":
        ring = add_to_ring(ring, *new, call.position)
        return attend_to(call, q, *ring, mask, impl, **options), ring
    from reformax.ops.kernels.triton import one_query as kernel

    rows = (x[:, 0].astype(of_ring.dtype) for x, of_ring in zip(new, ring, strict=True))
    added = kernel.NewKey(*rows, call.position % ring.keys.shape[2])
    options |= dict(logits=call.logits, new=added, sinks=call.sinks)
    out, ring = kernel.attend(q, *ring, mask, impl == INTERPRETED, **options)
    return out, KeyValues(*ring)


def attend_among(
    call: Call,
    q: Float[Array, "R 1 N H"],
    keys: Float[Array, "R G S H"],
    values: Float[Array, "R G S V"],
    mask: Bool[Array, "R S"],
    origins: Int[Array, "B K S"],
    alone: Float[Array, "R 1 N V"] | None = None,
    bias: Float[Array, "#R N S"] | None = None,
) -> Float[Array, "R 1 N V"]:
    """`attend_to` in beam search. `origins` is the index of the beam that holds each beam's slot.

    A query is multiplied with the slots of all K beams of its search, and all but those of
    `origins` are hidden. No beam's cache is copied.
    """
    n_searches, size, n_slots = origins.shape
    heads = grouped(q[:, 0], keys.shape[1], 1)

    def split(x):
        return x.reshape(n_searches, size, *x.shape[1:])

    # Axes: b search, j row of the keys, g head of the keys, i row of the query, m its head.
    heads, keys, values = split(heads), split(keys), split(values)
    key_row = jnp.arange(size)[None, :, None, None]
    mask = mask.reshape(n_searches, 1, size, n_slots) & (origins[:, None] == key_row)
    mask = mask[:, :, None, :, None]  # [b, j, 1, i, 1, s]
    shape = (n_searches, *keys.shape[1:3], size, *heads.shape[3:])
    heads = jnp.broadcast_to(jnp.swapaxes(heads, 1, 2)[:, None], shape)
    if bias is not None:  # [b, i, g, m, s]
        bias = split(jnp.broadcast_to(bias, (q.shape[0], *bias.shape[1:])))
        bias = bias.reshape(n_searches, size, *shape[2:3], -1, n_slots)
        bias = jnp.swapaxes(bias, 1, 2)[:, None]
    logits = call.logits.of("bjgimh,bjgsh->bjgims", heads, keys, bias)
    of_rows = softmax_over(logits, mask, "bjgims,bjgsv->bjgimv", values)
    whole = Softmax(*(jnp.swapaxes(x, 1, 2) for x in of_rows.merged(axis=1)))  # [b, i, g, m]
    if call.sinks is not None:
        whole = whole.with_sinks(call.sinks.reshape(keys.shape[2], -1))
    return _output(whole, alone, q).astype(values.dtype)
