"""The states of the delta rule, from chunk to chunk: kernels of `kernels.recurrence`.

A program has columns of the state, with all features of the keys, in float32 and transposed,
`[V, H]`. Products with rows of the chunk and with what these write then have the state, and their
results, on their left side, where a product's result lies in registers as the next one reads it: no
step waits for shared memory.

Groups of chunks run in parallel, as in `recurrence_states`. A group's transition of a state is its
result for the identity.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from reformax.ops.kernels.triton.recurrence_chunk import (
    ChunkRows,
    L,
    RecurrenceArrays,
    RecurrencePlan,
    RecurrenceStates,
    columns_of,
    to_float32,
)
from reformax.ops.kernels.triton.recurrence_states import StateBlocks
from reformax.ops.recurrence.unit_length import unit_factors


def _program(plan: RecurrencePlan, x: RecurrenceArrays, blocks: StateBlocks):
    """The rows of a program of the grid (blocks, N, B x groups), its group and its block.

    Blocks after those of the values are of the transition.
    """
    last, n_groups = pl.program_id(2), np.int32(plan.n_groups)
    rows = ChunkRows(plan, x, lax.div(last, n_groups), pl.program_id(1), 0, None)
    v = columns_of(0, pl.program_id(0) * blocks.v, blocks.v)
    return rows, lax.rem(last, n_groups), columns_of(0, 0, blocks.h), v


def _state(rows: ChunkRows, refs: RecurrenceStates | None, group, h, v) -> Float[Array, "V H"]:
    """The state of a group; zeros of None."""
    if refs is None:
        return jnp.zeros((len(v), len(h)), jnp.float32)
    return rows.state(refs, group, h, v).outer.T


def delta_states_kernel(
    x, solved, begins, states, values, ends, out, unit_q, *, plan, blocks, unit_length
) -> None:
    """The state before each chunk and the written values, or the outputs, or ends of groups.

    Args:
      x: the inputs.
      solved: `SolvedDelta`.
      begins: the state before each group; None: zeros.
      states, values: the results, values as the x of `SolvedDelta`; None in the first of two
        passes, and with `out`.
      ends: the state at the end of each group; in the first of two passes from zeros, and the
        transition. None otherwise.
      out: the outputs, of decays that are not by feature; neither states nor values then travel
        through memory. None otherwise.
      unit_q: with `out`, the results of queries that are normalised; None: they are not wanted.
      plan, blocks: the static settings.
      unit_length: with `out`, whether queries are brought to unit length and scaled.
    """
    program, group, h, v = _program(plan, x, blocks)
    columns, transition = v, None
    if states is None and out is None:
        width = pl.cdiv(x.v.shape[3], blocks.v) * blocks.v
        transition = pl.program_id(0) * blocks.v >= width
        columns = jnp.where(transition, columns_of(0, 0, blocks.v), v)
        state = jnp.where(h[None, :] == v[:, None] - width, 1.0, 0.0)
    else:
        state = _state(program, begins, group, h, v)

    def step(i, state):
        chunk = group * plan.n_chunks + i
        rows = program.at(chunk * L)
        if states is not None:
            rows.put_state(states, chunk, v, h, RecurrenceStates(state))
        keys, kept = rows.read_new(h), rows.forget_columns(state, h)
        state = state.astype(plan.dtype)
        lacked = to_float32(rows.read(solved.values, columns)).T
        if transition is not None:
            lacked = jnp.where(transition, 0, lacked)
        lacked = lacked - rows.product(state, rows.read(solved.reads, h), "11")
        if values is not None:
            rows.write(values, lacked.T, v)
        written = rows.beta_columns(lacked)
        if out is not None:
            q = rows.read(x.q, h)
            pairs = rows.weighted(rows.product(q, keys, "11"), rows.seen())
            old = rows.old_columns(rows.product(state, q, "11"))
            if unit_length:
                factors = unit_factors(to_float32(q)) * np.float32(x.q.shape[3] ** -0.5)
                pairs, old = pairs * factors, old * factors[:, 0][None, :]
                if unit_q is not None:
                    rows.write(unit_q.rows, q * factors, h)
                    rows.put_numbers(unit_q.factors, factors[:, 0])
            rows.write(out, (old + rows.product(written, pairs, "11")).T, v)
        return kept + rows.product(rows.new_columns(written), keys)

    state = lax.fori_loop(np.int32(0), np.int32(plan.n_chunks), step, state)
    if ends is not None:
        program.put_state(ends, group, h, v, RecurrenceStates(state.T))


def delta_d_states_kernel(
    x, solved, begins, d_out, d_values_within, states, d_values, ends, *, plan, blocks
) -> None:
    """The gradient of the state after each chunk, from the last chunk on, and of the values.

    Arguments are as in `delta_states_kernel`, with the gradients `d_out` of the outputs, and those
    of the values through the outputs of their chunk, `d_values_within`. If that is None, they are
    computed here, of decays that are not by feature.
    """
    program, group, h, v = _program(plan, x, blocks)

    def step(i, state):
        chunk = group * plan.n_chunks + (plan.n_chunks - 1 - i)
        rows = program.at(chunk * L)
        if states is not None:
            rows.put_state(states, chunk, v, h, RecurrenceStates(state))
        q, keys = rows.read(x.q if x.old_q is None else x.old_q, h), rows.read_new(h)
        after, of_out = rows.forget_columns(state, h), rows.read(d_out, v).T
        if d_values_within is None:
            pairs = rows.weighted(rows.product(q, keys, "11"), rows.seen())
            d = rows.product(of_out, pairs)
        else:
            d = to_float32(rows.read(d_values_within, v)).T
        after = after + rows.product(rows.old_columns(of_out), q)
        d = d + rows.new_columns(rows.product(state, keys, "11"))
        if d_values is not None:
            rows.write(d_values, d.T, v)
        return after - rows.product(rows.beta_columns(d), rows.read(solved.reads, h))

    state = _state(program, begins, group, h, v)
    state = lax.fori_loop(np.int32(0), np.int32(plan.n_chunks), step, state)
    if ends is not None:
        program.put_state(ends, group, h, v, RecurrenceStates(state.T))
