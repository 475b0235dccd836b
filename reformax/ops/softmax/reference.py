"""The reference: softmax attention over an explicit mask, in O(T * S) time and memory."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from reformax.ops.numerics.finite import finite, is_finite
from reformax.ops.numerics.precision import accum_dtype
from reformax.ops.softmax.dropout import full_dropout_mask
from reformax.ops.softmax.online import largest, masked_exp, nonzero


def reference_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S N H"],
    v: Float[Array, "B S N V"],
    mask: Bool[Array, "#B #N T S"],
    *,
    bias: Float[Array, "#B #N #T #S"] | None = None,
    dropout: float = 0.0,
    rng: PRNGKeyArray | None = None,
) -> Float[Array, "B T N V"]:
    """`softmax(q k^T / sqrt(H) + bias) v` over the keys that a mask shows.

    Logits and weights are float32 or wider. A row that sees nothing is zeros, and one that sees
    what is not finite is NaN.
    """
    dtype = accum_dtype(q.dtype, k.dtype, v.dtype)
    logits = jnp.einsum("btnh,bsnh->bnts", finite(q), finite(k), preferred_element_type=dtype)
    logits = logits / math.sqrt(q.shape[-1])
    if bias is not None:
        logits = logits + bias.astype(dtype)
    logits = logits + _mark(dtype, q) + jnp.swapaxes(_mark(dtype, k, v), 2, 3)
    row_max = largest(logits, mask, axis=-1)
    real = jnp.isfinite(row_max)
    mask = mask & real
    weights = masked_exp(logits, mask, row_max)
    weights = weights / nonzero(weights.sum(axis=-1, keepdims=True))
    if dropout > 0.0:
        weights = weights * full_dropout_mask(rng, dropout, weights.shape).astype(dtype)
    # The gradient of a hidden weight may have overflowed.
    weights = jnp.where(mask, weights, 0.0).astype(v.dtype)
    out = jnp.einsum("bnts,bsnv->btnv", weights, finite(v), preferred_element_type=dtype)
    return jnp.where(jnp.swapaxes(real, 1, 2), out, jnp.nan).astype(v.dtype)


def _mark(dtype: Any, *vectors: Float[Array, "B T N H"]) -> Float[Array, "B N T 1"]:
    """What to add to the logits of a position: NaN if one of its vectors is not finite."""
    mark = jnp.where(is_finite(*vectors), 0.0, jnp.nan).astype(dtype)
    return jnp.swapaxes(mark, 1, 2)
