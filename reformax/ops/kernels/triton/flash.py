"""The bodies of flash attention: one forward and two backward, over the blocks of any program.

    forward     O = softmax(Q K^T / sqrt(H)) V    Dao 2023, "FlashAttention-2", algorithm 1
    d_queries   dQ = dS K                         algorithm 2, by rows
    d_keys      dK = dS^T Q and dV = P^T dO       algorithm 2, by columns

The backward pass recomputes logits, by rows and by columns: each row of a gradient has one writer,
so sums have one order and need no atomics. A query of NaN makes NaN the gradients of all keys and
values in the tiles that it visits, and in array operations of those that it sees: here that would
take another pass over the queries.

A `Program` holds a tile of one side on the chip, and visits blocks of the other side. It says which
blocks these are, where their rows are in memory, and which keys are visible. What follows the loop
is the kernel's: it divides the softmax by its sum, or stores it for another kernel to continue.

Letters as in `reformax.ops.base`; I queries and J keys of a tile, L positions of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax.numpy as jnp
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Bool, Float, Int

from reformax.derivatives import CustomDerivatives
from reformax.ops.kernels.triton.common import (
    LOG2_E,
    QueryRows,
    column,
    empty_softmax,
    hide,
    line,
    load,
    matmul,
    recompute_weights,
    statistics_step,
    tile_product,
    tile_side,
    view_rows,
)
from reformax.ops.masking.visibility import is_token
from reformax.ops.numerics.first_order import first_order
from reformax.ops.numerics.logits import Logits
from reformax.ops.softmax.learned_sinks import d_sinks, with_sinks
from reformax.ops.softmax.online import Softmax, nonzero

# With dropout, most queries of a step of `d_keys` beside 64 keys: 128 spill 512 bytes a thread.
QUERIES_OF_DROPOUT = 64

# A program's own NamedTuple of `[L]`: positions, and whatever decides who sees whom.
Block = Any
Carry = TypeVar("Carry")


class Program:
    """A running program: what it visits and sees, and how it reads and writes.

    Attributes:
      x: references to the arrays of the call, among them `q`, `k` and `v`.
      row: references to what the backward pass reads of each query; None in the forward pass.
      logits: how products become logits; their scale is 1 / sqrt(H).
      zero_padding: whether padding is zeros in memory. Otherwise it may be NaN.
    """

    x: Any
    row: QueryRows | None
    batch: Any
    logits: Logits
    zero_padding = False

    @property
    def unit(self) -> float:
        """The factor between a kernel's logits, which are unscaled products, and those outside."""
        return math.sqrt(self.x.q.shape[3])

    @property
    def scale(self) -> float:
        """1 / sqrt(H), the factor that unscaled products and sums of `d_queries` and `d_keys` lack.

        A kernel stores the maxima and gradients of rows with it.
        """
        return 1.0 / self.unit

    def over_keys(self, queries: Block, body: Callable[[Block, Carry], Carry], carry: Carry):
        """`carry = body(keys, carry)` over the blocks of keys that the program's queries see."""
        raise NotImplementedError

    def over_queries(self, keys: Block, body: Callable[[Block, Carry], Carry], carry: Carry):
        """`carry = body(queries, carry)` over the blocks of queries that see the program's keys."""
        raise NotImplementedError

    def visible(self, queries: Block, keys: Block) -> Bool[Array, "I J"] | None:
        """Which keys each query sees, or both transposed; None: all keys."""
        raise NotImplementedError

    def dropped(self, queries: Block, keys: Block) -> Float[Array, "I J"] | float:
        """The dropout mask of the weights, or its transpose; 1 without dropout."""
        raise NotImplementedError

    def address(
        self, block: Block
    ) -> tuple[Int[Array, " L"], Int[Array, "*L"], Bool[Array, " L"] | None]:
        """The positions of a block's rows, their heads, and which rows exist; None: all.

        A row that does not exist has a position out of bounds: the interpreter also writes where it
        masks.
        """
        raise NotImplementedError

    def rows(self, ref: Any, block: Block, included: Array | None = None) -> Float[Array, "L H"]:
        """A block's rows of `[B, T, N, H]`, H padded; zeros where none exists or is `included`."""
        width = tile_side(ref.shape[3])
        view, mask = self.view(ref, block, width)
        if included is not None:
            shape = included.shape[0], width
            included = included[:, None] if mask is None else mask & included[:, None]
            mask = jnp.broadcast_to(included, shape)
        return load(view, mask, 0.0)

    def tokens(self, ref: Any, block: Block) -> Float[Array, "L H"]:
        """`rows` with zeros at padding too, for products whose weights may be 0 there.

        Padding may be NaN, and 0 times NaN is NaN.
        """
        masked = not self.zero_padding and block.segment is not None
        return self.rows(ref, block, is_token(block.segment) if masked else None)

    def put_rows(self, ref: Any, block: Block, value: Float[Array, "L H"]) -> None:
        """Writes a block's rows of `[B, T, N, H]`."""
        view, mask = self.view(ref, block, value.shape[1])
        pltriton.store(view, value.astype(ref.dtype), mask=mask)

    def view(self, ref: Any, block: Block, width: int) -> tuple[Any, Bool[Array, "L J"] | None]:
        """A view of a block's rows, and its mask."""
        position, head, exists = self.address(block)
        head = head[:, None] if jnp.ndim(head) else head
        return view_rows(ref, self.batch, position, head, width, exists)

    def numbers(self, ref: Any, block: Block, other: float = 0.0) -> Float[Array, " L"]:
        """A block's entries of `[B, N, T]`; `other` where none exists."""
        position, head, exists = self.address(block)
        return load(ref.at[self.batch, head, position], exists, other)

    def put_numbers(self, ref: Any, block: Block, value: Float[Array, " L"]) -> None:
        """Writes a block's entries of `[B, N, T]`."""
        position, head, exists = self.address(block)
        pltriton.store(ref.at[self.batch, head, position], value.astype(ref.dtype), mask=exists)

    def put_softmax(self, out: Softmax, queries: Block, state: Softmax) -> None:
        """Writes the values of a finished softmax, and each row's largest logit and sum."""
        self.put_rows(out.acc, queries, state.acc / nonzero(state.row_sum)[:, None])
        self.put_numbers(out.row_max, queries, state.row_max * self.scale)
        self.put_numbers(out.row_sum, queries, state.row_sum)

    def statistics(self, ref: Any, queries: Block) -> Float[Array, " L"]:
        """A block's entries of an array of `row`."""
        return self.numbers(ref, queries)

    def gradient(self, queries: Block) -> tuple[Float[Array, "L V"], Float[Array, " L"]]:
        """`d_out` and `dot` of a block of queries."""
        row = self.row
        return self.rows(row.d_out, queries), self.statistics(row.dot, queries)

    def softmax(self, queries: Block) -> tuple[Float[Array, " L"], Float[Array, " L"] | None]:
        """`row_max`, times `LOG2_E`, and `inverse_sum` of a block of queries."""
        row_max, inverse_sum = self.row.row_max, self.row.inverse_sum
        row_max = self.statistics(row_max, queries) * LOG2_E
        return row_max, None if inverse_sum is None else self.statistics(inverse_sum, queries)


def forward(program: Program, queries: Block, state: Softmax | None = None) -> Softmax:
    """The accumulator, the running maximum of unscaled logits, and the normalizer of some queries.

    Args:
      state: the softmax of earlier keys; None: there are none.
    """
    x, query = program.x, column(queries)
    scale = LOG2_E / math.sqrt(x.q.shape[3])
    q = program.tokens(x.q, queries)
    if state is None:
        state = empty_softmax(q.shape[0], x.v.shape[3])

    def visit(keys: Block, state: Softmax) -> Softmax:
        acc, row_max, row_sum = state
        k, v = program.rows(x.k, keys), program.tokens(x.v, keys)
        key = line(keys)
        logits, dropped = _logits(program, q, k, query, key), program.dropped(query, key)
        row_max, row_sum, p, decay = statistics_step(row_max, row_sum, logits, scale)
        p = p * dropped
        return Softmax(acc * decay[:, None] + matmul(p.astype(v.dtype), v), row_max, row_sum)

    return program.over_keys(queries, visit, state)


def d_queries(
    program: Program,
    queries: Block,
    q: Float[Array, "I H"],
    dq: Float[Array, "I H"] | None = None,
    put_keys: Callable[[Block, Float[Array, "J H"], Float[Array, "J V"]], None] | None = None,
) -> Float[Array, "I H"]:
    """The gradient of a tile of queries, times sqrt(H), added to `dq`.

    `put_keys` takes each block of keys, and what the tile adds to the gradients of its keys, times
    sqrt(H), and of its values.
    """
    x, query = program.x, column(queries)
    d_out, dot = program.gradient(queries)
    row_max, inverse_sum = program.softmax(queries)

    def visit(keys: Block, dq: Array) -> Array:
        k, v = program.tokens(x.k, keys), program.tokens(x.v, keys)
        key = line(keys)
        logits = _logits(program, q, k, query, key)
        p = recompute_weights(logits, column(row_max), column(inverse_sum), x.q.shape[3])
        dropped = program.dropped(query, key)
        dp = matmul(d_out, v, transpose_b=True) * dropped
        ds = program.logits.before_cap(p * (dp - column(dot)), logits, program.unit)
        if put_keys is not None:
            dk = tile_product(ds.astype(q.dtype), q, "00")
            put_keys(keys, dk, tile_product((p * dropped).astype(d_out.dtype), d_out, "00"))
        return dq + matmul(ds.astype(k.dtype), k)

    dq = jnp.zeros(q.shape, jnp.float32) if dq is None else dq
    return program.over_keys(queries, visit, dq)


def d_keys(program: Program, keys: Block) -> tuple[Float[Array, "J H"], Float[Array, "J V"]]:
    """The gradients of a tile of keys, times sqrt(H), and of its values."""
    x, key = program.x, column(keys)
    k, v = program.rows(x.k, keys), program.tokens(x.v, keys)

    def visit(queries: Block, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        dk, dv = sums
        q, (d_out, dot) = program.tokens(x.q, queries), program.gradient(queries)
        query = line(queries)
        logits = _logits(program, k, q, query, key)
        # Loads after the product take fewer registers.
        row_max, inverse_sum = program.softmax(queries)
        p = recompute_weights(logits, line(row_max), line(inverse_sum), x.q.shape[3])
        dropped = program.dropped(query, key)
        dv = dv + matmul((p * dropped).astype(d_out.dtype), d_out)
        dp = matmul(v, d_out, transpose_b=True) * dropped
        ds = program.logits.before_cap(p * (dp - line(dot)), logits, program.unit)
        return dk + matmul(ds.astype(q.dtype), q), dv

    sums = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    return program.over_queries(keys, visit, sums)


def _logits(
    program: Program, rows: Float[Array, "I H"], columns: Float[Array, "J H"], query, key
) -> Float[Array, "I J"]:
    """The unscaled logits of a tile. The exponents of the weights scale them by 1 / sqrt(H)."""
    mask = program.visible(query, key)
    logits = program.logits.capped(matmul(rows, columns, transpose_b=True), program.unit)
    return hide(logits, mask)


def attention(forward: Callable, backward: Callable, with_sums: bool = False) -> Callable:
    """`attend(static, interpret, x, sinks=None) -> out`, with gradients.

    `x` is a NamedTuple of the arrays of a call, q, k and v first. Gradients are of these and of the
    `sinks [N]` of `softmax.learned_sinks`, where there are any.

    Args:
      forward: `(static, x, interpret=) -> results`, the attended values, and for each row the
        largest logit and the sum of `exp(logit - largest)`, `[B, N, T]`.
      backward: `(static, x, results, d_out, interpret=) -> (dq, dk, dv)`.
      with_sums: whether `attend` returns `(out, row_sum)`. The sum has no gradient.
    """

    def run(static, interpret, sinks, x):
        sinks, *qkv = first_order((sinks, *x[:3]))
        x = type(x)(*qkv, *x[3:])
        results = with_sinks(forward(static, x, interpret=interpret), sinks)
        out = (results[0], results[2]) if with_sums else results[0]
        return out, (sinks, x, results)

    def differentiate(static, interpret, residuals, cotangents):
        sinks, x, results = residuals
        d_out = cotangents[0] if with_sums else cotangents
        results, d_out = first_order((results, d_out))
        gradients = backward(static, x, results, d_out, interpret=interpret)
        return d_sinks(results, sinks, d_out), type(x)(*gradients, *[None] * (len(x) - 3))

    derivatives = CustomDerivatives(lambda *args: run(*args)[0], n_static=2)
    derivatives.define(run, differentiate)

    def attend(static, interpret, x, sinks=None):
        return derivatives(static, interpret, sinks, x)

    return attend
