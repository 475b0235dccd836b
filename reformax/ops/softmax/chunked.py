"""Attention within neighbouring chunks of a reordered sequence: the core of local and LSH.

A sequence is put in an order and cut into chunks of `L` positions. The queries of a chunk see the
keys of their own chunk and of its neighbours. Local attention keeps the sequence as it is; LSH
attention sorts it by bucket, once for each hashing round. Keys may have an order of their own. All
rounds share one softmax, accumulated round by round with a running maximum and sum, so a row's
output is exactly softmax attention over the union of the keys that it sees.

The gradient is analytic: from the output, the maximum and the sum it computes the logits again,
round by round, and stores none (Dao et al. 2022, sec. 3.1 and appendix B.2).

Inside this module arrays are heads-first, `[N, B, T, ...]`, with T padded to whole chunks. Keys
have `n_chunks_before` more chunks in front and `n_chunks_after` behind, called their border.

A CPU computes a few heads at a time: logits are written and read a dozen times, and those of all
heads would not fit in its cache. On NVIDIA GPUs `kernels.chunked` computes the same function.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from reformax.devices import varying_as
from reformax.ops.masking.masks import SegmentIds, segment_pair
from reformax.ops.masking.padding import over_tokens
from reformax.ops.numerics.normalization import length_normalize, mean_product
from reformax.ops.numerics.precision import accum_dtype
from reformax.ops.softmax.dropout import dropout_mask, seed_words
from reformax.ops.softmax.online import Softmax, lowest, nonzero
from reformax.ops.softmax.orders import Chunks, Order

# Logits of one round that a CPU computes at a time: 2 MiB of float32.
LOGITS_IN_CACHE = 2**19


def chunked_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T N H"] | None,
    v: Float[Array, "B T N V"],
    chunks: Chunks,
    order: Order | None,
    segment_ids: SegmentIds | None,
    rng: PRNGKeyArray | None,
    impl: str = "xla",
    own_weight: Float[Array, "B N Tp"] | None = None,
) -> Float[Array, "B T N V"]:
    """Softmax attention over the union of the chunks that each query sees.

    Whatever stands at padding is not read.

    Args:
      q: queries.
      k: keys; None where `chunks.shared_qk`.
      v: values.
      chunks: which keys are seen.
      order: the rounds' orders of the padded sequence; None keeps the sequence as it is.
      segment_ids: ids; a position sees its own id only, and 0 is padding. A pair if
        `chunks.n_keys`.
      rng: the source of dropout, needed where `chunks.dropout > 0`.
      impl: "xla" or the kernel, as `dispatch.choose` returns them.
      own_weight: for shared queries and keys, the weight of a position's own value where it sees
        nothing else; None is 1. "xla" only.

    Returns:
      The attended values, in the dtype of `v`; zeros for a row that sees nothing.
    """
    padded = _padded(segment_ids, _n_places(chunks, order))
    if impl == "xla":
        order = None if order is None else order.with_places(chunks.two_orders)
        seed = seed_words(rng, len(q)) if chunks.dropout > 0.0 else None
        others = order, padded, seed, own_weight
        return over_tokens(lambda *qkv: _attend(chunks, *qkv, *others), q, k, v, segment_ids)
    from reformax.ops.kernels.triton import chunked as kernel

    return kernel.attend(chunks, impl == "pallas_interpret", q, k, v, order, padded, rng)


def _padded(segment_ids: SegmentIds | None, n_places: tuple[int, int]) -> SegmentIds | None:
    """Segments with 0 behind them, for each place of queries and of keys."""

    def pad(ids: Int[Array, "B T"], n: int) -> Int[Array, "B Tp"]:
        return jnp.pad(ids, ((0, 0), (0, n - ids.shape[1])))

    if isinstance(segment_ids, tuple):
        return tuple(map(pad, segment_ids, n_places))
    return None if segment_ids is None else pad(segment_ids, n_places[0])


def _n_places(chunks: Chunks, order: Order | None) -> tuple[int, int]:
    """The numbers of places of queries and of keys, without their border."""
    n = chunks.length + chunks.padding if order is None else order.queries.shape[-1]
    return n, n // chunks.ratio


# Layout: heads, chunks and windows.


def _heads_first(x: Float[Array, "B T N H"], length: int) -> Float[Array, "N B Tp H"]:
    """Heads outermost, positions padded to `length`."""
    padding = length - x.shape[1]
    return jnp.pad(jnp.moveaxis(x, 2, 0), ((0, 0), (0, 0), (0, padding), (0, 0)))


def _heads_last(x: Float[Array, "N B Tp H"], length: int) -> Float[Array, "B T N H"]:
    """The inverse of `_heads_first` for `length` positions."""
    return jnp.moveaxis(x[:, :, :length], 0, 2)


def _by_heads(function: Callable, chunks: Chunks, *operands: Any) -> Any:
    """`function` of arrays `[N, B, T, ...]`, on a CPU for a few heads at a time."""
    n_heads, n_batch, length = operands[0].shape[:3]
    n_seen = (chunks.n_chunks_before + 1 + chunks.n_chunks_after) * chunks.chunk_len
    fit = LOGITS_IN_CACHE // max(1, n_batch * length * n_seen)
    if jax.default_backend() != "cpu" or n_heads <= max(fit, 1):
        return function(*operands)
    size = max(n for n in range(1, n_heads) if n_heads % n == 0 and n <= max(fit, 1))
    groups = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), operands)
    results = lax.map(lambda group: function(*group), groups)
    return jax.tree.map(lambda x: x.reshape(n_heads, *x.shape[2:]), results)


def _take(x: Array, index: Int[Array, "N B T"] | None) -> Array:
    """Rows of `x`, `[N, B, T, ...]`, by index along T; all of them in order if there is none."""
    if index is None:
        return x
    index = index.reshape(index.shape + (1,) * (x.ndim - 3))
    return jnp.take_along_axis(x, index, axis=2, mode="promise_in_bounds")


def _split(x: Array, chunk_len: int) -> Array:
    """`[N, B, T, ...]` cut into `[N, B, C, L, ...]`."""
    return x.reshape(*x.shape[:2], -1, chunk_len, *x.shape[3:])


def _merge(x: Array) -> Array:
    """`[N, B, C, L, ...]` put back together as `[N, B, T, ...]`."""
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def _with_border(x: Array, chunks: Chunks, value: int = 0) -> Array:
    """`[N, B, C, ...]` with chunks of `value` in the place of the keys' border."""
    border = [(0, 0), (0, 0), (chunks.n_chunks_before, chunks.n_chunks_after)]
    return jnp.pad(x, border + [(0, 0)] * (x.ndim - 3), constant_values=value)


def _windows(x: Array, chunks: Chunks) -> Array:
    """The keys that each chunk sees: of `[N, B, C + border, L, ...]`, `[N, B, C, M, ...]`."""
    reach = chunks.n_chunks_before + chunks.n_chunks_after
    n = x.shape[2] - reach
    return jnp.concatenate([x[:, :, i : i + n] for i in range(reach + 1)], axis=3)


def _sum_windows(x: Array, chunks: Chunks) -> Array:
    """The transpose of `_windows`, `[N, B, C, V, M] -> [N, B, C + border, L, V]`.

    It sums over the windows that hold a key. Windows come with features first, because a CPU
    computes such products twice as fast; the barrier keeps the transposition out of them.
    """
    reach, n = chunks.n_chunks_before + chunks.n_chunks_after, x.shape[2]
    total = jnp.zeros((*x.shape[:2], n + reach, x.shape[3], chunks.chunk_len), x.dtype)
    for i, part in enumerate(jnp.split(x, reach + 1, axis=-1)):
        total = total.at[:, :, i : i + n].add(part)
    return jnp.swapaxes(jax.lax.optimization_barrier(total), -1, -2)


# One round.


class _Round(NamedTuple):
    """One round of an `Order`, and the chunks it is cut into; None keeps the sequence as it is."""

    chunks: Chunks
    index: Int[Array, ""]
    queries: Int[Array, "N B T"] | None
    places: Int[Array, "N B T"] | None
    keys: Int[Array, "N B K"] | None
    key_places: Int[Array, "N B T"] | None

    @property
    def empty_border(self) -> bool:
        """Whether there is no key before the first query's chunk, nor behind the last."""
        return self.keys is None or self.key_places is not None

    def at_queries(self, x: Array) -> Array:
        """Rows of `x`, `[N, B, T, ...]`, at the places of queries, `[N, B, C, L, ...]`."""
        return _split(_take(x, self.queries), self.chunks.query_chunk_len)

    def rows_of_keys(self, x: Array) -> Array:
        """Rows of `x` at the places of keys; without the border where that is empty."""
        if self.keys is None:
            return self.at_queries(x)
        return _split(_take(x, self.keys), self.chunks.chunk_len)

    def bordered(self, x: Array, outside: int = 0) -> Array:
        """`rows_of_keys` with the border, `[N, B, C + border, L, ...]`; `outside` fills it."""
        return _with_border(x, self.chunks, outside) if self.empty_border else x

    def at_keys(self, x: Array, outside: int = 0) -> Array:
        """Rows of `x` at the places of keys and in their border, `[N, B, C + border, L, ...]`."""
        return self.bordered(self.rows_of_keys(x), outside)

    def by_query(self, x: Array) -> Array:
        """The transpose of `at_queries`: `[N, B, C, L, ...]` by position."""
        return _take(_merge(x), self.places)

    def by_key(self, x: Array) -> Array:
        """The transpose of `at_keys`: sums of `[N, B, C + border, L, ...]` by position."""
        x = _merge(x)
        before, after = (
            n * self.chunks.chunk_len
            for n in (self.chunks.n_chunks_before, self.chunks.n_chunks_after)
        )
        n_places = x.shape[2]
        places = self.places if self.key_places is None else self.key_places
        total = _take(x[:, :, before : n_places - after], places)
        if self.empty_border:
            return total
        border = np.r_[:before, n_places - after : n_places]
        head, batch = np.ogrid[: x.shape[0], : x.shape[1]]
        position = self.keys[:, :, border]
        return total.at[head[..., None], batch[..., None], position].add(x[:, :, border])

    def pair(self, x: Int[Array, "N B T"], outside: int = 0) -> tuple[Array, Array]:
        """A number of each position for queries, `[..., L, 1]`, and keys, `[..., 1, M]`."""
        return self.at_queries(x)[..., :, None], self.in_windows(x, outside)

    def in_windows(self, x: Int[Array, "N B T"], outside: int = 0) -> Array:
        """A number of each position for keys, `[..., 1, M]`."""
        return _windows(self.at_keys(x, outside), self.chunks)[..., None, :]

    def positions(self, length: int) -> tuple[Array, Array]:
        """The positions of queries, `[..., L, 1]`, and of keys, `[..., 1, M]`.

        A key of an empty border has position `length`, behind all others.
        """
        if self.queries is None:
            return self.pair(jnp.arange(length)[None, None], length)
        queries = _split(self.queries, self.chunks.query_chunk_len)
        keys = queries if self.keys is None else _split(self.keys, self.chunks.chunk_len)
        keys = self.bordered(keys, length)
        return queries[..., :, None], _windows(keys, self.chunks)[..., None, :]


def _scan_rounds(body: Callable, carry: Any, chunks: Chunks, order: Order | None) -> Any:
    """`lax.scan` of `body(carry, round)` over the rounds; a single round needs no loop."""
    if order is None:
        return body(carry, _Round(chunks, jnp.int32(0), None, None, None, None))
    of_rounds = order.queries, order.places, order.keys, order.key_places
    n_rounds = order.queries.shape[2]
    if n_rounds == 1:
        of_round = jax.tree.map(lambda x: x[:, :, 0], of_rounds)
        return body(carry, _Round(chunks, jnp.int32(0), *of_round))
    of_rounds = jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), of_rounds)

    def each(carry, indexed):
        index, of_round = indexed
        return body(carry, _Round(chunks, index, *of_round)), None

    return lax.scan(each, carry, (jnp.arange(n_rounds), of_rounds))[0]


def _visible(
    this: _Round,
    order: Order | None,
    segment_ids: SegmentIds | None,
    n_heads: int,
    length: int,
) -> Bool[Array, "#N #B C #L M"]:
    """Which key of its window each query sees in a round of `order`, `[N, B, R, T]`."""
    chunks = this.chunks
    query, key = this.positions(length)
    mask = key <= query if chunks.causal else key < chunks.key_length
    if chunks.causal and chunks.n_keys is not None:
        mask = mask & (key < chunks.n_keys)
    if chunks.shared_qk:
        mask = mask & (key != query)
    if chunks.window is not None:
        mask = mask & (jnp.abs(query - key) < chunks.window)
    if segment_ids is not None:
        of_query, of_key = (
            jnp.broadcast_to(x, (n_heads, *x.shape)) for x in segment_pair(segment_ids)
        )
        query_segment, key_segment = this.at_queries(of_query)[..., None], this.in_windows(of_key)
        mask = mask & (query_segment == key_segment) & (key_segment != 0)
    if order is not None and order.first is not None:
        first = jax.lax.dynamic_index_in_dim(order.first, this.index, axis=2, keepdims=False)
        mask = mask & _shown_from(this, this.places, first)
    if chunks.count_once and order is not None:
        # N_ij by elimination: a key counts in the first round that shows it.
        for earlier in range(order.places.shape[2] - 1):
            places = order.places[:, :, earlier]
            if order.first is None:
                of_keys = None if order.key_places is None else order.key_places[:, :, earlier]
                seen = _in_reach(this, places, of_keys)
            else:
                seen = _shown_from(this, places, order.first[:, :, earlier])
            mask = mask & ~(seen & (earlier < this.index))
    return mask


def _in_reach(
    this: _Round, places: Int[Array, "N B T"], key_places: Int[Array, "N B T"] | None
) -> Bool[Array, "N B C L M"]:
    """Whether each key's chunk is in reach of the query's, in the round with those places."""
    query_chunk = this.at_queries(places // this.chunks.query_chunk_len)[..., None]
    key_places = places if key_places is None else key_places
    key_chunk = this.in_windows(key_places // this.chunks.chunk_len)
    distance = key_chunk - query_chunk
    return (distance >= -this.chunks.n_chunks_before) & (distance <= this.chunks.n_chunks_after)


def _shown_from(
    this: _Round, places: Int[Array, "N B T"], first: Int[Array, "N B T"]
) -> Bool[Array, "N B C L M"]:
    """Whether each key stands between the query's `first` place and its own, in that round."""
    query, key = this.pair(places)
    return (key >= this.at_queries(first)[..., None]) & (key <= query)


def _keys(this: _Round, rows: Array) -> Array:
    """The keys of each window, from rows of keys, or of queries where they are shared."""
    rows = length_normalize(rows) if this.chunks.shared_qk else rows
    return _windows(this.bordered(rows), this.chunks)


def _logits(q: Float[Array, "N B C L H"], keys: Float[Array, "N B C M H"]) -> Array:
    dtype = accum_dtype(q.dtype, keys.dtype)
    product = jnp.einsum("bnclh,bncmh->bnclm", q, keys, preferred_element_type=dtype)
    return product / math.sqrt(q.shape[-1])


def _dropout_mask(
    this: _Round, length: int, head: Int[Array, "N B"], seed: Int[Array, 6] | None
) -> Float[Array, "N B C L M"] | float:
    """The dropout mask of a round's weights."""
    if this.chunks.dropout == 0.0:
        return 1.0
    batch = jnp.arange(head.shape[1])[None, :, None, None, None]
    address = batch, head[..., None, None, None], *this.positions(length)
    return dropout_mask(seed, this.chunks.dropout, *address)


# All rounds, both passes.


def _lone_weight(chunks: Chunks, row_sum, segment_ids, seed, own_weight) -> Float[Array, "N B T 1"]:
    """The weight of a position's own value: 1, or its dropout mask, where it sees nothing else."""
    own_weight = 1.0 if own_weight is None else jnp.swapaxes(own_weight, 0, 1)
    weight = jnp.where(row_sum == 0.0, own_weight, 0.0)
    if segment_ids is not None:
        weight = jnp.where((segment_ids != 0)[None], weight, 0.0)
    if chunks.dropout > 0.0:
        head, batch, position = jnp.ogrid[tuple(slice(n) for n in row_sum.shape)]
        address = (batch, head, position, position)
        weight = weight * dropout_mask(seed, chunks.dropout, *address)
    return weight[..., None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(chunks, q, k, v, order, segment_ids, seed, own_weight):
    return _attend_forward(chunks, q, k, v, order, segment_ids, seed, own_weight)[0]


def _attend_forward(chunks, q, k, v, order, segment_ids, seed, own_weight):
    n_queries, n_keys = _n_places(chunks, order)
    sides = (q, n_queries), (k, n_keys), (v, n_keys)
    q, k, values = (None if x is None else _heads_first(x, n) for x, n in sides)
    order = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), order)
    forward = functools.partial(_forward, chunks, segment_ids, seed)
    out, row_max, row_sum = _by_heads(forward, chunks, q, k, values, order, _heads(q))
    if chunks.sees_itself:
        lone = _lone_weight(chunks, row_sum, segment_ids, seed, own_weight)
        out = out + lone * values.astype(out.dtype)
    out = _heads_last(out, chunks.length).astype(v.dtype)
    # The maximum and the sum are kept apart: their log-sum-exp would lose the sum where logits are
    # large.
    return out, (q, k, values, order, segment_ids, seed, own_weight, out, row_max, row_sum)


def _attend_backward(chunks, residuals, d_out):
    q, k, v, order, segment_ids, seed, own_weight, out, row_max, row_sum = residuals
    # D_i = sum_j P_ij dP_ij = dO_i . O_i, so that no row of P is ever needed whole.
    row_dot = mean_product(d_out, out) * out.shape[-1]
    d_out, row_dot = (_heads_first(x, q.shape[2]) for x in (d_out, row_dot))
    backward = functools.partial(_backward, chunks, segment_ids, seed)
    statistics = (row_max, row_sum, row_dot[..., 0])
    dq, dk, dv = _by_heads(backward, chunks, q, k, v, d_out, statistics, order, _heads(q))
    if chunks.sees_itself:
        lone = _lone_weight(chunks, row_sum, segment_ids, seed, own_weight)
        dv = dv + lone * d_out.astype(dv.dtype)

    def like(dx, x, length=chunks.key_length):
        return None if x is None else _heads_last(dx, length).astype(x.dtype)

    return like(dq, q, chunks.length), like(dk, k), like(dv, v), None, None, None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _heads(q: Float[Array, "N B T H"]) -> Int[Array, "N B"]:
    """The number of each head, by which its dropout is drawn."""
    return jnp.broadcast_to(jnp.arange(q.shape[0])[:, None], q.shape[:2])


def _forward(chunks, segment_ids, seed, q, k, v, order, head):
    """Each position's attended values, largest logit, and sum of `exp(logit - largest)`."""
    n_heads, _, length = q.shape[:3]
    dtype = accum_dtype(q.dtype, v.dtype)
    of_keys = q if k is None else k

    def attend_round(carry, this):
        acc, row_max, row_sum = carry
        queries = this.at_queries(q)
        keys = _keys(this, this.rows_of_keys(of_keys))
        values = _windows(this.at_keys(v), chunks)
        mask = _visible(this, order, segment_ids, n_heads, length)
        logits = jnp.where(mask, _logits(queries, keys), lowest(dtype))
        top_here = logits.max(axis=-1)
        weights = jnp.where(mask, jnp.exp(logits - top_here[..., None]), 0.0)
        total_here = weights.sum(axis=-1)
        weights = weights * _dropout_mask(this, length, head, seed)
        here = jnp.einsum(
            "bnclm,bncmv->bnclv",
            weights.astype(v.dtype),
            values,
            preferred_element_type=dtype,
        )
        here, top_here, total_here = (this.by_query(x) for x in (here, top_here, total_here))
        both = jnp.maximum(row_max, top_here)
        old, new = jnp.exp(row_max - both), jnp.exp(top_here - both)
        acc = acc * old[..., None] + here * new[..., None]
        return Softmax(acc, both, row_sum * old + total_here * new)

    nothing = varying_as((q, v), Softmax.empty(q.shape[:3], v.shape[3], dtype))
    acc, row_max, row_sum = _scan_rounds(attend_round, nothing, chunks, order)
    return acc / nonzero(row_sum)[..., None], row_max, row_sum


def _backward(chunks, segment_ids, seed, q, k, v, d_out, statistics, order, head):
    """The gradients of q, k and v, float32, of what `_forward` returns first."""
    n_heads, _, length = q.shape[:3]
    dtype = accum_dtype(q.dtype, v.dtype)
    f32 = dict(preferred_element_type=dtype)
    row_max, row_sum, row_dot = statistics
    real = row_sum > 0  # a row that saw nothing has no gradient
    row_max, row_dot = (jnp.where(real, x, 0) for x in (row_max, row_dot))
    inverse_sum = jnp.where(real, 1 / jnp.where(real, row_sum, 1), 0)
    d_out = jnp.where(real[..., None], d_out, 0)

    def attend_round(carry, this):
        dq, dk, dv = carry
        queries = this.at_queries(q)
        rows = this.rows_of_keys(q if k is None else k)
        keys, keys_vjp = jax.vjp(functools.partial(_keys, this), rows)
        values = _windows(this.at_keys(v), chunks)
        d_here = this.at_queries(d_out)
        mask = _visible(this, order, segment_ids, n_heads, length)
        row_top, row_share, dot = (
            this.at_queries(x)[..., None] for x in (row_max, inverse_sum, row_dot)
        )
        mask = mask & (row_share > 0)
        # A visible logit exceeds the maximum by rounding alone.
        logits = _logits(queries, keys) - row_top
        logits = jnp.where(mask & (logits < 0), logits, 0)
        weights = jnp.where(mask, jnp.exp(logits) * row_share, 0.0)
        dropped = _dropout_mask(this, length, head, seed)
        d_values = jnp.einsum(
            "bnclm,bnclv->bncvm", (weights * dropped).astype(v.dtype), d_here, **f32
        )
        d_weights = jnp.einsum("bnclv,bncmv->bnclm", d_here, values, **f32) * dropped
        # The product with a hidden value may have overflowed.
        d_logits = jnp.where(mask, weights * (d_weights - dot) / math.sqrt(q.shape[-1]), 0)
        d_logits = d_logits.astype(q.dtype)
        d_queries = jnp.einsum("bnclm,bncmh->bnclh", d_logits, keys, **f32)
        d_keys = jnp.einsum("bnclm,bnclh->bncmh", d_logits, queries, **f32)
        (d_rows,) = keys_vjp(d_keys.astype(keys.dtype))
        if k is None:  # a query and its key are one vector
            # An empty border joins after the sum, which keeps the bits of short sequences.
            d_queries = d_queries if this.keys is None else _with_border(d_queries, chunks)
            d_rows = d_rows.astype(dtype) + d_queries
            dq = dq + this.by_key(this.bordered(d_rows))
        else:
            dq = dq + this.by_query(d_queries)
            dk = dk + this.by_key(this.bordered(d_rows)).astype(dtype)
        dv = dv + this.by_key(_sum_windows(d_values, chunks))
        return dq, dk, dv

    nothing = tuple(None if x is None else jnp.zeros(x.shape, dtype) for x in (q, k, v))
    return _scan_rounds(attend_round, varying_as((q, v), nothing), chunks, order)
