"""Segments of packed rows: ids along a row, from 1 on, tell its texts apart; 0 is padding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from reformax.ops.parts.masks import Ids, Tokens


def token_segments(tokens: Int[Array, "B T"], segments: Int[Array, "B T"] | None) -> Ids:
    """`segments`, or by default one segment of all tokens that are not 0, as booleans."""
    return tokens != 0 if segments is None else segments


def segment_positions(segments: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Each token's distance from the first of its segment."""
    index = jnp.arange(segments.shape[1], dtype=jnp.int32)[None]
    return index - jax.lax.cummax(jnp.where(_begins(segments), index, 0), axis=1)


def with_positions(segments: Ids, padded_behind: bool = False) -> Tokens:
    """Segments and the positions in them, unless booleans say that a row has one.

    With `padded_behind` the padding of a row is all behind its tokens.
    """
    positions = None if segments.dtype == bool else segment_positions(segments)
    return Tokens(segments, positions=positions, padded_behind=padded_behind)


def shift_right(
    target: Int[Array, "B T"], segments: Int[Array, "B T"], first: int = 0
) -> Int[Array, "B T"]:
    """The token before each, and `first` in front of every segment."""
    return jnp.where(_begins(segments), first, jnp.pad(target, ((0, 0), (1, 0)))[:, :-1])


def _begins(segments: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """Whether a segment, or padding, begins at each position."""
    return segments != jnp.pad(segments, ((0, 0), (1, 0)))[:, :-1]
