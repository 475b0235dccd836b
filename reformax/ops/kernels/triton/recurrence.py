"""Linear recurrences, chunk by chunk, as Pallas kernels for NVIDIA GPUs (Triton).

They compute the function of `reformax.ops.recurrence.recurrence`, whose equations they follow (Yang
et al. 2023, "Gated Linear Attention", sec. 4; Yang et al. 2024, "Gated Delta Networks", sec. 3.3).
This file launches them. `recurrence_chunk` has the reads and writes of a program,
`recurrence_states` passes states from chunk to chunk, `recurrence_delta` does so with the delta
rule, and `recurrence_outputs` computes each chunk.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from reformax.ops.calls import dispatch
from reformax.ops.calls.dispatch import NARROW_HEAD
from reformax.ops.kernels.triton.common import launch
from reformax.ops.kernels.triton.recurrence_chunk import (
    L,
    NormalizedRows,
    RecurrenceArrays,
    RecurrencePlan,
    RecurrenceStates,
    SolvedDelta,
)
from reformax.ops.kernels.triton.recurrence_delta import (
    delta_d_states_kernel,
    delta_states_kernel,
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
    COLUMNS,
    StateBlocks,
    begins_kernel,
    d_states_kernel,
    states_kernel,
)
from reformax.ops.masking.visibility import same_segment
from reformax.ops.recurrence.chunks import RecurrenceInputs
from reformax.ops.recurrence.unit_length import UnitRows, with_factors

F32 = jnp.float32
# Programs that fill a GPU of 132 processors; the fewest chunks of a group.
PROGRAMS, LEAST_CHUNKS = 264, 16
# Warps of a program.
WARPS = dict(sums=4, solve=4, states=4, begins=8, d_states=4, output=4, d_values=4, gradients=8)
STAGES = 3  # pipeline stages of the kernels that loop over chunks
# Variants to be timed.
DELTA_COLUMNS = 128
FUSED = True
GRADIENT_WARPS = None
UNIT_IN_KERNELS = True


def _on_large_chip() -> bool:
    """Whether a chip holds a program of wide blocks: Hopper's, or none, where it is interpreted.

    Blackwell's has too little memory for products.
    """
    if dispatch.shared_kib() < dispatch.LARGE_CHIP:
        return False
    return dispatch.on_hopper() or jax.default_backend() != "gpu"


def _plan(x: RecurrenceInputs, interpret: bool, groups: int | None, mean: bool) -> RecurrencePlan:
    length, dtype = x.k.shape[1], jnp.result_type(x.q, x.k, x.v)
    columns = DELTA_COLUMNS if x.beta is not None and _on_large_chip() else COLUMNS
    found, fills = _groups(x, dtype, columns, groups)
    if not fills and columns > COLUMNS:  # more programs of narrower blocks
        columns = COLUMNS
        found, _ = _groups(x, dtype, columns, groups)
    n_chunks = pl.cdiv(pl.cdiv(length, L), found)
    return RecurrencePlan(length, found, n_chunks, mean, dtype, columns, interpret)


def _groups(x: RecurrenceInputs, dtype, columns: int, groups: int | None) -> tuple[int, bool]:
    """The number of groups of chunks, and whether their programs fill most of a GPU."""
    (batch, length, n_heads, size), d_v, delta = x.k.shape, x.v.shape[3], x.beta is not None
    blocks = StateBlocks.of(size, d_v, delta, dtype, columns)
    # A program of wide blocks has as many warps as two others.
    n_programs = batch * n_heads * blocks.grid(size, d_v) * (2 if blocks.v > COLUMNS else 1)
    if groups is None and delta and size > NARROW_HEAD:
        groups = 1  # a chip does not hold the matrix of a group
    elif groups is None:
        groups = min(PROGRAMS // n_programs, pl.cdiv(length, L) // LEAST_CHUNKS)
        # Groups read all chunks twice, and with the delta rule once more for a matrix.
        groups = groups if groups > (3 if delta else 1) else 1
    return groups, groups > 1 or n_programs > PROGRAMS // 2


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
    name = kernel.__name__.removesuffix("_kernel")
    return launch(
        functools.partial(kernel, plan=plan, **static),
        inputs,
        out_shape,
        grid=grid,
        num_warps=warps or WARPS[name],
        num_stages=1 if dispatch.on_small_chip() else stages,
        interpret=plan.interpret,
        name=f"recurrence_{name}",
    )


class KeptResults(NamedTuple):
    """What the backward pass reads beside the inputs.

    The solution is L numbers for a position and head in the inputs' dtype, half of keys of 128. The
    others are float32, of groups that fill a GPU: less than 30 MB with heads up to 128.
    """

    begins: RecurrenceStates | None = None  # the state before each group; None of one group
    # For the delta rule, the states of groups from zeros, and the groups' transitions.
    transitions: RecurrenceStates | None = None
    solution: Float[Array, "B N Tp L"] | None = None  # `kept` of `SolvedDelta`


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

    @property
    def fuses(self) -> bool:
        """Whether scans of the delta rule compute what belongs to the pairs of a chunk."""
        if not FUSED or self.x.beta is None or self.by_feature:
            return False
        row = self._blocks.h * self.plan.dtype.itemsize
        return row <= 256 and _on_large_chip()

    def _normalized(self, x) -> NormalizedRows:
        return NormalizedRows(self._like(x, x.dtype), self._shape(*x.shape[:3], dtype=F32))

    def solved(
        self, kept: KeptResults | None = None, keep: bool = False, unit_length: bool = False
    ) -> tuple[SolvedDelta | None, NormalizedRows | None]:
        """The delta rule of all chunks; None without `beta`. And the keys, if they are normalised.

        Args:
          kept: the forward pass's results, for the backward pass, which reads the inverse too.
          keep: whether to write what the backward pass reads.
          unit_length: whether keys are normalised.
        """
        x = self.x
        if x.beta is None:
            return None, None
        batch, _, n_heads, _ = x.k.shape
        square = self._shape(batch, n_heads, self.plan.padded, L)
        inverse, keeps = (square if wanted else None for wanted in (kept is not None, keep))
        shapes = SolvedDelta(self._like(x.k), self._like(x.v), inverse, keeps)
        solution = None if kept is None else kept.solution
        unit_k = self._normalized(x.k) if unit_length else None
        return tuple(self._each(solve_kernel, (solution,), (shapes, unit_k)))

    def states(
        self,
        solved,
        initial: RecurrenceStates | None = None,
        kept: KeptResults | None = None,
        outputs: bool = False,
        unit_q: NormalizedRows | None = None,
        unit_length: bool = False,
    ) -> tuple[Any, Array, RecurrenceStates | None, KeptResults]:
        """The state before each chunk, the written values, and the state after the last chunk.

        With `outputs`, of the delta rule, the outputs are in place of the values, and what is
        wanted of normalised queries in place of states.

        The state after the last chunk is there with the one before the first chunk, `initial`, of
        one group. The fourth result is what the backward pass reads, where it is called with None.
        """

        def run(begins, states, ends):
            if solved is None:
                states, ends = self._scan(states_kernel, (self.x, begins), (states, ends))
                return states, self.x.v, ends
            values = out = wanted = None
            blocks, more_blocks = self._blocks, 0
            if states is None:  # the first of two passes, with the groups' transitions
                more_blocks = pl.cdiv(blocks.h, blocks.v)
                width = (pl.cdiv(self.x.v.shape[3], blocks.v) + more_blocks) * blocks.v
                ends = ends._replace(outer=self._shape(*ends.outer.shape[:4], width, dtype=F32))
            elif outputs:
                states, out, wanted = None, self._like(self.x.v), unit_q
            else:
                values = self._like(self.x.v)
            inputs, shapes = (self.x, solved, begins), (states, values, ends, out, wanted)
            options = dict(more_blocks=more_blocks, unit_length=unit_length)
            found = self._scan(delta_states_kernel, inputs, shapes, **options)
            states, values, ends, out, wanted = found
            return (wanted, out, ends) if outputs else (states, values, ends)

        if initial is not None:
            states, values, final = run(initial, *self._state_shapes(F32))
            kept = KeptResults()
        else:
            if kept is None:
                begins, ends = self._groups(run, None, reverse=False)
                kept = KeptResults(begins, None if solved is None else ends)
            states, values, final = run(kept.begins, self._state_shapes()[0], None)
        if solved is not None:
            kept = kept._replace(solution=solved.kept)
        return states, values, final, kept

    def d_states(
        self, solved, d_out, d_total, d_values_within, transitions, d_final=None
    ) -> tuple[RecurrenceStates, Array | None, RecurrenceStates | None]:
        """The gradients of the state after each chunk, and of the values of the delta rule.

        With `d_final`, that of the state after the last chunk, of one group, the third result is
        that of the state before the first one.

        Args:
          solved, d_out, d_total: as in the kernel.
          d_values_within: the gradients of values by the outputs of their chunk.
          transitions: as in `KeptResults`.
        """

        def run(begins, states, ends):
            if solved is None:
                inputs = self.x, begins, d_out, d_total
                states, ends = self._scan(d_states_kernel, inputs, (states, ends))
                return states, None, ends
            d_values = None if states is None else self._like(self.x.v)
            inputs = self.x, solved, begins, d_out, d_values_within
            return self._scan(delta_d_states_kernel, inputs, (states, d_values, ends))

        if d_final is not None:
            return run(d_final, *self._state_shapes(F32))
        begins, _ = self._groups(run, transitions, reverse=True)
        return run(begins, self._state_shapes()[0], None)

    @property
    def _blocks(self) -> StateBlocks:
        (_, _, _, d_k), d_v, delta = self.x.k.shape, self.x.v.shape[3], self.x.beta is not None
        return StateBlocks.of(d_k, d_v, delta, self.plan.dtype, self.plan.columns)

    def _scan(self, kernel, inputs, out_shape, more_blocks: int = 0, **static):
        (batch, _, n_heads, d_k), d_v = self.x.k.shape, self.x.v.shape[3]
        blocks = self._blocks
        grid = blocks.grid(d_k, d_v) + more_blocks, n_heads, batch * self.plan.n_groups
        stages, warps = STAGES, None
        if self.x.beta is not None:
            # Programs read whole rows of several arrays: a chip holds fewer wide ones. The rows of
            # a step arrive while the one before computes, of few arrays two steps ahead.
            row, large = blocks.h * self.plan.dtype.itemsize, _on_large_chip()
            if row > 384 or (row >= 256 and not large):
                stages = STAGES - 1
            elif blocks.v > COLUMNS and kernel is delta_states_kernel and out_shape[3] is None:
                stages = STAGES + 1
            warps = 8 if blocks.v > COLUMNS or blocks.h > NARROW_HEAD else 4
        static |= dict(blocks=blocks)
        return _run(kernel, self.plan, grid, inputs, out_shape, stages, warps, **static)

    def _state_shapes(self, of_groups=None) -> list[RecurrenceStates]:
        """The shapes of the states of chunks, and of groups in the dtype `of_groups`."""
        plan, (batch, _, n_heads, d_k), d_v = self.plan, self.x.k.shape, self.x.v.shape[3]

        def shapes(n, dtype, sides):
            outer = self._shape(batch, n_heads, n, *sides, dtype=dtype)
            keys = self._shape(batch, n_heads, n, d_k, dtype=F32) if plan.mean else None
            return RecurrenceStates(outer, keys)

        sides = (d_k, d_v) if self.x.beta is None else (d_v, d_k)
        n = plan.n_groups * plan.n_chunks
        return [shapes(n, None, sides), shapes(plan.n_groups, of_groups, (d_k, d_v))]

    def _groups(self, run, transitions, reverse: bool):
        """The states before groups, and after them from zeros; none of one group.

        With `reverse`, the gradients of the states after groups.
        """
        plan, (batch, _, n_heads, d_k) = self.plan, self.x.k.shape
        if plan.n_groups == 1:
            return None, None
        shapes = self._state_shapes(F32)[1]
        ends = run(None, None, shapes)[2]
        if self.x.beta is not None and transitions is None:
            transitions = ends
        blocks, d_v = self._blocks, self.x.v.shape[3]
        width = pl.cdiv(d_v, blocks.v) * blocks.v
        blocks = blocks._replace(v=min(blocks.v, COLUMNS))
        (begins,) = _run(
            begins_kernel,
            plan,
            (blocks.grid(d_k, d_v), n_heads, batch),
            (self.x, self._kept(), ends, transitions),
            (shapes,),
            blocks=blocks,
            width=width,
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

    def output(self, solved, initial: RecurrenceStates | None = None):
        """The outputs, and the last two results of `states`."""
        if self.fuses:
            return self.states(solved, initial, outputs=True)[1:]
        states, values, final, kept = self.states(solved, initial)
        shapes = self._like(self.x.v), None
        return self._each(output_kernel, (states, values), shapes)[0], final, kept

    def means(self, states) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
        shapes = self._like(self.x.v, self.x.v.dtype), self._shape(*self.x.v.shape[:3], dtype=F32)
        return tuple(self._each(output_kernel, (states, self.x.v), shapes))

    def gradients(
        self, d_out, kept: KeptResults, d_total=None, initial=None, d_final=None, units=None
    ):
        """The gradients of the inputs, and of the state before them where there is one."""
        x = self.x
        d_out = d_out.astype(self.plan.dtype)
        solved, _ = self.solved(kept)
        states, values, _, _ = self.states(solved, initial, kept)
        d_values_within = inverse = None
        if solved is not None:
            if not self.fuses:
                (d_values_within,) = self._each(d_values_kernel, (d_out,), (self._like(x.v),))
            inverse = solved.inverse
        d_states, d_values, d_initial = self.d_states(
            solved, d_out, d_total, d_values_within, kept.transitions, d_final
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
        more = whole or wide or (self.by_feature and not dispatch.on_hopper())
        options = dict(stages=stages, warps=GRADIENT_WARPS or (None if more else 4))
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
    *,
    keep: bool = False,
    interpret: bool = False,
    groups: int | None = None,
) -> tuple[Float[Array, "B T N V"], KeptResults]:
    """The outputs, in the dtype of products' inputs.

    Args:
      x: as in `ops.recurrence.recurrence.recurrence`.
      ids: segments of the rows, those of one segment contiguous.
      order: the position in x of each row; None: rows are positions.
      keep: whether `backward` follows, which reads the second result.
      interpret: whether to run the kernels on any device, slowly.
      groups: groups of chunks that run in parallel; None: as many as fill a GPU.
    """
    launches = _launches(x, ids, interpret, groups, order)
    out, _, kept = launches.output(launches.solved(keep=keep)[0])
    return out[..., : x.v.shape[3]], kept


def forward_of_unit_length(
    x: RecurrenceInputs,
    ids: Int[Array, "B T"] | None,
    order: Int[Array, "B T"] | None = None,
    *,
    keep: bool = False,
    interpret: bool = False,
) -> tuple[Float[Array, "B T N V"], KeptResults, RecurrenceInputs, UnitRows]:
    """`forward` of queries and keys that are brought to unit length, which `with_factors` does.

    Returns:
      The results of `forward`. Then, for the backward pass, the inputs that are normalised and the
      factors; with `keep` alone.
    """
    launches = _launches(x, ids, interpret, None, order)
    if not (UNIT_IN_KERNELS and launches.fuses):
        x, units = with_factors(x)
        return *forward(x, ids, order, keep=keep, interpret=interpret), x, units
    solved, unit_k = launches.solved(keep=keep, unit_length=True)
    launches = launches._replace(x=launches.x._replace(k=unit_k.rows))
    unit_q = launches._normalized(x.q) if keep else None
    options = dict(outputs=True, unit_q=unit_q, unit_length=True)
    unit_q, out, _, kept = launches.states(solved, **options)
    out = out[..., : x.v.shape[3]]
    if not keep:
        return out, kept, x, None
    x = x._replace(q=unit_q.rows, k=unit_k.rows)
    return out, kept, x, UnitRows(unit_q.factors, unit_k.factors)


def backward(
    x: RecurrenceInputs,
    ids: Int[Array, "B T"] | None,
    kept: KeptResults,
    d_out: Float[Array, "B T N V"],
    order: Int[Array, "B T"] | None = None,
    units: UnitRows | None = None,
    *,
    interpret: bool = False,
    groups: int | None = None,
) -> RecurrenceInputs:
    """The gradients of `x`, by that of the outputs; with `units`, of queries and keys before them.

    Arguments are as in `forward`.
    """
    launches = _launches(x, ids, interpret, groups, order, gradient=True)
    units = units and units._replace(out=_wider(units.out))
    found, _ = launches.gradients(_wider(d_out), kept, units=units)
    return found._replace(v=found.v[..., : x.v.shape[3]])


def forward_from(
    x: RecurrenceInputs,
    initial: Float[Array, "B N H V"],
    ids: Int[Array, "B T"] | None,
    *,
    keep: bool = False,
    interpret: bool = False,
) -> tuple[tuple[Float[Array, "B T N V"], Float[Array, "B N H V"]], KeptResults]:
    """`forward` from a state of the first segment, with the state of the last one, in float32.

    The chunks are one group, so that states come in and go out once.
    """
    launches = _launches(x, ids, interpret, groups=1)
    out, final, kept = launches.output(launches.solved(keep=keep)[0], _state(initial))
    size = x.v.shape[3]
    return (out[..., :size].astype(F32), final.outer[:, :, 0, :, :size]), kept


def backward_from(
    x: RecurrenceInputs,
    initial: Float[Array, "B N H V"],
    ids: Int[Array, "B T"] | None,
    kept: KeptResults,
    d_out: Float[Array, "B T N V"],
    d_final: Float[Array, "B N H V"],
    *,
    interpret: bool = False,
) -> tuple[RecurrenceInputs, Float[Array, "B N H V"]]:
    """The gradients of `x` and of `initial`, by those of the results of `forward_from`."""
    launches = _launches(x, ids, interpret, groups=1, gradient=True)
    size = x.v.shape[3]
    states = dict(initial=_state(initial), d_final=_state(d_final))
    found, d_initial = launches.gradients(_wider(d_out), kept, **states)
    return found._replace(v=found.v[..., :size]), d_initial.outer[:, :, 0, :, :size]


def _state(x: Float[Array, "B N H V"]) -> RecurrenceStates:
    """A state as that of one group."""
    return RecurrenceStates(_wider(x.astype(F32))[:, :, None])


def means(
    x: RecurrenceInputs,
    ids: Int[Array, "B T"] | None,
    order: Int[Array, "B T"] | None = None,
    *,
    interpret: bool = False,
    groups: int | None = None,
) -> tuple[tuple[Float[Array, "B T N V"], Float[Array, "B T N"]], KeptResults]:
    """`ops.recurrence.means.mean` in the dtype of the values, and the sums of weights in float32.

    Arguments are as in `forward`, and so is the last result.
    """
    launches = _launches(x, ids, interpret, groups, order, mean=True)
    states, _, _, kept = launches.states(None)
    out, total = launches.means(states)
    return (out[..., : x.v.shape[3]], total), kept


def means_backward(
    x: RecurrenceInputs,
    ids: Int[Array, "B T"] | None,
    kept: KeptResults,
    d_sums: Float[Array, "B T N V"],
    d_total: Float[Array, "B T N"],
    order: Int[Array, "B T"] | None = None,
    *,
    interpret: bool = False,
    groups: int | None = None,
) -> RecurrenceInputs:
    """The gradients of `x`, by the gradients of the sums of values and of weights."""
    launches = _launches(x, ids, interpret, groups, order, mean=True, gradient=True)
    found, _ = launches.gradients(_wider(d_sums), kept, d_total)
    return found._replace(v=found.v[..., : x.v.shape[3]])
