"""Reversible residual layers: memory that does not grow with depth (Gomez et al. 2017; Reformer).

A layer maps streams to streams so that its inputs can be computed back from its outputs, in one of
the two ways of `layers.coupling`. The paper's has two streams (eq. 8 and 9),

    y1 = x1 + attention(x2)        y2 = x2 + feed_forward(y1)

The gradient then needs nothing else but each layer's attention plan: for LSH two integers for each
head, hash and token. A layer can have any number of sublayers. A decoder layer has three:
the second attends to the encoder's memory, whose gradient adds up on the way back.

**Drift.** In floating point `(x + f) - f` is not `x`, and a sublayer that the compiler fuses with
its gradient may give other numbers than it gave alone. The inputs rebuilt then differ from the
forward pass's, by an error that grows with depth. On a **grid** streams and sublayers' outputs are
multiples of 2^-12, which float32 adds and subtracts without rounding while they stay below 2^12 in
magnitude. The gradient passes through the rounding unchanged. Slots are always on the grid:
without it, training with them was seen to diverge.

An output may still differ when the backward pass computes it again. `exact=True` has the grid and
rules that out: the backward pass computes the sublayer a second time, separate from its gradient as
in the forward pass, so that the compiler must produce the same numbers. `optimization_barrier`
separates it. A CPU's compiler drops barriers before it fuses, so there a branch of `lax.cond` does.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from reformax import devices
from reformax.declared import Bounds, SettingError
from reformax.layers import remat
from reformax.layers.coupling import Coupling, Slots, Streams, TwoStreams, share_a_slot
from reformax.layers.remat import RematPolicy
from reformax.layers.reversible_attention import AttentionSublayer
from reformax.layers.reversible_feed_forward import FeedForwardSublayer
from reformax.layers.stacks import BlockStack
from reformax.ops.masking.masks import paired_segment_ids

GRID = 2.0**-12
SlotCount = Annotated[int, Bounds(2, 256)]


@jax.custom_vjp
def to_grid(x: Float[Array, "*d"]) -> Float[Array, "*d"]:
    """`x` rounded to the nearest multiple of `GRID`; its gradient is that of the identity."""
    y = jnp.round(x * (1 / GRID)) * GRID
    return jnp.where(y == 0, 0.0, y)  # the sums would turn -0 into +0


to_grid.defvjp(lambda x: (to_grid(x), None), lambda _, gradient: (gradient,))


class SideInputs(NamedTuple):
    """The inputs that layers read besides their stream."""

    memory: Array | None  # [B, S, D], with cross-attention
    segment_ids: dict[str, Any]  # of each attention sublayer, by its name


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class ReversibleStack(BlockStack):
    """Reversible layers: `([B, T, D], [B, T, D]) -> ([B, T, D], [B, T, D])`, float32.

    In Trax: `tl.Serial(tl.Dup(), ReversibleStack(...), tl.Concatenate())`. With slots there is one
    stream, `[B, T, D] -> [B, T, D]`. Whatever the depth, `jax.grad` needs the memory of one cycle
    of layers, apart from the streams, the weights and the plans. Further inputs and arguments are
    those of `BlockStack`.

    Args:
      n_slots: the number of slots (`layers.coupling` defines them); None: two streams, as in the
        papers.
      exact: whether the backward pass rebuilds the forward's inputs bit for bit. It costs one more
        forward of each sublayer in the backward pass, and the memory of its result; streams must
        stay below 2^12.
      keep_ff_outputs: whether each feed-forward layer's output, `[B, T, D]`, is kept for the
        backward pass, which otherwise computes it again to rebuild the streams. It saves an eighth
        of the layer's arithmetic and costs memory that grows with the depth: in `dtype`, or in
        float32 on the grid.
      remat_policy: what the gradient keeps of each layer (`layers.remat`). "nothing" keeps plans
        alone, and "attention" what attention computed, which the backward pass then does not
        compute again. "all" is plain autodiff of the same function: a step of a third less
        arithmetic, where memory allows.
      offload_activations: whether plans, and what `keep_ff_outputs` and the policy keep, lie in the
        host's memory between the passes; not with "all".

    Raises:
      SettingError: besides what `BlockStack` refuses: with slots, layers that see beyond a window
        share one; `keep_ff_outputs` or `offload_activations` with a policy that keeps all;
        `offload_activations` where nothing is kept.
    """

    n_slots: SlotCount | None = None
    exact: bool = False
    keep_ff_outputs: bool = False
    remat_policy: RematPolicy = "nothing"
    offload_activations: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.keep_ff_outputs and self.remat_policy == "all":
            raise SettingError("remat_policy is 'all', keep_ff_outputs is True: leave one out")
        remat.check_policy(self.remat_policy, self.offload_activations)
        self._check_offload()
        self._on_grid = self.exact or self.n_slots is not None
        self._coupling: Coupling = TwoStreams()
        if self.n_slots is not None:
            self._coupling = Slots(self.n_slots)
            self._check_slots()

    def _check_offload(self) -> None:
        """Raises `SettingError` if there is nothing to offload."""
        attentions = [x for block in self.blocks for x in block.attentions.values()]
        keeps = self.keep_ff_outputs or self.remat_policy != "nothing"
        keeps |= any(x.op.plan_needs != "nothing" for x in attentions)
        if self.offload_activations and not keeps:
            raise SettingError(
                "offload_activations is True and remat_policy is 'nothing', which keeps nothing of "
                "these layers: set remat_policy='attention'"
            )

    @property
    def n_streams(self) -> int:
        """The number of streams that the stack reads and returns."""
        return 2 if self.n_slots is None else 1

    def _check_slots(self) -> None:
        """Raises `SettingError` if layers that see beyond a window share a slot where they need
        not.
        """
        size = 3 if self._cross else 2
        far = [not block.attention.op.local for block in self.blocks] * self._n_repeats
        indices = [size * layer for layer, is_far in enumerate(far) if is_far]
        if share_a_slot(indices, self.n_slots):
            most = size * self.n_layers  # a slot for each sublayer
            others = range(self.n_slots + 1, most + 1)
            enough = next(n for n in others if not share_a_slot(indices, n))
            raise SettingError(
                f"n_slots is {self.n_slots}: attention layers that see further than a window would "
                f"share a slot and not read one another; set n_slots={enough}"
            )

    def apply(self, params, *inputs, rng=None):
        if self.offload_activations:
            remat.check_offload()
        streams, side = self._inputs(params, *inputs)
        if self.remat_policy == "all":  # plain autodiff of the same function
            after, _ = self._forward(params, self._coupling.opened(streams), side, rng)
        else:
            after = _run(self, params, streams, side, rng)
        return after[: self.n_streams] if self.n_streams > 1 else after[0]

    def rebuild(self, params, *inputs, rng=None) -> tuple[Streams, Streams]:
        """The stack's streams at its input, and those that the backward pass rebuilds.

        On a grid they are rounded to it. This runs the backward pass itself, for measuring its
        drift.
        """
        streams, side = self._inputs(params, *inputs)
        _, residuals = _run_forward(self, params, streams, side, rng)
        return self._coupling.opened(streams), self._backward(residuals, residuals[1])[0]

    def _inputs(self, params, *inputs) -> tuple[Streams, SideInputs]:
        streams, others = inputs[: self.n_streams], inputs[self.n_streams :]
        if len(streams) < self.n_streams or len(others) > 3:
            raise ValueError(
                f"{len(inputs)} inputs are given: expected {self.n_streams} "
                f"stream{'s' * (self.n_streams > 1)}, then "
                "segment_ids, memory and memory_segment_ids where there are any"
            )
        segment_ids, memory, memory_segment_ids = *others, *[None] * (3 - len(others))
        self._check_inputs(params, streams, segment_ids, memory, memory_segment_ids)
        seen = {"attention": segment_ids, "cross_attention": None}
        if self._cross:
            seen["cross_attention"] = paired_segment_ids(
                (segment_ids, streams[0]), (memory_segment_ids, memory)
            )
        streams = tuple(map(self._residual, streams))
        return streams, SideInputs(memory, seen)

    def _opened(self, streams: Streams) -> Streams:
        return self._coupling.opened(super()._opened(streams))

    def _decode(self, params, name, streams, sublayer):
        parts = self._coupling.parts_before(streams)
        read = self._unnormed(params[f"{name}_norm"], self._coupling.read(parts))
        if self._on_grid:  # what is added is rounded before
            out, *kept = sublayer(params[name], read, added=None)
            return self._coupling.streams_after(parts.plus(self._residual(out))), tuple(kept)
        (stream,) = parts.written
        out, *kept = sublayer(params[name], read, added=stream)
        return self._coupling.streams_after(parts._replace(written=(out,))), tuple(kept)

    def _residual(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        x = x.astype(jnp.float32)
        return to_grid(x) if self._on_grid else x

    def _separately(self, function, params, *args):
        """`function(params, *args)`; if exact, compiled separately from everything around it.

        `args` begin with what streams hold or is made of them.
        """
        if not self.exact:
            return function(params, *args)
        if jax.default_backend() != "cpu":
            fence = jax.lax.optimization_barrier
            return fence(function(*fence((params, *args))))
        # A CPU's compiler drops barriers before it fuses, but compiles a branch separately. The
        # other branch is never taken, for streams stay below 2^12.

        def lost(*operands):
            shapes = jax.eval_shape(function, *operands)

            def filled(x):
                of_floats = jnp.issubdtype(x.dtype, jnp.inexact)
                return jnp.full(x.shape, jnp.nan if of_floats else 0, x.dtype)

            return jax.tree.map(filled, shapes)

        first = jax.tree.leaves(args)[0]
        first = first[(0,) * first.ndim]
        return jax.lax.cond(first == jnp.inf, lost, function, params, *args)

    def _forward(self, params, streams: Streams, side: SideInputs, rng) -> tuple[Streams, Any]:
        """The outputs; what is kept of each attention and, if kept, each feed-forward's output."""
        coupling = self._coupling

        def repeat(streams, this):
            kept_attention, kept_ff = [], []
            for i, block in enumerate(self.blocks):
                block_params = this.params[f"block_{i}"]
                rngs = self._rngs(rng, this, i)
                kept_attention.append({})
                for sublayer in self._attentions(i, side, rngs):
                    sublayer_params = _params_of(block_params, sublayer.name)
                    parts, reused = coupling.parts_before(streams), None
                    if sublayer.source is not None:
                        reused = kept_attention[sublayer.source]["attention"].plan
                    read = coupling.read(parts)
                    out, of_attention = sublayer.forward(sublayer_params, read, reused)
                    streams = coupling.streams_after(parts.plus(out))
                    kept_attention[-1][sublayer.name] = of_attention
                sublayer_params = _params_of(block_params, "feed_forward")
                parts = coupling.parts_before(streams)
                feed_forward = FeedForwardSublayer(self, block.feed_forward, rngs["feed_forward"])
                parts, out = feed_forward.forward(sublayer_params, parts)
                streams = coupling.streams_after(parts)
                kept_ff.append(out)
            stored = tuple(kept_attention), tuple(kept_ff)
            return streams, remat.to_host(stored) if self.offload_activations else stored

        return self._scan(repeat, streams, params)

    def _backward(self, residuals, d_streams: Streams):
        """The inputs rebuilt, and the gradients of parameters, inputs and memory."""
        params, streams, stored, side, rng = residuals
        d_memory = jax.tree.map(jnp.zeros_like, side.memory)
        coupling = self._coupling

        def repeat(carry, this, stored):
            kept_attention, kept_ff = (
                remat.to_device(stored) if self.offload_activations else stored
            )
            streams, d_streams, d_memory = carry
            d_params = {}
            for i, block in reversed(list(enumerate(self.blocks))):
                block_params = this.params[f"block_{i}"]
                rngs = self._rngs(rng, this, i)
                sublayer_params = _params_of(block_params, "feed_forward")
                parts, gradient = coupling.parts_after(streams), coupling.gradient(d_streams)
                feed_forward = FeedForwardSublayer(self, block.feed_forward, rngs["feed_forward"])
                parts, d_read, d_block = feed_forward.backward(
                    sublayer_params, parts, gradient, kept_ff[i]
                )
                streams = coupling.streams_before(parts)
                d_streams = coupling.gradient_before(gradient, d_read)
                for sublayer in reversed(self._attentions(i, side, rngs)):
                    sublayer_params = _params_of(block_params, sublayer.name)
                    parts, gradient = coupling.parts_after(streams), coupling.gradient(d_streams)
                    of_attention = kept_attention[i][sublayer.name]
                    if sublayer.source is not None:
                        plan = kept_attention[sublayer.source]["attention"].plan
                        of_attention = of_attention._replace(plan=plan)
                    out, vjp = sublayer.recompute(
                        sublayer_params, coupling.read(parts), of_attention
                    )
                    d_sublayer, d_read, *d_read_memory = vjp((gradient.out, gradient.read))
                    streams = coupling.streams_before(parts.minus(out))
                    d_streams = coupling.gradient_before(gradient, d_read)
                    if d_read_memory:
                        d_memory = d_memory + d_read_memory[0]
                    d_block |= d_sublayer
                d_params[f"block_{i}"] = d_block
                if self.keep_ff_outputs:
                    # Streams can then be rebuilt before any gradient. Without a fence those of all
                    # layers would be in memory at once.
                    streams, d_streams = jax.lax.optimization_barrier((streams, d_streams))
            return (streams, d_streams, d_memory), devices.stored(d_params)

        carry = streams, d_streams, d_memory
        (streams, d_streams, d_memory), d_params = self._scan(
            repeat, carry, params, stored, reverse=True
        )
        return streams, d_params, d_streams, d_memory

    def _attentions(self, i: int, side: SideInputs, rngs) -> list[AttentionSublayer]:
        """The attention sublayers of block `i`, in order."""
        return [
            AttentionSublayer(
                self,
                name,
                layer,
                (side.memory,) if name == "cross_attention" else (),
                side.segment_ids[name],
                rngs[name],
                self._sources[i] if name == "attention" else None,
            )
            for name, layer in self.blocks[i].attentions.items()
        ]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(stack: ReversibleStack, params, streams: Streams, side: SideInputs, rng) -> Streams:
    return _run_forward(stack, params, streams, side, rng)[0]


def _run_forward(stack, params, streams, side, rng):
    after, stored = stack._forward(params, stack._coupling.opened(streams), side, rng)
    return after[: stack.n_streams], (params, after, stored, side, rng)


def _run_backward(stack, residuals, d_outputs):
    d_after = stack._coupling.opened(d_outputs)  # nothing reads the slots
    _, d_params, d_streams, d_memory = stack._backward(residuals, d_after)
    return d_params, d_streams[: stack.n_streams], SideInputs(d_memory, None), None


_run.defvjp(_run_forward, _run_backward)


def _params_of(block: dict, name: str) -> dict:
    """A block's parameters: those of one sublayer and of its norm."""
    return {f"{name}_norm": block[f"{name}_norm"], name: block[name]}
