"""Shared-QK attention: keys are the length-normalised queries (Reformer, sec. 2).

One projection makes queries and keys, so that locality-sensitive hashing can put a query and the
keys it needs into one bucket. A position would then always prefer itself, so it attends to itself
only when it sees nothing else.
"""

from __future__ import annotations

import jax
from jaxtyping import Array, Float

from reformax.ops.base import AttentionOp, Traits, named, no_params, no_plan
from reformax.ops.parts.cache import full_decoding
from reformax.ops.parts.masks import except_self, visibility
from reformax.ops.parts.normalization import length_normalize
from reformax.ops.parts.reference import reference_attention


@named
def shared_qk() -> AttentionOp:
    """Dense attention with shared queries and keys, which LSH attention approximates.

    It takes O(T^2) time. The gradient computes the logits again.
    """
    return AttentionOp(
        init=no_params,
        plan=no_plan,
        apply=_apply,
        traits=Traits(shared_qk=True, exact=True, beams=True),
        **full_decoding(shared_qk=True),
    )


def _apply(params, q, k, v, *, plan, segments, causal, dropout, rng):
    del params, k, plan

    @jax.checkpoint
    def attend(q, v) -> Float[Array, "B T N V"]:
        mask = except_self(visibility(q.shape[1], q.shape[1], causal=causal, segments=segments))
        return reference_attention(q, length_normalize(q), v, mask, dropout=dropout, rng=rng)

    return attend(q, v)
