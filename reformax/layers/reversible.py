"""Reversible residual layers: memory that does not grow with depth (Gomez et al. 2017; Reformer).

A layer maps two streams to two streams,

    y1 = x1 + attention(x2)        y2 = x2 + feed_forward(y1)            (Reformer, eq. 9)

so that its inputs can be computed back from its outputs (eq. 8) and nothing else need be kept for
the gradient but each layer's attention plan: two integers a head, hashing round and token for LSH.

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

from reformax.layers.attention import Projections
from reformax.layers.blocks import Block, BlockStack

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
    input is the segments `[B, T]`. The memory of `jax.grad` is that of one cycle of layers,
    whatever the depth, apart from the weights and the plans.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        n_layers: int,
        dtype: str = "float32",
        exact: bool = False,
        masked: bool = False,
        norm_epsilon: float = 1e-6,
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
        """
        super().__init__(blocks, n_layers, dtype, masked, norm_epsilon, n_streams=2)
        self._exact = exact

    def apply(self, params, x1, x2, segments=None, rng=None):
        return tuple(_run(self, params, *self._inputs(x1, x2, segments), rng))

    def rebuild(self, params, x1, x2, segments=None, rng=None) -> tuple[Streams, Streams]:
        """The stack's inputs, on the grid if exact, and what the backward pass rebuilds of them.

        This is the backward pass itself, for measuring its drift.
        """
        streams, segments = self._inputs(x1, x2, segments)
        outputs, residuals = _run_forward(self, params, streams, segments, rng)
        return streams, self._backward(residuals, outputs)[0]

    def _inputs(self, x1, x2, segments):
        streams = Streams(*(self._residual(x) for x in (x1, x2)))
        return streams, None if segments is None else segments.astype(jnp.int32)

    # Each sublayer is a function of (params, stream) alone, given its plan and rng. What goes into
    # it and comes out of it is fenced, if exact, from whatever the compiler finds around it.

    def _fence(self, x):
        return jax.lax.optimization_barrier(x) if self._exact else x

    def _residual(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        x = x.astype(jnp.float32)
        return to_grid(x) if self._exact else x

    def _project(self, block: Block, params, x) -> Projections:
        h = self._norm.apply(params["attention_norm"], x)
        return block.attention.project(params["attention"], h)

    def _attend(self, block: Block, params, projections, plan, segments, rng):
        attend = block.attention.attend
        return self._residual(attend(params["attention"], projections, plan, segments, rng))

    def _attention(self, block: Block, params, x, plan, segments, rng):
        projections = self._project(block, params, x)
        return self._attend(block, params, projections, plan, segments, rng)

    def _fed(self, block: Block, params, x, start, rng):
        h = self._norm.apply(params["feed_forward_norm"], x)
        return self._residual(block.feed_forward.at(params["feed_forward"], h, start, rng))

    def _alone(self, function, *args):
        """`function(*args)`, compiled apart from everything around it if exact."""
        return self._fence(function(*self._fence(args)))

    def _forward(self, params, streams: Streams, segments, rng) -> tuple[Streams, Any]:
        """The outputs, and every layer's plan."""

        def repeat(streams, this):
            plans = []
            for i, block in enumerate(self._blocks):
                attention_params, feed_forward_params = _halves(this.params[f"block_{i}"])
                attention_rng, feed_forward_rng = self._rngs(rng, this, i)
                project = functools.partial(self._project, block)
                projections = self._alone(project, attention_params, streams.two)
                plans.append(
                    block.attention.plan(
                        attention_params["attention"], projections, segments, attention_rng
                    )
                )
                attend = functools.partial(
                    self._attend, block, segments=segments, rng=attention_rng
                )
                attended = self._alone(attend, attention_params, projections, plans[-1])
                streams = Streams(streams.one + attended, streams.two)
                two = self._feed(block, feed_forward_params, streams, feed_forward_rng)
                streams = Streams(streams.one, two)
            return streams, tuple(plans)

        return self._scan(repeat, streams, params)

    def _backward(self, residuals, gradient: Streams):
        """The inputs rebuilt, and the gradients with respect to parameters and inputs."""
        params, streams, plans, segments, rng = residuals

        def repeat(carry, this, plans):
            streams, gradient = carry
            d_params = {}
            for i, block in reversed(list(enumerate(self._blocks))):
                attention_params, feed_forward_params = _halves(this.params[f"block_{i}"])
                attention_rng, feed_forward_rng = self._rngs(rng, this, i)

                two, d_one, d_feed_forward = self._feed_back(
                    block, feed_forward_params, streams, gradient, feed_forward_rng
                )

                attention = functools.partial(
                    self._attention, block, plan=plans[i], segments=segments, rng=attention_rng
                )
                attended, attention_vjp = jax.vjp(attention, attention_params, two)
                if self._exact:
                    project = functools.partial(self._project, block)
                    attend = functools.partial(
                        self._attend, block, segments=segments, rng=attention_rng
                    )
                    projections = self._alone(project, attention_params, two)
                    attended = self._alone(attend, attention_params, projections, plans[i])
                one = streams.one - attended
                d_attention, d_two = attention_vjp(d_one)

                streams = Streams(one, two)
                gradient = Streams(d_one, gradient.two + d_two)
                d_params[f"block_{i}"] = d_attention | d_feed_forward
            return (streams, gradient), d_params

        (streams, gradient), d_params = self._scan(
            repeat, (streams, gradient), params, plans, reverse=True
        )
        return streams, d_params, gradient

    # The feed-forward half goes through the positions in the chunks of its layer, forward and
    # back. A chunk's gradient is taken as soon as its input is known, so that chunks cost no
    # arithmetic, as they would under `jax.checkpoint`.

    def _feed(self, block: Block, params, streams: Streams, rng) -> Float[Array, "B T D"]:
        """The second stream plus what the feed-forward layer makes of the first."""

        def chunk(two, start, size):
            fed = self._alone(
                functools.partial(self._fed, block, start=start, rng=rng),
                params,
                _part(streams.one, start, size),
            )
            return _put(two, start, _part(two, start, size) + fed)

        return _over_chunks(chunk, streams.two, block.feed_forward.chunk_size)

    def _feed_back(self, block: Block, params, streams: Streams, gradient: Streams, rng):
        """The second stream before `_feed`, and the gradients of the first and of `params`."""

        def chunk(carry, start, size):
            two, d_one, d_params = carry
            feed = functools.partial(self._fed, block, start=start, rng=rng)
            one = _part(streams.one, start, size)
            fed, vjp = jax.vjp(feed, params, one)
            if self._exact:
                fed = self._alone(feed, params, one)
            d_params_here, d_one_here = vjp(_part(gradient.two, start, size))
            return (
                _put(two, start, _part(two, start, size) - fed),
                _put(d_one, start, _part(d_one, start, size) + d_one_here),
                jax.tree.map(jnp.add, d_params, d_params_here),
            )

        nothing = jax.tree.map(jnp.zeros_like, params)
        carry = (streams.two, gradient.one, nothing)
        return _over_chunks(chunk, carry, block.feed_forward.chunk_size)


def _halves(block: dict) -> tuple[dict, dict]:
    """A block's parameters: those of its attention and those of its feed-forward layer."""
    attention, feed_forward = ("attention_norm", "attention"), ("feed_forward_norm", "feed_forward")
    return {name: block[name] for name in attention}, {name: block[name] for name in feed_forward}


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
def _run(stack: ReversibleStack, params, streams: Streams, segments, rng) -> Streams:
    return stack._forward(params, streams, segments, rng)[0]


def _run_forward(stack, params, streams, segments, rng):
    outputs, plans = stack._forward(params, streams, segments, rng)
    return outputs, (params, outputs, plans, segments, rng)


def _run_backward(stack, residuals, gradient):
    _, d_params, d_streams = stack._backward(residuals, gradient)
    return d_params, d_streams, None, None


_run.defvjp(_run_forward, _run_backward)
