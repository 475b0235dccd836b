"""Maps over chunks of queries, so that no array holds all pairs of queries and keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Shaped

# Numbers in memory at a time: logits and keys of a chunk of queries.
AT_A_TIME = 2**24


def by_chunks(
    function: Callable[..., Any], n_seen: int, *arrays: Array, at_a_time: int | None = None
) -> Any:
    """Applies `function` to one chunk of queries after another; the results are `[chunks, ...]`.

    Args:
      function: takes the arrays' chunks, `[B, Q, ...]`.
      n_seen: the numbers in memory for each query of a row.
      arrays: `[B, T, ...]`; B is 1 where all rows are equal. Zeros fill up the last chunk.
      at_a_time: the numbers in memory of all queries of a chunk; None: `AT_A_TIME`. One query of
        each row may take more.
    """
    n_batch, length = arrays[0].shape[:2]
    size = max(min((at_a_time or AT_A_TIME) // (n_batch * n_seen), length), 1)
    chunks = tuple(cut_chunks(x, size) for x in arrays)
    return lax.map(lambda chunk: function(*chunk), chunks)


def in_blocks(x: Shaped[Array, "B T *d"], size: int) -> Shaped[Array, "B C L *d"]:
    """Blocks of `size` positions; zeros fill up the last one."""
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % size)] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(x.shape[0], -1, size, *x.shape[2:])


def with_neighbours(x: Shaped[Array, "B C L *d"], n_before: int, n_after: int) -> Array:
    """Each block between its neighbours, `[B, C, M, ...]`; zeros where there is none."""
    n = x.shape[1]
    x = jnp.pad(x, [(0, 0), (n_before, n_after)] + [(0, 0)] * (x.ndim - 2))
    return jnp.concatenate([x[:, i : i + n] for i in range(n_before + 1 + n_after)], axis=2)


def cut_chunks(x: Shaped[Array, "B T *d"], size: int) -> Shaped[Array, "C B L *d"]:
    """Chunks of `size` positions, as `lax.map` and `lax.scan` take them; zeros fill up the last."""
    return jnp.moveaxis(in_blocks(x, size), 1, 0)


def join_chunks(x: Array, length: int, axis: int = 1) -> Array:
    """Joins results of chunks, `[chunks, B, Q, ...]`, to those of all queries, `[B, T, ...]`.

    Queries are another `axis` of other results, such as 2 of `[chunks, B, N, Q, ...]`.
    """
    x = jnp.moveaxis(x, 0, axis)
    x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
    return lax.slice_in_dim(x, 0, length, axis=axis)


def positions_in(blocks: Int[Array, "*d K"], size: int) -> Int[Array, "*d K*L"]:
    """The positions of blocks by their numbers; -1 for all of a block of -1."""
    within = jnp.arange(size, dtype=jnp.int32).reshape(*blocks.ndim * [1], size)
    each = jnp.where(blocks[..., None] < 0, -1, blocks[..., None] * size + within)
    return each.reshape(*blocks.shape[:-1], -1)


def positions(length: int) -> Int[Array, "1 T"]:
    """0 to `length - 1`, in one row."""
    return jnp.arange(length, dtype=jnp.int32)[None]
