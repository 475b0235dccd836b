"""The states of a linear recurrence, from chunk to chunk: kernels of `kernels.recurrence`.

A program has a block of the state in float32, and writes the state before each chunk. Where heads
and blocks are few, groups of chunks run in parallel: once from zeros, then again from the state at
the end of the earlier groups. A group's transition of a state is a product, with a number for each
feature, or, with the delta rule, with a matrix. That matrix is the group's result for the identity.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from reformax.ops.kernels.triton.common import load, matmul_in_parts, power_of_two
from reformax.ops.kernels.triton.recurrence_chunk import (
    ChunkRows,
    L,
    RecurrenceArrays,
    RecurrencePlan,
    RecurrenceStates,
    column_mask,
    columns_of,
    joint_mask,
    parts_of,
)

COLUMNS, WIDE_COLUMNS = 64, 32


class StateBlocks(NamedTuple):
    """The sides of a program's block of a state."""

    h: int
    v: int

    @classmethod
    def of(cls, d_k: int, d_v: int, delta: bool, dtype: Any, columns: int = COLUMNS) -> StateBlocks:
        """Blocks of a state; those of the delta rule have all features of the keys."""
        h, v, widest = power_of_two(d_k), power_of_two(d_v), 256 // jnp.dtype(dtype).itemsize
        if not delta:
            return cls(min(h, COLUMNS), min(v, COLUMNS))
        return cls(h, min(v, columns if h <= widest else WIDE_COLUMNS))

    def grid(self, d_k: int, d_v: int) -> int:
        return pl.cdiv(d_k, self.h) * pl.cdiv(d_v, self.v)


def _block(plan: RecurrencePlan, x: RecurrenceArrays, blocks: StateBlocks):
    """The rows of a program of the grid (blocks, N, B x groups), its group and its block."""
    n = pl.cdiv(x.v.shape[3], blocks.v)
    block, last = pl.program_id(0), pl.program_id(2)
    group = lax.rem(last, np.int32(plan.n_groups))
    program = ChunkRows(plan, x, lax.div(last, np.int32(plan.n_groups)), pl.program_id(1), 0, None)
    h = columns_of(0, lax.div(block, np.int32(n)) * blocks.h, blocks.h)
    v = columns_of(0, lax.rem(block, np.int32(n)) * blocks.v, blocks.v)
    return program, group, h, v


def _zeros(plan: RecurrencePlan, blocks: StateBlocks) -> RecurrenceStates:
    keys = jnp.zeros((blocks.h,), jnp.float32) if plan.mean else None
    return RecurrenceStates(jnp.zeros((blocks.h, blocks.v), jnp.float32), keys)


def _add(rows: ChunkRows, state: RecurrenceStates, x, y, weights=None) -> RecurrenceStates:
    """Adds `x^T y` to the state, and `x^T weights` to the sums of keys, with weights `[L, 1]`."""
    keys = state.keys
    if keys is not None:
        keys = keys + jnp.sum(rows.rounded(x) * weights, axis=0)
    return RecurrenceStates(state.outer + rows.product(x, y, "00"), keys)


def states_kernel(x, begins, states, ends, *, plan, blocks) -> None:
    """The state before each chunk, or the state at the end of each group.

    Args:
      x: the inputs.
      begins: the state before each group; None: zeros.
      states: the results; None in the first of two passes.
      ends: the state at the end of each group; None otherwise.
      plan, blocks: the static settings.
    """
    program, group, h, v = _block(plan, x, blocks)
    state = _zeros(plan, blocks)
    if begins is not None:
        state = program.state(begins, group, h, v)

    def step(i, state):
        chunk = group * plan.n_chunks + i
        rows = program.at(chunk * L)
        if states is not None:
            rows.put_state(states, chunk, h, v, state)
        weights = rows.new_rows(jnp.ones((L, 1), jnp.float32)) if plan.mean else None
        written = rows.new_rows(rows.read(x.v, v))
        return _add(rows, rows.forget(state, h), rows.read_new(h), written, weights)

    state = lax.fori_loop(np.int32(0), np.int32(plan.n_chunks), step, state)
    if ends is not None:
        program.put_state(ends, group, h, v, state)


def d_states_kernel(x, begins, d_out, d_total, states, ends, *, plan, blocks) -> None:
    """The gradient of the state after each chunk, from the last chunk on.

    Arguments are as in `states_kernel`, with the gradients `d_out` and `d_total` of the outputs.
    """
    program, group, h, v = _block(plan, x, blocks)

    def step(i, state):
        chunk = group * plan.n_chunks + (plan.n_chunks - 1 - i)
        rows = program.at(chunk * L)
        if states is not None:
            rows.put_state(states, chunk, h, v, state)
        q = rows.read(x.q if x.old_q is None else x.old_q, h)
        weights = rows.old_rows(rows.numbers(d_total)[:, None]) if plan.mean else None
        d = rows.old_rows(rows.read(d_out, v))
        return _add(rows, rows.forget(state, h), q, d, weights)

    state = _zeros(plan, blocks)
    if begins is not None:
        state = program.state(begins, group, h, v)
    state = lax.fori_loop(np.int32(0), np.int32(plan.n_chunks), step, state)
    if ends is not None:
        program.put_state(ends, group, h, v, state)


def begins_kernel(x, kept, ends, transitions, begins, *, plan, blocks, width, reverse) -> None:
    """The state before each group; with `reverse`, the gradient of the state after it.

    Args:
      x: the inputs.
      kept: `[B, N, G, H]`, the decay of a state over a group; with the delta rule, 1 if any is
        left, or 0.
      ends: the state at the end of each group, from zeros.
      transitions: for the delta rule `[B, N, G, H, width + H]`, whose last H columns are the
        group's result for the identity; None for others.
      begins: the results.
      plan, blocks, width: the static settings.
      reverse: whether to go from the last group to the first.
    """
    n = pl.cdiv(x.v.shape[3], blocks.v)
    block = pl.program_id(0)
    program = ChunkRows(plan, x, pl.program_id(2), pl.program_id(1), 0, None)
    h = columns_of(0, lax.div(block, np.int32(n)) * blocks.h, blocks.h)
    v = columns_of(0, lax.rem(block, np.int32(n)) * blocks.v, blocks.v)

    def step(i, state):
        group = plan.n_groups - 1 - i if reverse else i
        program.put_state(begins, group, h, v, state)
        left = kept.at[program.batch, program.head, group, h[:, None]]
        left = load(left, joint_mask(None, column_mask(h, kept.shape[3], 1), (len(h), 1)))
        outer, keys = left * state.outer, state.keys
        if transitions is not None:
            matrix = program.state(transitions, group, h, width + h).outer
            parts = (parts_of(x, 2) for x in (matrix, state.outer))
            outer = matmul_in_parts(*parts, contract="00" if reverse else "10")
        more = program.state(ends, group, h, v)
        if keys is not None:
            keys = jnp.where(left > 0, left * keys[:, None], 0)[:, 0] + more.keys
        return RecurrenceStates(jnp.where(left > 0, outer, 0) + more.outer, keys)

    lax.fori_loop(np.int32(0), np.int32(plan.n_groups), step, _zeros(plan, blocks))
