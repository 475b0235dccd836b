"""Reversible residual layers: memory that does not grow with depth (Gomez et al. 2017; Reformer).

A layer maps two streams to two streams,

    y1 = x1 + attention(x2)        y2 = x2 + feed_forward(y1)            (Reformer, eq. 9)

so that its inputs can be computed back from its outputs (eq. 8) and nothing else need be kept for
the gradient but each layer's attention plan: two integers a head, hashing round and token for LSH.
Any number of sublayers can stand in such a row, each reading the stream that was written last and
adding to the other: a decoder's has three, the second of which attends to the encoder's memory,
and the gradient of that memory adds up on the way back.

**Exactly, if wanted.** In floating point `(x + f) - f` is not `x`, and a sublayer that the compiler
fuses with its gradient need not give the numbers it gave alone, so the inputs rebuilt are not the
forward pass's and the error grows with depth. With `exact=True` both causes are removed:

  * streams and sublayer outputs are multiples of 2^-12. Float32 adds and subtracts such numbers
    without rounding while they stay below 2^12 in magnitude;
  * the sublayer is computed in the backward pass a second time, apart from its gradient and behind
    `optimization_barrier`, as it was in the forward pass, so that the compiler has no choice but
    to produce the same numbers.

The gradient passes through the rounding unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from reformax.layers.attention import QKV, Attention
from reformax.layers.stacks import Block, BlockStack

GRID = 2.0**-12


@jax.custom_vjp
def to_grid(x: Float[Array, "*d"]) -> Float[Array, "*d"]:
    """`x` rounded to the nearest multiple of `GRID`; its gradient is that of the identity."""
    y = jnp.round(x * (1 / GRID)) * GRID
    return jnp.where(y == 0, 0.0, y)  # -0 would come back from the sums as +0


to_grid.defvjp(lambda x: (to_grid(x), None), lambda _, gradient: (gradient,))


class Streams(NamedTuple):
    """The two residual streams, `[B, T, D]` float32 each."""

    one: Array
    two: Array


class ReversibleStack(BlockStack):
    """Reversible layers: `([B, T, D], [B, T, D]) -> ([B, T, D], [B, T, D])`, float32.

    In Trax: `tl.Serial(tl.Dup(), ReversibleStack(...), tl.Concatenate())`. With `masked` the third
    input is the segments `[B, T]`; blocks with cross-attention take three more inputs, the
    segments, the memory `[B, S, D]` and its segments `[B, S]`. The memory of `jax.grad` is that of
    one cycle of layers, whatever the depth, apart from the weights and the plans.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        n_layers: int,
        dtype: str = "float32",
        exact: bool = False,
        masked: bool = False,
        norm_epsilon: float = 1e-6,
        scan_layers: bool = True,
        keep_ff_outputs: bool = False,
    ):
        """Args:
        blocks: the cycle.
        n_layers: a multiple of its length.
        dtype: what the sublayers compute in.
        exact: whether the backward pass rebuilds the forward's inputs bit for bit. It costs one
          more forward of each sublayer in the backward pass, and the memory of its result;
          streams must stay below 2^12.
        masked: whether segments come along, as in `Attention`.
        norm_epsilon: what the layers' norms add to the variance.
        scan_layers: whether the cycles are a loop to the compiler, as in `ResidualStack`.
        keep_ff_outputs: whether the backward pass finds what each feed-forward layer put out, `[B,
          T, D]` in `dtype`, and need not compute it again to rebuild the streams: an eighth of the
          layer's arithmetic, for memory that grows with the depth.
        """
        super().__init__(
            blocks, n_layers, dtype, masked, norm_epsilon, n_streams=2, scan_layers=scan_layers
        )
        self._exact = exact
        # What a feed-forward layer puts out is rounded to one of these.
        self._kept_dtype = ("float32" if exact else dtype) if keep_ff_outputs else None

    def apply(self, params, x1, x2, segments=None, memory=None, memory_segments=None, rng=None):
        streams, context = self._inputs(x1, x2, segments, memory, memory_segments)
        return tuple(_run(self, params, streams, *context, rng))

    def rebuild(
        self, params, x1, x2, segments=None, memory=None, memory_segments=None, rng=None
    ) -> tuple[Streams, Streams]:
        """The stack's inputs, on the grid if exact, and what the backward pass rebuilds of them.

        This is the backward pass itself, for measuring its drift.
        """
        streams, context = self._inputs(x1, x2, segments, memory, memory_segments)
        outputs, residuals = _run_forward(self, params, streams, *context, rng)
        return streams, self._backward(residuals, outputs)[0]

    def _inputs(self, x1, x2, segments=None, memory=None, memory_segments=None):
        """The streams, and what every layer reads besides: the memory and segments."""
        streams = Streams(*(self._residual(x) for x in (x1, x2)))
        seen = {"attention": None, "cross_attention": None}
        if segments is not None:
            own = segments.astype(jnp.int32)
            seen["attention"] = own
            if self._cross:
                seen["cross_attention"] = (own, memory_segments.astype(jnp.int32))
        return streams, (memory if self._cross else None, seen)

    # Each sublayer is a function of (params, stream) and, if it crosses, of the memory, given its
    # plan and rng. What goes into it and comes out of it is fenced, if exact, from whatever the
    # compiler finds around it. For its gradient it returns the stream too: the stream's other
    # gradient then comes in where the norm's is computed, and the vjp gives their sum.

    def _fence(self, x):
        return jax.lax.optimization_barrier(x) if self._exact else x

    def _residual(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        x = x.astype(jnp.float32)
        return to_grid(x) if self._exact else x

    def _project(self, layer: Attention, name: str, params, x, *memory) -> QKV:
        return layer.project(params[name], self._read(params, name, (x,))[0], *memory)

    def _attend(self, layer: Attention, name: str, params, projections, plan, segments, rng):
        return self._residual(layer.attend(params[name], projections, plan, segments, rng))

    def _attention(self, layer: Attention, name: str, params, x, *memory, plan, segments, rng):
        h, (x,) = self._read(params, name, (x,))
        projections = layer.project(params[name], h, *memory)
        return self._attend(layer, name, params, projections, plan, segments, rng), x

    def _fed(self, block: Block, params, x, start, rng):
        h, (x,) = self._read(params, "feed_forward", (x,))
        return self._residual(
            block.feed_forward.apply_chunk(params["feed_forward"], h, start, rng)
        ), x

    def _alone(self, function, *args):
        """`function(*args)`, compiled apart from everything around it if exact."""
        return self._fence(function(*self._fence(args)))

    def _forward(self, params, streams: Streams, memory, seen, rng) -> tuple[Streams, Any]:
        """The outputs, every attention's plan, and what feed-forward layers put out, if kept."""

        def repeat(streams, this):
            plans, kept = [], []
            for i, block in enumerate(self._blocks):
                block_params = this.params[f"block_{i}"]
                rngs = self._rngs(rng, this, i)
                plans.append({})
                for name, layer in block.attentions.items():
                    own, segments = _of(block_params, name), seen[name]
                    inputs = (streams.two, *_memory_of(name, memory))
                    project = functools.partial(self._project, layer, name)
                    projections = self._alone(project, own, *inputs)
                    plan = layer.plan(own[name], projections, segments, rngs[name])
                    attend = functools.partial(
                        self._attend, layer, name, segments=segments, rng=rngs[name]
                    )
                    attended = self._alone(attend, own, projections, plan)
                    streams = Streams(streams.two, streams.one + attended)
                    plans[-1][name] = plan
                own = _of(block_params, "feed_forward")
                written, fed = self._feed(block, own, streams, rngs["feed_forward"])
                streams = Streams(streams.two, written)
                kept.append(fed)
            return streams, (tuple(plans), tuple(kept))

        return self._scan(repeat, streams, params)

    def _backward(self, residuals, gradient: Streams):
        """The inputs rebuilt, and the gradients of parameters, inputs and memory."""
        params, streams, made, memory, seen, rng = residuals
        d_memory = jax.tree.map(jnp.zeros_like, memory)

        def repeat(carry, this, made):
            plans, kept = made
            streams, gradient, d_memory = carry
            d_params = {}
            for i, block in reversed(list(enumerate(self._blocks))):
                block_params = this.params[f"block_{i}"]
                rngs = self._rngs(rng, this, i)
                one, d_two, d_block = self._feed_back(
                    block,
                    _of(block_params, "feed_forward"),
                    streams,
                    gradient,
                    kept[i],
                    rngs["feed_forward"],
                )
                streams, gradient = Streams(one, streams.one), Streams(gradient.two, d_two)
                for name, layer in reversed(block.attentions.items()):
                    own, segments = _of(block_params, name), seen[name]
                    inputs = (streams.one, *_memory_of(name, memory))
                    attention = functools.partial(
                        self._attention,
                        layer,
                        name,
                        plan=plans[i][name],
                        segments=segments,
                        rng=rngs[name],
                    )
                    (attended, _), vjp = jax.vjp(attention, own, *inputs)
                    if self._exact:
                        project = functools.partial(self._project, layer, name)
                        attend = functools.partial(
                            self._attend, layer, name, segments=segments, rng=rngs[name]
                        )
                        projections = self._alone(project, own, *inputs)
                        attended = self._alone(attend, own, projections, plans[i][name])
                    d_own, d_read, *d_memory_here = vjp((gradient.two, gradient.one))
                    streams = Streams(streams.two - attended, streams.one)
                    gradient = Streams(gradient.two, d_read)
                    if d_memory_here:
                        d_memory = d_memory + d_memory_here[0]
                    d_block |= d_own
                d_params[f"block_{i}"] = d_block
                if self._kept_dtype is not None:
                    # Streams need no gradient to be rebuilt then: without a fence those of all
                    # layers would be at once.
                    streams, gradient = jax.lax.optimization_barrier((streams, gradient))
            return (streams, gradient, d_memory), d_params

        (streams, gradient, d_memory), d_params = self._scan(
            repeat, (streams, gradient, d_memory), params, made, reverse=True
        )
        return streams, d_params, gradient, d_memory

    # The feed-forward half goes through the positions in the chunks of its layer, forward and
    # back. A chunk's gradient is taken as soon as its input is known, so that chunks cost no
    # arithmetic, as they would under `jax.checkpoint`.

    def _feed(self, block: Block, params, streams: Streams, rng) -> tuple[Array, Array | None]:
        """The first stream plus what the feed-forward layer makes of the second; that, if kept."""
        params = self._cast(block, params)

        def chunk(carry, start, size):
            one, kept = carry
            fed = self._alone(
                lambda *args: self._fed(block, *args, start=start, rng=rng)[0],
                params,
                _part(streams.two, start, size),
            )
            one = _put(one, start, _part(one, start, size) + fed)
            return one, None if kept is None else _put(kept, start, fed.astype(kept.dtype))

        kept = None if self._kept_dtype is None else jnp.zeros_like(streams.one, self._kept_dtype)
        return _over_chunks(chunk, (streams.one, kept), block.feed_forward.chunk_size)

    def _feed_back(self, block: Block, params, streams: Streams, gradient: Streams, kept, rng):
        """What `_feed` added to, and the gradients of what it read and of `params`.

        The streams are those after it: the first was read, the second written.
        """
        nothing = jax.tree.map(jnp.zeros_like, params)
        params = self._cast(block, params)

        def chunk(carry, start, size):
            written, d_read, d_params = carry
            feed = functools.partial(self._fed, block, start=start, rng=rng)
            read = _part(streams.one, start, size)
            (fed, _), vjp = jax.vjp(feed, params, read)
            if kept is not None:
                fed = _part(kept, start, size)
            elif self._exact:
                fed = self._alone(lambda *args: feed(*args)[0], params, read)
            d_params_here, d_read_here = vjp(
                tuple(_part(d, start, size) for d in (gradient.two, d_read))
            )
            return (
                _put(written, start, _part(written, start, size) - fed),
                _put(d_read, start, d_read_here),
                jax.tree.map(lambda x, here: x + here.astype(x.dtype), d_params, d_params_here),
            )

        carry = (streams.two, gradient.one, nothing)
        return _over_chunks(chunk, carry, block.feed_forward.chunk_size)

    def _cast(self, block: Block, params):
        """The weights of the feed-forward half, in `dtype` once and not in every chunk."""
        cast = block.feed_forward.cast(params["feed_forward"], self._dtype)
        return params | {"feed_forward": cast}


def _of(block: dict, name: str) -> dict:
    """A block's parameters, those of one sublayer and its norm."""
    return {f"{name}_norm": block[f"{name}_norm"], name: block[name]}


def _memory_of(name: str, memory) -> tuple[Array, ...]:
    """What an attention reads besides its stream."""
    return (memory,) if name == "cross_attention" else ()


def _part(x: Float[Array, "B T D"], start, size: int) -> Float[Array, "B C D"]:
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis=1)


def _put(x: Float[Array, "B T D"], start, part: Float[Array, "B C D"]) -> Float[Array, "B T D"]:
    return jax.lax.dynamic_update_slice_in_dim(x, part, start, axis=1)


def _over_chunks(body: Callable, carry: Any, chunk_size: int) -> Any:
    """`carry = body(carry, start, size)` over the positions of its first array, the last shorter.

    One chunk, if `chunk_size` is 0.
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(stack: ReversibleStack, params, streams: Streams, memory, seen, rng) -> Streams:
    return stack._forward(params, streams, memory, seen, rng)[0]


def _run_forward(stack, params, streams, memory, seen, rng):
    outputs, made = stack._forward(params, streams, memory, seen, rng)
    return outputs, (params, outputs, made, memory, seen, rng)


def _run_backward(stack, residuals, gradient):
    _, d_params, d_streams, d_memory = stack._backward(residuals, gradient)
    return d_params, d_streams, d_memory, None, None


_run.defvjp(_run_forward, _run_backward)
