"""Attention within clusters that overlap, by the kernels of block-sparse attention.

Queries and keys are sorted by cluster. A query that is in several clusters has a row in each; the
rows' maxima and sums merge them into one softmax (Milakov and Gimelshein 2018, "Online normalizer
calculation for softmax"). The backward pass uses the maximum and sum of the merged softmax in each
row.

Letters as in `reformax.ops.routing`; X examples with their heads, M members of all clusters.
"""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from reformax.derivatives import CustomDerivatives
from reformax.ops.hashing.sorted_groups import Sorted
from reformax.ops.kernels.triton import block_sparse
from reformax.ops.kernels.triton.common import LOG2_E, LOWEST
from reformax.ops.numerics.first_order import first_order
from reformax.ops.softmax.block_lists import InOrder
from reformax.ops.softmax.online import nonzero


def in_order(members: Int[Array, "B N C W"]) -> Sorted:
    """The members of all clusters by (cluster, position), [X, M]; a group is a cluster.

    members: positions; -1 is none, of group 0.
    """
    cluster = lax.broadcasted_iota(jnp.int32, members.shape, 2) + 1
    group, position = (
        x.reshape(members.shape[0] * members.shape[1], -1)
        for x in (jnp.where(members < 0, 0, cluster), jnp.maximum(members, 0))
    )
    group, position = lax.sort((group, position), num_keys=2)
    return Sorted(position, group)


@functools.partial(CustomDerivatives, n_static=2)
def attend(
    layout: InOrder,
    interpret: bool,
    q: Float[Array, "X T 1 H"],
    k: Float[Array, "X T 1 H"],
    v: Float[Array, "X T 1 V"],
    queries: Sorted,
    keys: Sorted,
    rng: Array | None,
) -> tuple[Float[Array, "X T 1 V"], Float[Array, "X T"]]:
    """The attended values, and the sum of each position's softmax, 0 where it sees nothing.

    The sum has no gradient.

    Args:
      layout: of the members' orders.
      interpret: whether to run the kernels anywhere, slowly.
      q, k, v: queries, keys and values.
      queries, keys: from `in_order`.
      rng: the source of dropout; None if there is none.
    """
    return _attend_forward(layout, interpret, q, k, v, queries, keys, rng)[0]


def _taken(x: Array, order: Sorted) -> Array:
    """The members' rows of `[X, T, ...]`."""
    index = order.position.reshape(*order.position.shape, *[1] * (x.ndim - 2))
    return jnp.take_along_axis(x, index, axis=1, mode="promise_in_bounds")


def _at(x: Array, order: Sorted):
    """The members' rows of `[X, T, ...]`, to be updated; behind the end for group 0."""
    index = jnp.where(order.group == 0, x.shape[1], order.position)
    return x.at[jnp.arange(len(x))[:, None], index]


def _summed(x: Array, order: Sorted, like: Array) -> Array:
    """The sum of each position's rows."""
    zeros = jnp.zeros((*like.shape[:2], *x.shape[2:]), jnp.float32)
    return _at(zeros, order).add(x.astype(jnp.float32), mode="drop").astype(like.dtype)


def _parts(q, k, v, queries: Sorted, keys: Sorted) -> tuple:
    """The arguments of `block_sparse` behind its layout."""
    groups = queries.group, keys.group, queries.position, keys.position
    return _taken(q, queries), _taken(k, keys), _taken(v, keys), groups


def _attend_forward(layout, interpret, q, k, v, queries, keys, rng):
    q, k, v = first_order((q, k, v))
    parts = *_parts(q, k, v, queries, keys), rng
    out, row_max, row_sum = block_sparse.forward(layout, *parts, interpret=interpret)
    row_max, row_sum = row_max[:, 0], row_sum[:, 0]
    most = _at(jnp.full(q.shape[:2], LOWEST, jnp.float32), queries).max(row_max, mode="drop")
    below = row_max - _taken(most, queries)
    row_sum = jnp.exp2(below * (LOG2_E / math.sqrt(q.shape[3]))) * row_sum
    sums = jnp.zeros(q.shape[:2], jnp.float32)
    sums = _at(sums, queries).add(row_sum, mode="drop")
    # The fraction of its position's softmax that a row has.
    fraction = (row_sum / nonzero(_taken(sums, queries)))[..., None, None]
    out = _summed(out.astype(jnp.float32) * fraction, queries, v)
    return (out, sums), ((q, k, v, queries, keys, rng), (out, most, sums))


def _attend_backward(layout, interpret, residuals, cotangents):
    (q, k, v, queries, keys, rng), results = residuals
    results, d_out = first_order((results, cotangents[0]))
    out, most, sums, d_out = (_taken(x, queries) for x in (*results, d_out))
    parts = *_parts(q, k, v, queries, keys), rng
    row = out, most[:, None], sums[:, None], d_out
    gradients = block_sparse.backward(layout, *parts, *row, interpret=interpret)
    orders = queries, keys, keys
    gradients = (_summed(*x) for x in zip(gradients, orders, (q, k, v), strict=True))
    return *gradients, None, None, None


attend.define(_attend_forward, _attend_backward)
