"""A mask given as booleans, in terms that ops compute with: segments, or a bias.

Segments hide padding from every op and cost nothing. A mask of pairs is an array of T x S, which
ops with the trait `bias` add to their logits.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from reformax.ops.masking.masks import SegmentIds, segment_pair


def checked_mask(
    op: Any,
    mask: Bool[Array, "B S"] | Bool[Array, "#B #N #T #S"],
    q: Float[Array, "B T N H"],
    keys: Float[Array, "B S N H"],
) -> Bool[Array, "B S"] | Bool[Array, "#B #N #T #S"]:
    """The mask of a call of `op`, an `AttentionOp`, as an array.

    Raises:
      ValueError: its shape or dtype does not fit.
      NotImplementedError: it hides pairs, and the op adds no bias.
    """
    mask = jnp.asarray(mask)
    (n_batch, n_queries, n_heads), n_keys = q.shape[:3], keys.shape[1]
    full = n_batch, n_heads, n_queries, n_keys
    if mask.dtype != bool:
        raise ValueError(
            f"mask has dtype {mask.dtype}: expected booleans, True where a key may be seen; what "
            "is added to logits is a bias"
        )
    pairs = mask.ndim == 4 and all(n in (1, m) for n, m in zip(mask.shape, full, strict=True))
    if not pairs and mask.shape != (n_batch, n_keys):
        raise ValueError(
            f"mask has shape {mask.shape}: expected [batch, keys], {(n_batch, n_keys)}, or [batch, "
            f"heads, queries, keys], {full}, each or 1"
        )
    if _hides_pairs(mask) and not op.traits.bias:
        raise NotImplementedError(
            f"mask has shape {mask.shape}: {op.name} hides pairs by causal=True and segments "
            "alone; give a mask of keys, [batch, keys], or use an op whose traits say bias=True"
        )
    return mask


def _hides_pairs(mask: Bool[Array, ...]) -> bool:
    """Whether a mask is not the same for all queries and heads."""
    return mask.ndim == 4 and mask.shape[1:3] != (1, 1)


def with_mask(
    op: Any,
    mask: Bool[Array, "B S"] | Bool[Array, "#B #N #T #S"] | None,
    q: Float[Array, "B T N H"],
    keys: Float[Array, "B S N H"],
    segment_ids: SegmentIds | None,
    bias: Float[Array, "#B #N #T #S"] | None,
    causal: bool = False,
) -> tuple[SegmentIds | None, Float[Array, "#B #N #T #S"] | None]:
    """The segments and the bias of a call with a mask.

    Args:
      op: the algorithm, an `AttentionOp`.
      mask: from `checked_mask`, True where a key may be seen: `[B, S]` says it of each key, four
        axes of each pair. Four axes that are 1 for heads and for queries say it of each key too.
      q: queries.
      keys: keys; q where they are made of it.
      segment_ids: those of the call.
      bias: that of the call.
      causal: that of the call.

    Returns:
      Segments in which hidden keys are padding, and the bias. Where the op can tell queries from
      keys, hidden keys hide no query; elsewhere a hidden position is padding, and its row is zeros.
      An op that sorts a sequence takes the sides of a causal call for one.
    """
    if mask is None:
        return segment_ids, bias
    if _hides_pairs(mask):
        hidden = jnp.where(mask, 0.0, -jnp.inf)
        return segment_ids, hidden if bias is None else bias + hidden
    (n_batch, n_queries), n_keys = q.shape[:2], keys.shape[1]
    seen = jnp.broadcast_to(mask.reshape(mask.shape[0], -1), (n_batch, n_keys))
    of_query, of_key = segment_pair(segment_ids)
    of_key = jnp.where(seen, 1 if of_key is None else of_key, 0)
    sorts = op.traits.random_plan and not op.traits.causal_plan
    one = causal and sorts and n_queries == n_keys and not isinstance(segment_ids, tuple)
    if one or not op.traits.cross:
        return of_key, bias
    ones = jnp.ones((n_batch, n_queries), of_key.dtype)
    return (ones if of_query is None else of_query, of_key), bias
