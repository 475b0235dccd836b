"""Attention to a band of neighbours and to global keys, in one softmax.

The neighbours are `window` positions on either side, or every `dilation`-th position of a range
that is `dilation` times as long. The sequence is ordered by position modulo the dilation, so that a
band is contiguous, and cut into blocks of `window` positions: a block sees itself and its
neighbouring blocks. Global keys, such as global tokens or attention sinks, may have other positions
in each row of a batch. A global key in the band counts once. Logits take O(T (window + G)) time and
memory.

Letters besides those of `reformax.ops.base`: G global keys, C blocks of L queries, M keys of a
window.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from reformax.ops.calls.call import Call
from reformax.ops.calls.dispatch import INTERPRETED, choose_impl
from reformax.ops.calls.obstacles import kernel_obstacles
from reformax.ops.masking.bands import ids_at, outside_band, rows_at
from reformax.ops.masking.masks import TokensFirst, segment_numbers
from reformax.ops.masking.padding import attend_to_tokens
from reformax.ops.masking.visibility import Side, Visibility, is_token
from reformax.ops.numerics.query_chunks import with_neighbours
from reformax.ops.softmax.chunked import chunked_attention
from reformax.ops.softmax.joint import FarKeys, KeysOfKind, attend_to_kinds
from reformax.ops.softmax.orders import Chunking, ChunkSizes, Order, UnsortedInputs

# Logits in memory at a time. More are computed head by head.
LOGITS_AT_A_TIME = 2**29
# The least chunk of a kernel. Chunks are powers of two: whole tiles, and often whole sequences.
TILE = 64


def attend(
    call: Call,
    bands: tuple[Visibility, ...],
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T N H"],
    v: Float[Array, "B T N V"],
    global_positions: Int[Array, "#B G"] | None,
    impl: str = "auto",
) -> Float[Array, "B T N V"]:
    """Softmax attention of each head to its band and to the global keys.

    Args:
      call: of the op; a position sees its own segment.
      bands: the band of each head, or one for all heads.
      q, k, v: queries, keys and values, with global keys finite at padding.
      global_positions: the positions of the global keys, which all queries see; `NOWHERE` for none.
      impl: the op's.

    Raises:
      NotImplementedError: `impl` cannot compute the call.
    """
    bands = tuple(band.within(q.shape[1]) for band in bands)
    each = bands if len(set(bands)) > 1 else bands[:1]
    # A kernel draws dropout by the index of a head among those of its call.
    others = dict(
        dilation=tuple(band.dilation for band in each) if len(each) > 1 and call.dropout else None
    )
    impl = choose_impl(impl, pallas=kernel_obstacles(q, k, v, call.logits, **others))

    def of_heads(band: Visibility, q, k, v, heads):
        if impl == "xla":
            some = functools.partial(_of_heads, call, band, global_positions, heads)
            return attend_to_tokens(some, q, k, v, call.segment_ids)
        return _in_kernels(call, band, impl, q, k, v, global_positions)

    if len(each) == 1:
        return of_heads(bands[0], q, k, v, np.arange(q.shape[2]))
    alike = [np.flatnonzero([other == band for other in bands]) for band in dict.fromkeys(bands)]
    outs = [
        of_heads(bands[heads[0]], *(_heads_of(x, heads) for x in (q, k, v)), heads)
        for heads in alike
    ]
    return _heads_of(jnp.concatenate(outs, axis=2), np.argsort(np.concatenate(alike)))


def _heads_of(x: Array, heads: Sequence[int]) -> Array:
    """`x[:, :, heads]` by slices. The gradient of an index would be an atomic sum."""
    return jnp.concatenate([lax.slice_in_dim(x, i, i + 1, axis=2) for i in heads], axis=2)


def _in_kernels(call: Call, band: Visibility, impl: str, q, k, v, global_positions) -> Array:
    """`attend` in kernels, in chunks that hold the window."""
    chunks = _chunks(call, band, q.shape[1])
    order, of_order, n_tokens = None, call.segment_ids, call.lengths
    if band.dilation > 1:
        n_tokens = None
        n_slots = q.shape[1] + chunks.padding
        positions = _by_step(band.dilation, q.shape[1], n_slots)
        order = Order(jnp.broadcast_to(positions, (len(q), q.shape[2], 1, n_slots)))
        of_order = _by_segment_and_step(band.dilation, q, call.segment_ids)
    if global_positions is None or global_positions.shape[1] == 0:
        masks = of_order, call.seed
        return chunked_attention(q, k, v, chunks, order, *masks, impl, n_tokens=n_tokens)
    from reformax.ops.kernels.triton import band as kernel

    global_positions = jnp.broadcast_to(global_positions, (len(q), global_positions.shape[1]))
    x = UnsortedInputs(q, k, v, order, _in_slots(of_order, n_tokens, chunks), call.seed)
    interpret = impl == INTERPRETED
    return kernel.attend(band, chunks, interpret, x, global_positions, call.segment_ids)


def attend_and_far(
    call: Call,
    band: Visibility,
    interpret: bool,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T N H"],
    v: Float[Array, "B T N V"],
    far: FarKeys,
) -> Float[Array, "B T N V"]:
    """`attend` in kernels to a band, and to keys that are at no position.

    Args:
      call: of the op; a position sees its own segment.
      band: which neighbours a query sees, without dilation.
      far: the other keys, which all queries see.
    """
    from reformax.ops.kernels.triton import band as kernel

    band = band.within(q.shape[1])
    chunks = _chunks(call, band, q.shape[1])
    masks = _in_slots(call.segment_ids, call.lengths, chunks)
    x = UnsortedInputs(q, k, v, None, masks, call.seed)
    return kernel.attend_and_far(chunks, interpret, x, far)


def _in_slots(
    segment_ids: Int[Array, "B T"] | None, n_tokens: Int[Array, " B"] | None, chunks: Chunking
) -> Int[Array, "B Tp"] | TokensFirst | None:
    """Segment ids padded to whole chunks, with each row's number of tokens where it is known."""
    if segment_ids is not None:
        segment_ids = jnp.pad(segment_ids, ((0, 0), (0, chunks.padding)))
    return segment_ids if n_tokens is None else TokensFirst(segment_ids, n_tokens)


def _chunks(call: Call, band: Visibility, length: int) -> Chunking:
    """Chunks of a kernel that hold the band."""
    size = max(TILE, 1 << (band.window - 1).bit_length())
    sizes = ChunkSizes(size, 1, 0 if band.causal else 1)
    return sizes.cut(call, length, window=band.window * band.dilation)


def _by_step(step: int, length: int, n_slots: int) -> Int[Array, " n_slots"]:
    """The positions ordered by position modulo `step`; padding from `length` on keeps its slots."""
    slot = jnp.arange(n_slots, dtype=jnp.int32)
    size, n_larger = divmod(length, step)  # the first `n_larger` residues have `size + 1` positions
    rest = slot - n_larger * (size + 1)
    first = slot // (size + 1), slot % (size + 1)
    then = n_larger + rest // max(size, 1), rest % max(size, 1)
    residue, nth = (jnp.where(rest < 0, x, y) for x, y in zip(first, then, strict=True))
    return jnp.where(slot < length, nth * step + residue, slot)


def _by_segment_and_step(step: int, x: Array, segment_ids) -> Int[Array, "B T"]:
    """Ids of each segment's positions of each residue modulo `step`; 0 is padding."""
    number = 1 + jnp.arange(x.shape[1], dtype=jnp.int32)[None] % step
    if segment_ids is None:
        return jnp.broadcast_to(number, x.shape[:2])
    return jnp.where(is_token(segment_ids), segment_numbers(segment_ids) * step + number, 0)


def _of_heads(call: Call, band: Visibility, global_positions, heads, q, k, v) -> Array:
    """`attend` of heads with one band; head by head where all logits would be too many."""

    @jax.checkpoint  # the gradient computes the logits again instead of keeping them
    def some(q, k, v, heads):
        return _attend(call, band, q, k, v, global_positions, heads)

    n_seen = 3 * band.window + (0 if global_positions is None else global_positions.shape[1])
    if q.shape[0] * q.shape[1] * q.shape[2] * n_seen <= LOGITS_AT_A_TIME:
        return some(q, k, v, heads)
    each = (jnp.moveaxis(x, 2, 0)[..., None, :] for x in (q, k, v))
    out = lax.map(lambda x: some(*x), (*each, jnp.asarray(heads)[:, None]))
    return jnp.moveaxis(out[..., 0, :], 0, 2)


def _attend(call: Call, band: Visibility, q, k, v, global_positions, heads) -> Array:
    n_batch, length, n_heads, _ = q.shape
    ids = jnp.ones((1, length), jnp.int32) if call.segment_ids is None else call.segment_ids
    step = band.dilation
    size = min(band.window, -(-length // step))
    n_steps = -(-length // (step * size)) * size
    after = 0 if band.causal else 1

    def blocks(x):  # [B, T, ...] -> [B, C, L, ...]
        pad = [(0, 0), (0, n_steps * step - length)] + [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, pad).reshape(x.shape[0], n_steps, step, *x.shape[2:])
        return jnp.swapaxes(x, 1, 2).reshape(x.shape[0], -1, size, *x.shape[3:])

    windows = functools.partial(with_neighbours, n_before=1, n_after=after)
    query = jnp.arange(n_steps * step).reshape(n_steps, step).T.reshape(1, -1, size)
    queries, of_query = blocks(q), blocks(ids)
    key, of_key = windows(query), windows(of_query)
    q_side = Side(query[..., None], of_query[..., None])
    mask = band.sees(q_side, Side(key[:, :, None], of_key[:, :, None]))
    kinds = [
        KeysOfKind(
            logits=call.logits.of("bclnh,bcmnh->bnclm", queries, windows(blocks(k))),
            values=windows(blocks(v)),
            mask=mask[:, None],
            address=key,
        )
    ]
    if global_positions is not None:
        of_global = ids_at(ids, global_positions)[:, None, None]
        mask = outside_band(band, q_side, Side(global_positions[:, None, None], of_global))
        keys, values = (rows_at(x, global_positions) for x in (k, v))
        kinds.append(
            KeysOfKind(
                logits=call.logits.of("bclnh,bgnh->bnclg", queries, keys),
                values=values[:, None],
                mask=mask[:, None],
                address=global_positions[:, None],
            )
        )
    out = attend_to_kinds(call, kinds, query, heads).astype(v.dtype)
    out = out.reshape(n_batch, step, n_steps, n_heads, -1)
    return jnp.swapaxes(out, 1, 2).reshape(n_batch, -1, n_heads, v.shape[3])[:, :length]


def rows_of_global_tokens(
    call: Call,
    q: Float[Array, "B G N H"],
    k: Float[Array, "B T N H"],
    v: Float[Array, "B T N V"],
    global_positions: Int[Array, "B G"],
) -> Float[Array, "B G N V"]:
    """Attention of the queries at `global_positions` to all keys."""

    @jax.checkpoint
    def rows(q, k, v):
        ids = call.segment_ids
        ids = jnp.ones((1, k.shape[1]), jnp.int32) if ids is None else ids
        key, of_query = jnp.arange(k.shape[1]), ids_at(ids, global_positions)
        rule = Visibility(causal=call.causal)
        q_side = Side(global_positions[..., None], of_query[..., None])
        mask = rule.sees(q_side, Side(key, ids[:, None]))
        all_keys = KeysOfKind(
            logits=call.logits.of("bclnh,bsnh->bncls", q[:, None], k),
            values=v[:, None],
            mask=mask[:, None, None],
            address=key[None, None],
        )
        heads = jnp.arange(q.shape[2])
        out = attend_to_kinds(call, [all_keys], global_positions[:, None], heads)
        return out[:, 0].astype(v.dtype)

    return rows(q, k, v)
