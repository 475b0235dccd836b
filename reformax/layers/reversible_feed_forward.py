"""A feed-forward sublayer of a reversible stack, in chunks of positions, forward and back.

A chunk's gradient is computed as soon as its input is known: unlike under `jax.checkpoint`, chunks
then cost no arithmetic.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from reformax import devices
from reformax.buffers import in_parts
from reformax.layers.coupling import StreamGradients, StreamParts
from reformax.layers.feed_forward import FeedForward


class FeedForwardSublayer(NamedTuple):
    """A feed-forward sublayer as a function of the streams around it."""

    stack: Any  # the `ReversibleStack` that has it
    layer: FeedForward
    rng: Any

    def forward(self, params, parts: StreamParts) -> tuple[StreamParts, Array | None]:
        """The parts with the layer's output in them; that output, if kept."""
        stack, params = self.stack, self._cast(params)

        def of_positions(first, seen, written, params, rng):
            def chunk(carry, start, size):
                written, kept = carry
                chunk = StreamParts(*_slice((seen, written), start, size))
                out = stack._separately(
                    lambda *args: self._chunk(*args, start=first + start, rng=rng)[0],
                    params,
                    stack._coupling.read(chunk),
                )
                written = _update(written, start, chunk.plus(out).written)
                if kept is not None:
                    kept = _update(kept, start, out.astype(kept.dtype))
                return written, kept

            kept = None
            if stack.keep_ff_outputs:
                dtype = "float32" if stack._on_grid else stack.dtype
                kept = jnp.zeros_like(written[0], dtype)
            return _over_chunks(chunk, (written, kept), self.layer.chunk_size)

        # Each device takes chunks of its own positions.
        streams = parts.seen, parts.written
        written, kept = devices.by_positions(of_positions, streams, (params, self.rng))
        return parts._replace(written=written), kept

    def backward(
        self, params, parts: StreamParts, gradient: StreamGradients, kept: Array | None
    ) -> tuple[StreamParts, Array, Any]:
        """`forward` undone: the parts without the layer's output, and two gradients.

        These are the gradients of what it read and of `params`.
        """
        stack, zeros = self.stack, jax.tree.map(jnp.zeros_like, params)
        params = self._cast(params)

        def of_positions(first, seen, written, d_out, d_read, kept, params, zeros, rng):
            length = written[0].shape[1]
            n_chunks = -(-length // (self.layer.chunk_size or length))

            def chunk(carry, start, size):
                written, d_read, d_params = carry

                def run(params, read):
                    params = in_parts(params, n_chunks)
                    return self._chunk(params, read, first + start, rng)

                chunk = StreamParts(*_slice((seen, written), start, size))
                read = stack._coupling.read(chunk)
                (out, _), vjp = jax.vjp(run, params, read)
                if kept is not None:
                    out = _slice(kept, start, size).astype(jnp.float32)
                elif stack.exact:
                    out = stack._separately(lambda *args: run(*args)[0], params, read)
                d_chunk, d_read_chunk = vjp(_slice((d_out, d_read), start, size))
                return (
                    _update(written, start, chunk.minus(out).written),
                    _update(d_read, start, d_read_chunk),
                    jax.tree.map(lambda x, d: x + d.astype(x.dtype), d_params, d_chunk),
                )

            carry = (written, d_read, zeros)
            *arrays, d_params = _over_chunks(chunk, carry, self.layer.chunk_size)
            return tuple(arrays), d_params

        streams = parts.seen, parts.written, gradient.out, gradient.read, kept
        (written, d_read), d_params = devices.by_positions(
            of_positions, streams, (params, zeros, self.rng), sums=True
        )
        return parts._replace(written=written), d_read, d_params

    def _chunk(self, params, x, start, rng) -> tuple[Array, Array]:
        """A chunk's output, and its input for its other readers."""
        norm = params["feed_forward_norm"]
        h, x = self.stack._norm_of(norm).with_residual(norm, x)
        out = self.layer.apply_chunk(params["feed_forward"], h, start, rng)
        return self.stack._residual(out), x

    def _cast(self, params):
        """The feed-forward weights in the stack's `dtype`: cast once, and not in every chunk."""
        cast = self.layer.cast(params["feed_forward"], self.stack.dtype)
        return params | {"feed_forward": cast}


def _slice(tree: Any, start, size: int) -> Any:
    """Positions from `start` on of each array `[B, T, D]`."""
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size, axis=1), tree)


def _update(tree: Any, start, parts: Any) -> Any:
    """The arrays, with `parts` as their positions from `start` on."""
    put = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=1)
    return jax.tree.map(lambda x, part: put(x, part, start), tree, parts)


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
