"""Dense softmax attention: every visible key, O(T * S) time (Vaswani et al. 2017, eq. 1)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from reformax.ops.base import (
    AttentionOp,
    Segments,
    Traits,
    check_impl,
    no_params,
    no_plan,
    reference_attention,
    visibility,
)
from reformax.ops.cache import ring_decoding


def dense(*, impl: str = "auto") -> AttentionOp:
    """Attention of each query to every visible key.

    Args:
      impl: `"xla"` runs everywhere; its gradient recomputes the scores, so that no T x S array is
        kept between the passes. `"cudnn"` is NVIDIA's fused kernel, for float16 and bfloat16
        without segments, bias and dropout. `"auto"` takes it where it computes this same function.

    Raises:
      ValueError: an unknown `impl`.
      NotImplementedError: at the call, when `impl="cudnn"` is asked for what it cannot do.
    """
    check_impl(impl, "cudnn")
    return AttentionOp(
        init=no_params,
        plan=no_plan,
        apply=functools.partial(_apply, impl=impl),
        traits=Traits(cross=True, bias=True, exact=True, beams=True),
        **ring_decoding(shared_qk=False, n_slots=lambda capacity: capacity, first=lambda now: 0),
    )


def _apply(params, q, k, v, *, plan, segments, causal, dropout, rng, impl, bias=None):
    del params, plan
    obstacle = cudnn_obstacle(q, k, v, segments, dropout) if bias is None else "a bias"
    if use_cudnn(impl, obstacle):
        return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn")

    @jax.checkpoint
    def attend(q, k, v, bias) -> Float[Array, "B T N V"]:
        mask = visibility(q.shape[1], k.shape[1], causal=causal, segments=segments)
        return reference_attention(q, k, v, mask, bias=bias, dropout=dropout, rng=rng)

    return attend(q, k, v, bias)


def use_cudnn(impl: str, obstacle: str | None) -> bool:
    """Whether cuDNN computes a call; `NotImplementedError` if it was asked to and cannot."""
    if impl == "cudnn" and obstacle:
        raise NotImplementedError(f"impl='cudnn' with {obstacle}: use impl='auto' or 'xla'")
    return impl != "xla" and not obstacle


def cudnn_obstacle(
    q: Array, k: Array, v: Array, segments: Segments | None, dropout: float
) -> str | None:
    """What keeps cuDNN from computing this call, in words; None if nothing does."""
    if jax.default_backend() != "gpu":
        return f"the backend {jax.default_backend()!r}"
    if segments is not None:
        return "segments"
    if dropout > 0.0:
        return f"dropout {dropout}"
    if not all(x.dtype in (jnp.float16, jnp.bfloat16) for x in (q, k, v)):
        return f"dtype {q.dtype}"
    if q.shape[-1] != v.shape[-1] or q.shape[-1] % 8 or q.shape[-1] > 128:
        return f"head sizes {q.shape[-1]} and {v.shape[-1]}"
    if q.shape[1] != k.shape[1] or q.shape[1] % 64:
        return f"lengths {q.shape[1]} and {k.shape[1]}"
    return None
