"""Replaces padding by zeros, whatever it contains."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from reformax.ops.masking.masks import SegmentIds, segment_pair
from reformax.ops.masking.visibility import is_token


def tokens_only(x: Shaped[Array, "B T *d"], ids: Int[Array, "B T"]) -> Shaped[Array, "B T *d"]:
    """`x` with zeros at padding, where the gradient is 0 too."""
    return jnp.where(is_token(ids)[(..., *[None] * (x.ndim - 2))], x, 0)


def attend_to_tokens(
    attend: Callable[..., Array],
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S N H"] | None,
    v: Float[Array, "B S N V"],
    segment_ids: SegmentIds | None,
) -> Float[Array, "B T N V"]:
    """`attend(q, k, v)` with zeros at the padding of its arguments and of its result."""
    if segment_ids is None:
        return attend(q, k, v)
    of_query, of_key = segment_pair(segment_ids)
    k = None if k is None else tokens_only(k, of_key)
    out = attend(tokens_only(q, of_query), k, tokens_only(v, of_key))
    return tokens_only(out, of_query)
