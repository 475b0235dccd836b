"""Means of values weighted by products of queries and keys: a quotient of linear recurrences.

    out_t = sum_s a_(s,t) (q_t . k_s) v_s / sum_s a_(s,t) (q_t . k_s),

over the positions s up to t of its segment, where a_(s,t) is the decay from s to t (Katharopoulos
et al. 2020, eq. 18-20; Choromanski et al. 2020, sec. 2.2). The denominator is the recurrence of a
column of ones. Array operations add that column to the values. Kernels sum the keys instead.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from reformax.derivatives import CustomDerivatives, tangent_of
from reformax.ops.calls.dispatch import KERNELS, check_impl, compute_by
from reformax.ops.calls.obstacles import NARROW_HEAD, KernelObstacles, kernel_obstacles
from reformax.ops.masking.contiguous import order_of_segments
from reformax.ops.numerics.first_order import first_order
from reformax.ops.numerics.precision import accum_dtype, product
from reformax.ops.recurrence.chunks import RecurrenceInputs
from reformax.ops.recurrence.recurrence import recurrence
from reformax.ops.softmax.online import LEAST_SUM, nonzero

# The name of the forward pass's results that the gradient reads, for policies of `jax.checkpoint`.
KEPT = "mean"

# The most features of keys; a GPU's program reads some at a time.
MAX_FEATURES = 1024


def mean(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T N H"],
    v: Float[Array, "B T N V"],
    log_decay: Float[Array, "B T N 1"] | None = None,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    chunk_len: int = 64,
    impl: str = "auto",
) -> Float[Array, "B T N V"]:
    """The means, in the dtype of `v`; zeros where the sum of weights is below 1e-18.

    Arguments and errors are as in `recurrence`. Products of queries and keys must be at least 0.
    Those of float16 are float32.
    """
    check_impl(impl, *KERNELS)
    x = RecurrenceInputs(*map(_wide_enough, (q, k, v)), log_decay, None)

    def in_arrays() -> Float[Array, "B T N V"]:
        options = dict(segment_ids=segment_ids, chunk_len=chunk_len, impl="xla")
        return quotient(recurrence(x.q, x.k, with_ones(x.v), log_decay, **options))

    def in_kernels(interpret: bool) -> Float[Array, "B T N V"]:
        return _mean(interpret, x, segment_ids)

    found = compute_by(impl, in_arrays, pallas=(_obstacles(x), in_kernels))
    return found.astype(v.dtype)


def _wide_enough(x: Array) -> Array:
    """Float16 as float32, for it may hold neither sums nor gradients divided by them."""
    return x.astype(jnp.float32) if x.dtype == jnp.float16 else x


def _obstacles(x: RecurrenceInputs) -> KernelObstacles:
    """Queries and keys may be wider than a tile: the kernel sums over blocks of features."""
    size = x.k.shape[-1]
    narrow = (a[..., :1] for a in (x.q, x.k))
    found = kernel_obstacles(*narrow, x.v, most=NARROW_HEAD)
    if size > MAX_FEATURES:
        above = f"{size} features, which is above {MAX_FEATURES}"
        found = found._replace(chip=found.chip or above)
    return found


def with_ones(v: Float[Array, "*d V"]) -> Float[Array, "*d V1"]:
    """Values with a column of ones, whose sums are those of the weights; float32 for float16."""
    v = _wide_enough(v)
    return jnp.concatenate([v, jnp.ones((*v.shape[:-1], 1), v.dtype)], axis=-1)


def quotient(sums: Float[Array, "*d V1"]) -> Float[Array, "*d V"]:
    """The means, given the sums of `with_ones`; zeros where weights sum to below `LEAST_SUM`."""
    weights = sums[..., -1:]
    weights = jnp.where(weights < LEAST_SUM, 0, weights)
    return jnp.where(weights == 0, 0, sums[..., :-1] / nonzero(weights))


@functools.partial(CustomDerivatives, n_static=1)
def _mean(interpret: bool, inputs: RecurrenceInputs, segment_ids) -> Float[Array, "B T N V"]:
    return _forward(interpret, inputs, segment_ids)[0]


def _forward(interpret: bool, inputs: RecurrenceInputs, segment_ids):
    from reformax.ops.kernels.triton import recurrence as kernel

    order, ids = order_of_segments(segment_ids)
    results = kernel.means(first_order(inputs), ids, order, interpret=interpret)
    (out, total), residuals = jax.tree.map(lambda x: checkpoint_name(x, KEPT), results)
    return out, (inputs, segment_ids, out, total, residuals)


def _backward(interpret: bool, results, d_out):
    """The gradient d of a mean is `d / total` for its sum and `-d . mean / total` for its total."""
    from reformax.ops.kernels.triton import recurrence as kernel

    results, d_out = first_order((results, d_out))
    # Without the barrier the compiler would keep intermediate arrays of the forward pass.
    inputs, segment_ids, out, total, residuals = lax.optimization_barrier(results)
    order, ids = order_of_segments(segment_ids)
    inverse_sum = jnp.where(total > 0, 1 / nonzero(total), 0)[..., None]
    dtype = accum_dtype(out.dtype)
    d_sums = (d_out.astype(dtype) * inverse_sum).astype(out.dtype)
    d_total = -jnp.sum(d_sums.astype(dtype) * out.astype(dtype), axis=-1)
    given = inputs, ids, residuals, d_sums, d_total, order
    gradients = kernel.means_backward(*given, interpret=interpret)
    return jax.tree.map(lambda g, x: g.astype(x.dtype), gradients, inputs), None


_mean.define(_forward, _backward)


# Over all positions, earlier and later ones: products of matrices.


def mean_of_all(
    q: Float[Array, "B T N H"], k: Float[Array, "B S N H"], v: Float[Array, "B S N V"]
) -> Float[Array, "B T N V"]:
    """`sum_s (q_t . k_s) v_s / sum_s q_t . k_s`, otherwise as `mean`.

    Sums of values are rounded to the dtype of products before they are divided. The gradient reads
    the inputs, the output and sums.
    """
    return _mean_of_all(*map(_wide_enough, (q, k, v))).astype(v.dtype)


@CustomDerivatives
def _mean_of_all(q, k, v) -> Float[Array, "B T N V"]:
    return _means_and_sums(q, k, v)[0]


def _means_and_sums(q, k, v):
    dtype, wide = _dtypes(q, k, v)
    state = product("bsnh,bsnv->bnhv", k, v, dtype)
    keys = jnp.sum(k, axis=1, dtype=wide)
    total = jnp.sum(q.astype(wide) * keys[:, None], axis=-1, keepdims=True)
    total = jnp.where(total < LEAST_SUM, 0, total)
    sums = product("btnh,bnhv->btnv", q, state, dtype, written=dtype)
    out = jnp.where(total == 0, 0, sums.astype(wide) / nonzero(total))
    return out.astype(v.dtype), (state, keys, total)


def _forward_of_all(q, k, v):
    out, sums = _means_and_sums(*first_order((q, k, v)))
    return out, (q, k, v, out, sums)


def _backward_of_all(results, d_out):
    """`_backward` with products of whole matrices."""
    results, d_out = first_order((results, d_out))
    # Without the barrier the compiler would keep intermediate arrays of the forward pass.
    q, k, v, out, (state, keys, total) = lax.optimization_barrier(results)
    dtype, wide = _dtypes(q, k, v)
    inverse_sum = jnp.where(total > 0, 1 / nonzero(total), 0)
    d_sums = (d_out.astype(wide) * inverse_sum).astype(dtype)
    d_total = -jnp.sum(d_sums.astype(wide) * out.astype(wide), axis=-1, keepdims=True)
    d_state = product("btnh,btnv->bnhv", q, d_sums, dtype)
    d_keys = jnp.sum(q.astype(wide) * d_total, axis=1)
    dq = product("btnv,bnhv->btnh", d_sums, state, dtype, written=dtype) + d_total * keys[:, None]
    dk = product("bsnv,bnhv->bsnh", v, d_state, dtype, written=dtype) + d_keys[:, None]
    dv = product("bsnh,bnhv->bsnv", k, d_state, dtype, written=dtype)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


def _dtypes(*arrays):
    """The dtype of products and of sums in memory, and that of sums."""
    dtype = jnp.result_type(*arrays)
    return dtype, accum_dtype(dtype)


_mean_of_all.define(
    _forward_of_all,
    _backward_of_all,
    lambda results, tangents: tangent_of(_mean_of_all.function, results[:3], tangents),
)
