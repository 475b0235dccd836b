"""Attention to a band, by the kernels of `chunked`, and to global keys, in one softmax.

Array operations compute the columns of the global keys, which are few. The kernel of the band
returns each row's maximum and sum, which merge both parts (Milakov and Gimelshein 2018, "Online
normalizer calculation for softmax"). In the backward pass, both parts use the maximum and the sum
of the whole row.

Letters as in `ops.softmax.band`, and positions of global keys as in `ops.masking.bands`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from reformax.derivatives import CustomDerivatives
from reformax.ops.kernels.triton import chunked
from reformax.ops.masking.bands import ids_at, outside_band, rows_at
from reformax.ops.masking.visibility import Side, Visibility
from reformax.ops.numerics.first_order import first_order
from reformax.ops.numerics.precision import product
from reformax.ops.softmax.dropout import dropout_mask, far_address
from reformax.ops.softmax.joint import FarKeys
from reformax.ops.softmax.online import Softmax, lowest, nonzero
from reformax.ops.softmax.orders import UnsortedInputs


@functools.partial(CustomDerivatives, n_static=3)
def attend(
    band: Visibility,
    chunks: Any,
    interpret: bool,
    x: UnsortedInputs,
    global_positions: Int[Array, "B G"],
    segment_ids: Int[Array, "B T"] | None,
) -> Float[Array, "B T N V"]:
    """The attended values.

    Args:
      band: which neighbours a query sees.
      chunks: `Chunking` with the band as their window.
      x: the arrays, finite at padding: an order in which the band is contiguous, and the ids of
        positions that see each other in the band.
      global_positions: positions of the keys that all queries see; `NOWHERE` for none.
      segment_ids: of all positions.
    """
    return _attend_forward(band, chunks, interpret, x, global_positions, segment_ids)[0]


class _GlobalKeys(NamedTuple):
    """The global keys, and the logits of all queries with them."""

    keys: Float[Array, "B G N H"]
    values: Float[Array, "B G N V"]
    logits: Float[Array, "B N T G"]
    dropped: Array | float


def _global_keys(
    band: Visibility, chunks: Any, x: UnsortedInputs, global_positions, segment_ids
) -> _GlobalKeys:
    q = x.q
    query, key = jnp.arange(q.shape[1])[None, :, None], global_positions[:, None]
    q_side, k_side = Side(query), Side(key, exists=key < q.shape[1])
    if segment_ids is not None:
        q_side = q_side._replace(segment_id=segment_ids[..., None])
        k_side = k_side._replace(segment_id=ids_at(segment_ids, global_positions)[:, None])
    mask = outside_band(band, q_side, k_side)
    keys, values = (rows_at(y, global_positions) for y in (x.k, x.v))
    logits = chunks.logits.of("btnh,bgnh->bntg", q, keys)
    logits = jnp.where(mask[:, None], logits, -jnp.inf)
    return _GlobalKeys(keys, values, logits, _dropped(chunks, x, key[:, None]))


def _dropped(chunks: Any, x: UnsortedInputs, address: Int[Array, "#B 1 1 G"]) -> Array | float:
    """The factors of all queries' weights of keys with these addresses."""
    if chunks.dropout == 0.0:
        return 1.0
    batch, head, query = (jnp.arange(x.q.shape[i]) for i in (0, 2, 1))
    of_rows = batch.reshape(-1, 1, 1, 1), head.reshape(1, -1, 1, 1), query.reshape(1, 1, -1, 1)
    return dropout_mask(x.seed, chunks.dropout, *of_rows, address)


def _attend_forward(band, chunks, interpret, x, global_positions, segment_ids):
    x = UnsortedInputs(*first_order(x[:3]), *x[3:])
    in_band = chunked.forward(chunks, x, interpret=interpret)
    far = _global_keys(band, chunks, x, global_positions, segment_ids)
    results = _merged(in_band, far, x.v.dtype)
    return results[0], (x, global_positions, segment_ids, results)


def _merged(results, far: _GlobalKeys, dtype) -> tuple[Array, Array, Array]:
    """The output, the maximum and the sum of rows that see the band of `results` and far keys."""
    far_max = jnp.max(far.logits, axis=-1, initial=lowest(jnp.float32))
    weights = jnp.exp(far.logits - far_max[..., None])
    acc = product("bntg,bgnv->bntv", weights * far.dropped, far.values, dtype)
    of_far = Softmax(acc, far_max, weights.sum(axis=-1))
    return Softmax.of_results(results).merge(of_far).results(dtype)


def _attend_backward(band, chunks, interpret, residuals, d_out):
    x, global_positions, segment_ids, results = residuals
    results, d_out = first_order((results, d_out))
    dq, dk, dv = chunked.backward(chunks, x, results, d_out, interpret=interpret)
    far = _global_keys(band, chunks, x, global_positions, segment_ids)
    dq_far, *far_gradients = _far_gradients(chunks, x.q, far, results, d_out)
    row = jnp.arange(len(dq))[:, None]
    dk, dv = (
        x.astype(jnp.float32).at[row, global_positions].add(y, mode="drop").astype(x.dtype)
        for x, y in zip((dk, dv), far_gradients, strict=True)
    )
    return UnsortedInputs(dq + dq_far, dk, dv, None, None, None), None, None


attend.define(_attend_forward, _attend_backward)


def _far_gradients(chunks: Any, q, far: _GlobalKeys, results, d_out) -> tuple[Array, Array, Array]:
    """The gradients of queries, in their dtype, and of far keys and values."""
    (out, row_max, row_sum), dtype = results, far.values.dtype
    weights = jnp.exp(far.logits - row_max[..., None]) / nonzero(row_sum)[..., None]
    dot = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    ds = product("btnv,bgnv->bntg", d_out, far.values, dtype) * far.dropped
    ds = weights * (ds - jnp.swapaxes(dot, 1, 2)[..., None])
    ds = chunks.logits.scaled(chunks.logits.before_cap(ds, far.logits), q.shape[3])
    return (
        product("bntg,bgnh->btnh", ds, far.keys, q.dtype).astype(q.dtype),
        product("bntg,btnh->bgnh", ds, q, q.dtype),
        product("bntg,btnv->bgnv", weights * far.dropped, d_out, dtype),
    )


@functools.partial(CustomDerivatives, n_static=2)
def attend_and_far(
    chunks: Any, interpret: bool, x: UnsortedInputs, far: FarKeys
) -> Float[Array, "B T N V"]:
    """`ops.softmax.band.attend_and_far`; the arrays have no order."""
    return _and_far_forward(chunks, interpret, x, far)[0]


def _with_logits(chunks: Any, x: UnsortedInputs, far: FarKeys) -> _GlobalKeys:
    logits = chunks.logits.of("btnh,bgnh->bntg", x.q, far.keys)
    logits = jnp.where(far.exists[:, None, None], logits, -jnp.inf)
    number = jnp.arange(far.keys.shape[1])
    dropped = _dropped(chunks, x, far_address(number)[None, None, None])
    return _GlobalKeys(far.keys, far.values, logits, dropped)


def _and_far_forward(chunks, interpret, x, far):
    qkv, far = first_order((x[:3], far))
    x = UnsortedInputs(*qkv, *x[3:])
    in_band = chunked.forward(chunks, x, interpret=interpret)
    results = _merged(in_band, _with_logits(chunks, x, far), x.v.dtype)
    return results[0], (x, far, results)


def _and_far_backward(chunks, interpret, residuals, d_out):
    x, far, results = residuals
    results, d_out = first_order((results, d_out))
    dq, dk, dv = chunked.backward(chunks, x, results, d_out, interpret=interpret)
    found = _far_gradients(chunks, x.q, _with_logits(chunks, x, far), results, d_out)
    like = far.keys, far.values
    of_far = (g.astype(x.dtype) for g, x in zip(found[1:], like, strict=True))
    return UnsortedInputs(dq + found[0], dk, dv, None, None, None), FarKeys(*of_far, None)


attend_and_far.define(_and_far_forward, _and_far_backward)
