"""Block-sparse attention: only the nonzero blocks of a mask (FlashAttention, algorithm 5).

Dao et al. 2022 ("FlashAttention", sec. 3.3 and appendix D.1) leave those blocks of the score matrix
out that a block mask has as zero; the softmax is over what remains. Time is proportional to the
nonzero blocks in both passes, memory to the length. Patterns are in `block_patterns`.

The gradient is analytic, from the output, the maximum and the sum of each row's softmax alone
(their appendix B.2): queries' gradients run through the rows of the mask and keys' through its
columns, and scores are computed again.

Arrays in blocks are `[U, B, N, L, ...]`: U blocks of L positions. Where heads have masks of their
own they are blocks too, U is heads times blocks and N is 1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from reformax.ops import blocks
from reformax.ops.base import (
    AttentionOp,
    Traits,
    check_impl,
    dropout_multiplier,
    mean_product,
    no_params,
    no_plan,
    segment_pair,
)
from reformax.ops.block_patterns import Mask, Pattern, butterfly
from reformax.ops.blocks import Layout, Softmax
from reformax.ops.cache import attend_to, keep, put
from reformax.ops.chunked import HIDDEN, KERNELS, chosen_impl

BUTTERFLY = butterfly()

# Scores computed at a time: what a CPU's cache holds, and what keeps a GPU busy.
SCORES_AT_ONCE = {"cpu": 2**19, "gpu": 2**26}

# The least side of a kernel's tile.
MIN_TILE = 16


def block_sparse(
    *,
    pattern: Pattern | Mask = BUTTERFLY,
    block_size: int | tuple[int, int] = 128,
    impl: str = "auto",
) -> AttentionOp:
    """Attention to the keys in the nonzero blocks of a mask.

    Args:
      pattern: which block of queries sees which block of keys: a boolean array, `[n_blocks_q,
        n_blocks_k]` or with an axis for heads in front, or a function of the two numbers of blocks
        that returns one, such as those of `block_patterns`. An array fits one length, give or take
        a block, and cannot decode.
      block_size: positions in a block; a pair of them is for queries and keys.
      impl: `"xla"` runs everywhere. `"pallas"` is a kernel for NVIDIA GPUs of Ampere or later,
        heads of 128 or less and blocks of a multiple of 16; `"pallas_interpret"` runs it anywhere,
        slowly, for tests. `"auto"` takes the kernel where it computes this same function.

    Raises:
      ValueError: a block size below 1, a pattern that is no block mask, an unknown `impl`; at the
        call, a mask of another shape than the blocks of queries and keys.
      NotImplementedError: at the call, when `"pallas"` is asked for what it cannot do.
    """
    check_impl(impl, *KERNELS)
    block_q, block_k = _check_block_size(block_size)
    given = None if callable(pattern) else _check_mask(pattern)

    def layout(n_queries: int, n_keys: int, n_heads: int, causal: bool, dropout: float) -> Layout:
        shape = -(-n_queries // block_q), -(-n_keys // block_k)
        mask = _check_mask(pattern(*shape)) if given is None else given
        if mask.shape not in (shape, (n_heads, *shape)):
            raise ValueError(
                f"pattern has shape {mask.shape}: expected {shape}, the blocks of {block_q} in "
                f"{n_queries} queries and of {block_k} in {n_keys} keys, or {(n_heads, *shape)}"
            )
        mask = mask[None] if mask.ndim == 2 else mask
        return Layout(mask, block_q, block_k, n_queries, n_keys, causal, dropout)

    def apply(params, q, k, v, *, plan, segments, causal, dropout, rng):
        del params, plan
        here = layout(q.shape[1], k.shape[1], q.shape[2], causal, dropout)
        odd = None if block_q % MIN_TILE == block_k % MIN_TILE == 0 else (block_q, block_k)
        which = chosen_impl(impl, q, v, block_size=odd)
        return _attend((here, which), q, k, v, segment_pair(segments), rng)

    def init_cache(params, q, k, v, *, plan, lengths, capacity, rng):
        del params, plan, rng
        return keep(k, v, lengths, capacity)

    def step(params, q, k, v, cache, *, position):
        del params
        cache = put(cache, k, v, position)
        n_heads, capacity = cache.keys.shape[1:3]
        rows = layout(capacity, capacity, n_heads, True, 0.0).rows(block_q, block_k)
        # The keys of the blocks that the query's own sees, [B, G, M].
        width = max(1, rows.count.max())
        seen = blocks.padded_entries(rows, blocks.cut(rows, width), width, capacity)
        seen = jnp.asarray(seen.reshape(-1, -(-capacity // block_q), width))
        seen = jnp.swapaxes(seen[:, position // block_q], 0, 1)[..., None]
        held = (seen * block_k + jnp.arange(block_k)).reshape(*seen.shape[:2], -1)
        index = jnp.minimum(held, capacity - 1)[..., None]
        some = (jnp.take_along_axis(x, index, axis=2) for x in cache)
        return attend_to(q, *some, held <= position[:, None, None]), cache

    return AttentionOp(
        init=no_params,
        plan=no_plan,
        apply=apply,
        traits=Traits(cross=True),
        **(dict(init_cache=init_cache, step=step) if given is None else {}),
    )


def _check_block_size(block_size: Any) -> tuple[int, int]:
    sizes = block_size if isinstance(block_size, tuple | list) else (block_size, block_size)
    if len(sizes) != 2 or not all(isinstance(n, int | np.integer) and n >= 1 for n in sizes):
        raise ValueError(f"block_size is {block_size}: expected a number of at least 1, or two")
    return int(sizes[0]), int(sizes[1])


def _check_mask(mask: Any) -> Mask:
    if isinstance(mask, jax.core.Tracer):
        raise ValueError("pattern is traced: expected an array of NumPy, known before the call")
    mask = np.asarray(mask)
    if mask.dtype != bool or mask.ndim not in (2, 3):
        raise ValueError(
            f"pattern has shape {mask.shape} and dtype {mask.dtype}: expected booleans, "
            "[n_blocks_q, n_blocks_k] or [heads, n_blocks_q, n_blocks_k], or a function of the "
            "numbers of blocks that returns them"
        )
    return mask


# The function, by array operations or by kernels.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(how, q, k, v, segments, rng):
    return _forward(how, q, k, v, segments, rng)[0]


def _forward(how, q, k, v, segments, rng):
    layout, impl = how
    inputs = (q, k, v, segments, rng)
    if impl == "xla":
        out, top, total = _forward_arrays(layout, *inputs)
    else:
        from reformax.ops.kernels import block_sparse as kernel

        interpret = impl == "pallas_interpret"
        out, top, total = kernel.forward(layout, *inputs, interpret=interpret)
    # The maximum and the sum apart: their log-sum-exp would lose the sum where scores are large.
    return out, (inputs, (out, top, total))


def _backward(how, residuals, d_out):
    layout, impl = how
    inputs, results = residuals
    if impl == "xla":
        gradients = _backward_arrays(layout, *inputs, *results, d_out)
    else:
        from reformax.ops.kernels import block_sparse as kernel

        interpret = impl == "pallas_interpret"
        gradients = kernel.backward(layout, *inputs, *results, d_out, interpret=interpret)
    return (*gradients, None, None)


_attend.defvjp(_forward, _backward)


# Array operations.


def _in_blocks(x: Array, size: int, per_head: bool) -> Array:
    """`[B, T, N, ...]` in blocks, the last padded: `[U, B, N, L, ...]`."""
    n_blocks = -(-x.shape[1] // size)
    x = jnp.pad(x, [(0, 0), (0, n_blocks * size - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
    x = x.reshape(x.shape[0], n_blocks, size, *x.shape[2:])
    if per_head:
        x = jnp.moveaxis(x, 3, 0)  # [N, B, n_blocks, L, ...]
        return jnp.swapaxes(x, 1, 2).reshape(-1, x.shape[1], 1, size, *x.shape[4:])
    return jnp.moveaxis(x, (1, 3), (0, 2))


def _out_of_blocks(x: Array, length: int, per_head: bool) -> Array:
    """The inverse of `_in_blocks`."""
    size = x.shape[3]
    if per_head:
        x = x.reshape(-1, -(-length // size), x.shape[1], *x.shape[3:])
        x = jnp.moveaxis(jnp.swapaxes(x, 1, 2), 0, 3)
    else:
        x = jnp.moveaxis(x, (0, 2), (1, 3))
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


class _Side(NamedTuple):
    """Queries or keys: their arrays in blocks, and where the blocks stand."""

    arrays: tuple[Array, ...]
    segments: Int[Array, "n_blocks B 1 L"] | None
    length: int
    size: int

    @property
    def n_blocks(self) -> int:
        return -(-self.length // self.size)

    def at(self, block: Int[Array, " W"] | Int[Array, ""]) -> _Some:
        """What stands in one block or several; beyond the last there is nothing."""
        block = jnp.atleast_1d(block)

        def pick(x, block=block):  # [W, B, N, L, ...] -> [B, N, W * L, ...]
            x = jnp.moveaxis(x.at[block].get(mode="clip"), 0, 2)
            return x.reshape(*x.shape[:2], -1, *x.shape[4:])

        exists = block < self.arrays[0].shape[0]
        place = (block % self.n_blocks)[:, None] * self.size + jnp.arange(self.size)
        place = jnp.where(exists[:, None], place, self.length).ravel()
        ids = None
        if self.segments is not None:
            ids = pick(self.segments, block % self.n_blocks)[:, 0]
        head = block[0] // self.n_blocks
        return _Some(tuple(map(pick, self.arrays)), place, place < self.length, ids, head)


class _Some(NamedTuple):
    """Some positions of queries or of keys."""

    arrays: tuple[Array, ...]  # [B, N, I, ...]
    position: Int[Array, " I"]
    exists: Bool[Array, " I"]
    segment: Int[Array, "B I"] | None
    head: Int[Array, ""]  # whose blocks they are, where heads have masks of their own


def _sides(layout: Layout, queries, keys, segments) -> tuple[_Side, _Side]:
    """Both sides of arrays `[B, T, N, ...]` and `[B, S, N, ...]`."""

    def side(arrays, ids, size):
        length = arrays[0].shape[1]
        arrays = tuple(_in_blocks(x, size, layout.per_head) for x in arrays)
        ids = None if ids is None else _in_blocks(ids[:, :, None], size, False)
        return _Side(arrays, ids, length, size)

    sizes = (layout.block_q, layout.block_k)
    return tuple(map(side, (queries, keys), segments, sizes))


def _visible(layout: Layout, query: _Some, key: _Some) -> Bool[Array, "#B 1 Q K"]:
    mask = query.exists[:, None] & key.exists
    if layout.causal:
        mask = mask & (key.position <= query.position[:, None])
    mask = mask[None, None]
    if query.segment is not None:
        same = query.segment[:, None, :, None] == key.segment[:, None, None, :]
        mask = mask & same & (key.segment != 0)[:, None, None, :]
    return mask


def _scores(q: Float[Array, "B N Q H"], k: Float[Array, "B N K H"]) -> Float[Array, "B N Q K"]:
    product = jnp.einsum("bnqh,bnkh->bnqk", q, k, preferred_element_type=jnp.float32)
    return product / math.sqrt(q.shape[-1])


def _dropout(layout: Layout, query: _Some, key: _Some, rng) -> Float[Array, "B N Q K"] | float:
    if layout.dropout == 0.0:
        return 1.0
    batch, n_heads = query.arrays[0].shape[:2]
    head = jnp.arange(n_heads)[:, None, None] + (query.head if layout.per_head else 0)
    address = jnp.arange(batch)[:, None, None, None], head, query.position[:, None], key.position
    return dropout_multiplier(rng, layout.dropout, *address)


def _by_parts(rows: blocks.Rows, function: Callable, sides: tuple[_Side, _Side]) -> tuple:
    """`function(row, entries)` of every part of every row, `[P, ...]`, and the parts of each row.

    Entries are padded with one that is beyond the last block.
    """
    own, other = sides
    *batch, size = own.arrays[0].shape[1:4]
    n_scores = math.prod(batch) * size * other.size
    fit = SCORES_AT_ONCE.get(jax.default_backend(), SCORES_AT_ONCE["gpu"]) // n_scores
    width = blocks.width_of_least_cost(rows, max(1, fit))
    parts = blocks.cut(rows, width)
    nothing = len(other.arrays[0])
    offset = parts.row // own.n_blocks * other.n_blocks  # of the head's blocks among all
    entries = blocks.padded_entries(rows, parts, width, nothing)
    entries = np.where(entries < nothing, entries + offset[:, None], nothing)
    operands = jnp.asarray(parts.row), jnp.asarray(entries)
    n_at_once = max(1, fit // width)
    if n_at_once >= len(parts.row):
        results = jax.vmap(function)(*operands)
    else:
        results = lax.map(lambda x: function(*x), operands, batch_size=n_at_once)
    return results, parts.per_row


def _forward_arrays(layout, q, k, v, segments, rng):
    """The attended values and, in blocks, the largest score and the sum of `exp(s - largest)`."""
    queries, keys = _sides(layout, (q,), (k, v), segments)

    def attend(row, entries) -> Softmax:
        query, key = queries.at(row), keys.at(entries)
        (q,), (k, v) = query.arrays, key.arrays
        mask = _visible(layout, query, key)
        scores = jnp.where(mask, _scores(q, k), HIDDEN)
        top = jnp.max(scores, axis=-1)
        weights = jnp.where(mask, jnp.exp(scores - top[..., None]), 0.0)
        total = jnp.sum(weights, axis=-1)
        weights = (weights * _dropout(layout, query, key, rng)).astype(v.dtype)
        acc = jnp.einsum("bnqk,bnkv->bnqv", weights, v, preferred_element_type=jnp.float32)
        return Softmax(acc, top, total)

    rows = layout.rows(layout.block_q, layout.block_k)
    state = blocks.merge_softmax(*_by_parts(rows, attend, (queries, keys)))
    out = state.acc / jnp.where(state.total > 0, state.total, 1.0)[..., None]
    out = _out_of_blocks(out, layout.n_queries, layout.per_head).astype(v.dtype)
    return out, state.top, state.total


def _backward_arrays(layout, q, k, v, segments, rng, out, top, total, d_out):
    # D_i = sum_j P_ij dP_ij = dO_i . O_i, so that no row of P is ever needed whole.
    dot = mean_product(d_out, out)[..., 0] * out.shape[-1]
    queries, keys = _sides(layout, (q, d_out, dot), (k, v), segments)
    queries = queries._replace(arrays=(*queries.arrays, top, total))

    def differentiate(query: _Some, key: _Some):
        """The gradients that some queries and some keys have of each other."""
        (q, d_out, dot, top, total), (k, v) = query.arrays, key.arrays
        mask = _visible(layout, query, key)
        # Where nothing was hidden from it, no score exceeds the maximum but by rounding.
        scores = jnp.minimum(_scores(q, k) - top[..., None], 0.0)
        divisor = jnp.where(total > 0, total, 1.0)[..., None]
        weights = jnp.where(mask, jnp.exp(scores) / divisor, 0.0)
        kept = _dropout(layout, query, key, rng)
        f32 = dict(preferred_element_type=jnp.float32)
        d_weights = jnp.einsum("bnqv,bnkv->bnqk", d_out, v, **f32) * kept
        d_scores = weights * (d_weights - dot[..., None]) / math.sqrt(q.shape[-1])
        d_scores = d_scores.astype(q.dtype)
        dq = jnp.einsum("bnqk,bnkh->bnqh", d_scores, k, **f32)
        dk = jnp.einsum("bnqk,bnqh->bnkh", d_scores, q, **f32)
        weights = (weights * kept).astype(v.dtype)
        dv = jnp.einsum("bnqk,bnqv->bnkv", weights, d_out, **f32)
        return dq, (dk, dv)

    # The compiler drops the half of each that is not asked for.
    def by_query(row, entries):
        return differentiate(queries.at(row), keys.at(entries))[0]

    def by_key(column, entries):
        return differentiate(queries.at(entries), keys.at(column))[1]

    sizes = (layout.block_q, layout.block_k)
    dq = blocks.merge_sums(*_by_parts(layout.rows(*sizes), by_query, (queries, keys)))
    dk, dv = blocks.merge_sums(*_by_parts(layout.columns(*sizes), by_key, (keys, queries)))
    return tuple(
        _out_of_blocks(dx, x.shape[1], layout.per_head).astype(x.dtype)
        for dx, x in ((dq, q), (dk, k), (dv, v))
    )
