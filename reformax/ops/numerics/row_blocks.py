"""Reads, replaces and adds blocks of neighbouring rows, for some examples and heads at once.

A block is a slice of the arrays: none is padded or copied. Where the length is not a multiple of
the block size, the last block begins earlier and overlaps the block before. `RowBlock.in_block`
masks the rows of the overlap.

Letters besides those of `reformax.ops.base`: b examples and n heads of a group, L rows of a block,
Q queries and K keys of a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

# Logits of the heads that a CPU computes together: 2 MiB of float32 fit in its cache.
LOGITS_IN_CACHE = 2**19


def largest_divisor(n: int, most: int) -> int:
    """The largest divisor of `n` that is at most `most`, or 1."""
    return next(d for d in range(max(1, min(n, most)), 0, -1) if n % d == 0)


class Group(NamedTuple):
    """Examples and heads that are computed together."""

    batch: Any  # the first example
    head: Any  # the first head
    n_batch: int
    n_heads: int


class RowBlock(NamedTuple):
    """Neighbouring rows of queries or of keys."""

    start: Any  # the first row that is read
    position: Int[Array, " L"]
    in_block: Bool[Array, " L"] | None  # False for rows of the block before; None: none is


def block_at(start: Any, size: int, length: int, aligned: bool | None = None) -> RowBlock:
    """The block of `size` rows from `start` on. It begins earlier where fewer rows are left.

    Args:
      start: its first row, without the overlap.
      size: its number of rows, with the overlap.
      length: the length of the sequence.
      aligned: whether every block has enough rows; by default, whether `size` divides the length.
    """
    aligned = length % size == 0 if aligned is None else aligned
    first = start if aligned else jnp.minimum(start, length - size)
    position = first + jnp.arange(size, dtype=jnp.int32)
    return RowBlock(first, position, None if aligned else position >= start)


def over_groups(
    sizes: tuple[int, int],
    n_batch: int,
    n_heads: int,
    n_blocks: int,
    body: Callable[[Group, Any, Any], Any],
    carry: Any,
) -> Any:
    """`carry = body(group, i, carry)` for each group and each of its `n_blocks` blocks."""
    some_batch, some_heads = sizes
    n_parts = n_heads // some_heads

    def each(n, carry):
        part, i = n // n_blocks, n % n_blocks
        group = Group(
            part // n_parts * some_batch, part % n_parts * some_heads, some_batch, some_heads
        )
        return body(group, i, carry)

    n = np.int32(n_batch // some_batch * n_parts * n_blocks)
    return lax.fori_loop(np.int32(0), n, each, carry)


def _starts(*starts: Any) -> tuple[Array, ...]:
    """The start of a slice, as integers of one dtype."""
    return tuple(jnp.asarray(i, jnp.int32) for i in starts)


def rows(x: Float[Array, "B T N H"], group: Group, block: RowBlock) -> Float[Array, "b n L H"]:
    """A block's rows of the group's heads."""
    sizes = group.n_batch, block.position.size, group.n_heads, x.shape[3]
    part = lax.dynamic_slice(x, _starts(group.batch, block.start, group.head, 0), sizes)
    return jnp.swapaxes(part, 1, 2)


def put_rows(
    x: Float[Array, "B T N H"], value: Float[Array, "b n L H"], group: Group, block: RowBlock
) -> Float[Array, "B T N H"]:
    """`x` with a block's rows of the group's heads replaced."""
    value = value.astype(x.dtype)
    if block.in_block is not None:
        value = jnp.where(block.in_block[:, None], value, rows(x, group, block))
    start = _starts(group.batch, block.start, group.head, 0)
    return lax.dynamic_update_slice(x, jnp.swapaxes(value, 1, 2), start)


def add_rows(
    x: Float[Array, "B T N H"], value: Float[Array, "b n L H"], group: Group, block: RowBlock
) -> Float[Array, "B T N H"]:
    """`x` with `value` added, which is 0 in the rows of the block before."""
    total = rows(x, group, block) + value.astype(x.dtype)
    start = _starts(group.batch, block.start, group.head, 0)
    return lax.dynamic_update_slice(x, jnp.swapaxes(total, 1, 2), start)


def row_statistics(
    x: Float[Array, "B N T"], group: Group, block: RowBlock
) -> Float[Array, "b n L"]:
    """The statistics of a block's rows, of the group's heads."""
    sizes = group.n_batch, group.n_heads, block.position.size
    return lax.dynamic_slice(x, _starts(group.batch, group.head, block.start), sizes)


def put_row_statistics(
    x: Float[Array, "B N T"], value: Float[Array, "b n L"], group: Group, block: RowBlock
) -> Float[Array, "B N T"]:
    """`x` with the statistics of a block's rows, of the group's heads, replaced."""
    if block.in_block is not None:
        value = jnp.where(block.in_block[None, None], value, row_statistics(x, group, block))
    return lax.dynamic_update_slice(x, value, _starts(group.batch, group.head, block.start))


def bias_tile(
    shape: tuple[int, ...], group: Group, queries: RowBlock, keys: RowBlock
) -> tuple[tuple[Array, ...], list[int]]:
    """The start and the size of a tile's slice of a bias. Axes of size 1 stay whole."""
    starts = group.batch, group.head, queries.start, keys.start
    sizes = group.n_batch, group.n_heads, queries.position.size, keys.position.size
    start = [i if n > 1 else 0 for i, n in zip(starts, shape, strict=True)]
    return _starts(*start), [s if n > 1 else 1 for s, n in zip(sizes, shape, strict=True)]


def add_bias_tile(
    x: Float[Array, "#B #N #T #S"],
    value: Float[Array, "b n Q K"],
    group: Group,
    queries: RowBlock,
    keys: RowBlock,
) -> Float[Array, "#B #N #T #S"]:
    """`x` with a tile's gradient added, summed over the axes of size 1."""
    start, sizes = bias_tile(x.shape, group, queries, keys)
    shared = [axis for axis, n in enumerate(x.shape) if n == 1]
    value = jnp.sum(value, axis=shared, keepdims=True)
    return lax.dynamic_update_slice(x, lax.dynamic_slice(x, start, sizes) + value, start)


def ids_of(ids: Int[Array, "B T"], group: Group, block: RowBlock) -> Int[Array, "b L"]:
    """The ids of a block's rows, such as segment ids."""
    sizes = group.n_batch, block.position.size
    return lax.dynamic_slice(ids, _starts(group.batch, block.start), sizes)
