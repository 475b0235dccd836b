"""Attention within neighbouring chunks of a reordered sequence: the core of local and LSH.

A sequence is put in some order and cut into chunks of `L` positions; each chunk's queries see the
keys of their own chunk and of its neighbours. Local attention keeps the order as it is; LSH
attention sorts by bucket, once per hashing round. The rounds' keys share one softmax, accumulated
round by round with its running log-sum-exp, so a row's output is exactly softmax attention over
the union of what it sees.

The gradient is analytic, from the output and its log-sum-exp alone (Dao et al. 2022, sec. 3.1 and
appendix B.2): scores are computed again, round by round, and never stored.

Inside this module arrays are heads-first, `[N, B, T, ...]`, with T padded to whole chunks.

On a CPU a few heads are computed at a time: scores are written and read a dozen times, and all of
them are more than its cache holds. On an NVIDIA GPU `kernels.chunked` computes the same function.
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

from reformax.ops.parts.dropout import dropout_mask, seed_words
from reformax.ops.parts.normalization import length_normalize, mean_product
from reformax.ops.parts.softmax import HIDDEN

# Scores of one round that a CPU computes at a time: 2 MiB of float32.
SCORES_IN_CACHE = 2**19


class Order(NamedTuple):
    """An order of the padded sequence for each round, and its inverse: `slot[order[t]] == t`.

    With `first`, a position sees no key at a place before `first[t]` or after its own.
    """

    order: Int[Array, "B N R T"]  # the position that stands at each place
    slot: Int[Array, "B N R T"] | None  # the place of each position; None where nobody asks
    first: Int[Array, "B N R T"] | None = None  # by position; None: all of the chunks in reach


def inverse(order: Int[Array, "*d T"]) -> Int[Array, "*d T"]:
    """The inverse of each permutation along the last axis."""
    place = jnp.broadcast_to(jnp.arange(order.shape[-1], dtype=order.dtype), order.shape)
    slot = jnp.zeros_like(order)
    return jnp.put_along_axis(slot, order, place, axis=-1, inplace=False, mode="promise_in_bounds")


class Chunks(NamedTuple):
    """The static part of a chunked attention: which keys a query sees, and with what weight.

    Attributes:
      length: the number of real positions; those behind it are padding.
      chunk_len: positions in a chunk, L.
      n_chunks_before: how many chunks before its own a query sees.
      n_chunks_after: how many chunks after its own a query sees.
      causal: whether the future is hidden, by original position.
      shared_qk: whether keys are the length-normalised queries, hidden from themselves.
      window: if set, keys `window` or more positions away are hidden.
      count_once: whether a key that several rounds see counts once (the paper's N_ij) or each time.
      dropout: the rate at which attention weights are dropped.
      wrap: whether the order is one of `in_a_circle`.
      n_pad: positions of padding behind the real ones; None makes whole chunks.
      self_score: the score of a position's own key where it sees no other; see `_own_share`.
    """

    length: int
    chunk_len: int
    n_chunks_before: int
    n_chunks_after: int
    causal: bool
    shared_qk: bool
    window: int | None = None
    count_once: bool = True
    dropout: float = 0.0
    wrap: bool = False
    n_pad: int | None = None
    self_score: float | None = None

    @property
    def padding(self) -> int:
        """How many positions stand behind the real ones."""
        return -self.length % self.chunk_len if self.n_pad is None else self.n_pad


def padding(length: int, chunk_len: int, pad_chunks: int) -> int:
    """What makes a length a multiple of so many chunks; none where one chunk covers it."""
    return 0 if length <= chunk_len else -length % (chunk_len * pad_chunks)


def check_chunks(
    chunk_len: int, n_chunks_before: int, n_chunks_after: int, pad_chunks: int = 1
) -> None:
    """Raises `ValueError` for chunk sizes that mean nothing."""
    for name, n in (("chunk_len", chunk_len), ("pad_chunks", pad_chunks)):
        if n < 1:
            raise ValueError(f"{name} is {n}: expected at least 1")
    for name, n in (("n_chunks_before", n_chunks_before), ("n_chunks_after", n_chunks_after)):
        if n < 0:
            raise ValueError(f"{name} is {n}: expected 0 or more")


def in_a_circle(order: Order, chunk_len: int, n_chunks_before: int, n_chunks_after: int) -> Order:
    """The order with, around each round, the chunks that its first and its last chunk see there.

    The rounds stand one behind the other and the first behind the last, as in Trax: before a
    round's first chunk are the last ones of the round before. Of one round it makes a circle.
    """
    n_rounds, length = order.order.shape[2:]
    before, after = n_chunks_before * chunk_len, n_chunks_after * chunk_len
    place = np.arange(n_rounds)[:, None] * length + np.arange(-before, length + after)
    rounds = order.order.reshape(*order.order.shape[:2], -1)
    return order._replace(order=rounds[:, :, place % (n_rounds * length)], slot=order.slot + before)


def chunked_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T N H"] | None,
    v: Float[Array, "B T N V"],
    chunks: Chunks,
    order: Order | None,
    segments: Int[Array, "B T"] | None,
    rng: PRNGKeyArray | None,
    impl: str = "xla",
) -> Float[Array, "B T N V"]:
    """Softmax attention over the union of the chunks that each query sees.

    Args:
      q: queries.
      k: keys; None where `chunks.shared_qk`.
      v: values.
      chunks: which keys are seen.
      order: the rounds' orders of the padded sequence; None keeps the sequence as it is.
      segments: ids; a position sees its own id only, and 0 is padding.
      rng: the source of dropout, needed where `chunks.dropout > 0`.
      impl: what `dispatch.choose` returned.

    Returns:
      The attended values, in the dtype of `v`; zeros for a row that sees nothing.
    """
    if segments is not None:
        segments = jnp.pad(segments, ((0, 0), (0, chunks.padding)))
    if impl == "xla":
        return _attend(chunks, q, k, v, order, segments, rng)
    from reformax.ops.kernels import chunked as kernel

    return kernel.attend(chunks, impl == "pallas_interpret", q, k, v, order, segments, rng)


def _heads_first(x: Float[Array, "B T N H"], chunks: Chunks) -> Float[Array, "N B Tp H"]:
    """Heads outermost, positions padded to whole chunks."""
    return jnp.pad(jnp.moveaxis(x, 2, 0), ((0, 0), (0, 0), (0, chunks.padding), (0, 0)))


def _heads_last(x: Float[Array, "N B Tp H"], chunks: Chunks) -> Float[Array, "B T N H"]:
    """The inverse of `_heads_first`."""
    return jnp.moveaxis(x[:, :, : chunks.length], 0, 2)


def _by_heads(function: Callable, chunks: Chunks, *operands: Any) -> Any:
    """`function` of arrays `[N, B, T, ...]`, on a CPU for a few heads at a time."""
    n_heads, n_batch, length = operands[0].shape[:3]
    n_seen = (chunks.n_chunks_before + 1 + chunks.n_chunks_after) * chunks.chunk_len
    fit = SCORES_IN_CACHE // max(1, n_batch * length * n_seen)
    if jax.default_backend() != "cpu" or n_heads <= fit:
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


def _put_back(x: Array, this: _Round, chunks: Chunks) -> Array:
    """The transpose of `_take` by a round's order: what is said of each place, by position."""
    total = _take(x, this.slot)
    if chunks.wrap:
        border = _border(x.shape[2], chunks)
        head, batch = np.ogrid[: x.shape[0], : x.shape[1]]
        position = this.order[:, :, border]
        total = total.at[head[..., None], batch[..., None], position].add(x[:, :, border])
    return total


def _border(n_places: int, chunks: Chunks) -> np.ndarray:
    """The places that `in_a_circle` added around a round."""
    before, after = (n * chunks.chunk_len for n in (chunks.n_chunks_before, chunks.n_chunks_after))
    return np.r_[:before, n_places - after : n_places]


def _split(x: Array, chunks: Chunks) -> Array:
    """`[N, B, T, ...]` cut into `[N, B, C, L, ...]`."""
    return x.reshape(*x.shape[:2], -1, chunks.chunk_len, *x.shape[3:])


def _merge(x: Array) -> Array:
    """`[N, B, C, L, ...]` put back together as `[N, B, T, ...]`."""
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def _look_around(x: Array, chunks: Chunks) -> Array:
    """Each chunk beside its neighbours, `[N, B, C, L, ...] -> [N, B, C, M, ...]`, zeros outside."""
    before, after = chunks.n_chunks_before, chunks.n_chunks_after
    n = x.shape[2]
    padded = jnp.pad(x, [(0, 0), (0, 0), (before, after)] + [(0, 0)] * (x.ndim - 3))
    return jnp.concatenate([padded[:, :, i : i + n] for i in range(before + after + 1)], axis=3)


def _fold_back(x: Array, chunks: Chunks) -> Array:
    """The transpose of `_look_around`, `[N, B, C, V, M] -> [N, B, C, L, V]`.

    It sums what every chunk's window says of a position. Windows come with features first, as a
    CPU computes such products twice as fast, and the barrier keeps the transposition out of them.
    """
    before, after = chunks.n_chunks_before, chunks.n_chunks_after
    n = x.shape[2]
    total = jnp.zeros((*x.shape[:2], n + before + after, x.shape[3], chunks.chunk_len), x.dtype)
    for i, part in enumerate(jnp.split(x, before + after + 1, axis=-1)):
        total = total.at[:, :, i : i + n].add(part)
    total = jax.lax.optimization_barrier(total[:, :, before : before + n])
    return jnp.swapaxes(total, -1, -2)


def _exists(n_chunks: int, chunks: Chunks) -> Bool[Array, "C 1 M"]:
    """Whether the chunk that a window's key belongs to lies within the sequence."""
    offsets = np.arange(-chunks.n_chunks_before, chunks.n_chunks_after + 1)
    neighbour = np.arange(n_chunks)[:, None] + offsets
    exists = (neighbour >= 0) & (neighbour < n_chunks)
    return jnp.asarray(np.repeat(exists, chunks.chunk_len, axis=1)[:, None])


def _positions(chunks: Chunks, order: Int[Array, "N B T"] | None, length: int) -> Array:
    """Original positions by place, `[N, B, C, L]`, or `[1, 1, C, L]` without an order."""
    return _split(jnp.arange(length)[None, None] if order is None else order, chunks)


def _visible(
    chunks: Chunks,
    index: Int[Array, ""],
    order: Int[Array, "N B T"] | None,
    rounds: Order | None,
    segments: Int[Array, "B T"] | None,
    length: int,
) -> Bool[Array, "#N #B C L M"]:
    """Which key of its window each query sees in round `index` of `rounds`, `[N, B, R, T]`."""
    around = functools.partial(_look_around, chunks=chunks)

    def pair(x):  # queries [..., L, 1] and keys [..., 1, M] of a per-position quantity
        return x[..., :, None], around(x)[..., None, :]

    position = _positions(chunks, order, length)
    query, key = pair(position)
    mask = _exists(position.shape[2], chunks)
    if chunks.wrap:  # what was added around the round are keys alone
        own = np.ones(order.shape[2], bool)
        own[_border(order.shape[2], chunks)] = False
        mask = mask & own.reshape(-1, chunks.chunk_len, 1)
    if chunks.causal:
        mask = mask & (key <= query)
    elif segments is None and length > chunks.length:
        mask = mask & (key < chunks.length)
    if chunks.shared_qk:
        mask = mask & (key != query)
    if chunks.window is not None:
        mask = mask & (jnp.abs(query - key) < chunks.window)
    if segments is not None:
        segment = jnp.broadcast_to(segments, (position.shape[0], *segments.shape))
        query_segment, key_segment = pair(_split(_take(segment, order), chunks))
        mask = mask & (query_segment == key_segment) & (key_segment != 0)
    if rounds is not None and rounds.first is not None:
        query, key = pair(_split(jnp.arange(length)[None, None], chunks))
        first = jax.lax.dynamic_index_in_dim(rounds.first, index, axis=2, keepdims=False)
        first = _split(_take(first, order), chunks)[..., None]
        mask = mask & (key >= first) & (key <= query)
    if chunks.count_once and rounds is not None:
        # N_ij by elimination: a key counts in the first round that shows it.
        for earlier in range(rounds.slot.shape[2] - 1):
            place = _split(_take(rounds.slot[:, :, earlier], order), chunks)
            if rounds.first is None:
                query_chunk, key_chunk = pair(place // chunks.chunk_len)
                distance = key_chunk - query_chunk
                seen = (distance >= -chunks.n_chunks_before) & (distance <= chunks.n_chunks_after)
            else:
                query, key = pair(place)
                first = _split(_take(rounds.first[:, :, earlier], order), chunks)[..., None]
                seen = (key >= first) & (key <= query)
            mask = mask & ~(seen & (earlier < index))
    return mask


class _Round(NamedTuple):
    """What one round needs beside q, k and v."""

    index: Int[Array, ""]
    order: Int[Array, "N B T"] | None
    slot: Int[Array, "N B T"] | None


def _scan_rounds(body, carry, order: Order | None):
    """`lax.scan` of `body(carry, round)` over the rounds; a single round needs no loop."""
    if order is None:
        return body(carry, _Round(jnp.int32(0), None, None))
    n_rounds = order.order.shape[2]
    if n_rounds == 1:
        return body(carry, _Round(jnp.int32(0), order.order[:, :, 0], order.slot[:, :, 0]))
    rounds = _Round(
        jnp.arange(n_rounds), jnp.moveaxis(order.order, 2, 0), jnp.moveaxis(order.slot, 2, 0)
    )
    return lax.scan(lambda c, r: (body(c, r), None), carry, rounds)[0]


def _keys(chunks: Chunks, q: Array, k: Array | None) -> Array:
    """The keys of each window, made from the queries where they are shared."""
    return _look_around(length_normalize(q) if chunks.shared_qk else k, chunks)


def _scores(q: Float[Array, "N B C L H"], keys: Float[Array, "N B C M H"]) -> Array:
    product = jnp.einsum("bnclh,bncmh->bnclm", q, keys, preferred_element_type=jnp.float32)
    return product / math.sqrt(q.shape[-1])


def _dropout(chunks: Chunks, order, length, head, rng) -> Float[Array, "N B C L M"] | float:
    if chunks.dropout == 0.0:
        return 1.0
    position = _positions(chunks, order, length)
    return dropout_mask(
        seed_words(rng),
        chunks.dropout,
        jnp.arange(head.shape[1])[:, None, None, None],
        head[..., None, None, None],
        position[..., :, None],
        _look_around(position, chunks)[..., None, :],
    )


def _lone_weight(chunks: Chunks, total, order, segments, rng) -> Float[Array, "N B T 1"]:
    """The weight of a position's own value: 1, or its dropout, where it sees nothing else."""
    weight = jnp.where(total == 0.0, _own_share(chunks, order), 0.0)
    if segments is not None:
        weight = weight * (segments != 0)
    if chunks.dropout > 0.0:
        head, batch, position = jnp.ogrid[tuple(slice(n) for n in total.shape)]
        address = (batch, head, position, position)
        weight = weight * dropout_mask(seed_words(rng), chunks.dropout, *address)
    return weight[..., None]


def _own_share(chunks: Chunks, order: Order | None) -> Float[Array, "N B T"] | float:
    """What float32 makes of a position's softmax over its own key alone, in every round: about 1.

    To the scores, `self_score` each, it adds the logarithms of how often a round shows the key and
    of the number of rounds, and rounds: at -1e5 it tells 1/128 apart.
    """
    if chunks.self_score is None or order is None:
        return 1.0
    score = jnp.float32(chunks.self_score)
    copies = jnp.ones(order.slot.shape, jnp.float32)
    if chunks.wrap:  # a round shows it again where a chunk of the next round has it too
        border = _border(order.order.shape[-1], chunks)
        position = order.order[..., border]
        own = jnp.take_along_axis(order.slot, position, axis=-1) // chunks.chunk_len
        distance = border // chunks.chunk_len - own
        near = (distance >= -chunks.n_chunks_before) & (distance <= chunks.n_chunks_after)
        index = np.ogrid[tuple(slice(n) for n in position.shape[:-1])]
        copies = copies.at[*(i[..., None] for i in index), position].add(near)
    # Barriers, as what cancels here on paper is the point.
    logits = jax.lax.optimization_barrier(score + jnp.log(copies))
    top = logits.max(axis=2, keepdims=True)
    everything = jnp.log(jnp.sum(jnp.exp(logits - top), axis=2, keepdims=True))
    everything = jax.lax.optimization_barrier(top + everything)
    return jnp.sum(copies * jnp.exp(score - logits) * jnp.exp(logits - everything), axis=2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(chunks, q, k, v, order, segments, rng):
    return _attend_forward(chunks, q, k, v, order, segments, rng)[0]


def _attend_forward(chunks, q, k, v, order, segments, rng):
    q, k, values = (None if x is None else _heads_first(x, chunks) for x in (q, k, v))
    order = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), order)
    forward = functools.partial(_forward, chunks, segments, rng)
    out, top, total = _by_heads(forward, chunks, q, k, values, order, _heads(q))
    if chunks.shared_qk:
        out = out + _lone_weight(chunks, total, order, segments, rng) * values
    out = _heads_last(out, chunks).astype(v.dtype)
    # The maximum and the sum apart: their log-sum-exp would lose the sum where scores are large.
    return out, (q, k, values, order, segments, rng, out, top, total)


def _attend_backward(chunks, residuals, d_out):
    q, k, v, order, segments, rng, out, top, total = residuals
    # D_i = sum_j P_ij dP_ij = dO_i . O_i, so that no row of P is ever needed whole.
    row = mean_product(d_out, out) * out.shape[-1]
    d_out, row = (_heads_first(x, chunks) for x in (d_out, row))
    backward = functools.partial(_backward, chunks, segments, rng)
    statistics = (top, total, row[..., 0])
    dq, dk, dv = _by_heads(backward, chunks, q, k, v, d_out, statistics, order, _heads(q))
    if chunks.shared_qk:
        dv = dv + _lone_weight(chunks, total, order, segments, rng) * d_out

    def like(dx, x):
        return None if x is None else _heads_last(dx, chunks).astype(x.dtype)

    return like(dq, q), like(dk, k), like(dv, v), None, None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _heads(q: Float[Array, "N B T H"]) -> Int[Array, "N B"]:
    """The number of each head, by which its dropout is drawn."""
    return jnp.broadcast_to(jnp.arange(q.shape[0])[:, None], q.shape[:2])


def _forward(chunks, segments, rng, q, k, v, order, head):
    """Each position's attended values, largest score, and sum of `exp(score - largest)`."""
    length = q.shape[2]

    def attend_round(carry, this):
        acc, top, total = carry
        q_sorted = _split(_take(q, this.order), chunks)
        k_sorted = None if k is None else _split(_take(k, this.order), chunks)
        values = _look_around(_split(_take(v, this.order), chunks), chunks)
        mask = _visible(chunks, this.index, this.order, order, segments, length)
        scores = jnp.where(mask, _scores(q_sorted, _keys(chunks, q_sorted, k_sorted)), HIDDEN)
        top_here = scores.max(axis=-1)
        weights = jnp.where(mask, jnp.exp(scores - top_here[..., None]), 0.0)
        total_here = weights.sum(axis=-1)
        weights = weights * _dropout(chunks, this.order, length, head, rng)
        here = jnp.einsum(
            "bnclm,bncmv->bnclv",
            weights.astype(v.dtype),
            values,
            preferred_element_type=jnp.float32,
        )
        here, top_here, total_here = (
            _take(_merge(x), this.slot) for x in (here, top_here, total_here)
        )
        both = jnp.maximum(top, top_here)
        old, new = jnp.exp(top - both), jnp.exp(top_here - both)
        acc = acc * old[..., None] + here * new[..., None]
        return acc, both, total * old + total_here * new

    acc, top, total = _scan_rounds(
        attend_round,
        (
            jnp.zeros(v.shape, jnp.float32),
            jnp.full(v.shape[:3], HIDDEN, jnp.float32),
            jnp.zeros(v.shape[:3], jnp.float32),
        ),
        order,
    )
    return acc / jnp.where(total > 0, total, 1.0)[..., None], top, total


def _backward(chunks, segments, rng, q, k, v, d_out, statistics, order, head):
    """The gradients of q, k and v, float32, of what `_forward` returns first."""
    length = q.shape[2]

    def attend_round(carry, this):
        dq, dk, dv = carry
        q_sorted = _split(_take(q, this.order), chunks)
        k_sorted = None if k is None else _split(_take(k, this.order), chunks)
        values = _look_around(_split(_take(v, this.order), chunks), chunks)
        keys, keys_vjp = jax.vjp(functools.partial(_keys, chunks), q_sorted, k_sorted)
        d_here = _split(_take(d_out, this.order), chunks)
        mask = _visible(chunks, this.index, this.order, order, segments, length)
        top, total, row = (_split(_take(x, this.order), chunks)[..., None] for x in statistics)
        # Where nothing was hidden from it, no score exceeds the maximum but by rounding.
        scores = jnp.minimum(_scores(q_sorted, keys) - top, 0.0)
        weights = jnp.where(mask, jnp.exp(scores) * (1 / total), 0.0)
        keep = _dropout(chunks, this.order, length, head, rng)
        f32 = dict(preferred_element_type=jnp.float32)
        d_values = jnp.einsum("bnclm,bnclv->bncvm", (weights * keep).astype(v.dtype), d_here, **f32)
        d_weights = jnp.einsum("bnclv,bncmv->bnclm", d_here, values, **f32) * keep
        d_scores = weights * (d_weights - row) / math.sqrt(q.shape[-1])
        d_scores = d_scores.astype(q.dtype)
        d_query = jnp.einsum("bnclm,bncmh->bnclh", d_scores, keys, **f32)
        d_keys = jnp.einsum("bnclm,bnclh->bncmh", d_scores, q_sorted, **f32)
        d_query_as_key, d_key = keys_vjp(d_keys.astype(q.dtype))
        dq = dq + _put_back(_merge(d_query + d_query_as_key), this, chunks)
        dk = None if dk is None else dk + _put_back(_merge(d_key), this, chunks)
        dv = dv + _put_back(_merge(_fold_back(d_values, chunks)), this, chunks)
        return dq, dk, dv

    nothing = [None if x is None else jnp.zeros(x.shape, jnp.float32) for x in (q, k, v)]
    return _scan_rounds(attend_round, tuple(nothing), order)


def visible_union(
    chunks: Chunks, order: Order | None, segments: Int[Array, "B T"] | None
) -> Bool[Array, "B N T T"]:
    """The mask of original positions for which `chunked_attention` is exact softmax attention.

    O(T^2) memory: this is what the tests hand to the oracle, not a way to compute.
    """
    length = chunks.length + chunks.padding
    place = jnp.arange(length)[None, None, None] if order is None else order.slot
    chunk = place // chunks.chunk_len
    distance = chunk[..., None, :] - chunk[..., :, None]
    near = (distance >= -chunks.n_chunks_before) & (distance <= chunks.n_chunks_after)
    if chunks.wrap:  # a key stands at several places
        around = jnp.arange(order.order.shape[-1]) // chunks.chunk_len - chunk[..., None]
        near = (around >= -chunks.n_chunks_before) & (around <= chunks.n_chunks_after)
        stands = jax.nn.one_hot(order.order, length, dtype=bool)
        near = jnp.any(near[..., None] & stands[:, :, :, None], axis=-2)
    if order is not None and order.first is not None:
        key = place[..., None, :]
        near = near & (key >= order.first[..., None]) & (key <= place[..., None])
    mask = near.any(axis=2)[:, :, : chunks.length, : chunks.length]
    query, key = jnp.ogrid[: chunks.length, : chunks.length]
    if chunks.causal:
        mask = mask & (key <= query)
    if chunks.window is not None:
        mask = mask & (jnp.abs(query - key) < chunks.window)
    if segments is not None:
        segments = segments[:, : chunks.length]
        same = segments[:, None, :, None] == segments[:, None, None, :]
        mask = mask & same & (segments != 0)[:, None, None, :]
    return mask
