"""What the kernels of a compiled program read and write, counted in its text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from tools.hlo import TRIPS, called, computations, shapes, size_of

_COMMENT = re.compile(r"/\*.*?\*/")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)")
_OPERAND = re.compile(r"%([\w.\-]+)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_SOURCE = re.compile(r'op_name="([^"]*)"')
# These run nothing by themselves; the former run what they call.
_CALLS = {"while", "conditional", "call"}
_SLICES = {"slice", "dynamic-slice"}
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

    Of an array that a fusion only slices, and of one that it updates in place, the part counts.
    Others count whole, though a kernel may read or write a part: bytes are bounds from above. A
    loop whose number of rounds the text does not tell counts as one.
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
        inputs = [sizes.get(x, 0) for x in _operands(rest)]
        # What begins beside others has its inputs among its results.
        results = sizes[own] - sum(inputs) * operation.endswith("-start")
        read, written = sum(inputs), max(results, 0)
        if operation.startswith("fusion"):
            read, written = _of_fusion(bodies[called(line)[0]])
        target, source = _TARGET.search(line), _SOURCE.search(line)
        source = source[1] if source else ""
        if source.endswith("/pallas_call"):
            kind = re.findall(r"\w+", source)[-2]  # within transpose(jvp())
        else:
            kind = target[1] if target else re.sub(r"[._]\d+", "", own)
        yield Kernel(kind, source, read, written, times)


def _operands(rest: str) -> list[str]:
    """The names that an instruction reads, from what follows its opening bracket."""
    return _OPERAND.findall(rest.split("), ")[0])


def _of_fusion(lines: list[str]) -> tuple[int, int]:
    """The bytes that a fusion reads and writes."""
    found = {x[1]: x.groups()[1:] for x in map(_INSTRUCTION.match, lines) if x}
    sizes = {name: sum(map(size_of, shapes(shape))) for name, (shape, *_) in found.items()}

    def results(name: str) -> Iterator[str]:
        _, operation, rest = found[name]
        if operation in ("tuple", "bitcast"):
            for operand in _operands(rest):
                yield from results(operand)
        else:
            yield name

    written = list(results(list(found)[-1]))  # of the root
    in_place = {x for x in written if found[x][1] == "dynamic-update-slice"}

    def read_of(name: str) -> int:
        total = 0
        for user, (_, operation, rest) in found.items():
            for i, operand in enumerate(_operands(rest)):
                if operand != name:
                    continue
                if operation == "bitcast":
                    total += read_of(user)
                elif operation in _SLICES and i == 0:
                    total += sizes[user]
                elif not (user in in_place and i == 0):
                    total += sizes[name]
        return min(total, sizes[name])

    inputs = (name for name, (_, operation, _) in found.items() if operation == "parameter")
    updates = {x: _operands(found[x][2])[1] for x in in_place}
    return sum(map(read_of, inputs)), sum(sizes[updates.get(x, x)] for x in written)


def gigabytes(found: list[Kernel]) -> float:
    """All that they read and write, in 10^9 bytes."""
    return math.fsum(x.bytes for x in found) / 1e9
