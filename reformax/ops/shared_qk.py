"""Shared-QK attention: keys are the length-normalised queries (Reformer, sec. 2).

One projection makes queries and keys, so that locality-sensitive hashing can put a query and the
keys it needs into one bucket. A position would then always prefer itself, so it attends to itself
only when it sees nothing else.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from reformax.ops.base import AttentionOp, Traits, named, no_params, no_plan
from reformax.ops.parts.cache import full_decoding
from reformax.ops.parts.cudnn import cudnn_attention, cudnn_obstacle
from reformax.ops.parts.dispatch import check_impl, choose
from reformax.ops.parts.masks import except_self, visibility
from reformax.ops.parts.normalization import length_normalize
from reformax.ops.parts.reference import reference_attention


@named
def shared_qk(*, own: bool = True, impl: str = "auto") -> AttentionOp:
    """Dense attention with shared queries and keys, which LSH attention approximates.

    It takes O(T^2) time.

    Args:
      own: whether a position that sees nothing else attends to itself. False makes zeros of it.
      impl: `"xla"` runs everywhere. Its gradient computes the logits again. `"cudnn"` is NVIDIA's
        fused kernel, for causal attention under the conditions of `dense.dense`. `"auto"` takes it
        where it computes the same function.

    Raises:
      ValueError: an unknown `impl`.
      NotImplementedError: at the call, when `impl="cudnn"` is asked for what it cannot do.
    """
    check_impl(impl, "cudnn")
    return AttentionOp(
        init=no_params,
        plan=no_plan,
        apply=functools.partial(_apply, own=own, impl=impl),
        traits=Traits(shared_qk=True, exact=True, beams=True, strict=not own, heads_apart=True),
        **full_decoding(shared_qk=True, own=own),
    )


def _apply(params, q, k, v, *, plan, segments, causal, dropout, rng, own, impl):
    del params, k, plan
    obstacle = cudnn_obstacle(q, q, v, segments, dropout) if causal else "causal=False"
    if choose(impl, cudnn=obstacle) == "cudnn":
        return _to_those_before(q, v, own)

    @jax.checkpoint
    def attend(q, v) -> Float[Array, "B T N V"]:
        mask = visibility(q.shape[1], q.shape[1], causal=causal, segments=segments)
        mask = except_self(mask, own)
        return reference_attention(q, length_normalize(q), v, mask, dropout=dropout, rng=rng)

    return attend(q, v)


def _to_those_before(
    q: Float[Array, "B T N H"], v: Float[Array, "B T N H"], own: bool
) -> Float[Array, "B T N H"]:
    """Attention of each position to those before it, of which the first has none.

    Moved by one position, it is causal attention.
    """
    first = v[:, :1] if own else jnp.zeros_like(v[:, :1])
    if q.shape[1] == 1:
        return first
    keys = length_normalize(q)
    rest = cudnn_attention(q[:, 1:], keys[:, :-1], v[:, :-1], causal=True)
    return jnp.concatenate([first, rest], axis=1)
