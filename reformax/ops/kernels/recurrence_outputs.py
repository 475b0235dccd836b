"""Outputs and gradients of the chunks of a linear recurrence: kernels of `kernels.recurrence`.

Each has a program for each chunk. The delta rule's triangular system is inverted once for each
chunk, by halves.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from reformax.ops.kernels.recurrence_chunk import (
    BITS,
    L,
    across,
    chunk_of,
    columns_of,
    finite,
    parts_of,
    precise,
    product,
    sides,
    wide,
)

# Decays.


def sums_kernel(x, log_decay, out, *, plan) -> None:
    """Log decays summed up from the chunk's begin, within segments, `[B, T, N, H]`."""
    rows = chunk_of(plan, x)
    # As in `ops.parts.recurrence`.
    least = math.log(jnp.finfo(jnp.float32).smallest_subnormal) - 1
    each = jnp.maximum(wide(rows.read(log_decay)), least)
    rows.write(out, _sums(rows, each))


def _sums(rows, x, contract: str = "10") -> Float[Array, "L H"]:
    """Sums over the rows of a segment up to each; or, with "00", from each on."""
    so_far = jnp.where(rows.seen(False), 1.0, 0.0).astype(jnp.bfloat16)
    return sum(product(so_far, part, contract) for part in reversed(parts_of(x, 3)))


# The delta rule.


def solve_kernel(x, reads, values, inverse, *, plan) -> None:
    """The delta rule as a recurrence of other values: `Solved` of a chunk."""
    rows = chunk_of(plan, x)
    k, beta = rows.read(x.k), rows.numbers(x.beta)[:, None]
    solution = _inverse(rows, beta * rows.pairs_of(k, k, rows.seen(True)))
    if inverse is not None:
        rows.put_pairs(inverse, solution)
    rows.write(reads, rows.product(solution, beta * rows.from_old(k)))
    rows.write(values, rows.product(solution, beta * rows.read(x.v)))


def _inverse(rows, below: Float[Array, "L L"]) -> Float[Array, "L L"]:
    """`(1 + below)^-1`, as `ops.parts.chunk_products.inverse`: all blocks of a size at once.

    Newton's iteration, of precise residuals, takes out what products of few digits left.
    """
    i, j = sides()
    one = jnp.where(i == j, 1.0, 0.0)
    result = one - jnp.where(across(0), below, 0)
    for bit in range(1, BITS):
        corner = jnp.where(across(bit), below, 0)
        result = result - rows.product(rows.product(result, corner), result)
    wide = rows.plan.dtype == jnp.float32
    for _ in range(2 if wide else 1):
        residual = one - result - precise(below, result, n=3 if wide else 2)
        result = result + rows.product(result, residual)
    return result


class _Delta(NamedTuple):
    """Gradients of a chunk by the delta rule's own pairs and reads."""

    v: Float[Array, "L V"]
    beta: Float[Array, " L"]
    read: Float[Array, "L H"]  # of the keys as they read
    written: Float[Array, "L H"]  # and as they are written


def _delta_vjp(rows, k, state, inverse, values, d_values) -> _Delta:
    beta, below = rows.numbers(rows.x.beta)[:, None], rows.seen(True)
    d_right = rows.product(rows.pairs(inverse), rows.read(d_values), "00")
    d_below = -rows.product(d_right, values, "11")
    d_below = jnp.where(below, d_below, 0)
    d_beta = jnp.sum(d_below * rows.pairs_of(k, k, below), axis=1)
    left = rows.read(rows.x.v) - rows.product(rows.from_old(k), state)
    d_beta = d_beta + jnp.sum(d_right * left, axis=1)
    dv = beta * d_right
    read, written = rows.pairs_vjp(beta * d_below, k, k, below)
    return _Delta(dv, d_beta, read - rows.from_old(rows.product(dv, state, "11")), written)


# Outputs and gradients.


def output_kernel(x, states, values, out, *, plan) -> None:
    """What the queries of a chunk read."""
    rows = chunk_of(plan, x)
    h, v = columns_of(x.k.shape[3]), columns_of(x.v.shape[3])
    q = rows.read(x.q)
    pairs = rows.pairs_of(q, rows.read(x.k), rows.seen(plan.strict))
    new = rows.product(pairs, rows.read(values))
    state = rows.state(states, pl.program_id(0), h, v)
    rows.write(out, new + rows.old_only(rows.product(rows.from_old(q), state)))


def d_values_kernel(x, d_out, d_values, *, plan) -> None:
    """Gradients of the values by the outputs of their own chunk."""
    rows = chunk_of(plan, x)
    pairs = rows.pairs_of(rows.read(x.q), rows.read(x.k), rows.seen(plan.strict))
    rows.write(d_values, rows.product(pairs, rows.read(d_out), "00"))


class Gradients(NamedTuple):
    """Arrays of gradients."""

    q: Any
    k: Any
    v: Any
    decay: Any  # [B, T, N], or [B, T, N, H] by feature
    beta: Any  # [B, T, N]


def gradients_kernel(x, inverse, states, d_states, values, d_values, d_out, out, *, plan) -> None:
    """Those of the inputs, from the states on both sides of a chunk."""
    rows, chunk = chunk_of(plan, x), pl.program_id(0)
    h, v = columns_of(x.k.shape[3]), columns_of(x.v.shape[3])
    seen = rows.seen(plan.strict)
    q, k, u, d = (rows.read(ref) for ref in (x.q, x.k, values, d_out))
    state = finite(rows.state(states, chunk, h, v))
    delta = None
    if x.beta is not None:
        delta = _delta_vjp(rows, k, state, inverse, u, d_values)
        rows.write(out.v, delta.v)
        rows.put_numbers(out.beta, delta.beta)
    d_state = finite(rows.state(d_states, chunk, h, v))
    if delta is None:
        dv = rows.product(rows.pairs_of(q, k, seen), d, "00")
        rows.write(out.v, dv + rows.product(rows.to_new(k), d_state))
    dq, dk = rows.pairs_vjp(rows.product(d, u, "11"), q, k, seen)
    dq = dq + rows.from_old(rows.product(d, state, "11"))
    rows.write(out.q, dq)
    dk_new = rows.to_new(rows.product(u, d_state, "11"))
    dk = dk + dk_new
    q, k = wide(q), wide(k)
    dc = q * dq - k * dk
    if delta is not None:
        dk = dk + delta.read + delta.written
        dc = dc + k * (delta.read - delta.written)
    rows.write(out.k, dk)
    if x.decay is None:
        return
    kept = jnp.sum(rows.forget(wide(state) * d_state, h), axis=1)
    at_end = jnp.sum(k * dk_new, axis=0) + kept
    dc = dc + jnp.where(sides()[0] == L - 1, at_end[None, :], 0)
    if rows.by_feature:
        rows.write(out.decay, _sums(rows, dc, "00"))
    else:
        from_here = jnp.where(rows.seen(False), jnp.sum(dc, axis=1)[:, None], 0)
        rows.put_numbers(out.decay, jnp.sum(from_here, axis=0))
