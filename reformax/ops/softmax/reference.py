"""The reference: softmax attention over an explicit mask, in O(T * S) time and memory."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from reformax.ops.softmax.dropout import full_dropout_mask
from reformax.ops.softmax.masked import scaled_logits, softmax_over


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
    logits = scaled_logits("btnh,bsnh->bnts", q, k, bias=bias)
    dropped = full_dropout_mask(seed, dropout, logits.shape) if dropout > 0.0 else None
    whole = softmax_over(logits, mask, "bnts,bsnv->bntv", v, dropped)
    return jnp.swapaxes(whole.output(), 1, 2).astype(v.dtype)
