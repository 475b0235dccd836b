"""Fading attention: a sum of `k v^T` that a gate lets fade, read by each query.

Linear attention (Katharopoulos et al. 2020) with a decay that depends on the input (Yang et al.
2024, "Gated Linear Attention", here one gate a head): `S_t = a_t S_{t-1} + k_t v_t^T`, and
`o_t = q_t S_t`. Of all positions at once, in O(T^2); a step of decoding takes O(H V).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from reformax.ops.base import AttentionOp, Dims, Projection, options
from reformax.ops.numerics.precision import accum_dtype


def _log_decay(params, gate: Float[Array, "B T N 1"]) -> Float[Array, "B T N"]:
    """The logarithm of what is left, after a position, of all before it."""
    dtype = accum_dtype(gate.dtype)
    return -jax.nn.softplus(gate[..., 0].astype(dtype) + params["rate"].astype(dtype)[None, None])


@options
class fading(AttentionOp):
    """Causal attention to a fading sum of all positions so far.

    Weights: `rate [N]`. Further projections of the input: `gate`, a number for each head.
    """

    causality = "only"
    dropout = False

    def _init(self, rng, dims: Dims) -> dict[str, Array]:
        return {"rate": jax.random.normal(rng, (dims.n_heads,))}

    def extra_projections(self, dims: Dims) -> dict[str, Projection]:
        return {"gate": Projection(dims.n_heads, 1)}

    def _apply(self, call, params, q, k, v, plan):
        ids = jnp.ones(q.shape[:2], jnp.int32) if call.segment_ids is None else call.segment_ids
        same = (ids[:, :, None] == ids[:, None]) & (ids != 0)[:, None]
        decay = jnp.swapaxes(_log_decay(params, call.extra_projections["gate"]), 1, 2)
        # Up to position s, what fades of a query's own segment; [B, N, T, S].
        sums = jnp.cumsum(jnp.where(same[:, None], decay[:, :, None], 0), axis=-1)
        total = jnp.diagonal(sums, axis1=2, axis2=3)[..., None]
        seen = (same & jnp.tril(jnp.ones(same.shape[1:], bool))[None])[:, None]
        left = jnp.where(seen, jnp.exp(jnp.where(seen, total - sums, 0)), 0)
        products = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=left.dtype)
        return jnp.einsum("bnts,bsnv->btnv", left * products, v.astype(left.dtype)).astype(v.dtype)

    def _init_cache(self, call, params, q, k, v, plan):
        real = (jnp.arange(q.shape[1])[None] < call.lengths[:, None])[..., None]
        k, v, gate = (
            jnp.where(real[..., None], x, 0) for x in (k, v, call.extra_projections["gate"])
        )
        decay = jnp.where(real, _log_decay(params, gate), 0)
        left = jnp.exp(decay.sum(axis=1, keepdims=True) - jnp.cumsum(decay, axis=1))
        return jnp.einsum("btn,btnh,btnv->bnhv", left, *(x.astype(left.dtype) for x in (k, v)))

    def _step(self, call, params, q, k, v, cache):
        left = jnp.exp(_log_decay(params, call.extra_projections["gate"]))[:, 0, :, None, None]
        query, key, value = (x[:, 0].astype(left.dtype) for x in (q, k, v))
        cache = left * cache + key[..., :, None] * value[..., None, :]
        return jnp.einsum("bnh,bnhv->bnv", query, cache)[:, None].astype(v.dtype), cache
