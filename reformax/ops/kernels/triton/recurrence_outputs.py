"""Outputs and gradients of the chunks of a linear recurrence: kernels of `kernels.recurrence`.

Each kernel has a program for each chunk.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from reformax.ops.calls.obstacles import NARROW_HEAD
from reformax.ops.kernels.triton.common import matmul_in_parts, tile_product, tile_side
from reformax.ops.kernels.triton.recurrence_chunk import (
    BITS,
    L,
    across,
    chunk_of,
    columns_of,
    parts_of,
    sides,
    to_float32,
)
from reformax.ops.softmax.online import LEAST_SUM

# Decays.


def sums_kernel(x, log_decay, out, old_q, new_k, *, plan) -> None:
    """Cumulative log decays from the start of the chunk, within segments, `[B, Tp, N, H]`.

    With decays by feature it also writes `old_q` and `new_k` of `RecurrenceArrays`, if not None.
    """
    rows = chunk_of(plan, x)
    # As in `ops.recurrence.chunks`.
    least = math.log(jnp.finfo(jnp.float32).smallest_subnormal) - 1
    c = _sums(rows, jnp.maximum(to_float32(rows.read(log_decay)), least))
    rows.put_decays(out, c)
    if old_q is not None:
        rows.write(old_q, rows.read(x.q) * jnp.exp(c))
    if new_k is not None:
        end = jnp.sum(jnp.where(sides()[0] == L - 1, c, 0), axis=0, keepdims=True)
        rows.write(new_k, rows.read(x.k) * jnp.exp(jnp.minimum(end - c, 0)))


def _sums(rows, x, contract: str = "10") -> Float[Array, "L H"]:
    """Cumulative sums over the rows of a segment; with "00", from the last row backwards."""
    so_far = jnp.where(rows.seen(), 1.0, 0.0).astype(jnp.bfloat16)
    return sum(tile_product(so_far, part, contract) for part in reversed(parts_of(x, 3)))


# The delta rule.


def solve_kernel(x, stored, solved, *, plan) -> None:
    """The delta rule as a recurrence of other values: `SolvedDelta` of a chunk.

    Rows x that lack what earlier rows of the chunk have written solve `(1 + P b) x = v - e^c k S`,
    where P holds the products of keys. The gradients read `(1 + b P)^-1`, which is
    `1 - b (1 + P b)^-1 P`.

    Args:
      stored: the solution of the forward pass; None: a chunk's system is inverted once, by halves.
    """
    rows = chunk_of(plan, x)

    def add(h, pairs):
        k = rows.read(x.k, h)
        return pairs + rows.products_of(k, k, h)

    if stored is None or solved.inverse is not None:
        pairs = _each_block(x, add, jnp.zeros((L, L), jnp.float32))
        pairs = rows.weighted(pairs, rows.seen(exclude_self=True))
    solution = _inverse(rows, rows.beta_columns(pairs)) if stored is None else rows.pairs(stored)
    if solved.solution is not None:
        rows.put_pairs(solved.solution, solution)
    if solved.inverse is not None:
        later = rows.times_beta(rows.product(solution, pairs))
        rows.put_pairs(solved.inverse, _one() - later)
    of_old = rows.old_columns(solution)

    def put_reads(h, carry):
        rows.write(solved.reads, rows.product(of_old, rows.from_old(rows.read(x.k, h), h)), h)
        return carry

    _each_block(x, put_reads, 0)
    rows.write(solved.values, rows.product(solution, rows.read(x.v)))


def _one() -> Float[Array, "L L"]:
    i, j = sides()
    return jnp.where(i == j, 1.0, 0.0)


def _inverse(rows, below: Float[Array, "L L"]) -> Float[Array, "L L"]:
    """`(1 + below)^-1`, as `ops.recurrence.decay_products.inverse`: all blocks of a size at once.

    Newton's iteration, with precise residuals, removes the rounding of the products.
    """
    one = _one()
    result = one - jnp.where(across(0), below, 0)
    for bit in range(1, BITS):
        corner = jnp.where(across(bit), below, 0)
        result = result - rows.product(rows.product(result, corner), result)
    n_parts, n_iterations = (3, 2) if rows.plan.dtype == jnp.float32 else (2, 1)
    for _ in range(n_iterations):
        parts = (parts_of(x, n_parts) for x in (below, result))
        residual = one - result - matmul_in_parts(*parts, contract="10")
        result = result + rows.product(result, residual)
    return result


class _DeltaGradients(NamedTuple):
    """Gradients of a chunk through the right side and the pairs of the delta rule."""

    v: Float[Array, "L V"]
    pairs: Float[Array, "L L"]  # of the keys that read and of those that are written, weighted
    along_k: Float[Array, " L"]  # the products of keys and their gradients

    def of_keys(self, rows, k, state, h) -> tuple[Float[Array, "L H"], Float[Array, "L H"]]:
        """The gradients of a block of the keys as they read and as they are written."""
        read, written = rows.pairs_vjp(self.pairs, k, k, h)
        of_state = rows.old_rows(rows.product(self.v, state, "11"))
        return read - rows.from_old(of_state, h), written


def _delta_vjp(rows, inverse, values, d_values, d_beta) -> _DeltaGradients:
    """Writes the gradient of beta, and returns those through which the others go.

    With x of `SolvedDelta` and y, the gradient of what is written less what later rows of the chunk
    undo of it, `y = (1 + b P)^-T d_values`, the gradient of b is `x . y` and that of v is `b y`.
    The product of a key and its gradient is `b x . y` as it is written, and `b (x - v) . y` as it
    reads.
    """
    y = rows.product(rows.pairs(inverse), rows.read(d_values), "00")
    of_beta = jnp.sum(y * values, axis=1)
    rows.put_numbers(d_beta, of_beta)
    along_k = of_beta + jnp.sum(y * (to_float32(values) - to_float32(rows.read(rows.x.v))), axis=1)
    along_k = rows.times_beta(along_k[:, None])[:, 0]
    d_right = rows.times_beta(y).astype(rows.plan.dtype)
    pairs = -rows.beta_columns(rows.product(d_right, values, "11"))
    return _DeltaGradients(d_right, rows.weighted(pairs, rows.seen(exclude_self=True)), along_k)


# Outputs and gradients. Wide rows are read in blocks of features, whose products add up, so that a
# program's tiles fit in its registers. A gradient has more tiles than an output, and decays by
# feature add their own. Products of whole float32 numbers ("highest" precision) take more registers
# than those of rounded ones.

FEATURES = 64  # features of a block; of a gradient, half


def _blocks(x, gradient: bool) -> tuple[int, int]:
    """The number of blocks of features, and their width."""
    size, widest = x.k.shape[3], max(x.k.shape[3], x.v.shape[3])
    wide = x.k.dtype == jnp.float32
    by_feature = x.decay is not None and len(x.decay.shape) == 4
    most = FEATURES if wide or by_feature else NARROW_HEAD
    if gradient:
        most = FEATURES // 2
    if widest <= most:
        return 1, tile_side(size)
    width = min(most, FEATURES)
    if wide and widest > NARROW_HEAD:
        width = FEATURES // 4
    return pl.cdiv(size, width), width


def _each_block(x, step, carry, gradient: bool = False):
    """`step(columns, carry)` for each block of features in turn."""
    n, width = _blocks(x, gradient)
    if n == 1:
        return step(columns_of(0, 0, width), carry)

    def body(i, carry):
        return step(columns_of(0, i * width, width), carry)

    return lax.fori_loop(np.int32(0), np.int32(n), body, carry)


def _pairs(rows, gradient: bool = False) -> Float[Array, "L L"]:
    """The weight of each key of the chunk for each of its queries, without the delta rule."""

    def add(h, pairs):
        return pairs + rows.products_of(rows.read(rows.x.q, h), rows.read(rows.x.k, h), h)

    pairs = _each_block(rows.x, add, jnp.zeros((L, L), jnp.float32), gradient)
    return rows.weighted(pairs, rows.seen())


def output_kernel(x, states, values, out, total, *, plan) -> None:
    """The outputs of a chunk's queries; or their means, and the sums `total` of the weights."""
    rows, chunk = chunk_of(plan, x), pl.program_id(0)
    v = columns_of(x.v.shape[3])

    def add_old(h, sums):
        old, weights = sums
        q, state = rows.from_old(rows.read(x.q, h), h), rows.state(states, chunk, h, v)
        if plan.mean:
            weights = weights + jnp.sum(rows.rounded(q) * state.keys[None, :], axis=1)
        return old + rows.product(q, state.outer), weights

    pairs = rows.beta_columns(_pairs(rows)).astype(plan.dtype)
    zeros = jnp.zeros((L,), jnp.float32) if plan.mean else None
    old, weights = _each_block(x, add_old, (jnp.zeros((L, len(v)), jnp.float32), zeros))
    sums = rows.product(pairs, rows.read(values)) + rows.old_rows(old)
    if not plan.mean:
        rows.write(out, sums)
        return
    weights = jnp.sum(to_float32(pairs), axis=1) + rows.old_rows(weights[:, None])[:, 0]
    weights = jnp.where(weights < LEAST_SUM, 0, weights)
    means = jnp.where(weights == 0, 0, 1 / jnp.where(weights == 0, 1, weights))[:, None] * sums
    rows.write(out, means)
    rows.put_numbers(total, weights)


def d_values_kernel(x, d_out, d_values, *, plan) -> None:
    """Gradients of the values through the outputs of their chunk."""
    rows = chunk_of(plan, x)
    rows.write(d_values, rows.product(_pairs(rows), rows.read(d_out), "00"))


class RecurrenceGradients(NamedTuple):
    """The gradients of the inputs, arrays or references to them."""

    q: Any
    k: Any
    v: Any
    decay: Any  # [B, T, N], or [B, T, N, H] by feature
    beta: Any  # [B, T, N]


def _values_vjp(rows, d_states, chunk, d) -> Float[Array, "L V"]:
    """The gradients of the values without the delta rule."""
    x, v = rows.x, columns_of(rows.x.v.shape[3])

    def add_new(h, dv):
        d_state = rows.state(d_states, chunk, h, v).outer
        return dv + rows.new_rows(rows.product(rows.read_new(h), d_state))

    dv = rows.product(_pairs(rows, gradient=True), d, "00")
    return _each_block(x, add_new, dv, gradient=True)


def gradients_kernel(
    x, inverse, states, d_states, values, d_values, d_out, d_total, units, out, *, plan
) -> None:
    """The gradients of the inputs, from the states on both sides of a chunk.

    Args:
      inverse, values: from `solve_kernel` and `states_kernel`; `x.v` without the delta rule.
      states, d_states: the state before each chunk, and the gradient of the state after it.
      d_values: the gradients of the values of the delta rule.
      d_total: for means, the gradient of the sums of weights, `[B, T, N]`.
      units: `UnitRows` of the queries and keys, for gradients of what they were normalised from.
    """
    rows, chunk = chunk_of(plan, x), pl.program_id(0)
    v = columns_of(x.v.shape[3])
    seen = rows.seen()
    u, d = rows.read(values), rows.read(d_out)
    if units is not None:  # products of rows and their gradients
        along_q = x.k.shape[3] * jnp.sum(to_float32(rows.read(units.out)) * to_float32(d), axis=1)
    delta = None
    if x.beta is None:
        dv = _values_vjp(rows, d_states, chunk, d)
        rows.write(out.v, dv)
        along_k = None if units is None else jnp.sum(dv * u, axis=1)
    else:
        delta = _delta_vjp(rows, inverse, u, d_values, out.beta)
        rows.write(out.v, delta.v)
        along_k = delta.along_k

    d_pairs, d_weights = rows.beta_columns(rows.product(d, u, "11")), None
    if plan.mean:
        d_weights = rows.numbers(d_total)[:, None]
        d_pairs = d_pairs + d_weights
    d_pairs = rows.weighted(d_pairs, seen)

    def of_block(h, dc):
        q, k = rows.read(x.q, h), rows.read(x.k, h)
        state, d_state = (rows.state(a, chunk, h, v) for a in (states, d_states))
        dq, dk = rows.pairs_vjp(d_pairs, q, k, h)
        dq_old = rows.product(d, state.outer, "11")
        dk_new = rows.times_beta(rows.product(u, d_state.outer, "11"))
        if plan.mean:
            dq_old = dq_old + d_weights * state.keys[None, :]
            dk_new = dk_new + d_state.keys[None, :]
        dq = dq + rows.old_rows(rows.from_old(dq_old, h))
        dk_new = rows.new_rows(rows.to_new(dk_new, h))
        dk = dk + dk_new
        d_decay = to_float32(q) * dq - to_float32(k) * dk
        if delta is not None:
            as_read, as_written = delta.of_keys(rows, k, state.outer, h)
            dk = dk + as_read + as_written
            d_decay = d_decay + to_float32(k) * (as_read - as_written)
        if units is not None:
            dq = rows.numbers(units.q)[:, None] * (dq - along_q[:, None] * q)
            dk = rows.numbers(units.k)[:, None] * (dk - along_k[:, None] * k)
        rows.write(out.q, dq, h)
        rows.write(out.k, dk, h)
        if x.decay is None:
            return dc
        state_product = jax.tree.map(lambda a, b: to_float32(a) * b, state, d_state)
        kept = rows.forget(state_product, h)
        at_end = jnp.sum(to_float32(k) * dk_new, axis=0) + jnp.sum(kept.outer, axis=1)
        if plan.mean:
            at_end = at_end + kept.keys
        d_decay = d_decay + jnp.where(sides()[0] == L - 1, at_end[None, :], 0)
        if rows.by_feature:
            rows.write(out.decay, _sums(rows, d_decay, "00"), h)
            return dc
        return dc + jnp.sum(d_decay, axis=1)

    dc = _each_block(x, of_block, jnp.zeros((L,), jnp.float32), gradient=True)
    if rows.by_head:
        later = jnp.where(rows.seen(), dc[:, None], 0)
        rows.put_numbers(out.decay, jnp.sum(later, axis=0))
