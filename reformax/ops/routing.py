"""Routing attention: queries see the keys of the same k-means cluster (Roy et al. 2021).

"Efficient Content-Based Sparse Attention with Routing Transformers", sec. 4.1 and algorithm 1.
Queries and keys are compared as vectors on the unit sphere. Each centroid takes the same number of
queries and of keys, those nearest to it: its cluster. The queries of a cluster see its keys.
Training moves the centroids by online k-means, each towards the mean of the vectors whose nearest
centroid it is. They are buffers: no optimizer changes them, and neither does evaluation. With T / C
tokens a centroid, and sqrt(T) centroids, time is O(T^1.5).

Letters besides those of `reformax.ops.base`: C centroids, W members of a centroid's cluster.
"""

from __future__ import annotations

import functools
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from reformax.buffers import Buffer, updated
from reformax.declared import Bounds, Size, Width
from reformax.ops.base import AttentionOp, options
from reformax.ops.calls.call import Call
from reformax.ops.calls.dims import Dims
from reformax.ops.calls.dispatch import KERNELS, compute_by
from reformax.ops.calls.obstacles import kernel_obstacles
from reformax.ops.decoding.cache import (
    KeyValues,
    add_to_ring,
    attend_to,
    fill_ring,
    replace_in_memory,
)
from reformax.ops.masking.masks import ids_or_ones
from reformax.ops.masking.visibility import CAUSAL, Side, Visibility, is_token
from reformax.ops.numerics.best import with_nan_highest
from reformax.ops.numerics.precision import accum_dtype
from reformax.ops.numerics.query_chunks import cut_chunks
from reformax.ops.softmax.block_lists import SortedLayout
from reformax.ops.softmax.dropout import dropped_self_values
from reformax.ops.softmax.gathered import gather_rows, gathered_softmax
from reformax.ops.softmax.online import Softmax, nonzero

Decay = Annotated[float, Bounds(0, 1)]
# The number of centroids whose products with all positions are in memory at a time.
CENTROIDS_AT_A_TIME = 16
# The number of positions whose products with all centroids are in memory at a time.
POSITIONS_AT_A_TIME = 1024


class Clusters(NamedTuple):
    """Positions of each cluster's queries and keys, the nearest first; -1 is no position."""

    queries: Int[Array, "B N C W"]
    keys: Int[Array, "B N C W"]


@options
class routing(AttentionOp):
    """Attention within the clusters of an online k-means.

    It is exact attention over the clusters that a query is in, which may be none or several. A key
    counts once for each cluster in common with the query. With one cluster it is dense attention,
    or `shared_qk.shared_qk()`. Logits are products of queries and keys, which the paper first
    scales to unit length. The paper moves a centroid by the sum of its vectors; this op moves it by
    their mean, so that the batch size does not matter.

    In a causal call later tokens decide what is in a cluster. A step of decoding computes the last
    row of attention over the tokens so far. Rows have one segment, because clusters cover the row.

    Buffers, which are not trained: `centroids [N, C, H]`, of unit length.

    Args:
      n_clusters: centroids of a head; the paper takes about the square root of the length.
      cluster_size: queries, and keys, of a cluster; None divides a row's tokens by `n_clusters`.
      decay: the weight of the old centroid in a training step, the paper's lambda.
      shared_qk: whether keys are the length-normalised queries, as in the paper's causal attention.
      attend_self_if_alone: whether a position that sees nothing else attends to itself. False makes
        its output zeros.
      impl: implementation of the attention; array operations choose the clusters. `"xla"` runs
        everywhere, cluster by cluster. `"pallas"` is the kernel of block-sparse attention, for
        NVIDIA GPUs of Ampere or later and heads of 256 or less. `"auto"` takes the kernel where it
        computes the same function.

    Raises:
      ValueError: a number below 1, a decay that is not from 0 to 1, or an unknown `impl`.
      NotImplementedError: at the call, when `"pallas"` is asked for what it cannot do.
    """

    n_clusters: Width = 16
    cluster_size: Size | None = None
    decay: Decay = 0.999
    shared_qk: bool = False
    attend_self_if_alone: bool = True
    impl: str = "auto"

    packed = False
    chooses_keys = True
    _impls = KERNELS
    _replace_value = staticmethod(replace_in_memory)

    def _width(self, length: int) -> int:
        """The most members that a cluster can have in a row of `length`."""
        return min(self.cluster_size or -(-length // self.n_clusters), length)

    def _n_members(self, n_tokens: Int[Array, " B"]) -> Int[Array, " B"]:
        """How many members a cluster takes among `n_tokens`."""
        return -(-n_tokens // self.n_clusters) if self.cluster_size is None else self.cluster_size

    def _init(self, rng, dims: Dims) -> dict[str, Buffer]:
        shape = dims.n_heads, self.n_clusters, dims.d_qk
        return {"centroids": Buffer(_unit(jax.random.normal(rng, shape)))}

    def _plan(self, call, params, q, k) -> Clusters:
        """The members of each cluster."""
        ids, centroids = ids_or_ones(call.segment_ids, q), params["centroids"].value
        token_mask = is_token(ids)
        width, n_members = self._width(q.shape[1]), self._n_members(token_mask.sum(axis=1))
        n_members = jnp.broadcast_to(n_members, q.shape[:1])

        def members(x: Float[Array, "B T N H"]) -> Int[Array, "B N C W"]:
            x = _unit(x)

            def of_centroid(centroid: Float[Array, "N H"]) -> Int[Array, "B N W"]:
                products = jnp.einsum("btnh,nh->bnt", x, centroid, precision=lax.Precision.HIGHEST)
                products = with_nan_highest(products)
                _, position = lax.top_k(jnp.where(token_mask[:, None], products, -jnp.inf), width)
                is_token = jnp.take_along_axis(token_mask[:, None], position, axis=2)
                taken = jnp.arange(width)[None, None] < n_members[:, None, None]
                return jnp.where(taken & is_token, position, -1)

            of_each = jnp.moveaxis(lax.stop_gradient(centroids), 1, 0)
            return jnp.moveaxis(lax.map(of_centroid, of_each, batch_size=CENTROIDS_AT_A_TIME), 0, 2)

        queries = members(q)
        return Clusters(queries, queries if self.shared_qk else members(k))

    def _moved(self, centroids, vectors, token_mask) -> Float[Array, "N C H"]:
        """The centroids after a step of online k-means over some arrays of unit vectors."""
        n_clusters = centroids.shape[1]

        def add(sums, chunk):
            x, token_mask = chunk  # [B, t, N, H], [B, t]
            products = jnp.einsum("btnh,nch->btnc", x, centroids, precision=lax.Precision.HIGHEST)
            nearest = jax.nn.one_hot(jnp.argmax(products, axis=-1), n_clusters, dtype=x.dtype)
            nearest = nearest * token_mask[..., None, None]
            total = jnp.einsum("btnc,btnh->nch", nearest, x, precision=lax.Precision.HIGHEST)
            return (sums[0] + total, sums[1] + nearest.sum(axis=(0, 1))), None

        def chunks(x):  # `token_mask` is 0 at the padding of the last chunk
            return cut_chunks(x, min(POSITIONS_AT_A_TIME, x.shape[1]))

        token_mask = token_mask.astype(centroids.dtype)
        sums = jnp.zeros_like(centroids), jnp.zeros_like(centroids[..., 0])
        for x in vectors:
            sums, _ = lax.scan(
                add, sums, (chunks(_unit(x).astype(centroids.dtype)), chunks(token_mask))
            )
        total, count = (sums[0], sums[1][..., None])
        mean = total / nonzero(count)
        moved = _unit(self.decay * centroids + (1 - self.decay) * mean)
        return jnp.where(count > 0, moved, centroids)

    def _apply(self, call, params, q, k, v, plan):
        centroids, dtype = params["centroids"], accum_dtype(q.dtype, v.dtype)
        vectors = (q,) if self.shared_qk else (q, k)
        token_mask = is_token(ids_or_ones(call.segment_ids, q))
        moved = self._moved(lax.stop_gradient(centroids.value), vectors, token_mask)
        new_centroids = updated(centroids, moved)

        q, keys, values = (jnp.swapaxes(x, 1, 2) for x in (q, self.keys_of(q, k), v))
        arrays = q, keys, values, plan
        in_arrays = functools.partial(self._in_arrays, call, *arrays)
        in_kernels = functools.partial(self._in_kernels, call, *arrays)
        obstacles = kernel_obstacles(q, keys, v, call.logits)
        out, row_sum = compute_by(self.impl, in_arrays, pallas=(obstacles, in_kernels))
        if self.attend_self_if_alone:
            alone = dropped_self_values(v.astype(dtype), call.dropout, call.seed)
            alone = jnp.swapaxes(alone, 1, 2)
            out = jnp.where((row_sum == 0)[..., None], alone, out)
        out = jnp.swapaxes(out, 1, 2).astype(v.dtype)
        # Its gradient carries the change of the buffer.
        return out + (0 * new_centroids.sum()).astype(v.dtype)

    def _in_arrays(
        self, call: Call, q, k, v, plan: Clusters
    ) -> tuple[Float[Array, "B N T V"], Float[Array, "B N T"]]:
        """Attention in array operations, cluster by cluster, and each row's sum of weights."""
        dtype = accum_dtype(q.dtype, v.dtype)

        def of(position: Int[Array, "B N C W"], x: Array) -> Array:  # [B, N, T, ...] by cluster
            return jnp.moveaxis(gather_rows(x, jnp.maximum(position, 0)), 2, 0)

        attend = jax.checkpoint(functools.partial(self._cluster, call))
        parts = lax.map(
            lambda cluster: attend(*cluster),
            (
                jnp.moveaxis(plan.queries, 2, 0),
                jnp.moveaxis(plan.keys, 2, 0),
                of(plan.queries, q.astype(dtype)),
                *(of(plan.keys, x.astype(dtype)) for x in (k, v)),
            ),
        )
        parts = Softmax(*(jnp.moveaxis(x, 0, 2) for x in parts))  # [B, N, C, W, ...]
        row = jnp.where(plan.queries >= 0, plan.queries, q.shape[2])
        merged_at = functools.partial(Softmax.merged_at, n_rows=q.shape[2])
        whole = jax.vmap(jax.vmap(merged_at))(parts, row)
        return whole.output(), whole.row_sum

    def _in_kernels(
        self, call: Call, q, k, v, plan: Clusters, interpret: bool
    ) -> tuple[Float[Array, "B N T V"], Float[Array, "B N T"]]:
        """`_in_arrays`, computed by kernels."""
        from reformax.ops.kernels.triton import clusters as kernel

        queries, n_heads = kernel.in_order(plan.queries), q.shape[1]
        keys = queries if self.shared_qk else kernel.in_order(plan.keys)
        sizes = queries.position.shape[1], keys.position.shape[1]
        options = dict(exclude_self=self.shared_qk, n_folded=n_heads)
        layout = SortedLayout(*sizes, call.causal, call.dropout, call.logits, **options)
        folded = (x.reshape(-1, x.shape[2], 1, x.shape[3]) for x in (q, k, v))
        out, row_sum = kernel.attend(layout, interpret, *folded, queries, keys, call.seed)
        return out.reshape(*q.shape[:3], -1), row_sum.reshape(q.shape[:3])

    def _cluster(self, call: Call, query, key, q, k, v) -> Softmax:
        """The softmax of a cluster's queries over its keys.

        Args:
          query, key: the positions of queries and of keys, `[B, N, W]`; -1 is none.
          q, k, v: `[B, N, W, ...]`.
        """
        query, key = query[..., None], key[..., None, :]
        q_side, k_side = (Side(x, exists=x >= 0) for x in (query, key))
        mask = Visibility(call.causal, exclude_self=self.shared_qk).sees(q_side, k_side)
        return gathered_softmax(call, q, k, v, mask, (query, key))

    def _init_cache(self, call, params, q, k, v, plan) -> RoutingCache:
        n_free = ((0, 0),) * 3 + ((0, call.length - q.shape[1]),)
        queries = jnp.pad(_products(params, q), n_free)
        keys = queries if self.shared_qk else jnp.pad(_products(params, k), n_free)
        memory = fill_ring(self.keys_of(q, k), v, call.lengths, call.length)
        return RoutingCache(memory, queries, keys)

    def _step(self, call, params, q, k, v, cache: RoutingCache):
        row, position = jnp.arange(q.shape[0]), call.position
        queries = cache.queries.at[row, :, :, position].set(_products(params, q)[..., 0])
        keys = queries
        if not self.shared_qk:
            keys = cache.keys.at[row, :, :, position].set(_products(params, k)[..., 0])
        memory = add_to_ring(cache.memory, self.keys_of(q, k), v, position)
        capacity = memory.keys.shape[2]
        newest = position[:, None, None, None]
        so_far = Side(jnp.arange(capacity)[None, None, None])
        exists = CAUSAL.sees(Side(newest), so_far)
        n_members = self._n_members(position + 1)
        n_members = jnp.broadcast_to(n_members, position.shape)[:, None, None, None]
        # Among equal products earlier positions come first, so the newest is the last.
        of_query = jnp.take_along_axis(queries, newest, axis=3)
        is_member = ((queries >= of_query) & exists).sum(axis=3, keepdims=True) <= n_members
        width = self._width(capacity)
        _, seen = lax.top_k(jnp.where(exists, keys, -jnp.inf), width)
        mask = is_member & (jnp.arange(width)[None, None, None] < n_members) & (seen <= newest)
        if self.shared_qk:
            mask = mask & (seen != newest)
        index = seen.reshape(*seen.shape[:2], -1)
        alone = v if self.attend_self_if_alone else None
        out = attend_to(call, q, *memory.at(index), mask.reshape(index.shape), self.impl, alone)
        return out, RoutingCache(memory, queries, keys)


def _unit(x: Float[Array, "*d H"]) -> Float[Array, "*d H"]:
    """Vectors scaled to length 1; zeros stay zeros. Float32 or wider."""
    x = lax.stop_gradient(x).astype(accum_dtype(x.dtype))
    x = x / nonzero(jnp.max(jnp.abs(x), axis=-1, keepdims=True))  # squares do not overflow
    return x / nonzero(jnp.linalg.norm(x, axis=-1, keepdims=True))


# Decoding. T is the capacity.


class RoutingCache(NamedTuple):
    """Keys and values by position, and the products of queries and keys with the centroids."""

    memory: KeyValues
    queries: Float[Array, "B N C T"]
    keys: Float[Array, "B N C T"]


def _products(params, x: Float[Array, "B T N H"]) -> Float[Array, "B N C T"]:
    """The products of unit vectors with the centroids."""
    centroids = params["centroids"].value
    exact = dict(precision=lax.Precision.HIGHEST)
    return with_nan_highest(jnp.einsum("btnh,nch->bnct", _unit(x), centroids, **exact))
