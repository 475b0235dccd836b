"""The reference: softmax attention over an explicit mask, in O(T * S) time and memory."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from reformax.ops.parts.dropout import full_dropout_mask
from reformax.ops.parts.softmax import masked_exp, nonzero


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

    Logits and weights are float32 whatever the inputs are. A row that sees nothing is zeros.
    """
    logits = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32)
    logits = logits / math.sqrt(q.shape[-1])
    if bias is not None:
        logits = logits + bias
    weights = masked_exp(logits, mask, axis=-1)
    weights = weights / nonzero(weights.sum(axis=-1, keepdims=True))
    if dropout > 0.0:
        weights = weights * full_dropout_mask(rng, dropout, weights.shape)
    out = jnp.einsum(
        "bnts,bsnv->btnv", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    return out.astype(v.dtype)
