"""Turns a boolean mask into what ops compute with: segment ids, or a bias.

A mask of keys becomes segment ids, which hide padding in every op and cost nothing. A mask of pairs
becomes an array of T x S, which ops with `bias` add to their logits.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from reformax.ops.masking.masks import SegmentIds, segment_pair


def shape_of_pairs(
    q: Float[Array, "B T N H"], keys: Float[Array, "B S G H"], v: Float[Array, "B S G V"]
) -> tuple[int, int, int, int]:
    """The whole shape of a mask or bias of pairs, [batch, heads, queries, keys]."""
    return q.shape[0], max(q.shape[2], v.shape[2]), q.shape[1], keys.shape[1]


def checked_mask(
    op: Any,
    mask: Bool[Array, "B S"] | Bool[Array, "#B #N #T #S"],
    q: Float[Array, "B T N H"],
    keys: Float[Array, "B S N H"],
    v: Float[Array, "B S N V"],
) -> Bool[Array, "B S"] | Bool[Array, "#B #N #T #S"]:
    """The mask of a call of `op`, an `AttentionOp`, as an array, after checks.

    Raises:
      ValueError: the mask's shape or dtype does not fit.
      NotImplementedError: the mask hides pairs, and the op adds no bias.
    """
    mask = jnp.asarray(mask)
    full = shape_of_pairs(q, keys, v)
    of_keys = full[0], full[3]
    if mask.dtype != bool:
        raise ValueError(
            f"mask has dtype {mask.dtype}: expected booleans, True where a key is visible; pass "
            "numbers to add to logits as bias"
        )
    pairs = mask.ndim == 4 and all(n in (1, m) for n, m in zip(mask.shape, full, strict=True))
    if not pairs and mask.shape != of_keys:
        raise ValueError(
            f"mask has shape {mask.shape}: expected [batch, keys], {of_keys}, or [batch, heads, "
            f"queries, keys], {full}, each or 1"
        )
    if _hides_pairs(mask) and not op.bias:
        raise NotImplementedError(
            f"mask has shape {mask.shape}: {op.name} hides pairs only by causal=True and segments; "
            "give a mask of keys, [batch, keys], or use an op whose bias is True, such as "
            "flash.flash()"
        )
    return mask


def is_one_sequence(
    op: Any, causal: bool, n_queries: int, n_keys: int, segment_ids: SegmentIds | None = None
) -> bool:
    """Whether a hidden position is neither a key nor a query of `op`, an `AttentionOp`."""
    if not op.cross:
        return True
    is_pair = isinstance(segment_ids, tuple)
    return causal and op.plan_needs == "rng" and n_queries == n_keys and not is_pair


def _hides_pairs(mask: Bool[Array, ...]) -> bool:
    """Whether the mask differs between queries or heads."""
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
      mask: from `checked_mask`, True where a key is visible: of keys, `[B, S]` or four axes of
        which those of heads and queries are 1, or of pairs, with four axes.
      keys: keys; q where keys are made of queries.

    Returns:
      Segment ids in which hidden keys are padding, and the bias. Where the op distinguishes queries
      from keys, hidden keys hide no query. Elsewhere a hidden position is padding, and its row is
      zeros. An op that sorts a sequence does not distinguish them in a causal call.
    """
    if mask is None:
        return segment_ids, bias
    if _hides_pairs(mask):
        hidden = jnp.where(mask, 0.0, -jnp.inf)
        return segment_ids, hidden if bias is None else bias + hidden
    (n_batch, n_queries), n_keys = q.shape[:2], keys.shape[1]
    seen = jnp.broadcast_to(mask.reshape(mask.shape[0], -1), (n_batch, n_keys))
    of_query, of_key = segment_pair(segment_ids)
    of_key = seen if of_key is None else jnp.where(seen, of_key, 0).astype(of_key.dtype)
    if is_one_sequence(op, causal, n_queries, n_keys, segment_ids):
        return of_key, bias
    ones = jnp.ones((n_batch, n_queries), of_key.dtype)
    return (ones if of_query is None else of_query, of_key), bias
