"""Softmax attention to a window and to summaries, which are merged to one softmax.

Rows of a softmax are `[B, T, G, M]`: M query heads of a key head. Other letters besides those of
`reformax.ops.base`: C blocks of L positions, Q queries of a chunk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from reformax.ops.calls.call import Call
from reformax.ops.calls.heads import grouped
from reformax.ops.masking.masks import ids_or_ones
from reformax.ops.masking.padding import tokens_only
from reformax.ops.masking.visibility import Side, Visibility
from reformax.ops.numerics.query_chunks import (
    by_chunks,
    in_blocks,
    join_chunks,
    positions,
    with_neighbours,
)
from reformax.ops.sharding.borders import border
from reformax.ops.sharding.queries import axis_of, first_query
from reformax.ops.softmax.dropout import dropped_factors, far_address, seed_at
from reformax.ops.softmax.online import Softmax, softmax_over


class Summaries(NamedTuple):
    """Summaries of blocks as keys and values, and the segment of each one's last position."""

    keys: Float[Array, "B C G H"]
    values: Float[Array, "B C G V"]
    ids: Int[Array, "B C"]


class Blocks(NamedTuple):
    """Blocks of `size` positions with `n_each` summaries each, and when these are seen.

    A query sees the summaries of a block from `delay` positions after the block's last one on.
    """

    size: int
    n_each: int = 1
    delay: int = 0


def last_position(block: Int[Array, "*d"], size: int) -> Int[Array, "*d"]:
    """The last position of blocks, from which on their summaries are seen."""
    return block * size + (size - 1)


def to_window(call: Call, q, k, v, window: int) -> Softmax:
    """The softmax of each query over the keys less than `window` positions before it.

    A device that has a shard of the sequence reads the end of the shards before.
    """
    if (axis := axis_of(call.shard)) is None:
        return _to_window(call, q, k, v, window)
    length = q.shape[1]
    n = min(window, length * lax.axis_size(axis)) - 1
    k, v, ids = (
        jnp.concatenate([border(x, axis, n, ahead=False), x], axis=1)
        for x in (k, v, ids_or_ones(call.segment_ids, q))
    )
    first = first_query(call.shard, length) - n
    call = call.but(segment_ids=ids, seed=seed_at(call.seed, first, first))
    found = _to_window(call, jnp.pad(q, ((0, 0), (n, 0), (0, 0), (0, 0))), k, v, window)
    return Softmax(*(x[:, n:] for x in found))


def _to_window(call: Call, q, k, v, window: int) -> Softmax:
    length, n_heads, n_kv = *q.shape[1:3], k.shape[2]
    size = min(window, length)
    rule, ids = Visibility(call.causal, window), ids_or_ones(call.segment_ids, q)

    def attend(q, ids, query, k, v, key_ids, key):
        """Some blocks, and of each as many rows at a time as fit: a window may be long."""
        key = key[:, :, None]
        keys = Side(key, key_ids[:, :, None], exists=key >= 0)

        @jax.checkpoint  # the gradient computes the logits again instead of keeping them
        def attend_rows(*rows):
            q, ids, query = (jnp.swapaxes(x, 1, 2) for x in rows)  # [B, C, Q, ...]
            query = query[..., None]
            mask = rule.sees(Side(query, ids[..., None]), keys)
            heads, addresses = q.shape[3:5], (query[:, :, None, None], key[:, :, None, None])
            dropped = dropped_factors(call, (len(q), 1, *heads), *addresses)
            logits = call.logits.of("bclgmh,bckgh->bcgmlk", q, k)
            found = softmax_over(logits, mask[:, :, None, None], "bcgmlk,bckgv->bcgmlv", v, dropped)
            return [jnp.moveaxis(x, 4, 2) for x in found]

        rows = (jnp.swapaxes(x, 1, 2) for x in (q, ids, query))
        found = by_chunks(attend_rows, 2 * size * n_heads * q.shape[1], *rows)
        return [join_chunks(x, size, axis=2) for x in found]

    queries = [in_blocks(x, size) for x in (grouped(q, n_kv, 2), ids, positions(length))]
    keys = (k, v, ids, positions(length) + 1)
    keys = [with_neighbours(in_blocks(x, size), 1, 0) for x in keys]
    keys[-1] = keys[-1] - 1  # -1 is none
    n_seen = 2 * size * (size * n_heads + n_kv * (k.shape[3] + v.shape[3]))
    found = by_chunks(attend, n_seen, *queries, *keys)
    rows = (join_chunks(x, queries[0].shape[1]) for x in found)
    return Softmax(*(x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length] for x in rows))


def to_summaries(
    call: Call,
    logits: Float[Array, "B G M Q K"],
    mask: Bool[Array, "B 1 1 Q K"],
    axes: str,
    values: Array,
    block: Int[Array, "#B #G #M #Q K"],
    query: Int[Array, "1 Q"],
) -> Softmax:
    """The softmax of a chunk of queries over summaries.

    Args:
      call: of the op, which says what is dropped.
      logits, mask, axes, values: as in `softmax_over`.
      block: the numbers of the summaries, by which dropout is drawn.
    """
    addresses = query[:, None, None, :, None], far_address(block)
    dropped = dropped_factors(call, logits.shape[:3], *addresses)
    found = softmax_over(logits, mask, axes, values, dropped)
    return Softmax(*(jnp.moveaxis(x, 3, 1) for x in found))


def merged(call: Call, near: Softmax, far: Softmax) -> Softmax:
    """One softmax over the keys of both, and the sinks of the call's heads if it has some."""
    whole = near.merge(far)
    if call.sinks is None:
        return whole
    return whole.with_sinks(call.sinks.reshape(1, 1, *far.row_max.shape[2:]))


def in_kernels(
    call: Call,
    interpret: bool,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T G H"],
    v: Float[Array, "B T G V"],
    summaries: Summaries,
    window: int,
    blocks: Blocks,
    chosen: Int[Array, "B T K"] | None = None,
    learner: Any = None,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B N T"], Float[Array, "B N T"]]:
    """`merged` of the window and of summaries in kernels; each row's maximum and sum.

    Args:
      call: of the op, with its sinks.
      summaries: of the blocks.
      window: as in `to_window`.
      blocks: of the summaries, one each if there is a choice.
      chosen: the numbers of the summaries that each query sees, -1 for none; None: it sees all.
      learner: the `ChoiceLearner` of the kernels; None: no indexer learns.
    """
    from reformax.ops.kernels.triton import compressed as kernel
    from reformax.ops.kernels.triton.chosen_keys import reads_lists
    from reformax.ops.kernels.triton.nsa import n_rows

    ids, group, n_summaries = call.segment_ids, q.shape[2] // k.shape[2], summaries.keys.shape[1]
    by_list = chosen is not None and reads_lists(chosen.shape[2], n_summaries, q, k)
    common = dict(group=group, dropout=call.dropout, logits=call.logits)
    of_parts = (
        kernel.window_sizes(min(window, q.shape[1]), n_rows(q), **common),
        kernel.summary_sizes(blocks, n_rows(q), by_list, **common),
    )
    far = summaries.keys.astype(k.dtype), summaries.values.astype(v.dtype)
    far = kernel.Part(*far, None if ids is None else summaries.ids, chosen)
    inputs = q, kernel.Part(k, v, ids), far, call.sinks, learner, ids, call.seed
    out, *sums = kernel.attend(of_parts, interpret, *inputs)
    if call.sinks is not None and ids is not None:
        # The gradient at padding, which may be anything, is not part of that of the sinks.
        out = tokens_only(out, ids)
    return out, *sums
