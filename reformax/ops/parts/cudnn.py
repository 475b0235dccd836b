"""cuDNN's fused attention, NVIDIA's own kernel, and what it can compute.

While a program that calls it is loaded, cuDNN captures a graph on the stream on which the device's
programs run (`warmup` in cudnn-frontend's graph_interface.h). What another thread launches there in
the meantime is captured and not run: its results are NaN, or wrong. Load such programs while no
thread runs one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from reformax.ops.parts.masks import Segments

# Lengths are padded to a multiple of this.
BLOCK = 64


def cudnn_obstacle(
    q: Array,
    k: Array,
    v: Array,
    segments: Segments | None,
    dropout: float,
    bias: Array | None = None,
) -> str | None:
    """The reason why cuDNN cannot compute this call, in words; None if it can."""
    if segments is not None:
        return "segments"
    if bias is not None:
        return "a bias"
    if dropout > 0.0:
        return f"dropout {dropout}"
    if not all(x.dtype == q.dtype and x.dtype in (jnp.float16, jnp.bfloat16) for x in (q, k, v)):
        return f"dtypes {q.dtype}, {k.dtype} and {v.dtype}"
    if q.shape[-1] != v.shape[-1] or q.shape[-1] % 8 or q.shape[-1] > 128:
        return f"head sizes {q.shape[-1]} and {v.shape[-1]}"
    return None


def cudnn_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S N H"],
    v: Float[Array, "B S N H"],
    *,
    causal: bool,
    scale: float | None = None,
    window: int | None = None,
) -> Float[Array, "B T N H"]:
    """Attention by cuDNN, for a call without a `cudnn_obstacle`.

    Lengths are padded to a multiple of 64. Padded keys are in the future of every query; where the
    future is visible, cuDNN is told the true lengths. Padded queries are cut off.

    Args:
      q, k, v: the call's.
      causal: whether a position sees only itself and what came before it.
      scale: the factor of the logits; None is `1 / sqrt(H)`.
      window: if set, a causal position sees only the last `window` positions.
    """
    n_queries, n_keys = q.shape[1], k.shape[1]
    options = {} if window is None else dict(local_window_size=(window - 1, 0))
    pads = -n_queries % BLOCK, -n_keys % BLOCK
    if any(pads):
        q, k, v = (
            jnp.pad(x, ((0, 0), (0, n), (0, 0), (0, 0)))
            for x, n in zip((q, k, v), (pads[0], pads[1], pads[1]), strict=True)
        )
        if not (causal and n_queries <= n_keys):
            options["query_seq_lengths"] = jnp.full(q.shape[0], n_queries, jnp.int32)
            options["key_value_seq_lengths"] = jnp.full(q.shape[0], n_keys, jnp.int32)
    out = jax.nn.dot_product_attention(
        q, k, v, is_causal=causal, scale=scale, implementation="cudnn", **options
    )
    return out[:, :n_queries]
