"""The layout of chunked attention: arrays by head, cut into chunks in the order of each hash.

Letters as in `softmax.chunked`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from reformax.ops.numerics import row_blocks
from reformax.ops.numerics.row_blocks import largest_divisor
from reformax.ops.softmax.orders import Chunking, Order

# Heads, chunks and windows.


def heads_first(x: Float[Array, "B T N H"], length: int) -> Float[Array, "N B Tp H"]:
    """Puts heads first, and pads positions to `length`."""
    padding = length - x.shape[1]
    return jnp.pad(jnp.moveaxis(x, 2, 0), ((0, 0), (0, 0), (0, padding), (0, 0)))


def heads_last(x: Float[Array, "N B Tp H"], length: int) -> Float[Array, "B T N H"]:
    """The inverse of `heads_first` for `length` positions."""
    return jnp.moveaxis(x[:, :, :length], 0, 2)


def by_heads(function: Callable, chunks: Chunking, *operands: Any) -> Any:
    """`function` of arrays `[N, B, T, ...]`, on a CPU for some heads at a time."""
    n_heads, n_batch, length = operands[0].shape[:3]
    n_seen = (chunks.n_chunks_before + 1 + chunks.n_chunks_after) * chunks.chunk_len
    size = largest_divisor(n_heads, row_blocks.LOGITS_IN_CACHE // max(1, n_batch * length * n_seen))
    if jax.default_backend() != "cpu" or size == n_heads:
        return function(*operands)
    groups = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), operands)
    results = lax.map(lambda group: function(*group), groups)
    return jax.tree.map(lambda x: x.reshape(n_heads, *x.shape[2:]), results)


def _take(x: Array, index: Int[Array, "N B T"] | None) -> Array:
    """Rows of `x`, `[N, B, T, ...]`, by index along T; all rows without an index."""
    if index is None:
        return x
    index = index.reshape(index.shape + (1,) * (x.ndim - 3))
    return jnp.take_along_axis(x, index, axis=2, mode="promise_in_bounds")


def _split(x: Array, chunk_len: int) -> Array:
    """Cuts `[N, B, T, ...]` into `[N, B, C, L, ...]`."""
    return x.reshape(*x.shape[:2], -1, chunk_len, *x.shape[3:])


def _merge(x: Array) -> Array:
    """Joins `[N, B, C, L, ...]` to `[N, B, T, ...]`."""
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def with_border(x: Array, chunks: Chunking, value: int = 0) -> Array:
    """`[N, B, C, ...]` with chunks of `value` as the keys' border."""
    border = [(0, 0), (0, 0), (chunks.n_chunks_before, chunks.n_chunks_after)]
    return jnp.pad(x, border + [(0, 0)] * (x.ndim - 3), constant_values=value)


def keys_in_reach(x: Array, chunks: Chunking) -> Array:
    """The keys that each chunk sees: `[N, B, C + border, L, ...] -> [N, B, C, M, ...]`."""
    reach = chunks.n_chunks_before + chunks.n_chunks_after
    n = x.shape[2] - reach
    return jnp.concatenate([x[:, :, i : i + n] for i in range(reach + 1)], axis=3)


def sum_keys_in_reach(x: Array, chunks: Chunking) -> Array:
    """The transpose of `keys_in_reach`, `[N, B, C, V, M] -> [N, B, C + border, L, V]`.

    It sums over the windows that hold a key. Windows have features first, because a CPU computes
    such products twice as fast. The barrier keeps the transposition out of the products.
    """
    reach, n = chunks.n_chunks_before + chunks.n_chunks_after, x.shape[2]
    total = jnp.zeros((*x.shape[:2], n + reach, x.shape[3], chunks.chunk_len), x.dtype)
    for i, part in enumerate(jnp.split(x, reach + 1, axis=-1)):
        total = total.at[:, :, i : i + n].add(part)
    return jnp.swapaxes(jax.lax.optimization_barrier(total), -1, -2)


# One order, cut into chunks.


class ChunkedOrder(NamedTuple):
    """The order of one hash, cut into chunks; None keeps the order of the sequence."""

    chunks: Chunking
    hash_index: Int[Array, ""]
    query_positions: Int[Array, "N B T"] | None
    query_slots: Int[Array, "N B T"] | None
    key_positions: Int[Array, "N B K"] | None
    key_slots: Int[Array, "N B T"] | None

    @property
    def empty_border(self) -> bool:
        """Whether there is no key before the first chunk of queries, nor after the last."""
        return self.key_positions is None or self.key_slots is not None

    def at_queries(self, x: Array) -> Array:
        """Rows of `x`, `[N, B, T, ...]`, at the slots of queries, `[N, B, C, L, ...]`."""
        return _split(_take(x, self.query_positions), self.chunks.query_chunk_len)

    def at_keys_alone(self, x: Array) -> Array:
        """Rows of `x` at the slots of keys, without the border where it is empty."""
        if self.key_positions is None:
            return self.at_queries(x)
        return _split(_take(x, self.key_positions), self.chunks.chunk_len)

    def with_border(self, x: Array, outside: int = 0) -> Array:
        """`at_keys_alone` with the border; `outside` fills an empty one."""
        return with_border(x, self.chunks, outside) if self.empty_border else x

    def at_keys(self, x: Array, outside: int = 0) -> Array:
        """Rows of `x` at the slots of keys and in their border, `[N, B, C + border, L, ...]`."""
        return self.with_border(self.at_keys_alone(x), outside)

    def by_query(self, x: Array) -> Array:
        """The transpose of `at_queries`: `[N, B, C, L, ...]` by position."""
        return _take(_merge(x), self.query_slots)

    def by_key(self, x: Array) -> Array:
        """The transpose of `at_keys`: sums of `[N, B, C + border, L, ...]` by position."""
        x = _merge(x)
        before, after = (
            n * self.chunks.chunk_len
            for n in (self.chunks.n_chunks_before, self.chunks.n_chunks_after)
        )
        n_slots = x.shape[2]
        slots = self.query_slots if self.key_slots is None else self.key_slots
        total = _take(x[:, :, before : n_slots - after], slots)
        if self.empty_border:
            return total
        border_slots = np.r_[:before, n_slots - after : n_slots]
        head, batch = np.ogrid[: x.shape[0], : x.shape[1]]
        position = self.key_positions[:, :, border_slots]
        return total.at[head[..., None], batch[..., None], position].add(x[:, :, border_slots])

    def pair(self, x: Int[Array, "N B T"], outside: int = 0) -> tuple[Array, Array]:
        """A number of each position for queries, `[..., L, 1]`, and keys, `[..., 1, M]`."""
        return self.at_queries(x)[..., :, None], self.keys_in_reach(x, outside)

    def keys_in_reach(self, x: Int[Array, "N B T"], outside: int = 0) -> Array:
        """A number of each position for keys, `[..., 1, M]`."""
        return keys_in_reach(self.at_keys(x, outside), self.chunks)[..., None, :]

    def positions(self, length: int) -> tuple[Array, Array]:
        """The positions of queries, `[..., L, 1]`, and of keys, `[..., 1, M]`.

        A key of an empty border has position `length`, after all others.
        """
        if self.query_positions is None:
            return self.pair(jnp.arange(length)[None, None], length)
        queries = _split(self.query_positions, self.chunks.query_chunk_len)
        keys = queries
        if self.key_positions is not None:
            keys = _split(self.key_positions, self.chunks.chunk_len)
        keys = self.with_border(keys, length)
        return queries[..., :, None], keys_in_reach(keys, self.chunks)[..., None, :]


def scan_orders(body: Callable, carry: Any, chunks: Chunking, order: Order | None) -> Any:
    """`lax.scan` of `body(carry, chunked_order)` over the hashes. A single order needs no loop."""
    if order is None:
        return body(carry, ChunkedOrder(chunks, jnp.int32(0), None, None, None, None))
    of_hashes = order.query_positions, order.query_slots, order.key_positions, order.key_slots
    n_hashes = order.query_positions.shape[2]
    if n_hashes == 1:
        arrays = jax.tree.map(lambda x: x[:, :, 0], of_hashes)
        return body(carry, ChunkedOrder(chunks, jnp.int32(0), *arrays))
    of_hashes = jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), of_hashes)

    def each(carry, indexed):
        index, arrays = indexed
        return body(carry, ChunkedOrder(chunks, index, *arrays)), None

    return lax.scan(each, carry, (jnp.arange(n_hashes), of_hashes))[0]
