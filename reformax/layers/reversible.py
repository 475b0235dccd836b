"""Reversible residual layers: memory that does not grow with depth (Gomez et al. 2017; Reformer).

A layer maps two streams to two streams,

    y1 = x1 + attention(x2)        y2 = x2 + feed_forward(y1)            (Reformer, eq. 9)

so that its inputs can be computed back from its outputs (eq. 8). The gradient then needs nothing
else but each layer's attention plan: for LSH two integers for each head, hashing round and token. A
layer can have any number of sublayers. Each reads the stream that was written last and adds to the
other. A decoder layer has three: the second attends to the encoder's memory, whose gradient adds up
on the way back.

**Exactness.** In floating point `(x + f) - f` is not `x`, and a sublayer that the compiler fuses
with its gradient may give other numbers than it gave alone. The inputs rebuilt then differ from the
forward pass's, by an error that grows with depth. `exact=True` removes both causes:

  * streams and sublayers' outputs are multiples of 2^-12, which float32 adds and subtracts without
    rounding while they stay below 2^12 in magnitude;
  * the backward pass computes the sublayer a second time, apart from its gradient as in the forward
    pass, so that the compiler must produce the same numbers. `optimization_barrier` keeps it apart,
    and on a CPU, whose compiler drops barriers before it fuses, a branch of `lax.cond` does.

The gradient passes through the rounding unchanged.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from reformax.layers.attention import QKV, MultiHead
from reformax.layers.stacks import Block, BlockStack

GRID = 2.0**-12


@jax.custom_vjp
def to_grid(x: Float[Array, "*d"]) -> Float[Array, "*d"]:
    """`x` rounded to the nearest multiple of `GRID`; its gradient is that of the identity."""
    y = jnp.round(x * (1 / GRID)) * GRID
    return jnp.where(y == 0, 0.0, y)  # the sums would turn -0 into +0


to_grid.defvjp(lambda x: (to_grid(x), None), lambda _, gradient: (gradient,))


class Streams(NamedTuple):
    """The two residual streams, `[B, T, D]` float32 each."""

    one: Array
    two: Array


class Context(NamedTuple):
    """The inputs that layers read besides their stream."""

    memory: Array | None  # [B, S, D], with cross-attention
    segments: dict[str, Any]  # of each attention sublayer, by its name


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class ReversibleStack(BlockStack):
    """Reversible layers: `([B, T, D], [B, T, D]) -> ([B, T, D], [B, T, D])`, float32.

    In Trax: `tl.Serial(tl.Dup(), ReversibleStack(...), tl.Concatenate())`. Whatever the depth,
    `jax.grad` needs the memory of one cycle of layers, apart from the weights and the plans.
    Further inputs and arguments are those of `BlockStack`.

    Args:
      exact: whether the backward pass rebuilds the forward's inputs bit for bit. It costs one more
        forward of each sublayer in the backward pass, and the memory of its result; streams must
        stay below 2^12.
      keep_ff_outputs: whether each feed-forward layer's output, `[B, T, D]` in `dtype`, is kept for
        the backward pass, which otherwise computes it again to rebuild the streams. It saves an
        eighth of the layer's arithmetic and costs memory that grows with the depth.
    """

    exact: bool = False
    keep_ff_outputs: bool = False

    n_streams = 2

    def apply(self, params, x1, x2, segments=None, memory=None, memory_segments=None, rng=None):
        streams, context = self._inputs(x1, x2, segments, memory, memory_segments)
        return tuple(_run(self, params, streams, context, rng))

    def rebuild(
        self, params, x1, x2, segments=None, memory=None, memory_segments=None, rng=None
    ) -> tuple[Streams, Streams]:
        """The stack's inputs, on the grid if exact, and those that the backward pass rebuilds.

        This runs the backward pass itself, for measuring its drift.
        """
        streams, context = self._inputs(x1, x2, segments, memory, memory_segments)
        outputs, residuals = _run_forward(self, params, streams, context, rng)
        return streams, self._backward(residuals, outputs)[0]

    def apply_keeping(
        self, params, x1, x2, segments=None, memory=None, memory_segments=None, rng=None
    ) -> tuple[Array, Array]:
        """`apply`, whose gradient is plain autodiff's: it keeps every activation."""
        streams, context = self._inputs(x1, x2, segments, memory, memory_segments)
        return tuple(self._forward(params, streams, context, rng)[0])

    def _inputs(self, x1, x2, segments, memory, memory_segments) -> tuple[Streams, Context]:
        seen = {"attention": None, "cross_attention": None}
        if segments is not None:
            own = segments.astype(jnp.int32)
            seen["attention"] = own
            if self._cross:
                seen["cross_attention"] = (own, memory_segments.astype(jnp.int32))
        streams = Streams(self._residual(x1), self._residual(x2))
        return streams, Context(memory if self._cross else None, seen)

    def _residual(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        x = x.astype(jnp.float32)
        return to_grid(x) if self.exact else x

    def _alone(self, function, params, *args):
        """`function(params, *args)`; if exact, compiled apart from everything around it.

        `args` begin with what streams hold or is made of them.
        """
        if not self.exact:
            return function(params, *args)
        if jax.default_backend() != "cpu":
            fence = jax.lax.optimization_barrier
            return fence(function(*fence((params, *args))))
        # A CPU's compiler drops barriers before it fuses. A branch is a program of its own; the
        # other one is never taken, for streams stay below 2^12.

        def lost(*operands):
            shapes = jax.eval_shape(function, *operands)
            return jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), shapes)

        first = jnp.ravel(jax.tree.leaves(args)[0])[0]
        return jax.lax.cond(first == jnp.inf, lost, function, params, *args)

    def _forward(self, params, streams: Streams, context: Context, rng) -> tuple[Streams, Any]:
        """The outputs; each attention's plan and, if kept, each feed-forward layer's output."""

        def repeat(streams, this):
            plans, kept = [], []
            for i, block in enumerate(self.blocks):
                block_params = this.params[f"block_{i}"]
                rngs = self._rngs(rng, this, i)
                plans.append({})
                for sublayer in self._attentions(block, context, rngs):
                    own = _params_of(block_params, sublayer.name)
                    out, plan = sublayer.forward(own, streams.two)
                    streams = Streams(streams.two, streams.one + out)
                    plans[-1][sublayer.name] = plan
                own = _params_of(block_params, "feed_forward")
                y, out = self._feed_forward(block, own, streams, rngs["feed_forward"])
                streams = Streams(streams.two, y)
                kept.append(out)
            return streams, (tuple(plans), tuple(kept))

        return self._scan(repeat, streams, params)

    def _backward(self, residuals, gradient: Streams):
        """The inputs rebuilt, and the gradients of parameters, inputs and memory."""
        params, streams, (plans, kept), context, rng = residuals
        d_memory = jax.tree.map(jnp.zeros_like, context.memory)

        def repeat(carry, this, plans, kept):
            streams, gradient, d_memory = carry
            d_params = {}
            for i, block in reversed(list(enumerate(self.blocks))):
                block_params = this.params[f"block_{i}"]
                rngs = self._rngs(rng, this, i)
                own = _params_of(block_params, "feed_forward")
                x, d_read, d_block = self._feed_forward_back(
                    block, own, streams, gradient, kept[i], rngs["feed_forward"]
                )
                streams, gradient = Streams(x, streams.one), Streams(gradient.two, d_read)
                for sublayer in reversed(self._attentions(block, context, rngs)):
                    own = _params_of(block_params, sublayer.name)
                    out, vjp = sublayer.again(own, streams.one, plans[i][sublayer.name])
                    d_own, d_read, *d_memory_here = vjp((gradient.two, gradient.one))
                    streams = Streams(streams.two - out, streams.one)
                    gradient = Streams(gradient.two, d_read)
                    if d_memory_here:
                        d_memory = d_memory + d_memory_here[0]
                    d_block |= d_own
                d_params[f"block_{i}"] = d_block
                if self.keep_ff_outputs:
                    # Streams can then be rebuilt before any gradient. Without a fence those of all
                    # layers would be in memory at once.
                    streams, gradient = jax.lax.optimization_barrier((streams, gradient))
            return (streams, gradient, d_memory), d_params

        carry = streams, gradient, d_memory
        (streams, gradient, d_memory), d_params = self._scan(
            repeat, carry, params, plans, kept, reverse=True
        )
        return streams, d_params, gradient, d_memory

    def _attentions(self, block: Block, context: Context, rngs) -> list[_AttentionSublayer]:
        """The attention sublayers of a block, in order."""
        return [
            _AttentionSublayer(
                self,
                name,
                layer,
                (context.memory,) if name == "cross_attention" else (),
                context.segments[name],
                rngs[name],
            )
            for name, layer in block.attentions.items()
        ]

    # The feed-forward sublayer takes positions in the chunks of its layer, forward and back. A
    # chunk's gradient is computed as soon as its input is known: unlike under `jax.checkpoint`,
    # chunks then cost no arithmetic.

    def _feed_forward(
        self, block: Block, params, streams: Streams, rng
    ) -> tuple[Array, Array | None]:
        """The first stream plus the layer's output for the second; that output, if kept."""
        params = self._cast(block, params)

        def chunk(carry, start, size):
            y, kept = carry
            out = self._alone(
                lambda *args: self._chunk(block, *args, start=start, rng=rng)[0],
                params,
                _slice(streams.two, start, size),
            )
            y = _update(y, start, _slice(y, start, size) + out)
            return y, None if kept is None else _update(kept, start, out.astype(kept.dtype))

        kept = None
        if self.keep_ff_outputs:
            kept = jnp.zeros_like(streams.one, "float32" if self.exact else self.dtype)
        return _over_chunks(chunk, (streams.one, kept), block.feed_forward.chunk_size)

    def _feed_forward_back(
        self, block: Block, params, streams: Streams, gradient: Streams, kept, rng
    ) -> tuple[Array, Array, Any]:
        """`_feed_forward` undone: the stream before it, and two gradients.

        The streams are those after it: it read the first and wrote the second. The gradients are
        those of the stream that it read and of `params`.
        """
        zeros = jax.tree.map(jnp.zeros_like, params)
        params = self._cast(block, params)

        def chunk(carry, start, size):
            y, d_read, d_params = carry
            run = functools.partial(self._chunk, block, start=start, rng=rng)
            read = _slice(streams.one, start, size)
            (out, _), vjp = jax.vjp(run, params, read)
            if kept is not None:
                out = _slice(kept, start, size)
            elif self.exact:
                out = self._alone(lambda *args: run(*args)[0], params, read)
            d_params_here, d_read_here = vjp(
                tuple(_slice(d, start, size) for d in (gradient.two, d_read))
            )
            return (
                _update(y, start, _slice(y, start, size) - out),
                _update(d_read, start, d_read_here),
                jax.tree.map(lambda x, here: x + here.astype(x.dtype), d_params, d_params_here),
            )

        carry = (streams.two, gradient.one, zeros)
        return _over_chunks(chunk, carry, block.feed_forward.chunk_size)

    def _chunk(self, block: Block, params, x, start, rng) -> tuple[Array, Array]:
        """A chunk's output, and its input for the other readers of the stream."""
        h, (x,) = self._read(params, "feed_forward", (x,))
        out = block.feed_forward.apply_chunk(params["feed_forward"], h, start, rng)
        return self._residual(out), x

    def _cast(self, block: Block, params):
        """The feed-forward weights in `dtype`: cast once, and not in every chunk."""
        cast = block.feed_forward.cast(params["feed_forward"], self.dtype)
        return params | {"feed_forward": cast}


class _AttentionSublayer(NamedTuple):
    """An attention sublayer: a function of (params, stream), given all that it reads besides."""

    stack: ReversibleStack
    name: str
    layer: MultiHead
    memory: tuple[Array, ...]  # one array, or none
    segments: Any
    rng: Any

    def forward(self, params, x) -> tuple[Array, Any]:
        """The output and the plan."""
        qkv = self.stack._alone(self.project, params, x, *self.memory)
        plan = self.layer.plan(params[self.name], qkv, self.segments, self.rng)
        return self.stack._alone(self.attend, params, qkv, plan), plan

    def again(self, params, x, plan) -> tuple[Array, Callable]:
        """The output by the same plan, and the function that `jax.vjp` gives.

        That function takes the gradient of the stream from its other readers too: the norm adds it
        to its own.
        """
        (out, _), vjp = jax.vjp(
            functools.partial(self.project_and_attend, plan), params, x, *self.memory
        )
        if self.stack.exact:
            qkv = self.stack._alone(self.project, params, x, *self.memory)
            out = self.stack._alone(self.attend, params, qkv, plan)
        return out, vjp

    def project_and_attend(self, plan, params, x, *memory) -> tuple[Array, Array]:
        h, (x,) = self.stack._read(params, self.name, (x,))
        qkv = self.layer.project(params[self.name], h, *memory)
        return self.attend(params, qkv, plan), x

    def project(self, params, x, *memory) -> QKV:
        h, _ = self.stack._read(params, self.name, (x,))
        return self.layer.project(params[self.name], h, *memory)

    def attend(self, params, qkv: QKV, plan) -> Array:
        out = self.layer.attend(params[self.name], qkv, plan, self.segments, self.rng)
        return self.stack._residual(out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(stack: ReversibleStack, params, streams: Streams, context: Context, rng) -> Streams:
    return stack._forward(params, streams, context, rng)[0]


def _run_forward(stack, params, streams, context, rng):
    outputs, stored = stack._forward(params, streams, context, rng)
    return outputs, (params, outputs, stored, context, rng)


def _run_backward(stack, residuals, gradient):
    _, d_params, d_streams, d_memory = stack._backward(residuals, gradient)
    return d_params, d_streams, Context(d_memory, None), None


_run.defvjp(_run_forward, _run_backward)


def _params_of(block: dict, name: str) -> dict:
    """A block's parameters: those of one sublayer and of its norm."""
    return {f"{name}_norm": block[f"{name}_norm"], name: block[name]}


def _slice(x: Float[Array, "B T D"], start, size: int) -> Float[Array, "B C D"]:
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis=1)


def _update(x: Float[Array, "B T D"], start, part: Float[Array, "B C D"]) -> Float[Array, "B T D"]:
    return jax.lax.dynamic_update_slice_in_dim(x, part, start, axis=1)


def _over_chunks(body: Callable, carry: Any, chunk_size: int) -> Any:
    """`carry = body(carry, start, size)` over the positions of the carry's first array.

    The last chunk may be shorter. With `chunk_size` 0 there is one.
    """
    length = jax.tree.leaves(carry)[0].shape[1]
    size = min(chunk_size or length, length)
    n_chunks, rest = divmod(length, size)
    if n_chunks == 1:
        carry = body(carry, 0, size)
    else:
        starts = size * jnp.arange(n_chunks)
        carry = jax.lax.scan(lambda c, start: (body(c, start, size), None), carry, starts)[0]
    return body(carry, n_chunks * size, rest) if rest else carry
