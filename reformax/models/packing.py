"""Segments of packed rows: ids along a row, from 1 on, tell its texts apart; 0 is padding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from reformax.ops.masking.masks import Ids, Tokens


def segmented(tokens: Int[Array, "B T"], segment_ids: Ids | None = None) -> Tokens:
    """The segments of tokens, and the positions in them, as a stack reads them.

    Without segments a row is one, up to its last token that is not 0: its padding follows.
    """
    if segment_ids is not None:
        return with_positions(segment_ids)
    position = jnp.arange(tokens.shape[1])[None]
    length = jnp.max(jnp.where(tokens != 0, position + 1, 0), axis=1, initial=0, keepdims=True)
    return Tokens(position < length, right_padded=True)


def segment_positions(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Each token's distance from the first of its segment."""
    index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None]
    return index - jax.lax.cummax(jnp.where(_begins(segment_ids), index, 0), axis=1)


def with_positions(segment_ids: Ids) -> Tokens:
    """Segments and the positions in them, unless booleans say that a row has one."""
    is_packed = segment_ids.dtype != bool
    return Tokens(segment_ids, positions=segment_positions(segment_ids) if is_packed else None)


def shift_right(
    target: Int[Array, "B T"], segment_ids: Int[Array, "B T"], first: int = 0
) -> Int[Array, "B T"]:
    """The token before each, and `first` before every segment."""
    return jnp.where(_begins(segment_ids), first, jnp.pad(target, ((0, 0), (1, 0)))[:, :-1])


def _begins(segment_ids: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """Whether a segment, or padding, begins at each position."""
    return segment_ids != jnp.pad(segment_ids, ((0, 0), (1, 0)))[:, :-1]
