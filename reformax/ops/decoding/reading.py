"""Several more positions of each row at once, from the cache of those before: a text in pieces.

The rule is that of decoding: each position sees what its own step would see, in any division into
pieces. An op that has only steps takes them one after the other. One that sees all earlier
positions writes the new keys and then attends to the cache, a slab of slots at a time, so that
further memory does not grow with the text. A mesh axis may divide the cache: of n devices, device i
then holds the positions i, i + n, i + 2n, ..., attends to them, and devices merge their parts of
each softmax. So all hold as many, however long a text is.

Letters besides those of `reformax.ops.base`: S slots of a ring, K slots of a slab.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from reformax import devices
from reformax.ops.calls.call import Call
from reformax.ops.calls.heads import grouped, repeat_heads
from reformax.ops.decoding.cache import KeyValues, where_rows
from reformax.ops.numerics.precision import accum_dtype
from reformax.ops.numerics.query_chunks import by_chunks, join_chunks
from reformax.ops.softmax import tiles
from reformax.ops.softmax.block_lists import BlockInputs
from reformax.ops.softmax.online import Softmax, softmax_over

# Slots of a slab, and bytes of a bias between all queries and a slab.
SLAB, BIAS_BYTES = 4096, 2**26


def by_steps(
    step: Callable[..., tuple[Array, Any]],
    choice_of: Callable[[Any], Any],
    call: Call,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T G H"] | None,
    v: Float[Array, "B T G V"],
    cache: Any,
) -> tuple[Float[Array, "B T N V"], Any, Any]:
    """The outputs of one step after the other, the cache, and what each query chose.

    Args:
      step: `(call, q, k, v, cache)`, of one position.
      choice_of: of a cache, what its newest query chose; None for no choice.
      call: with the first `position` of each row, and the `lengths` of rows.
      q, k, v: of the positions.
      cache: of the positions before.
    """
    first, lengths, is_alone = call.position, call.lengths, len(q) == 1

    def one(t, cache):
        def at(x):
            return lax.dynamic_slice_in_dim(x, t, 1, axis=1)

        now = dict(position=first + t, lengths=None, bias=None)
        if call.bias is not None:
            now["bias"] = lambda keys: call.bias((first + t)[:, None], keys)[:, :, 0]
        if call.chosen is not None:
            now["chosen"] = at(call.chosen)[:, 0]
        now["extra_projections"] = jax.tree.map(at, call.extra_projections)
        return step(call.but(**now), *jax.tree.map(at, (q, k, v)), cache)

    def put(x, new, t):
        return lax.dynamic_update_slice_in_dim(x, new, t, axis=1)

    def body(t, carry):
        cache, out, choices = carry
        found, after = one(t, cache)
        # Rows that have ended stay as they are. To choose between two caches copies them.
        cache = after if is_alone else where_rows(t < lengths, after, cache)
        of_queries = choices, choice_of(after)
        return (
            cache,
            put(out, found, t),
            jax.tree.map(lambda x, y: put(x, y[:, None], t), *of_queries),
        )

    found, after = jax.eval_shape(one, jnp.int32(0), cache)
    out = jnp.zeros((*q.shape[:2], *found.shape[2:]), found.dtype)
    choices = jax.tree.map(
        lambda x: jnp.zeros((len(x), q.shape[1], *x.shape[1:]), x.dtype),
        jax.eval_shape(choice_of, after),
    )
    carry = devices.varying_as((q, cache), (cache, out, choices))
    cache, out, choices = lax.fori_loop(0, jnp.max(lengths), body, carry)
    return out, cache, choices


def add_all_to_ring(
    ring: KeyValues,
    k: Float[Array, "B T G H"],
    v: Float[Array, "B T G V"],
    position: Int[Array, " B"],
    lengths: Int[Array, " B"],
    axis: str | None = None,
) -> KeyValues:
    """The ring with the keys and values of each row's `lengths` positions from `position` on.

    `axis` is that of the mesh that divides the ring; None: it is whole.
    """
    both = zip(ring, (k, v), strict=True)
    return KeyValues(*(put_all(x, new, position, lengths, axis) for x, new in both))


def held_by(axis: str | None) -> tuple[Any, int]:
    """`(i, n)`: a device has the positions i, i + n, i + 2n, ... of a cache that `axis` divides."""
    return (0, 1) if axis is None else (lax.axis_index(axis), lax.axis_size(axis))


def put_all(
    x: Float[Array, "B G S J"],
    new: Float[Array, "B T G J"],
    position: Int[Array, " B"],
    lengths: Int[Array, " B"],
    axis: str | None = None,
) -> Float[Array, "B G S J"]:
    """The keys or values of a ring with new ones, as in `add_all_to_ring`."""
    n_slots, index, (i, n) = x.shape[2], jnp.arange(new.shape[1])[None], held_by(axis)
    at = position[:, None] + index
    kept = (index < lengths[:, None]) & (index >= lengths[:, None] - n_slots * n)
    if axis is not None:
        kept &= at % n == i
    slot = jnp.where(kept, at // n % n_slots, n_slots)  # out of bounds: not written
    return x.at[jnp.arange(len(x))[:, None], :, slot].set(new.astype(x.dtype), mode="drop")


def attend_to_ring(
    call: Call,
    q: Float[Array, "B T N H"],
    ring: KeyValues,
    exclude_self: bool,
    alone: Float[Array, "B T N V"] | None = None,
    axis: str | None = None,
) -> Float[Array, "B T N V"]:
    """Attention to the earlier positions of a ring that holds them all, in the order of positions.

    Args:
      call: of the op, with the first `position` of each row and the `lengths` of rows.
      ring: keys and values, the queries' own too.
      exclude_self: whether a key is hidden from the query of its own position too.
      alone: the outputs of queries that see no key; None is zeros.
      axis: that of the mesh that divides the ring. The results are then the device's shard of the
        positions where it divides them, and otherwise all.
    """
    (n_batch, length, n_heads, _), n_slots = q.shape, ring.keys.shape[2]
    dtype = accum_dtype(q.dtype, ring.values.dtype)
    at = call.position[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
    i, n = held_by(axis)
    size = min(SLAB, n_slots)
    if call.bias is not None:
        size = max(1, min(size, BIAS_BYTES // (4 * n_heads * length)))
    most = 512 if jax.default_backend() == "cpu" else 2048
    tiling = tiles.Tiling(
        query_size=min(most, length),
        key_size=min(most, size),
        causal=True,
        logits=call.logits.for_size(q.shape[3]),
        exclude_self=exclude_self,
    )
    plain = tiling._replace(causal=False, exclude_self=False)  # any tile may have visible keys
    every = tiles.every_tile(plain, length, size).by_query

    def slab(number, state: Softmax) -> Softmax:
        first = jnp.minimum(number * size, n_slots - size)  # the last one begins earlier
        slot = first + jnp.arange(size, dtype=jnp.int32)
        keys = lax.dynamic_slice_in_dim(ring.keys, first, size, axis=2)
        values = lax.dynamic_slice_in_dim(ring.values, first, size, axis=2)
        k, v = repeat_heads(q, *(jnp.swapaxes(x, 1, 2) for x in (keys, values)))
        position = jnp.broadcast_to((slot * n + i)[None], (n_batch, size))
        bias = None if call.bias is None else call.bias(at, position)
        new = jnp.broadcast_to(slot >= number * size, position.shape).astype(jnp.int32)
        ids = jnp.ones_like(at), new
        x = BlockInputs(q, k, v, *ids, None, at, position, bias=bias)
        return state.merge(Softmax.of_results(tiles.forward(tiling, x, every)))

    state = Softmax.empty((n_batch, n_heads, length), ring.values.shape[3], dtype)
    state = devices.varying_as((q, ring), state)
    last = jnp.max(call.position + call.lengths)  # after the newest position
    n_slabs = jnp.minimum(-(-(last - i) // n), n_slots)
    state = lax.fori_loop(0, -(-n_slabs // size), slab, state)
    if axis is not None:
        state = _merged_over(axis, state)
    if call.sinks is not None:
        state = state.with_sinks(call.sinks.astype(dtype)[:, None])
    out, row_sum = (jnp.swapaxes(x, 1, 2) for x in (state.output(), state.row_sum))
    if alone is not None:
        n_each = out.shape[1]
        first = 0 if n_each == length else lax.axis_index(axis) * n_each
        own = lax.dynamic_slice_in_dim(alone, first, n_each, axis=1)
        out = jnp.where(row_sum[..., None] == 0, own.astype(dtype), out)
    return out.astype(ring.values.dtype)


def attend_to_chosen(
    call: Call,
    q: Float[Array, "B T N H"],
    ring: KeyValues,
    chosen: Int[Array, "B T K"],
    axis: str | None = None,
) -> Float[Array, "B T N V"]:
    """Attention of queries to the positions that each chose, -1 for none, as `attend_to_ring`."""
    n_batch, length, n_heads, _ = q.shape
    dtype, (i, n) = accum_dtype(q.dtype, ring.values.dtype), held_by(axis)

    def attend(q, chosen):  # g heads of keys, m of queries of each
        held = (chosen >= 0) & (chosen % n == i)
        slot = jnp.where(held, chosen // n, 0)
        keys, values = (jax.vmap(lambda x, at: x[:, at])(x, slot) for x in ring)
        heads = grouped(q, keys.shape[1], 2).astype(dtype)
        logits = call.logits.of("bqgmh,bgqkh->bgmqk", heads, keys.astype(dtype))
        found = softmax_over(logits, held[:, None, None], "bgmqk,bgqkv->bgmqv", values)
        return [jnp.moveaxis(x, 3, 1) for x in found]

    n_each = n_heads + ring.keys.shape[1] * (q.shape[3] + ring.values.shape[3])
    found = (join_chunks(x, length) for x in by_chunks(attend, n_each * chosen.shape[2], q, chosen))
    rows = (x.reshape(n_batch, length, n_heads, *x.shape[4:]) for x in found)
    state = Softmax(*(jnp.swapaxes(x, 1, 2) for x in rows))
    state = state if axis is None else _merged_over(axis, state)
    return state.results(ring.values.dtype)[0]


def _merged_over(axis: str, state: Softmax) -> Softmax:
    """The softmax over all devices' keys, of a device's shard of the positions if they divide."""
    row_max = lax.pmax(state.row_max, axis)
    factor = jnp.exp(state.row_max - row_max)
    acc, row_sum = state.acc * factor[..., None], state.row_sum * factor
    length, n = row_max.shape[2], lax.axis_size(axis)
    if length % n:
        return Softmax(lax.psum(acc, axis), row_max, lax.psum(row_sum, axis))
    acc, row_sum = (
        lax.psum_scatter(x, axis, scatter_dimension=2, tiled=True) for x in (acc, row_sum)
    )
    first = lax.axis_index(axis) * (length // n)
    return Softmax(acc, lax.dynamic_slice_in_dim(row_max, first, length // n, axis=2), row_sum)
