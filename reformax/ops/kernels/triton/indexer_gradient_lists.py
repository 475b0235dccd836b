"""The gradient of the indexer's loss for a query, by the list of the keys that it chose.

A program of `kernels.indexer_gradient` has one query: the softmax's sums in one loop over its list,
then the difference, and the gradients of the query's vectors and weights.

Letters as in `kernels.indexer_gradient`; M heads of a part of a group, C keys of a tile of a list.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from reformax.ops.kernels.triton.common import (
    LOG2_E,
    LOWEST,
    hide,
    load,
    matmul,
    recompute_weights,
    tile_side,
    view_rows,
)
from reformax.ops.kernels.triton.indexer import COLUMNS, ROWS, IndexerInputs, IndexerProgram
from reformax.ops.kernels.triton.listed import put_contributions
from reformax.ops.masking.visibility import Side
from reformax.ops.numerics.logits import Logits
from reformax.ops.softmax.online import nonzero

# Keys of a tile of a list, and numbers that are set to zero at a time.
LIST_COLUMNS, ZEROS = 64, 1024
# Bytes of the queries of a part of a group of heads.
MAX_PART_BYTES = 64 * 128 * 2


class KeyRule(NamedTuple):
    """The static settings of the indexer's gradient."""

    causal: bool
    logits: Logits  # how the attention's products become logits
    span: int = 1  # positions of a key, which is seen from the last one on

    def program(self, x: IndexerInputs, batch: Any, columns: int = COLUMNS) -> IndexerProgram:
        return IndexerProgram(x, batch, self.causal, self.span, columns)


class AttentionInputs(NamedTuple):
    """The arrays of the attention that the difference reads."""

    q: Array  # [B, T, N, H]
    k: Array  # [B, S, G, H]
    row_max: Array  # [B, N, T], of `Softmax`
    row_sum: Array
    # [B, T]: the sum of all heads' weights of these keys; None: N, as there are no others
    total: Array | None = None


class ListInputs(NamedTuple):
    """The arrays that a program reads."""

    x: IndexerInputs
    attention: AttentionInputs
    chosen: Array  # [B, T, K]


class GradientOutputs(NamedTuple):
    """The gradients by a chunk of queries; of its keys `difference` or `contributions`."""

    queries: Array  # [B, Q, J, D], of index queries
    weights: Array  # [B, Q, J]
    # [B, Q, F]: the gradient of the scaled scores, of which that of the keys is made.
    difference: Array | None
    # [B, 1, Q, K, D]: what each query adds to the gradients of the keys of its list.
    contributions: Array | None


class _ListedKeys(NamedTuple):
    """A tile of a query's list."""

    slot: Int[Array, " C"]  # the indices in the list
    exists: Array  # whether a slot has a key
    number: Int[Array, " C"]  # the keys' numbers, 0 where there is none
    visible: Array  # whether the query sees them
    rows: Float[Array, "C D"]  # the index keys
    products: Float[Array, "J C"]  # those of the index heads with them
    scores: Float[Array, " C"]  # their scores, eq. 1


class _Heads(NamedTuple):
    """Heads of a query that share a key head."""

    q: Float[Array, "M H"]
    row_max: Float[Array, " M"]
    inverse_sum: Float[Array, " M"]


class _ListProgram(NamedTuple):
    """The program of one query, whose position is 0 where there is none."""

    rule: KeyRule
    inputs: ListInputs
    tiles: IndexerProgram
    batch: Any
    query: Side

    @classmethod
    def located(cls, rule: KeyRule, inputs: ListInputs, row: Any, batch: Any) -> Self:
        """The program of a row of the chunk."""
        x = inputs.x
        tiles, position = rule.program(x, batch), x.start[0] + row
        exists = position < x.queries[0].shape[1]
        position = jnp.where(exists, position, 0)
        ids = None if x.ids is None else x.ids[batch, position]
        return cls(rule, inputs, tiles, batch, Side(position, ids, exists))

    def index_heads(self) -> tuple[Float[Array, "J D"], Float[Array, " J"]]:
        """The vectors and weights of the index heads."""
        (queries,), n = self.inputs.x.queries, self.inputs.x.weights.shape[2]
        head = jnp.arange(tile_side(n), dtype=jnp.int32)
        q = _heads_of(queries, self.batch, self.query.position, head, head < n)
        at = self.batch, self.query.position, jnp.where(head < n, head, 0)
        return q, load(self.inputs.x.weights.at[at], head < n, 0.0)

    @property
    def group(self) -> int:
        """The query heads of a key head."""
        return self.inputs.attention.q.shape[2] // self.inputs.attention.k.shape[2]

    @property
    def n_rows(self) -> int:
        """The heads of a part of a group."""
        q = self.inputs.attention.q
        most = MAX_PART_BYTES // (tile_side(q.shape[3]) * q.dtype.itemsize)
        return max(16, min(most, tile_side(self.group)))

    @property
    def n_parts(self) -> int:
        """The parts of all groups."""
        return -(-self.group // self.n_rows) * self.inputs.attention.k.shape[2]

    def key_head(self, part: Any) -> Any:
        return lax.div(part, jnp.int32(-(-self.group // self.n_rows)))

    def heads(self, part: Any) -> _Heads:
        """The attention's heads of a part of a group."""
        q, _, row_max, row_sum, _ = self.inputs.attention
        per_group, key_head = -(-self.group // self.n_rows), self.key_head(part)
        number = (part - key_head * per_group) * self.n_rows
        number = number + jnp.arange(self.n_rows, dtype=jnp.int32)
        exists = number < self.group
        head = key_head * self.group + jnp.where(exists, number, 0)
        at = self.batch, head, self.query.position
        row_max, row_sum = (load(ref.at[at], exists, 0.0) for ref in (row_max, row_sum))
        inverse = jnp.where(exists, 1.0 / nonzero(row_sum), 0.0)
        return _Heads(_heads_of(q, self.batch, self.query.position, head, exists), row_max, inverse)

    def keys(self, i: Any, heads: tuple[Array, Array]) -> _ListedKeys:
        """A tile of the list, with the scores of the index heads."""
        x, chosen = self.inputs.x, self.inputs.chosen
        slot = i * LIST_COLUMNS + jnp.arange(LIST_COLUMNS, dtype=jnp.int32)
        exists = slot < chosen.shape[2]
        at = self.batch, self.query.position, jnp.where(exists, slot, 0)
        number = load(chosen.at[at], exists, -1)
        exists, number = number >= 0, jnp.maximum(number, 0)
        ids = None if x.key_ids is None else load(x.key_ids.at[self.batch, number], exists, 0)
        visible = self.tiles.sees(self.query, Side(number, ids, exists))
        (keys,), (queries, weights) = x.keys, heads
        width = tile_side(keys.shape[3])
        rows = load(*view_rows(keys, self.batch, number, 0, width, visible), 0.0)
        products = matmul(queries, rows, transpose_b=True)
        scores = jnp.sum(weights[:, None] * jnp.maximum(products, 0.0), axis=0)
        return _ListedKeys(slot, exists, number, visible, rows, products, scores)

    def mean_weights(self, keys: _ListedKeys, alone: _Heads | None) -> Float[Array, " C"]:
        """The mean of all heads' weights; `alone` is the only part."""
        attention = self.inputs.attention
        n_heads, size = attention.q.shape[2:]

        def add(part, total):
            heads = self.heads(part) if alone is None else alone
            at = self.batch, keys.number, self.key_head(part), tile_side(size)
            view = view_rows(attention.k, *at, keys.visible)
            logits = matmul(heads.q, load(*view, 0.0), transpose_b=True)
            logits = hide(self.rule.logits.capped(logits, math.sqrt(size)), keys.visible[None, :])
            row_max = (heads.row_max * LOG2_E)[:, None]
            weights = recompute_weights(logits, row_max, heads.inverse_sum[:, None], size)
            return total + jnp.sum(weights, axis=0)

        total = jnp.zeros((LIST_COLUMNS,), jnp.float32)
        if alone is None:
            total = lax.fori_loop(jnp.int32(0), jnp.int32(self.n_parts), add, total)
        else:
            total = add(jnp.int32(0), total)
        if attention.total is None:
            return total * (1.0 / n_heads)
        return total / nonzero(attention.total[self.batch, self.query.position])

    def softmax_sums(self, heads) -> tuple[Any, Any]:
        """The largest score of the list, and the sum of its softmax."""
        scale = self.inputs.x.softmax_scale

        def step(i, state):
            largest, total = state
            keys = self.keys(i, heads)
            scores = hide(keys.scores, keys.visible)
            new = jnp.maximum(largest, scores)
            total = total * jnp.exp((largest - new) * scale) + jnp.exp((scores - new) * scale)
            return new, total

        state = tuple(jnp.full((LIST_COLUMNS,), x, jnp.float32) for x in (LOWEST, 0.0))
        largest, total = self.over_list(step, state)
        row_max = jnp.max(largest)
        return row_max, jnp.sum(total * jnp.exp((largest - row_max) * scale))

    def over_list(self, step: Callable, state: Any) -> Any:
        n_tiles = -(-self.inputs.chosen.shape[2] // LIST_COLUMNS)
        return lax.fori_loop(jnp.int32(0), jnp.int32(n_tiles), step, state)


def _heads_of(ref, batch, position, head: Int[Array, " M"], exists) -> Float[Array, "M H"]:
    """Rows of some heads at one position of `[B, T, N, H]`."""
    size = ref.shape[3]
    number = jnp.arange(tile_side(size), dtype=jnp.int32)[None, :]
    head = jnp.where(exists, head, 0)[:, None]
    mask = exists[:, None] & (number < size)
    return load(ref.at[batch, position, head, jnp.where(number < size, number, 0)], mask, 0.0)


def _clear_row(difference, batch, row, end) -> None:
    """Sets a row to zero up to the end of the tiles that are read."""

    def clear(i, _):
        position = i * ZEROS + jnp.arange(ZEROS, dtype=jnp.int32)
        zeros = jnp.zeros((ZEROS,), difference.dtype)
        # The interpreter also writes where it masks, which nothing reads.
        pltriton.store(difference.at[batch, row, position], zeros, mask=position < end)

    lax.fori_loop(jnp.int32(0), lax.div(end + (ZEROS - 1), jnp.int32(ZEROS)), clear, None)


def lists_kernel(
    inputs: ListInputs, out: GradientOutputs, *, rule: KeyRule, barrier: Callable[[], None]
) -> None:
    """The gradients of a query's index heads, and what it adds to those of its keys.

    `barrier` is between the zeros of a row and what is written over them.
    """
    row, batch = pl.program_id(0), pl.program_id(1)
    program = _ListProgram.located(rule, inputs, row, batch)
    scale = inputs.x.softmax_scale
    if out.difference is not None:
        end = program.tiles.end(lax.div(row, jnp.int32(ROWS))) * COLUMNS
        _clear_row(out.difference, batch, row, end)
        barrier()
    heads = program.index_heads()
    row_max, row_sum = program.softmax_sums(heads)
    alone = program.heads(jnp.int32(0)) if program.n_parts == 1 else None
    learns = True
    if inputs.attention.total is not None:
        # A query that gives these keys no weight has nothing to learn.
        learns = inputs.attention.total[batch, program.query.position] > 0

    def step(i, sums):
        dq, dw = sums
        keys = program.keys(i, heads)
        # A score may exceed the maximum by rounding, which for large scores is not small.
        scores = jnp.minimum(keys.scores - row_max, 0.0) * scale
        weights = jnp.exp(hide(scores, keys.visible)) * (1.0 / nonzero(row_sum))
        slope = weights - program.mean_weights(keys, alone)
        # A row that sees NaN has no gradient.
        slope = jnp.where((slope == slope) & learns, slope, 0.0)
        active = jnp.where(keys.products > 0, slope[None, :], 0.0)
        if out.difference is None:
            weighted = (active * (heads[1] * scale)[:, None]).T.astype(keys.rows.dtype)
            at = batch, 0, row
            put_contributions(out.contributions, at, keys, matmul(weighted, heads[0]))
        else:
            position = jnp.where(keys.visible, keys.number, out.difference.shape[2])
            view = out.difference.at[batch, row, position]
            pltriton.store(view, slope.astype(out.difference.dtype), mask=keys.visible)
        return dq + matmul(active.astype(keys.rows.dtype), keys.rows), dw + active * keys.products

    sums = jnp.zeros(heads[0].shape, jnp.float32)
    sums = sums, jnp.zeros((len(heads[1]), LIST_COLUMNS), jnp.float32)
    dq, dw = program.over_list(step, sums)
    n_heads, size = out.queries.shape[2:]
    head, number = (jnp.arange(n, dtype=jnp.int32) for n in dq.shape)
    mask = (head < n_heads)[:, None] & (number < size)[None, :]
    view = out.queries.at[
        batch,
        row,
        jnp.where(head < n_heads, head, n_heads)[:, None],
        jnp.where(number < size, number, size)[None, :],
    ]
    pltriton.store(view, dq * (heads[1] * scale)[:, None], mask=mask)
    view = out.weights.at[batch, row, jnp.where(head < n_heads, head, n_heads)]
    pltriton.store(view, jnp.sum(dw, axis=1) * scale, mask=head < n_heads)
