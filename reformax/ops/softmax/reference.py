"""The reference: softmax attention over an explicit mask, in O(T * S) time and memory."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from reformax.ops.numerics.precision import accum_dtype
from reformax.ops.softmax.dropout import full_dropout_mask
from reformax.ops.softmax.online import masked_softmax


def reference_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S N H"],
    v: Float[Array, "B S N V"],
    mask: Bool[Array, "#B #N T S"],
    *,
    bias: Float[Array, "#B #N #T #S"] | None = None,
    dropout: float = 0.0,
    seed: Int[Array, 6] | None = None,
) -> Float[Array, "B T N V"]:
    """`softmax(q k^T / sqrt(H) + bias) v` over the keys that are visible in a mask.

    Logits and weights are float32 or wider. A row without visible keys is zeros. `seed` is that of
    `seed_words`, for dropout.
    """
    dtype = accum_dtype(q.dtype, k.dtype, v.dtype)
    logits = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=dtype)
    logits = logits / math.sqrt(q.shape[-1])
    if bias is not None:
        logits = logits + bias.astype(dtype)
    weights = masked_softmax(logits, mask)
    if dropout > 0.0:
        weights = weights * full_dropout_mask(seed, dropout, weights.shape).astype(dtype)
    weights = weights.astype(v.dtype)
    out = jnp.einsum("bnts,bsnv->btnv", weights, v, preferred_element_type=dtype)
    return out.astype(v.dtype)
