"""Attention within overlapping clusters, by the kernels of block-sparse attention.

Queries and keys are sorted by cluster. A query in several clusters has a row in each. The rows'
maxima and sums merge them into one softmax (Milakov and Gimelshein 2018, "Online normalizer
calculation for softmax"). In the backward pass, each row uses the maximum and the sum of the merged
softmax.

Letters as in `reformax.ops.routing`; X examples with their heads, M members of all clusters.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from reformax.derivatives import CustomDerivatives
from reformax.ops.hashing.sorted_groups import SortedSequence
from reformax.ops.kernels.triton import block_sparse
from reformax.ops.numerics.first_order import first_order
from reformax.ops.softmax.block_lists import BlockInputs, SortedLayout
from reformax.ops.softmax.online import Softmax


def in_order(members: Int[Array, "B N C W"]) -> SortedSequence:
    """Sorts the members of all clusters by (cluster, position), [X, M]; a group is a cluster.

    Args:
      members: positions, -1 for none, whose group is 0.
    """
    cluster = lax.broadcasted_iota(jnp.int32, members.shape, 2) + 1
    group, position = (
        x.reshape(members.shape[0] * members.shape[1], -1)
        for x in (jnp.where(members < 0, 0, cluster), jnp.maximum(members, 0))
    )
    group, position = lax.sort((group, position), num_keys=2)
    return SortedSequence(position, group)


@functools.partial(CustomDerivatives, n_static=2)
def attend(
    layout: SortedLayout,
    interpret: bool,
    q: Float[Array, "X T 1 H"],
    k: Float[Array, "X T 1 H"],
    v: Float[Array, "X T 1 V"],
    queries: SortedSequence,
    keys: SortedSequence,
    seed: Int[Array, 6] | None,
) -> tuple[Float[Array, "X T 1 V"], Float[Array, "X T"]]:
    """The attended values, and the sum of each position's softmax, 0 where it sees no key.

    The sum has no gradient.

    Args:
      queries, keys: from `in_order`.
    """
    return _attend_forward(layout, interpret, q, k, v, queries, keys, seed)[0]


def _taken(x: Array, order: SortedSequence) -> Array:
    """The members' rows of `[X, T, ...]`."""
    index = order.position.reshape(*order.position.shape, *[1] * (x.ndim - 2))
    return jnp.take_along_axis(x, index, axis=1, mode="promise_in_bounds")


def _summed(x: Array, order: SortedSequence, like: Array) -> Array:
    """The sum of each position's rows, in the dtype of `like`; group 0 is no position's."""
    sums = jnp.zeros((*like.shape[:2], *x.shape[2:]), jnp.float32)
    index = jnp.where(order.group == 0, like.shape[1], order.position)
    sums = sums.at[jnp.arange(len(x))[:, None], index].add(x.astype(jnp.float32), mode="drop")
    return sums.astype(like.dtype)


def _inputs(q, k, v, queries: SortedSequence, keys: SortedSequence, seed) -> BlockInputs:
    """The arrays of a call of `block_sparse`."""
    members = _taken(q, queries), _taken(k, keys), _taken(v, keys)
    return BlockInputs(*members, queries.group, keys.group, seed, queries.position, keys.position)


def _attend_forward(layout, interpret, q, k, v, queries, keys, seed):
    q, k, v = first_order((q, k, v))
    x = _inputs(q, k, v, queries, keys, seed)
    out, row_max, row_sum = block_sparse.forward(layout, x, interpret=interpret)
    parts = Softmax.of_output(out[:, :, 0], row_max[:, 0], row_sum[:, 0])
    row = jnp.where(queries.group == 0, q.shape[1], queries.position)
    merged_at = functools.partial(Softmax.merged_at, n_rows=q.shape[1])
    whole = jax.vmap(merged_at)(parts, row)
    out = whole.output()[:, :, None].astype(v.dtype)
    return (out, whole.row_sum), ((q, k, v, queries, keys, seed), (out, *whole[1:]))


def _attend_backward(layout, interpret, residuals, cotangents):
    (q, k, v, queries, keys, seed), results = residuals
    results, d_out = first_order((results, cotangents[0]))
    out, total_max, sums, d_out = (_taken(x, queries) for x in (*results, d_out))
    x, results = _inputs(q, k, v, queries, keys, seed), (out, total_max[:, None], sums[:, None])
    gradients = block_sparse.backward(layout, x, results, d_out, interpret=interpret)
    orders = queries, keys, keys
    gradients = (_summed(*x) for x in zip(gradients, orders, (q, k, v), strict=True))
    return *gradients, None, None, None


attend.define(_attend_forward, _attend_backward)
