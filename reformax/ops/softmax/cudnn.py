"""Attention by NVIDIA's cuDNN, and the calls that cuDNN can compute.

While a program that calls cuDNN is loaded, cuDNN captures a graph on the stream on which the
device's programs run (`warmup` in cudnn-frontend's graph_interface.h). It also captures what
another thread launches there meanwhile, which then does not run: the results are NaN, or wrong.
Load such programs while no thread runs one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from reformax.ops.calls import this_gpu
from reformax.ops.calls.call import Call
from reformax.ops.calls.obstacles import MAX_HEAD_SIZE, NARROW_HEAD
from reformax.ops.masking.masks import tokens_before
from reformax.ops.masking.padding import tokens_only

# Lengths are padded to a multiple of this.
BLOCK = 64

# Keys of a head in one program of the gradient of keys; programs that fill a GPU; the fewest
# queries of a piece.
KEYS, PROGRAMS, LEAST_PIECE = 128, 264, 1024


def cudnn_obstacle(call: Call, q: Array, k: Array, v: Array) -> str | None:
    """The property of a call that cuDNN cannot compute; None if it can compute the call.

    Heads above 128 need Hopper. It can compute segments where `lengths` replace them.
    """
    if call.segment_ids is not None and call.lengths is None:
        return "segment_ids"
    if call.bias is not None:
        return "a bias"
    if call.logits.soft_cap is not None:
        return f"soft_cap={call.logits.soft_cap}"
    if call.sinks is not None:
        return "learned_sinks=True"
    if call.dropout > 0.0:
        return f"dropout {call.dropout}"
    if not all(x.dtype == q.dtype and x.dtype in (jnp.float16, jnp.bfloat16) for x in (q, k, v)):
        return f"dtypes {q.dtype}, {k.dtype} and {v.dtype}"
    most = MAX_HEAD_SIZE if this_gpu.is_hopper() else NARROW_HEAD
    if q.shape[-1] != v.shape[-1] or q.shape[-1] % 8 or q.shape[-1] > most:
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
    lengths: Int[Array, " B"] | None = None,
) -> Float[Array, "B T N H"]:
    """Attention by cuDNN, for a call without a `cudnn_obstacle`.

    Lengths are padded to a multiple of 64. Padded keys are in the future of every query. Where the
    future is visible, cuDNN also gets the true lengths. Padded queries are cut off. Many queries of
    few keys are cut into pieces, each an example to cuDNN.

    cuDNN writes gradients of 0 at the padding of rows that have `lengths`: its own tests compare
    them (test/python/sdpa/fp16.py of cudnn-frontend). Those tests leave out the outputs at padding,
    which may be NaN. This function masks them.

    Args:
      scale: the factor of the logits; None is `1 / sqrt(H)`.
      window: if set, a causal position sees only the last `window` positions.
      lengths: the number of tokens of each row before its padding, of queries and keys alike; None:
        no position is padding. Arrays are finite at padding: a weight of 0 times NaN is NaN.
    """
    n_queries, n_keys = q.shape[1], k.shape[1]
    options = {} if window is None else dict(local_window_size=(window - 1, 0))
    pieces = 1 if causal else _pieces(q, n_keys)
    pads = -n_queries % (pieces * BLOCK), -n_keys % BLOCK
    if any(pads):
        q, k, v = (
            jnp.pad(x, ((0, 0), (0, n), (0, 0), (0, 0)))
            for x, n in zip((q, k, v), (pads[0], pads[1], pads[1]), strict=True)
        )
    if pieces > 1:  # as sequences, each of which sees all keys
        q = q.reshape(-1, q.shape[1] // pieces, *q.shape[2:])
        k, v = _repeated(k, pieces), _repeated(v, pieces)
    if lengths is not None or (any(pads) and not (causal and n_queries <= n_keys)):
        of_queries = jnp.full(q.shape[0], n_queries if pieces == 1 else q.shape[1], jnp.int32)
        of_keys = jnp.full(q.shape[0], n_keys, jnp.int32)
        if lengths is not None:
            # A softmax over no key is NaN, so a row with only padding sees its first position.
            of_keys = jnp.repeat(jnp.maximum(lengths, 1), pieces)
            of_queries = of_keys if pieces == 1 else of_queries
        options |= dict(query_seq_lengths=of_queries, key_value_seq_lengths=of_keys)
    out = jax.nn.dot_product_attention(
        q, k, v, is_causal=causal, scale=scale, implementation="cudnn", **options
    )
    out = out.reshape(-1, out.shape[1] * pieces, *out.shape[2:])[:, :n_queries]
    if lengths is None:
        return out
    return tokens_only(out, tokens_before(lengths, n_queries))


def _pieces(q: Float[Array, "B T N H"], n_keys: int) -> int:
    """The number of pieces that queries are cut into, a power of two.

    Without pieces, few programs would compute the gradient of few keys over many queries.
    """
    n_batch, length, n_heads, _ = q.shape
    programs = n_batch * n_heads * -(-n_keys // KEYS)
    most = min(PROGRAMS // programs, length // LEAST_PIECE)
    return 1 << max(most, 1).bit_length() - 1


def _repeated(x: Float[Array, "B S N H"], pieces: int) -> Float[Array, "BP S N H"]:
    """Keys or values repeated for each piece. Their gradients are summed in float32."""
    each = jnp.repeat(x.astype(jnp.float32), pieces, axis=0)
    return each.astype(x.dtype)
