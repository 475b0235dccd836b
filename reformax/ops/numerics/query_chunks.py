"""Array operations over some queries after the other, so that no array has all pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Shaped

# Numbers of a chunk of queries, logits and keys, that are in memory at a time.
AT_A_TIME = 2**24


def by_chunks(function: Callable[..., Any], n_seen: int, *arrays: Array) -> Any:
    """`function` of chunks of queries, `[B, Q, ...]`, after each other: `[chunks, ...]`.

    Args:
      function: of the arrays' chunks.
      n_seen: the numbers that are in memory for a query of a row.
      arrays: `[B, T, ...]`, `B` being 1 where all rows have the same; zeros fill up the last chunk.
    """
    n_batch, length = arrays[0].shape[:2]
    size = max(min(AT_A_TIME // (n_batch * n_seen), length), 1)
    chunks = tuple(jnp.moveaxis(in_blocks(x, size), 1, 0) for x in arrays)
    return lax.map(lambda chunk: function(*chunk), chunks)


def in_blocks(x: Shaped[Array, "B T *d"], size: int) -> Shaped[Array, "B C L *d"]:
    """Blocks of `size` positions, the last one filled up with zeros."""
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % size)] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(x.shape[0], -1, size, *x.shape[2:])


def join_chunks(x: Array, length: int) -> Array:
    """Results of chunks, `[chunks, B, Q, ...]`, as those of all queries, `[B, T, ...]`."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def positions(length: int) -> Int[Array, "1 T"]:
    """0 to `length - 1`, as an array of one row."""
    return jnp.arange(length, dtype=jnp.int32)[None]
