"""Linear recurrences, chunk by chunk, as Pallas kernels for NVIDIA GPUs (Triton).

They compute the function of `reformax.ops.recurrence.recurrence`, whose equations they follow (Yang
et al. 2023, "Gated Linear Attention", sec. 4; Yang et al. 2024, "Gated Delta Networks", sec. 3.3).
This file launches them. `recurrence_chunk` has the reads and writes of a program,
`recurrence_states` passes states from chunk to chunk, and computes the outputs too where that pays;
`recurrence_outputs` computes each chunk by itself.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from reformax.ops.calls import this_gpu
from reformax.ops.calls.obstacles import NARROW_HEAD
from reformax.ops.kernels.triton.common import launch, name_of
from reformax.ops.kernels.triton.recurrence_chunk import (
    L,
    RecurrenceArrays,
    RecurrencePlan,
    RecurrenceStates,
    SolvedDelta,
)
from reformax.ops.kernels.triton.recurrence_outputs import (
    RecurrenceGradients,
    d_values_kernel,
    gradients_kernel,
    output_kernel,
    solve_kernel,
    sums_kernel,
)
from reformax.ops.kernels.triton.recurrence_states import (
    StateBlocks,
    begins_kernel,
    d_states_kernel,
    states_kernel,
)
from reformax.ops.masking.visibility import same_segment
from reformax.ops.recurrence.chunks import RecurrenceInputs
from reformax.ops.recurrence.unit_length import UnitRows

F32 = jnp.float32
# Programs that fill a GPU of 132 processors: two run on each, but one of the delta rule with decays
# by head.
PROGRAMS = 264
# The fewest programs whose scan also computes the outputs: about half of the processors.
LEAST_SCANNING = 64
LEAST_CHUNKS = 16  # of a group
# Warps of a program.
WARPS = dict(sums=4, solve=4, states=4, begins=8, d_states=4, output=4, d_values=4, gradients=8)
STAGES = 3  # pipeline stages of the kernels that loop over chunks


def _plan(x: RecurrenceInputs, interpret: bool, groups: int | None, mean: bool) -> RecurrencePlan:
    (batch, length, n_heads, size), d_v, delta = x.k.shape, x.v.shape[3], x.beta is not None
    n_chunks = pl.cdiv(length, L)
    dtype = jnp.result_type(x.q, x.k, x.v)
    blocks = StateBlocks.of(size, d_v, delta, dtype).grid(size, d_v)
    if groups is None and delta and size > NARROW_HEAD:
        groups = 1  # a chip does not hold the matrix of a group
    elif groups is None:
        by_head = x.log_decay is None or x.log_decay.shape[3] == 1
        programs = PROGRAMS // 2 if delta and by_head else PROGRAMS
        groups = min(programs // (batch * n_heads * blocks), n_chunks // LEAST_CHUNKS)
        # Groups read all chunks twice, and with the delta rule once more for a matrix.
        groups = groups if groups > (3 if delta else 1) else 1
    n_chunks = pl.cdiv(n_chunks, groups)
    return RecurrencePlan(length, groups, n_chunks, mean, dtype, interpret)


def _read(
    plan: RecurrencePlan, x: RecurrenceInputs, ids, order, gradient: bool
) -> RecurrenceArrays:
    more = plan.padded - plan.length
    if ids is not None:
        ids = jnp.pad(ids, ((0, 0), (0, more)), mode="edge")
    if order is not None:
        behind = jnp.arange(plan.length, plan.padded, dtype=order.dtype)
        behind = jnp.broadcast_to(behind, (len(order), more))
        order = jnp.concatenate([order, behind], axis=1)
    beta = None if x.beta is None else x.beta[..., 0]
    read = RecurrenceArrays(x.q, x.k, x.v, None, beta, ids, order)
    if x.log_decay is None:
        return read
    batch, _, n_heads, size = x.log_decay.shape
    # A decay for each head is summed like features of one head.
    decay = x.log_decay if size > 1 else jnp.swapaxes(x.log_decay, 2, 3)
    shape = jax.ShapeDtypeStruct((batch, plan.padded, *decay.shape[2:]), jnp.float32)
    decayed = jax.ShapeDtypeStruct(x.k.shape, plan.dtype)
    old_q, new_k = (decayed if wanted and size > 1 else None for wanted in (gradient, True))
    grid = plan.padded // L, decay.shape[2], batch
    summed, old_q, new_k = _run(sums_kernel, plan, grid, (read, decay), (shape, old_q, new_k))
    summed = summed if size > 1 else summed[:, :, 0]
    return read._replace(decay=summed, old_q=old_q, new_k=new_k)


def _run(
    kernel, plan: RecurrencePlan, grid, inputs, out_shape, stages: int = 2, warps=None, **static
):
    name = name_of(kernel)
    return launch(
        functools.partial(kernel, plan=plan, **static),
        inputs,
        out_shape,
        grid=grid,
        num_warps=warps or WARPS[name],
        num_stages=1 if this_gpu.on_small_chip() else stages,
        interpret=plan.interpret,
        name=f"recurrence_{name}",
    )


class Residuals(NamedTuple):
    """The arrays that the backward pass reads besides the inputs.

    The solution is L numbers for a position and head in the inputs' dtype, half of keys of 128. The
    others are float32, of groups that fill a GPU: less than 30 MB with heads up to 128.
    """

    begins: RecurrenceStates | None = None  # the state before each group; None of one group
    # For the delta rule, the states of groups from zeros, and the groups' transitions.
    transitions: RecurrenceStates | None = None
    solution: Float[Array, "B N Tp L"] | None = None  # of `SolvedDelta`


class _Launches(NamedTuple):
    """The kernels of a call."""

    plan: RecurrencePlan
    x: RecurrenceArrays

    def _shape(self, *shape, dtype=None):
        return jax.ShapeDtypeStruct(shape, dtype or self.plan.dtype)

    def _like(self, x, dtype=None):
        return self._shape(*x.shape, dtype=dtype)

    def _each(self, kernel, inputs, out_shape, **static):
        batch, _, n_heads, _ = self.x.k.shape
        grid = self.plan.n_groups * self.plan.n_chunks, n_heads, batch
        return _run(kernel, self.plan, grid, (self.x, *inputs), out_shape, **static)

    @property
    def by_feature(self) -> bool:
        return self.x.decay is not None and self.x.decay.ndim == 4

    def solved(self, residuals: Residuals | None = None, keep: bool = False) -> SolvedDelta | None:
        """The delta rule of all chunks; None without `beta`.

        Args:
          residuals: of the forward pass, for the backward pass, which reads the inverse too.
          keep: whether to write what the backward pass reads.
        """
        x = self.x
        if x.beta is None:
            return None
        batch, _, n_heads, _ = x.k.shape
        square = self._shape(batch, n_heads, self.plan.padded, L)
        inverse, keeps = (square if wanted else None for wanted in (residuals is not None, keep))
        shapes = SolvedDelta(self._like(x.k), self._like(x.v), inverse, keeps)
        solution = None if residuals is None else residuals.solution
        return self._each(solve_kernel, (solution,), (shapes,))[0]

    @property
    def in_one_scan(self) -> bool:
        """Whether the programs that pass states on compute the outputs too.

        They hold the queries, keys, values and reads of three chunks, and pairs of rows, which with
        decays by feature are too many tiles. A chunk takes them longer, which pays if they keep
        half of a GPU busy.
        """
        (batch, _, n_heads, d_k), blocks = self.x.k.shape, self._blocks
        n_programs = batch * n_heads * self.plan.n_groups * blocks.grid(d_k, self.x.v.shape[3])
        row = (blocks.h * (2 if self.x.beta is None else 3) + blocks.v) * self.plan.dtype.itemsize
        fits = STAGES * L * row < 0.75 * 1024 * this_gpu.shared_kib()
        whole = blocks.h >= d_k and not (self.by_feature or self.plan.mean)
        return fits and whole and n_programs >= LEAST_SCANNING

    def outputs(
        self, solved, initial: RecurrenceStates | None = None
    ) -> tuple[Float[Array, "B T N V"], RecurrenceStates | None, Residuals]:
        """The outputs, and the rest as in `states`."""
        like_v = self._like(self.x.v)
        if self.in_one_scan:
            (_, _, out), final, residuals = self._pass_on(solved, (None, None, like_v), initial)
        else:
            states, values, final, residuals = self.states(solved, initial)
            (out, _) = self._each(output_kernel, (states, values), (like_v, None))
        return out, final, residuals

    def states(
        self, solved, initial: RecurrenceStates | None = None, residuals: Residuals | None = None
    ) -> tuple[RecurrenceStates, Array, RecurrenceStates | None, Residuals]:
        """The state before each chunk, the written values, and the state after the last chunk.

        The state after the last chunk is there with the one before the first chunk, `initial`, of
        one group. The fourth result is what the backward pass reads, where it is called with None.
        """
        dtype = None if initial is None else F32
        values = None if solved is None else self._like(self.x.v)
        wanted = self._state_shapes(dtype)[0], values, None
        (states, values, _), final, residuals = self._pass_on(solved, wanted, initial, residuals)
        return states, self.x.v if solved is None else values, final, residuals

    def _pass_on(self, solved, wanted, initial=None, residuals: Residuals | None = None):
        """The `wanted` states, values and outputs of `states_kernel`, and the rest of `states`."""

        def run(begins, wanted, ends):
            scanned = self._scan(states_kernel, (self.x, solved, begins), (*wanted, ends))
            return scanned[:3], scanned[3]

        def run_groups(ends):
            if solved is None:
                return run(None, (None,) * 3, ends)[1]
            blocks = self._blocks
            n = blocks.of_transition
            width = (pl.cdiv(self.x.v.shape[3], blocks.v) + n) * blocks.v
            ends = ends._replace(outer=self._shape(*ends.outer.shape[:4], width, dtype=F32))
            inputs, shapes = (self.x, solved, None), (None, None, None, ends)
            return self._scan(states_kernel, inputs, shapes, more_blocks=n)[3]

        if initial is not None:
            found, final = run(initial, wanted, self._state_shapes(F32)[1])
            residuals = Residuals()
        else:
            if residuals is None:
                begins, ends = self._groups(run_groups, None, reverse=False)
                residuals = Residuals(begins, None if solved is None else ends)
            found, final = run(residuals.begins, wanted, None)
        if solved is not None:
            residuals = residuals._replace(solution=solved.solution)
        return found, final, residuals

    def d_states(
        self, solved, d_out, d_total, d_values_within, transitions, d_final=None
    ) -> tuple[RecurrenceStates, Array | None, RecurrenceStates | None]:
        """The gradients of the state after each chunk, and of the values of the delta rule.

        With `d_final`, that of the state after the last chunk, of one group, the third result is
        that of the state before the first one.

        Args:
          solved, d_out, d_total: as in the kernel.
          d_values_within: the gradients of values by the outputs of their chunk.
          transitions: as in `Residuals`.
        """

        def run(begins, states, ends):
            d_values = None if solved is None or states is None else self._like(self.x.v)
            inputs = self.x, solved, begins, d_out, d_total, d_values_within
            return self._scan(d_states_kernel, inputs, (states, d_values, ends))

        if d_final is not None:
            return run(d_final, *self._state_shapes(F32))
        begins, _ = self._groups(lambda ends: run(None, None, ends)[2], transitions, reverse=True)
        return run(begins, self._state_shapes()[0], None)

    @property
    def _blocks(self) -> StateBlocks:
        (_, _, _, d_k), d_v, delta = self.x.k.shape, self.x.v.shape[3], self.x.beta is not None
        return StateBlocks.of(d_k, d_v, delta, self.plan.dtype)

    def _scan(self, kernel, inputs, out_shape, more_blocks: int = 0):
        (batch, _, n_heads, d_k), d_v = self.x.k.shape, self.x.v.shape[3]
        blocks = self._blocks
        grid = blocks.grid(d_k, d_v) + more_blocks, n_heads, batch * self.plan.n_groups
        # The delta rule reads whole rows of three arrays: a chip holds fewer wide ones. Two
        # programs of `states` share a processor where two stages are in flight; of `d_states`,
        # which reads more, one has it for itself, if it holds three.
        row = blocks.h * self.plan.dtype.itemsize
        in_one_scan = kernel is states_kernel and out_shape[2] is not None
        fewer = kernel is states_kernel or this_gpu.shared_kib() < this_gpu.LARGE_CHIP
        wide = row > 384 or (row >= 256 and fewer)
        wide &= self.x.beta is not None and not in_one_scan
        stages = STAGES - 1 if wide else STAGES
        return _run(kernel, self.plan, grid, inputs, out_shape, stages, blocks=blocks)

    def _state_shapes(self, of_groups=None) -> list[RecurrenceStates]:
        """The shapes of the states of chunks, and of groups in the dtype `of_groups`."""
        plan, (batch, _, n_heads, d_k) = self.plan, self.x.k.shape

        def shapes(n, dtype=None):
            outer = self._shape(batch, n_heads, n, d_k, self.x.v.shape[3], dtype=dtype)
            keys = self._shape(batch, n_heads, n, d_k, dtype=F32) if plan.mean else None
            return RecurrenceStates(outer, keys)

        return [shapes(plan.n_groups * plan.n_chunks), shapes(plan.n_groups, of_groups)]

    def _groups(self, run, transitions, reverse: bool):
        """The states before groups, and after them from zeros, by `run`; none of one group.

        With `reverse`, the gradients of the states after groups.
        """
        plan, (batch, _, n_heads, d_k) = self.plan, self.x.k.shape
        if plan.n_groups == 1:
            return None, None
        shapes = self._state_shapes(F32)[1]
        ends = run(shapes)
        if self.x.beta is not None and transitions is None:
            transitions = ends
        blocks, first = self._blocks, None
        if transitions is not None:
            first = transitions.outer.shape[4] - blocks.of_transition * blocks.v
            blocks = blocks.narrow
        (begins,) = _run(
            begins_kernel,
            plan,
            (blocks.grid(d_k, self.x.v.shape[3]), n_heads, batch),
            (self.x, self._kept(), ends, transitions),
            (shapes,),
            blocks=blocks,
            first=first,
            reverse=reverse,
        )
        return begins, ends

    def _kept(self) -> Float[Array, "B N G H"]:
        """The decay of a state over each group; with the delta rule, 1 if any is left, or 0."""
        plan, x = self.plan, self.x
        batch, _, n_heads, size = x.k.shape
        kept = jnp.ones((batch, n_heads, plan.n_groups, 1))
        if x.decay is not None and x.beta is None:
            ends = lax.slice_in_dim(x.decay, L - 1, None, L, 1)
            ends = ends.reshape(batch, plan.n_groups, plan.n_chunks, n_heads, -1).sum(axis=2)
            kept = jnp.exp(jnp.moveaxis(ends, 1, 2))
        if x.ids is not None:
            group_ids = x.ids.reshape(batch, plan.n_groups, -1)
            id_before = jnp.concatenate([group_ids[:, :1, 0], group_ids[:, :-1, -1]], axis=1)
            one_segment = same_segment(id_before, group_ids[:, :, -1])
            kept = jnp.where(one_segment[:, None, :, None], kept, 0)
        return jnp.broadcast_to(kept, (*kept.shape[:3], size))

    def means(self, states) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
        shapes = self._like(self.x.v, self.x.v.dtype), self._shape(*self.x.v.shape[:3], dtype=F32)
        # One stage: queries are operands and summed, and in a pipeline Triton gives such a tile one
        # buffer, which the next block's overwrites while the product of the state may read it.
        return tuple(self._each(output_kernel, (states, self.x.v), shapes, stages=1))

    def gradients(
        self, d_out, residuals: Residuals, d_total=None, initial=None, d_final=None, units=None
    ):
        """The gradients of the inputs, and of the state before them where there is one."""
        x = self.x
        d_out = d_out.astype(self.plan.dtype)
        solved = self.solved(residuals)
        states, values, _, _ = self.states(solved, initial, residuals)
        d_values_within = inverse = None
        if solved is not None:
            (d_values_within,) = self._each(d_values_kernel, (d_out,), (self._like(x.v),))
            inverse = solved.inverse
        d_states, d_values, d_initial = self.d_states(
            solved, d_out, d_total, d_values_within, residuals.transitions, d_final
        )
        numbers = self._shape(*x.k.shape[:3], dtype=F32)
        decay = None
        if x.decay is not None:
            decay = self._like(x.k, F32) if self.by_feature else numbers
        qkv = (self._like(a, a.dtype) for a in x[:3])
        shapes = RecurrenceGradients(*qkv, decay, None if x.beta is None else numbers)
        inputs = inverse, states, d_states, values, d_values, d_out, d_total, units
        whole, wide = self.plan.dtype == F32, max(x.k.shape[3], x.v.shape[3]) > NARROW_HEAD
        # Chips' limits: with wide rows of the delta rule, Blackwell's memory holds one stage. A
        # tile of 64 rows is a product of four warps on Hopper; more hold more tiles, and elsewhere
        # those of decays by feature are too many for four.
        stages = 1 if whole or (wide and x.beta is not None) else STAGES - (wide or self.by_feature)
        more = whole or wide or (self.by_feature and not this_gpu.is_hopper())
        options = dict(stages=stages, warps=None if more else 4)
        (out,) = self._each(gradients_kernel, inputs, (shapes,), **options)
        decay = out.decay if decay is not numbers else out.decay[..., None]
        beta = None if out.beta is None else out.beta[..., None]
        return RecurrenceInputs(out.q, out.k, out.v, decay, beta), d_initial


def _wider(v: Float[Array, "B T N V"]) -> Float[Array, "B T N V8"]:
    """Adds columns of zeros, up to a multiple of 8.

    Rows then begin at multiples of 16 bytes. Other rows load number by number.
    """
    return jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, -v.shape[3] % 8)))


def _launches(
    x: RecurrenceInputs, ids, interpret, groups, order=None, mean=False, gradient=False
) -> _Launches:
    x = x._replace(v=_wider(x.v))
    plan = _plan(x, interpret, groups, mean)
    return _Launches(plan, _read(plan, x, ids, order, gradient))


def forward(
    x: RecurrenceInputs,
    ids: Int[Array, "B T"] | None,
    order: Int[Array, "B T"] | None = None,
    initial: Float[Array, "B N H V"] | None = None,
    *,
    keep: bool = False,
    interpret: bool = False,
    groups: int | None = None,
) -> tuple[tuple[Float[Array, "B T N V"], Float[Array, "B N H V"] | None], Residuals]:
    """The outputs, in the dtype of products' inputs, and with `initial` the last state, in float32.

    Args:
      x: as in `ops.recurrence.recurrence.recurrence`.
      ids: segments of the rows, those of one segment contiguous.
      order: the position in x of each row; None: rows are positions.
      initial: the state that the first segment begins with; None: zeros. The chunks are one group
        with it, so that states come in and go out once.
      keep: whether `backward` follows, which reads the second result.
      groups: groups of chunks that run in parallel; None: as many as fill a GPU.
    """
    launches = _launches(x, ids, interpret, groups if initial is None else 1, order)
    out, final, residuals = launches.outputs(launches.solved(keep=keep), _state(initial))
    size = x.v.shape[3]
    return (out[..., :size], None if initial is None else final.outer[:, :, 0, :, :size]), residuals


def backward(
    x: RecurrenceInputs,
    ids: Int[Array, "B T"] | None,
    residuals: Residuals,
    d_out: Float[Array, "B T N V"],
    order: Int[Array, "B T"] | None = None,
    units: UnitRows | None = None,
    initial: Float[Array, "B N H V"] | None = None,
    d_final: Float[Array, "B N H V"] | None = None,
    *,
    interpret: bool = False,
    groups: int | None = None,
) -> tuple[RecurrenceInputs, Float[Array, "B N H V"] | None]:
    """The gradients of `x` and of `initial`, by those of the results of `forward`.

    With `units` they are of queries and keys before these. Arguments are as in `forward`.
    """
    groups = groups if initial is None else 1
    launches = _launches(x, ids, interpret, groups, order, gradient=True)
    units, size = units and units._replace(out=_wider(units.out)), x.v.shape[3]
    states = dict(initial=_state(initial), d_final=_state(d_final))
    found, d_initial = launches.gradients(_wider(d_out), residuals, units=units, **states)
    d_initial = None if initial is None else d_initial.outer[:, :, 0, :, :size]
    return found._replace(v=found.v[..., :size]), d_initial


def _state(x: Float[Array, "B N H V"] | None) -> RecurrenceStates | None:
    """A state as that of one group."""
    return None if x is None else RecurrenceStates(_wider(x.astype(F32))[:, :, None])


def means(
    x: RecurrenceInputs,
    ids: Int[Array, "B T"] | None,
    order: Int[Array, "B T"] | None = None,
    *,
    interpret: bool = False,
    groups: int | None = None,
) -> tuple[tuple[Float[Array, "B T N V"], Float[Array, "B T N"]], Residuals]:
    """`ops.recurrence.means.mean` in the dtype of the values, and the sums of weights in float32.

    Arguments are as in `forward`, and so is the last result.
    """
    launches = _launches(x, ids, interpret, groups, order, mean=True)
    states, _, _, residuals = launches.states(None)
    out, total = launches.means(states)
    return (out[..., : x.v.shape[3]], total), residuals


def means_backward(
    x: RecurrenceInputs,
    ids: Int[Array, "B T"] | None,
    residuals: Residuals,
    d_sums: Float[Array, "B T N V"],
    d_total: Float[Array, "B T N"],
    order: Int[Array, "B T"] | None = None,
    *,
    interpret: bool = False,
    groups: int | None = None,
) -> RecurrenceInputs:
    """The gradients of `x`, by the gradients of the sums of values and of weights."""
    launches = _launches(x, ids, interpret, groups, order, mean=True, gradient=True)
    found, _ = launches.gradients(_wider(d_sums), residuals, d_total)
    return found._replace(v=found.v[..., : x.v.shape[3]])
