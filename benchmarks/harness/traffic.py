"""What the kernels of a compiled program read and write, counted in its text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.harness.hlo import TRIPS, called, computations, shapes, size_of

_COMMENT = re.compile(r"/\*.*?\*/")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)")
_OPERAND = re.compile(r"%([\w.\-]+)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_SOURCE = re.compile(r'op_name="([^"]*)"')
# These run nothing by themselves; the former run what they call.
_CALLS = {"while", "conditional", "call"}
_NOTHING = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"}


class Kernel(NamedTuple):
    """An instruction of a program that a device runs.

    Attributes:
      kind: the name of a kernel of ours, of the library's function, or of the fusion without its
        number.
      source: the operation of JAX that it comes from, as far as it is known.
      read, written: the bytes of its inputs and of its results.
      times: how often the program runs it, loops included.
    """

    kind: str
    source: str
    read: int
    written: int
    times: int

    @property
    def bytes(self) -> int:
        return self.times * (self.read + self.written)


def kernels(text: str) -> list[Kernel]:
    """The kernels of a compiled program, from its text (`compiled.as_text()`).

    Arrays count whole, though a kernel may read a slice of one or write to a part of it: bytes are
    bounds from above. A loop whose number of rounds the text does not tell counts as one.
    """
    bodies, entry = computations(_COMMENT.sub("", text))
    return list(_of_computation(bodies, entry, 1))


def _of_computation(bodies: dict[str, list[str]], name: str, times: int) -> Iterator[Kernel]:
    sizes: dict[str, int] = {}
    for line in bodies.get(name, ()):
        found = _INSTRUCTION.match(line)
        if found is None:
            continue
        own, shape, operation, rest = found.groups()
        sizes[own] = sum(map(size_of, shapes(shape)))
        if operation in _CALLS:
            rounds = TRIPS.search(line) if operation == "while" else None
            for inner in called(line):
                yield from _of_computation(bodies, inner, times * int(rounds[1] if rounds else 1))
            continue
        # What began beside others is told by its begin.
        if operation in _NOTHING or operation.endswith("-done"):
            continue
        read = sum(sizes.get(x, 0) for x in _OPERAND.findall(rest.split("), ")[0]))
        target, source = _TARGET.search(line), _SOURCE.search(line)
        source = source[1] if source else ""
        if source.endswith("/pallas_call"):
            kind = re.findall(r"\w+", source)[-2]  # within transpose(jvp())
        else:
            kind = target[1] if target else re.sub(r"[._]\d+", "", own)
        # What begins beside others has its inputs among its results.
        written = max(sizes[own] - read, 0) if operation.endswith("-start") else sizes[own]
        yield Kernel(kind, source, read, written, times)


def gigabytes(found: list[Kernel]) -> float:
    """All that they read and write, in 10^9 bytes."""
    return math.fsum(x.bytes for x in found) / 1e9
