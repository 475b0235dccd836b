"""Segments of packed rows: ids along a row, from 1 on, tell its texts apart; 0 is padding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from reformax.ops.masking.masks import Ids, Tokens


def segmented(tokens: Int[Array, "B T"], segments: Ids | None = None) -> Tokens:
    """What a stack is told of tokens: their segments, and the positions in them.

    Without segments a row is one, up to its last token that is not 0: its padding is behind.
    """
    if segments is not None:
        return with_positions(segments)
    place = jnp.arange(tokens.shape[1])[None]
    length = jnp.max(jnp.where(tokens != 0, place + 1, 0), axis=1, initial=0, keepdims=True)
    return Tokens(place < length, padded_behind=True)


def segment_positions(segments: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Each token's distance from the first of its segment."""
    index = jnp.arange(segments.shape[1], dtype=jnp.int32)[None]
    return index - jax.lax.cummax(jnp.where(_begins(segments), index, 0), axis=1)


def with_positions(segments: Ids) -> Tokens:
    """Segments and the positions in them, unless booleans say that a row has one."""
    is_packed = segments.dtype != bool
    return Tokens(segments, positions=segment_positions(segments) if is_packed else None)


def shift_right(
    target: Int[Array, "B T"], segments: Int[Array, "B T"], first: int = 0
) -> Int[Array, "B T"]:
    """The token before each, and `first` in front of every segment."""
    return jnp.where(_begins(segments), first, jnp.pad(target, ((0, 0), (1, 0)))[:, :-1])


def _begins(segments: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """Whether a segment, or padding, begins at each position."""
    return segments != jnp.pad(segments, ((0, 0), (1, 0)))[:, :-1]
