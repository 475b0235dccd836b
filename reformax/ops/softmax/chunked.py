"""Attention within neighbouring chunks of a sorted sequence: the core of local and LSH attention.

The sequence is sorted and cut into chunks of `L` slots. The queries of a chunk see keys of their
own chunk and of its neighbours: `visible_keys` computes the mask. Local attention keeps the order
of the sequence. LSH attention sorts by bucket, once for each hash. Keys may have another order than
queries. One softmax spans all orders and is accumulated order by order, with a running maximum and
sum. A row's output is exactly softmax attention over the union of its visible keys.

The gradient is analytic. It computes the logits again, order by order, from the output, the maximum
and the sum, and stores none (Dao et al. 2022, sec. 3.1 and appendix B.2).

Arrays in this module are heads-first, `[N, B, T, ...]`, with T padded to whole chunks. C is the
number of chunks, M the number of keys in a window, the chunks that one chunk of queries sees. Keys
have `n_chunks_before` more chunks before and `n_chunks_after` after, called their border.

A CPU computes some heads at a time: logits are written and read a dozen times, and those of all
heads would not fit in its cache. On NVIDIA GPUs `kernels.triton.chunked` computes the same
function.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from reformax.derivatives import CustomDerivatives, tangent_of
from reformax.devices import varying_as
from reformax.ops.calls.dispatch import INTERPRETED
from reformax.ops.masking.masks import SegmentIds, TokensFirst, segment_pair
from reformax.ops.masking.padding import attend_to_tokens
from reformax.ops.masking.visibility import Side, is_token
from reformax.ops.numerics.normalization import length_normalize, mean_product
from reformax.ops.numerics.precision import accum_dtype
from reformax.ops.softmax.chunk_layout import (
    ChunkedOrder,
    by_heads,
    heads_first,
    heads_last,
    keys_in_reach,
    scan_orders,
    sum_keys_in_reach,
    with_border,
)
from reformax.ops.softmax.dropout import dropout_mask
from reformax.ops.softmax.online import Softmax, lowest, without_nan
from reformax.ops.softmax.orders import Chunking, Order, UnsortedInputs

# Earlier hashes whose masks are computed in one body: a program of any number of hashes is as long
# as one of twice as many, and of 9 hashes or fewer has no loop.
_UNROLLED = 8
# The equation of the logits of an order.
LOGITS = "bnclh,bncmh->bnclm"


def chunked_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T N H"] | None,
    v: Float[Array, "B T N V"],
    chunks: Chunking,
    order: Order | None,
    segment_ids: SegmentIds | None,
    seed: Int[Array, 6] | None,
    impl: str = "xla",
    self_weight: Float[Array, "B N Tp"] | None = None,
    n_tokens: Int[Array, " B"] | None = None,
) -> Float[Array, "B T N V"]:
    """Softmax attention over the union of the chunks that each query sees.

    The function does not read the arrays at padding.

    Args:
      k: keys; None where `chunks.shared_qk`.
      chunks: which keys are visible.
      order: the hashes' orders of the padded sequence; None keeps the order of the sequence.
      segment_ids: ids; a position sees its own segment, and 0 is padding. A pair if
        `chunks.n_keys`.
      impl: of `choose_impl`, "mosaic" too.
      self_weight: for shared queries and keys, the weight of a position's own value where the
        position sees nothing else; None is 1. "xla" only.
      n_tokens: the number of tokens of each row, where rows are one segment and all orders have
        padding after it; None: not known. It says what `segment_ids` say, at less cost.

    Returns:
      The attended values, in the dtype of `v`; zeros for a row without visible keys.
    """
    padded = _padded(segment_ids, _n_slots(chunks, order))
    if impl == "xla":
        order = None if order is None else order.with_slots(chunks.two_orders)

        def attend(q, k, v):
            return _attend(chunks, q, k, v, order, padded, seed, self_weight)

        return attend_to_tokens(attend, q, k, v, segment_ids)
    if impl == "mosaic":
        from reformax.ops.kernels.mosaic import chunked as kernel
    else:
        from reformax.ops.kernels.triton import chunked as kernel

    masks = padded if n_tokens is None else TokensFirst(padded, n_tokens)
    x = UnsortedInputs(q, k, v, order, masks, seed)
    return kernel.attend(chunks, impl == INTERPRETED, x)


def _padded(segment_ids: SegmentIds | None, n_slots: tuple[int, int]) -> SegmentIds | None:
    """Segment ids padded with 0, for each slot of queries and of keys."""

    def pad(ids: Int[Array, "B T"], n: int) -> Int[Array, "B Tp"]:
        return jnp.pad(ids, ((0, 0), (0, n - ids.shape[1])))

    if isinstance(segment_ids, tuple):
        return tuple(map(pad, segment_ids, n_slots))
    return None if segment_ids is None else pad(segment_ids, n_slots[0])


def _n_slots(chunks: Chunking, order: Order | None) -> tuple[int, int]:
    """The numbers of slots of queries and of keys, without their border."""
    n = chunks.length + chunks.padding if order is None else order.query_positions.shape[-1]
    return n, n // chunks.ratio


def visible_keys(
    of_hash: ChunkedOrder,
    order: Order | None,
    segment_ids: SegmentIds | None,
    n_heads: int,
    length: int,
) -> Bool[Array, "#N #B C #L M"]:
    """The mask of one order: which keys in its reach each query sees.

    Of the keys in its reach a query does not see: later ones (if `causal`), its own (if
    `shared_qk`), those farther than `window`, padding and other segments, those that are not
    between `first_slot` and its own slot, and those of an earlier hash (if `count_once`).

    Args:
      of_hash: the order of one hash, cut into chunks.
      order: the orders of all hashes, `[N, B, R, Tp]`.
      segment_ids: the ids of each position.
      n_heads: N.
      length: T.
    """
    chunks = of_hash.chunks
    query, key = of_hash.positions(length)
    # Padding of one causal sequence follows all of its queries.
    exists = None if chunks.causal and chunks.n_keys is None else key < chunks.key_length
    q_side, k_side = Side(query), Side(key, exists=exists)
    if segment_ids is not None:
        of_query, of_key = (
            jnp.broadcast_to(x, (n_heads, *x.shape)) for x in segment_pair(segment_ids)
        )
        q_side = q_side._replace(segment_id=of_hash.at_queries(of_query)[..., None])
        k_side = k_side._replace(segment_id=of_hash.keys_in_reach(of_key))
    mask = chunks.rule.sees(q_side, k_side)
    if order is not None and order.first_slot is not None:
        first_slot = order.first_slot
        first = jax.lax.dynamic_index_in_dim(first_slot, of_hash.hash_index, axis=2, keepdims=False)
        mask = mask & _between_slots(of_hash, of_hash.query_slots, first)
    if chunks.count_once and order is not None:
        # N_ij by elimination: a key counts in the first hash in which it is visible. Reach is all
        # that differs among hashes.
        def not_seen_in(earlier, mask):
            query_slots, of_keys, first = (
                None if x is None else jax.lax.dynamic_index_in_dim(x, earlier, 2, keepdims=False)
                for x in (order.query_slots, order.key_slots, order.first_slot)
            )
            if first is None:
                seen = _chunk_in_reach(of_hash, query_slots, of_keys)
            else:
                seen = _between_slots(of_hash, query_slots, first)
            return mask & ~(seen & (earlier < of_hash.hash_index))

        shape = jnp.broadcast_shapes(query.shape, key.shape)
        mask = varying_as(order, jnp.broadcast_to(mask, shape))
        n_earlier = order.query_slots.shape[2] - 1
        mask = jax.lax.fori_loop(0, n_earlier, not_seen_in, mask, unroll=_UNROLLED)
    return mask


def _chunk_in_reach(
    of_hash: ChunkedOrder, query_slots: Int[Array, "N B T"], key_slots: Int[Array, "N B T"] | None
) -> Bool[Array, "N B C L M"]:
    """Whether each key's chunk is in reach of the query's, in the order with those slots."""
    chunks = of_hash.chunks
    query_chunk = of_hash.at_queries(query_slots // chunks.query_chunk_len)[..., None]
    key_slots = query_slots if key_slots is None else key_slots
    key_chunk = of_hash.keys_in_reach(key_slots // chunks.chunk_len)
    distance = key_chunk - query_chunk
    return (distance >= -chunks.n_chunks_before) & (distance <= chunks.n_chunks_after)


def _between_slots(
    of_hash: ChunkedOrder, slots: Int[Array, "N B T"], first: Int[Array, "N B T"]
) -> Bool[Array, "N B C L M"]:
    """Whether each key's slot is from the query's `first` to the query's own, in that order."""
    query_slot, key_slot = of_hash.pair(slots)
    return (key_slot >= of_hash.at_queries(first)[..., None]) & (key_slot <= query_slot)


def _keys(of_hash: ChunkedOrder, rows: Array) -> Array:
    """The keys of each window, from rows of keys, or of queries where they are shared."""
    rows = length_normalize(rows) if of_hash.chunks.shared_qk else rows
    return keys_in_reach(of_hash.with_border(rows), of_hash.chunks)


def _dropout_mask(
    of_hash: ChunkedOrder, length: int, head: Int[Array, "N B"], seed: Int[Array, 6] | None
) -> Float[Array, "N B C L M"] | float:
    """The dropout mask of one order's weights."""
    if of_hash.chunks.dropout == 0.0:
        return 1.0
    batch = jnp.arange(head.shape[1])[None, :, None, None, None]
    address = batch, head[..., None, None, None], *of_hash.positions(length)
    return dropout_mask(seed, of_hash.chunks.dropout, *address)


# All orders, both passes.


def _alone_weight(
    chunks: Chunking, row_sum, segment_ids, seed, self_weight
) -> Float[Array, "N B T 1"]:
    """The weight of a position's own value where it sees nothing else: 1, or its dropout mask."""
    self_weight = 1.0 if self_weight is None else jnp.swapaxes(self_weight, 0, 1)
    weight = jnp.where(row_sum == 0.0, self_weight, 0.0)
    if segment_ids is not None:
        weight = jnp.where(is_token(segment_ids)[None], weight, 0.0)
    if chunks.dropout > 0.0:
        head, batch, position = jnp.ogrid[tuple(slice(n) for n in row_sum.shape)]
        address = (batch, head, position, position)
        weight = weight * dropout_mask(seed, chunks.dropout, *address)
    return weight[..., None]


@functools.partial(CustomDerivatives, n_static=1)
def _attend(chunks, q, k, v, order, segment_ids, seed, self_weight):
    return _attend_forward(chunks, q, k, v, order, segment_ids, seed, self_weight)[0]


def _attend_forward(chunks, q, k, v, order, segment_ids, seed, self_weight):
    n_queries, n_keys = _n_slots(chunks, order)
    sides = (q, n_queries), (k, n_keys), (v, n_keys)
    q, k, values = (None if x is None else heads_first(x, n) for x, n in sides)
    order = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), order)
    forward = functools.partial(_forward, chunks, segment_ids, seed)
    out, row_max, row_sum = by_heads(forward, chunks, q, k, values, order, _head_index(q))
    if chunks.sees_itself:
        alone = _alone_weight(chunks, row_sum, segment_ids, seed, self_weight)
        out = out + alone * values.astype(out.dtype)
    out = heads_last(out, chunks.length).astype(v.dtype)
    # The maximum and the sum are two numbers: a log-sum-exp would lose the sum where logits are
    # large.
    return out, (q, k, values, order, segment_ids, seed, self_weight, out, row_max, row_sum)


def _attend_backward(chunks, residuals, d_out):
    q, k, v, order, segment_ids, seed, self_weight, out, row_max, row_sum = residuals
    # D_i = sum_j P_ij dP_ij = dO_i . O_i needs no whole row of P.
    row_dot = mean_product(d_out, out) * out.shape[-1]
    d_out, row_dot = (heads_first(x, q.shape[2]) for x in (d_out, row_dot))
    backward = functools.partial(_backward, chunks, segment_ids, seed)
    statistics = (row_max, row_sum, row_dot[..., 0])
    dq, dk, dv = by_heads(backward, chunks, q, k, v, d_out, statistics, order, _head_index(q))
    if chunks.sees_itself:
        alone = _alone_weight(chunks, row_sum, segment_ids, seed, self_weight)
        dv = dv + alone * d_out.astype(dv.dtype)

    def like(dx, x, length=chunks.key_length):
        return None if x is None else heads_last(dx, length).astype(x.dtype)

    return like(dq, q, chunks.length), like(dk, k), like(dv, v), None, None, None, None


def _attend_tangent(chunks, residuals, tangents):
    q, k, v, order, segment_ids, seed, self_weight, *_ = residuals
    q = heads_last(q, chunks.length)
    k, v = (None if x is None else heads_last(x, chunks.key_length) for x in (k, v))
    order = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), order)
    attend = functools.partial(_attend.function, chunks)
    return tangent_of(attend, (q, k, v, order, segment_ids, seed, self_weight), tangents)


_attend.define(_attend_forward, _attend_backward, _attend_tangent)


def _head_index(q: Float[Array, "N B T H"]) -> Int[Array, "N B"]:
    """The index of each head, by which dropout is drawn."""
    return jnp.broadcast_to(jnp.arange(q.shape[0])[:, None], q.shape[:2])


def _forward(chunks, segment_ids, seed, q, k, v, order, head):
    """The attended values, the largest logit, and the sum of `exp(logit - largest)` of each row."""
    n_heads, _, length = q.shape[:3]
    dtype = accum_dtype(q.dtype, v.dtype)
    of_keys = q if k is None else k

    def attend_in_order(carry, of_hash):
        queries = of_hash.at_queries(q)
        keys = _keys(of_hash, of_hash.at_keys_alone(of_keys))
        values = keys_in_reach(of_hash.at_keys(v), chunks)
        mask = visible_keys(of_hash, order, segment_ids, n_heads, length)
        logits = jnp.where(mask, chunks.logits.of(LOGITS, queries, keys), lowest(dtype))
        order_max = logits.max(axis=-1)
        weights = jnp.where(mask, jnp.exp(logits - order_max[..., None]), 0.0)
        order_sum = weights.sum(axis=-1)
        weights = weights * _dropout_mask(of_hash, length, head, seed)
        order_acc = jnp.einsum(
            "bnclm,bncmv->bnclv", weights.astype(v.dtype), values, preferred_element_type=dtype
        )
        return carry.merge(Softmax(*map(of_hash.by_query, (order_acc, order_max, order_sum))))

    unseen = varying_as((q, v), Softmax.empty(q.shape[:3], v.shape[3], dtype))
    state = scan_orders(attend_in_order, unseen, chunks, order)
    return state.output(), *state[1:]


def _backward(chunks, segment_ids, seed, q, k, v, d_out, statistics, order, head):
    """The gradients of q, k and v in float32, given that of `_forward`'s attended values."""
    n_heads, _, length = q.shape[:3]
    dtype = accum_dtype(q.dtype, v.dtype)
    f32 = dict(preferred_element_type=dtype)
    row_max, row_sum, row_dot = statistics
    real = row_sum != 0  # a row without visible keys has no gradient
    row_max, row_dot = (jnp.where(real, x, 0) for x in (row_max, row_dot))
    inverse_sum = jnp.where(real, 1 / jnp.where(real, row_sum, 1), 0)
    d_out = jnp.where(real[..., None], d_out, 0)

    def attend_in_order(carry, of_hash):
        dq, dk, dv = carry
        queries = of_hash.at_queries(q)
        rows = of_hash.at_keys_alone(q if k is None else k)
        keys, keys_vjp = jax.vjp(functools.partial(_keys, of_hash), rows)
        values = keys_in_reach(of_hash.at_keys(v), chunks)
        d_attended = of_hash.at_queries(d_out)
        mask = visible_keys(of_hash, order, segment_ids, n_heads, length)
        max_of_row, inverse_of_row, dot = (
            of_hash.at_queries(x)[..., None] for x in (row_max, inverse_sum, row_dot)
        )
        mask = mask & (inverse_of_row != 0)
        # A visible logit exceeds the maximum by rounding alone.
        capped = chunks.logits.of(LOGITS, queries, keys)
        logits = capped - max_of_row
        logits = jnp.where(mask & (logits < 0), logits, 0)
        weights = jnp.where(mask, jnp.exp(logits) * inverse_of_row, 0.0)
        dropped = _dropout_mask(of_hash, length, head, seed)
        d_values = jnp.einsum(
            "bnclm,bnclv->bncvm", (weights * dropped).astype(v.dtype), d_attended, **f32
        )
        d_weights = jnp.einsum("bnclv,bncmv->bnclm", d_attended, values, **f32) * dropped
        # The product with a hidden value may have overflowed.
        d_logits = chunks.logits.before_cap(weights * (d_weights - dot), capped)
        d_logits = chunks.logits.scaled(d_logits, q.shape[-1])
        d_logits = jnp.where(mask, d_logits, 0).astype(q.dtype)
        d_queries = jnp.einsum("bnclm,bncmh->bnclh", d_logits, keys, **f32)
        d_keys = jnp.einsum("bnclm,bnclh->bncmh", d_logits, without_nan(queries), **f32)
        (d_rows,) = keys_vjp(d_keys.astype(keys.dtype))
        if k is None:  # a query and its key are one vector
            # An empty border is added after the sum, which keeps the bits of short sequences.
            if of_hash.key_positions is not None:
                d_queries = with_border(d_queries, chunks)
            d_rows = d_rows.astype(dtype) + d_queries
            dq = dq + of_hash.by_key(of_hash.with_border(d_rows))
        else:
            dq = dq + of_hash.by_query(d_queries)
            dk = dk + of_hash.by_key(of_hash.with_border(d_rows)).astype(dtype)
        dv = dv + of_hash.by_key(sum_keys_in_reach(d_values, chunks))
        return dq, dk, dv

    zeros = tuple(None if x is None else jnp.zeros(x.shape, dtype) for x in (q, k, v))
    return scan_orders(attend_in_order, varying_as((q, v), zeros), chunks, order)
