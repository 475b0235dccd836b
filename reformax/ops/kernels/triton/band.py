"""Attention to a band by the kernels of `chunked`, and to a few keys besides, in one softmax.

The few keys are few columns of the matrix of logits, for which array operations do. The band leaves
each row's maximum and sum, with which both parts are merged (Milakov and Gimelshein 2018, "Online
normalizer calculation for softmax"). The backward pass gives those of the whole row to each part.

Letters as in `ops.softmax.band`, and the few keys' positions as in `ops.masking.bands`.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from reformax.derivatives import CustomDerivatives
from reformax.ops.kernels.triton import chunked
from reformax.ops.kernels.triton.common import LOG2_E, LOWEST
from reformax.ops.masking.bands import Band, ids_at, rows_at
from reformax.ops.numerics.first_order import first_order
from reformax.ops.numerics.precision import product
from reformax.ops.softmax.dropout import dropout_mask, seed_words
from reformax.ops.softmax.online import nonzero


class Near(NamedTuple):
    """The band as chunks, in an order in which it is contiguous.

    Attributes:
      order: as in `ops.softmax.chunked.chunked_attention`; None where the sequence is in order.
      segment_ids: ids that see each other there, padded to whole chunks with 0; None is one.
    """

    order: Any
    segment_ids: Int[Array, "B Tp"] | None


@functools.partial(CustomDerivatives, n_static=3)
def attend(
    of: Band,
    chunks: Any,
    interpret: bool,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T N H"],
    v: Float[Array, "B T N V"],
    few: Int[Array, "B G"],
    near: Near,
    segment_ids: Int[Array, "B T"] | None,
    rng: Array | None,
) -> Float[Array, "B T N V"]:
    """The attended values.

    Args:
      of: the band.
      chunks: `Chunks` with the band as their window.
      interpret: whether to run the kernels anywhere, slowly.
      q, k, v: queries, keys and values, zeros at padding.
      few: the positions of the keys that all queries see; `NOWHERE` for none.
      near: where the band is contiguous.
      segment_ids: ids of positions; None is one.
      rng: the source of dropout.
    """
    return _attend_forward(of, chunks, interpret, q, k, v, few, near, segment_ids, rng)[0]


class _Few(NamedTuple):
    """The few keys, as the queries see them. Logits are products, before they are scaled."""

    keys: Float[Array, "B G N H"]
    values: Float[Array, "B G N V"]
    logits: Float[Array, "B N T G"]
    dropped: Array | float


def _few(of: Band, dropout: float, q, k, v, few, segment_ids, rng) -> _Few:
    length, place = q.shape[1], jnp.arange(q.shape[1])[None, :, None]
    at = few[:, None]
    mask = at < length
    mask = mask & ~of.shows(place, at)
    if of.causal:
        mask = mask & (at <= place)
    if segment_ids is not None:
        of_few = ids_at(segment_ids, few)[:, None]
        mask = mask & (segment_ids[..., None] == of_few) & (of_few != 0)
    keys, values = (rows_at(x, few) for x in (k, v))
    logits = product("btnh,bgnh->bntg", q, keys, q.dtype)
    logits = jnp.where(mask[:, None], logits, -jnp.inf)
    dropped = 1.0
    if dropout > 0.0:
        example, head = jnp.arange(len(q)).reshape(-1, 1, 1, 1), jnp.arange(q.shape[2])
        of_weights = example, head.reshape(1, -1, 1, 1), place[:, None], at[:, None]
        dropped = dropout_mask(seed_words(rng, len(q)), dropout, *of_weights)
    return _Few(keys, values, logits, dropped)


def _scale(q) -> float:
    return LOG2_E / math.sqrt(q.shape[3])


def _columns(x: Float[Array, "B N T"]) -> Float[Array, "B T N 1"]:
    return jnp.swapaxes(x, 1, 2)[..., None]


def _attend_forward(of, chunks, interpret, q, k, v, few, near, segment_ids, rng):
    q, k, v = first_order((q, k, v))
    in_band, row_max, row_sum = chunked.forward(chunks, q, k, v, *near, rng, interpret=interpret)
    found = _few(of, chunks.dropout, q, k, v, few, segment_ids, rng)
    most = jnp.maximum(row_max, jnp.max(found.logits, axis=-1, initial=LOWEST))
    weights = jnp.exp2((found.logits - most[..., None]) * _scale(q))
    inverse_sum = jnp.exp2((row_max - most) * _scale(q)) * row_sum
    row_sum = inverse_sum + weights.sum(axis=-1)
    far = product("bntg,bgnv->btnv", weights * found.dropped, found.values, v.dtype)
    out = in_band.astype(jnp.float32) * _columns(inverse_sum) + far
    out = (out / nonzero(_columns(row_sum))).astype(v.dtype)
    return out, ((q, k, v, few, near, segment_ids, rng), (out, most, row_sum))


def _attend_backward(of, chunks, interpret, residuals, d_out):
    inputs, results = residuals
    (out, row_max, row_sum), d_out = first_order((results, d_out))
    q, k, v, few, near, segment_ids, rng = inputs
    in_band = q, k, v, *near, rng
    dq, dk, dv = chunked.backward(
        chunks, *in_band, out, row_max, row_sum, d_out, interpret=interpret
    )
    found = _few(of, chunks.dropout, q, k, v, few, segment_ids, rng)
    weights = (
        jnp.exp2((found.logits - row_max[..., None]) * _scale(q)) / nonzero(row_sum)[..., None]
    )
    dot = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    ds = product("btnv,bgnv->bntg", d_out, found.values, v.dtype) * found.dropped
    ds = weights * (ds - jnp.swapaxes(dot, 1, 2)[..., None]) / math.sqrt(q.shape[3])
    dq = dq + product("bntg,bgnh->btnh", ds, found.keys, q.dtype).astype(q.dtype)
    of_few = (
        product("bntg,btnh->bgnh", ds, q, q.dtype),
        product("bntg,btnv->bgnv", weights * found.dropped, d_out, v.dtype),
    )
    row = jnp.arange(len(q))[:, None]
    dk, dv = (
        x.astype(jnp.float32).at[row, few].add(y, mode="drop").astype(x.dtype)
        for x, y in zip((dk, dv), of_few, strict=True)
    )
    return dq, dk, dv, None, None, None, None


attend.define(_attend_forward, _attend_backward)
