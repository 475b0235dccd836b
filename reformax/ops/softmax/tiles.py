"""FlashAttention in array operations, tile by tile, for ops without a T x S matrix.

A tile is a block of queries and a block of keys. FlashAttention (Dao et al. 2022) accumulates the
tiles of a row with a running maximum and sum (algorithm 2). Its gradient computes the logits again
from the maximum, the sum and the output (algorithm 4). `Visits` lists the tiles. Other tiles cost
nothing in either pass: causal attention visits the tiles up to the diagonal.

Letters besides those of `reformax.ops.base`: b examples and n heads of a group, Q queries and K
keys of a tile, I and J the blocks of queries and of keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from reformax.derivatives import CustomDerivatives, tangent_of
from reformax.devices import varying_as
from reformax.ops.calls.call import Call
from reformax.ops.masking.visibility import Side, Visibility
from reformax.ops.numerics import row_blocks
from reformax.ops.numerics.first_order import first_order
from reformax.ops.numerics.logits import Logits
from reformax.ops.numerics.row_blocks import (
    Group,
    RowBlock,
    add_bias_tile,
    add_rows,
    bias_tile,
    block_at,
    ids_of,
    largest_divisor,
    over_groups,
    put_row_statistics,
    put_rows,
    row_statistics,
    rows,
)
from reformax.ops.softmax.block_lists import BlockInputs, FullLayout
from reformax.ops.softmax.dropout import dropout_mask
from reformax.ops.softmax.learned_sinks import d_sinks, with_sinks
from reformax.ops.softmax.online import Softmax, lowest, nonzero, without_nan

# Logits of a tile, of all heads that a GPU computes together: several kernels write and read them,
# and more logits at a time amortize the launches.
LOGITS_AT_A_TIME = 2**25


class Tiling(NamedTuple):
    """The static part of a call: its tiles, and what each tile computes."""

    query_size: int  # queries of a block
    key_size: int  # keys of a block
    causal: bool  # whether a key is hidden from the queries before it
    logits: Logits  # how products of queries and keys become logits; with a scale
    dropout: float = 0.0
    exclude_self: bool = False  # whether a key is hidden from the query of its own position too
    # The number of heads where they are folded into the axis of examples, because each has another
    # order. Each example then has its own visits. 0: heads are not folded.
    n_folded: int = 0

    @property
    def rule(self) -> Visibility:
        """Which keys a query sees."""
        return Visibility(causal=self.causal, exclude_self=self.exclude_self)


def tiling_of(
    call: Call, q: Array, k: Array, query_size: int, key_size: int, **options: Any
) -> Tiling:
    """The tiling of a call, of blocks of at most these sizes."""
    sizes = min(query_size, q.shape[1]), min(key_size, k.shape[1])
    return Tiling(*sizes, call.causal, call.logits.for_size(q.shape[-1]), call.dropout, **options)


class Visits(NamedTuple):
    """The blocks of keys for each block of queries, or vice versa: `index[start[i]:stop[i]]`.

    The first axis is heads, of size 1 where all heads have the same blocks. With `Tiling.n_folded`
    it is examples. Without an `index`, the blocks are `start[i]` to `stop[i] - 1`.
    """

    start: Int[Array, "#N I"]
    stop: Int[Array, "#N I"]
    index: Int[Array, "#N P"] | None = None

    def loop(
        self, tiling: Tiling, group: Group, i: Any, body: Callable[[Any, Any], Any], carry: Any
    ) -> Any:
        """`carry = body(j, carry)` over the blocks j of block `i`."""
        row = group.batch if tiling.n_folded else group.head
        row = row if self.start.shape[0] > 1 else 0
        each = body
        if self.index is not None:

            def each(entry, carry):
                return body(self.index[row, entry], carry)

        return lax.fori_loop(self.start[row, i], self.stop[row, i], each, carry)


class TilePlan(NamedTuple):
    """The tiles of a call, by block of queries and by block of keys."""

    by_query: Visits
    by_key: Visits


def every_tile(tiling: Tiling, n_queries: int, n_keys: int) -> TilePlan:
    """All tiles; of a causal call, those in which some query sees some key."""
    layout = FullLayout(n_queries, n_keys, tiling.causal, 0.0, exclude_self=tiling.exclude_self)
    sizes = tiling.query_size, tiling.key_size
    # The first blocks of keys that each block of queries sees; the last blocks that see each.
    seen, seeing = layout.rows(*sizes).count, layout.columns(*sizes).count
    end = np.full_like(seeing, len(seen))
    ranges = (np.zeros_like(seen), seen), (end - seeing, end)
    return TilePlan(*(Visits(*(jnp.asarray(x, jnp.int32)[None] for x in pair)) for pair in ranges))


def groups(tiling: Tiling, n_batch: int, n_heads: int, per_head: bool = False) -> tuple[int, int]:
    """The numbers of examples and heads that are computed together, divisors of all of them.

    Heads are divided first.
    """
    fit = row_blocks.LOGITS_IN_CACHE if jax.default_backend() == "cpu" else LOGITS_AT_A_TIME
    if tiling.n_folded:
        return 1, n_heads
    fit //= tiling.query_size * tiling.key_size
    heads = 1 if per_head else largest_divisor(n_heads, fit // n_batch)
    return n_batch if heads > 1 else largest_divisor(n_batch, fit), heads


# The arithmetic of a tile.


def _sides(x: BlockInputs, group: Group, queries: RowBlock, keys: RowBlock) -> tuple[Side, Side]:
    """A tile's queries, arrays `[#b, 1, Q, 1]`, and its keys, `[#b, 1, 1, K]`."""

    def side(order, ids, block: RowBlock, axis: int) -> Side:
        position = block.position[None] if order is None else ids_of(order, group, block)
        segment_id = None if ids is None else ids_of(ids, group, block)
        exists = None if block.in_block is None else block.in_block[None]
        each = position, segment_id, exists
        return Side(*(None if y is None else jnp.expand_dims(y, (1, axis)) for y in each))

    of_queries = side(x.query_order, x.query_segment_ids, queries, 3)
    return of_queries, side(x.key_order, x.key_segment_ids, keys, 2)


def logits(
    tiling: Tiling,
    x: BlockInputs,
    group: Group,
    queries: RowBlock,
    keys: RowBlock,
    q: Float[Array, "b n Q H"],
    k: Float[Array, "b n K H"],
) -> Float[Array, "b n Q K"]:
    """The logits of a tile, minus infinity where a query does not see a key."""
    bias = x.bias
    if bias is not None:
        bias = lax.dynamic_slice(bias, *bias_tile(bias.shape, group, queries, keys))
    s = tiling.logits.of("bnqh,bnkh->bnqk", q, k, bias)
    mask = tiling.rule.sees(*_sides(x, group, queries, keys))
    return s if mask is None else jnp.where(mask, s, -jnp.inf)


def tile_dropout_mask(
    tiling: Tiling, x: BlockInputs, group: Group, queries: RowBlock, keys: RowBlock
) -> Float[Array, "b n Q K"] | float:
    """The dropout mask of a tile's weights."""
    if tiling.dropout == 0.0:
        return 1.0
    example = group.batch + jnp.arange(group.n_batch)[:, None, None, None]
    head = group.head + jnp.arange(group.n_heads)[None, :, None, None]
    if tiling.n_folded:
        example, head = jnp.divmod(example, tiling.n_folded)
    positions = (side.position for side in _sides(x, group, queries, keys))
    return dropout_mask(x.seed, tiling.dropout, example, head, *positions)


class TiledResults(NamedTuple):
    """The results of a forward pass. The backward pass needs them and the inputs."""

    out: Float[Array, "B T N V"]
    row_max: Float[Array, "B N T"]  # the largest logit of each row
    row_sum: Float[Array, "B N T"]  # the sum of `exp(logit - row_max)`

    def with_rows(self, state: Softmax, group: Group, block: RowBlock) -> TiledResults:
        """Writes the rows of a block from their complete softmax; zeros without visible keys."""
        return TiledResults(
            put_rows(self.out, state.output(), group, block),
            put_row_statistics(self.row_max, state.row_max, group, block),
            put_row_statistics(self.row_sum, state.row_sum, group, block),
        )


def no_results(x: BlockInputs) -> TiledResults:
    """Zeros, into which `with_rows` writes."""
    statistic = jnp.zeros((x.q.shape[0], x.q.shape[2], x.q.shape[1]), x.dtype)
    out = jnp.zeros((*x.q.shape[:3], x.v.shape[3]), x.v.dtype)
    return varying_as(x, TiledResults(out, statistic, statistic))


def tile_softmax(
    tiling: Tiling,
    x: BlockInputs,
    group: Group,
    queries: RowBlock,
    keys: RowBlock,
    q: Float[Array, "b n Q H"],
) -> Softmax:
    """The softmax of one tile."""
    k, v = rows(x.k, group, keys), rows(x.v, group, keys)
    s = logits(tiling, x, group, queries, keys, q, k)
    row_max = jnp.max(s, axis=-1, initial=lowest(s.dtype))
    p = jnp.exp(s - row_max[..., None])
    row_sum = jnp.sum(p, axis=-1)
    p = p * tile_dropout_mask(tiling, x, group, queries, keys)
    acc = jnp.einsum("bnqk,bnkv->bnqv", p.astype(v.dtype), v, preferred_element_type=x.dtype)
    return Softmax(acc, row_max, row_sum)


# Both passes.


def forward(tiling: Tiling, x: BlockInputs, visits: Visits) -> TiledResults:
    """Attention over the tiles in `visits`, the blocks of keys for each block of queries.

    This is algorithm 2 of Dao et al. with the loops swapped, so that each row is written once.
    """
    n_batch, length, n_heads, _ = x.q.shape
    n_keys = x.k.shape[1]

    def query_block(group, i, results):
        queries = block_at(i * tiling.query_size, tiling.query_size, length)
        q = rows(x.q, group, queries)

        def key_block(j, state):
            keys = block_at(j * tiling.key_size, tiling.key_size, n_keys)
            return state.merge(tile_softmax(tiling, x, group, queries, keys, q))

        shape = group.n_batch, group.n_heads, tiling.query_size
        state = varying_as(x, Softmax.empty(shape, x.v.shape[3], x.dtype))
        state = visits.loop(tiling, group, i, key_block, state)
        return results.with_rows(state, group, queries)

    sizes = groups(tiling, n_batch, n_heads, visits.start.shape[0] > 1)
    n_blocks = visits.start.shape[1]
    return over_groups(sizes, n_batch, n_heads, n_blocks, query_block, no_results(x))


def backward(
    tiling: Tiling,
    x: BlockInputs,
    visits: Visits,
    results: TiledResults,
    d_out: Float[Array, "B T N V"],
) -> tuple[Array, Array, Array, Array | None]:
    """The gradients of q, k, v and the bias (Dao et al., algorithm 4).

    Args:
      tiling, x: as in `forward`.
      visits: the blocks of queries for each block of keys.
      results: of the forward pass.
    """
    n_batch, length, n_heads, _ = x.q.shape
    n_keys = x.k.shape[1]
    f32 = dict(preferred_element_type=x.dtype)
    # D_i = sum_j P_ij dP_ij = dO_i . O_i.
    dot = jnp.einsum("btnv,btnv->bnt", d_out, results.out, **f32)
    inverse_sum = 1.0 / nonzero(results.row_sum)

    def key_block(group, j, written):
        *sums, dk_all, dv_all = written
        keys = block_at(j * tiling.key_size, tiling.key_size, n_keys)
        k, v = rows(x.k, group, keys), rows(x.v, group, keys)

        def query_block(i, sums):
            dq_all, d_bias, dk, dv = sums
            queries = block_at(i * tiling.query_size, tiling.query_size, length)
            q, d = rows(x.q, group, queries), rows(d_out, group, queries)
            row_max, row_inverse, row_dot = (
                row_statistics(y, group, queries)[..., None]
                for y in (results.row_max, inverse_sum, dot)
            )
            s = logits(tiling, x, group, queries, keys, q, k)
            # A logit exceeds the maximum by rounding alone.
            p = jnp.exp(jnp.minimum(s - row_max, 0)) * row_inverse
            p = jnp.where(s == -jnp.inf, 0, p)  # of a query of NaN too
            mask = tile_dropout_mask(tiling, x, group, queries, keys)
            dp = jnp.einsum("bnqv,bnkv->bnqk", d, v, **f32)
            # The product with a hidden value may have overflowed.
            ds = jnp.where(p == 0, 0, p * (dp * mask - row_dot))
            p = (p * mask).astype(v.dtype)
            dv = dv + jnp.einsum("bnqk,bnqv->bnkv", p, d, **f32)
            if d_bias is not None:
                d_bias = add_bias_tile(d_bias, ds, group, queries, keys)
            if tiling.logits.soft_cap is not None:
                capped = tiling.logits.of("bnqh,bnkh->bnqk", q, k)
                ds = tiling.logits.before_cap(ds, capped)
            ds = ds.astype(q.dtype)
            dk = dk + jnp.einsum("bnqk,bnqh->bnkh", ds, without_nan(q), **f32)
            dq = jnp.einsum("bnqk,bnkh->bnqh", ds, k, **f32)
            return add_rows(dq_all, dq * tiling.logits.scale, group, queries), d_bias, dk, dv

        zeros = varying_as(x, [jnp.zeros(y.shape, x.dtype) for y in (k, v)])
        *sums, dk, dv = visits.loop(tiling, group, j, query_block, (*sums, *zeros))
        dk_all = put_rows(dk_all, dk * tiling.logits.scale, group, keys)
        return *sums, dk_all, put_rows(dv_all, dv, group, keys)

    d_bias = None if x.bias is None else jnp.zeros(x.bias.shape, x.dtype)
    dq = jnp.zeros(x.q.shape, x.dtype)
    written = varying_as(x, (dq, d_bias, jnp.zeros_like(x.k), jnp.zeros_like(x.v)))
    sizes = groups(tiling, n_batch, n_heads, visits.start.shape[0] > 1)
    n_blocks = visits.start.shape[1]
    dq, d_bias, dk, dv = over_groups(sizes, n_batch, n_heads, n_blocks, key_block, written)
    return (dq.astype(x.q.dtype), dk, dv, None if d_bias is None else d_bias.astype(x.bias.dtype))


@functools.partial(CustomDerivatives, n_static=2)
def attend(
    forward_pass: Callable[..., TiledResults], tiling: Tiling, x: BlockInputs, plan: TilePlan
) -> Float[Array, "B T N V"]:
    """Softmax attention over the tiles of a plan.

    Args:
      forward_pass: `forward`, or another function of its arguments with the same results.
      tiling, x: as in `forward`.
      plan: the tiles of both passes.
    """
    return with_sinks(forward_pass(tiling, x, plan.by_query), x.sinks)[0]


def _attend_forward(forward_pass, tiling, x, plan):
    results = TiledResults(*with_sinks(forward_pass(tiling, x, plan.by_query), x.sinks))
    return results.out, (x, plan, results)


def _attend_backward(forward_pass, tiling, residuals, d_out):
    x, plan, results = residuals
    results, d_out = first_order((results, d_out))
    gradients = backward(tiling, x, plan.by_key, results, d_out)
    *of_qkv, d_bias = gradients
    d_x = BlockInputs(*of_qkv, *[None] * 3, bias=d_bias, sinks=d_sinks(results, x.sinks, d_out))
    return d_x, None  # integers have no gradient


def _attend_tangent(forward_pass, tiling, residuals, tangents):
    x, plan, _ = residuals
    return tangent_of(functools.partial(attend.function, forward_pass, tiling), (x, plan), tangents)


attend.define(_attend_forward, _attend_backward, _attend_tangent)


def inputs(call: Call, q: Array, k: Array, v: Array) -> BlockInputs:
    """The arrays of an op's call."""
    return BlockInputs.of(call, q, k, v)._replace(bias=call.bias, sinks=call.sinks)
