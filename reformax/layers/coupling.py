"""How the sublayers of a reversible stack read its streams and write to them.

A sublayer f reads one array and adds its output to others, so that the array it read can be
computed back from the streams after it. There are two ways, both `Coupling`s:

**Two streams** (Gomez et al. 2017; Reformer, eq. 9). f reads the stream that was written last and
adds to the other, `(a, b) -> (b, a + f(b))`. A sublayer does not read what the one before the last
wrote there: every attention layer adds to the one stream and reads the other.

**Slots.** There is one stream x, the sum of all outputs, and n slots. A *slot* is a partial sum,
`[B, T, D]`: the outputs of every n-th sublayer, starting at 0. Sublayers take the slots in turn,
and the one whose slot is s computes

    x' = x + f(x - s)        s' = s + f(x - s)

It reads all earlier outputs but those in its slot, of the sublayers n, 2n, ... before it. The
logits read x, as in a Transformer. The inputs can be computed back because `x' - s' = x - s`. Two
slots are two streams, `(a, b) = (x - s_2, x - s_1)`; n slots are n streams that each sublayer reads
one of and adds to the others. Cai et al. 2023, "Reversible Column Networks", generalise two streams
likewise: each step reads the last m - 1 of m groups of features and adds to the oldest.

The option `n_slots` is the number of slots. `n_streams` of a stack is another number: of the arrays
that the stack reads and returns, 1 with slots and 2 without.

The gradient of slots follows from the sum of the gradients of x' and s', which is that of f's
output and is the same before and after.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax.numpy as jnp
from jaxtyping import Array

Streams = tuple[Array, ...]  # [B, T, D] each


class StreamParts(NamedTuple):
    """The streams, by what one sublayer does with them."""

    seen: Streams  # read and not written
    written: Streams
    others: Streams = ()  # neither

    def plus(self, out: Array) -> StreamParts:
        """The parts with a sublayer's output in them."""
        return self._replace(written=tuple(x + out for x in self.written))

    def minus(self, out: Array) -> StreamParts:
        """The parts without it."""
        return self._replace(written=tuple(x - out for x in self.written))


class StreamGradients(NamedTuple):
    """The gradients at a sublayer, from the streams after it."""

    out: Array  # of its output
    read: Array  # of what it reads, by other readers
    others: Streams = ()


class Coupling(Protocol):
    """The streams around a sublayer, forward and back."""

    def opened(self, streams: Streams) -> Streams:
        """The streams of a stack, from its inputs, which they begin with."""

    def parts_before(self, streams: Streams) -> StreamParts:
        """The parts of the streams before a sublayer."""

    def streams_after(self, parts: StreamParts) -> Streams:
        """The streams after it, from parts that have its output."""

    def parts_after(self, streams: Streams) -> StreamParts:
        """The parts of the streams after a sublayer."""

    def streams_before(self, parts: StreamParts) -> Streams:
        """The streams before it, from parts without its output."""

    def read(self, parts: StreamParts) -> Array:
        """The sublayer's input, which is the same before and after it."""

    def gradient(self, d_streams: Streams) -> StreamGradients:
        """The gradients at a sublayer."""

    def gradient_before(self, gradient: StreamGradients, d_read: Array) -> Streams:
        """The gradients of the streams before it; `d_read` has all that reads what it reads."""


class TwoStreams:
    """`(a, b) -> (b, a + f(b))`."""

    def opened(self, streams: Streams) -> Streams:
        return streams

    def parts_before(self, streams: Streams) -> StreamParts:
        return StreamParts(streams[1:], streams[:1])

    def streams_after(self, parts: StreamParts) -> Streams:
        return parts.seen + parts.written

    def parts_after(self, streams: Streams) -> StreamParts:
        return StreamParts(streams[:1], streams[1:])

    def streams_before(self, parts: StreamParts) -> Streams:
        return parts.written + parts.seen

    def read(self, parts: StreamParts) -> Array:
        return parts.seen[0]

    def gradient(self, d_streams: Streams) -> StreamGradients:
        return StreamGradients(out=d_streams[1], read=d_streams[0])

    def gradient_before(self, gradient: StreamGradients, d_read: Array) -> Streams:
        return gradient.out, d_read


class Slots(NamedTuple):
    """`(x, s, ...) -> (x + f(x - s), ..., s + f(x - s))`: the slots are a queue."""

    n_slots: int

    def opened(self, streams: Streams) -> Streams:
        (x,) = streams
        return (x, *[jnp.zeros_like(x)] * self.n_slots)

    def parts_before(self, streams: Streams) -> StreamParts:
        return StreamParts((), streams[:2], streams[2:])

    def streams_after(self, parts: StreamParts) -> Streams:
        x, slot = parts.written
        return (x, *parts.others, slot)

    def parts_after(self, streams: Streams) -> StreamParts:
        x, *others, slot = streams
        return StreamParts((), (x, slot), tuple(others))

    def streams_before(self, parts: StreamParts) -> Streams:
        return parts.written + parts.others

    def read(self, parts: StreamParts) -> Array:
        x, slot = parts.written
        return x - slot

    def gradient(self, d_streams: Streams) -> StreamGradients:
        d_x, *others, d_slot = d_streams
        return StreamGradients(out=d_x + d_slot, read=d_x, others=tuple(others))

    def gradient_before(self, gradient: StreamGradients, d_read: Array) -> Streams:
        return (d_read, gradient.out - d_read, *gradient.others)


def share_a_slot(indices: list[int], n_slots: int) -> bool:
    """Whether sublayers with these indices share a slot that they need not share.

    Sublayers that share a slot do not read one another. Up to `n_slots` of them can have one
    each; of more than that, neighbours can have two.
    """
    slots = [index % n_slots for index in indices]
    if len(slots) <= n_slots:
        return len(set(slots)) < len(slots)
    return any(a == b for a, b in zip(slots, slots[1:], strict=False))
