"""The states of a linear recurrence, from chunk to chunk: kernels of `kernels.recurrence`.

A program has a block of the state in float32, and writes the state before each chunk, or the
chunk's outputs, which read it. Where heads and blocks are few, groups of chunks run in parallel:
once from zeros, then again from the state at the end of the earlier groups. A group's transition of
a state is a product, with a number for each feature, or, with the delta rule, with a matrix. That
matrix is the group's result for the identity.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from reformax.ops.kernels.triton.common import load, matmul_in_parts, tile_side
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
    to_float32,
)

COLUMNS = 64  # columns of a block
# Columns of programs that wait for a whole matrix for each product: many wait at the same time.
NARROW_COLUMNS = 16


class StateBlocks(NamedTuple):
    """The sides of a program's block of a state."""

    h: int
    v: int

    @classmethod
    def of(cls, d_k: int, d_v: int, whole: bool, dtype: Any) -> StateBlocks:
        """Blocks of a state; `whole` ones have all features of the keys."""
        h, v, widest = tile_side(d_k), tile_side(d_v), 256 // jnp.dtype(dtype).itemsize
        return cls(h if whole else min(h, 64), min(v, COLUMNS if h <= widest or not whole else 32))

    @property
    def of_transition(self) -> int:
        """How many blocks have the columns of a group's matrix."""
        return pl.cdiv(self.h, self.v)

    @property
    def narrow(self) -> StateBlocks:
        return self._replace(v=min(self.v, NARROW_COLUMNS))

    def grid(self, d_k: int, d_v: int) -> int:
        return pl.cdiv(d_k, self.h) * pl.cdiv(d_v, self.v)


def _block(plan: RecurrencePlan, x: RecurrenceArrays, blocks: StateBlocks):
    """The rows of a program of the grid (blocks, N, B x groups), its group and its block."""
    n = pl.cdiv(x.v.shape[3], blocks.v)
    block, last = pl.program_id(0), pl.program_id(2)
    group = lax.rem(last, np.int32(plan.n_groups))
    program = ChunkRows(plan, x, lax.div(last, np.int32(plan.n_groups)), pl.program_id(1), 0, None)
    if x.beta is not None:  # blocks of all features; those after the values are transitions
        return program, group, columns_of(0, 0, blocks.h), columns_of(0, block * blocks.v, blocks.v)
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


def states_kernel(x, solved, begins, states, values, out, ends, *, plan, blocks) -> None:
    """The state before each chunk and the written values; or the outputs, and neither of these.

    In the first of two passes: the state at the end of each group alone.

    Args:
      solved: the delta rule; None for others.
      begins: the state before each group; None: zeros.
      states, values: the results; None in the first of two passes. Values are the x of
        `SolvedDelta`, None for others.
      out: the outputs, of blocks of all features without decays by feature; or None.
      ends: the state at the end of each group from zeros, and the transition; None otherwise.
    """
    program, group, h, v = _block(plan, x, blocks)
    state = _zeros(plan, blocks)
    columns, transition = v, None
    if begins is not None:
        state = program.state(begins, group, h, v)
    elif solved is not None and ends is not None:
        width = pl.cdiv(x.v.shape[3], blocks.v) * blocks.v
        transition = pl.program_id(0) * blocks.v >= width
        columns = jnp.where(transition, columns_of(0, 0, blocks.v), v)
        state = RecurrenceStates(jnp.where(h[:, None] == v[None, :] - width, 1.0, 0.0))

    def step(i, state):
        chunk = group * plan.n_chunks + i
        rows = program.at(chunk * L)
        if out is not None:
            rows = rows.load_numbers()
        if states is not None:
            rows.put_state(states, chunk, h, v, state)
        # What does not wait for the products comes before them.
        keys, kept = rows.read_new(h), rows.forget(state, h)
        if solved is None:
            written = rows.read(x.v, v)
        else:
            written = to_float32(rows.read(solved.values, columns))
            if transition is not None:
                written = jnp.where(transition, 0, written)
            written = written - rows.product(rows.read(solved.reads, h), state.outer)
            if values is not None:
                rows.write(values, written, v)
            written = rows.times_beta(written)
        if out is not None:
            q = rows.read(x.q, h)
            pairs = rows.weighted(rows.product(q, keys, "11"), rows.seen())
            old = rows.old_rows(rows.product(q, state.outer))
            rows.write(out, old + rows.product(pairs, written), v)
        weights = rows.new_rows(jnp.ones((L, 1), jnp.float32)) if plan.mean else None
        return _add(rows, kept, keys, rows.new_rows(written), weights)

    state = lax.fori_loop(np.int32(0), np.int32(plan.n_chunks), step, state)
    if ends is not None:
        program.put_state(ends, group, h, v, state)


def d_states_kernel(
    x, solved, begins, d_out, d_total, d_values_within, states, d_values, ends, *, plan, blocks
) -> None:
    """The gradient of the state after each chunk, from the last chunk on.

    Arguments are as in `states_kernel`, with the gradients `d_out` and `d_total` of the outputs,
    and those of the values through the outputs of their chunk, `d_values_within`.
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
        after = _add(rows, rows.forget(state, h), q, d, weights)
        if solved is not None:
            keys = rows.read_new(h)
            d = rows.read(d_values_within, v) + rows.new_rows(rows.product(keys, state.outer))
            if d_values is not None:
                rows.write(d_values, d, v)
            reads = rows.read(solved.reads, h)
            after = RecurrenceStates(after.outer - rows.product(reads, rows.times_beta(d), "00"))
        return after

    state = _zeros(plan, blocks)
    if begins is not None:
        state = program.state(begins, group, h, v)
    state = lax.fori_loop(np.int32(0), np.int32(plan.n_chunks), step, state)
    if ends is not None:
        program.put_state(ends, group, h, v, state)


def begins_kernel(x, kept, ends, transitions, begins, *, plan, blocks, first, reverse) -> None:
    """The state before each group; with `reverse`, the gradient of the state after it.

    Args:
      kept: `[B, N, G, H]`, the decay of a state over a group; with the delta rule, 1 if any is
        left, or 0.
      ends: the state at the end of each group, from zeros.
      transitions: for the delta rule the group's result for the identity, from column `first` on;
        None for others.
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
            matrix = program.state(transitions, group, h, first + h).outer
            parts = (parts_of(x, 2) for x in (matrix, state.outer))
            outer = matmul_in_parts(*parts, contract="00" if reverse else "10")
        more = program.state(ends, group, h, v)
        if keys is not None:
            keys = jnp.where(left > 0, left * keys[:, None], 0)[:, 0] + more.keys
        return RecurrenceStates(jnp.where(left > 0, outer, 0) + more.outer, keys)

    lax.fori_loop(np.int32(0), np.int32(plan.n_groups), step, _zeros(plan, blocks))
