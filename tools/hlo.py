"""The text of a compiled program: its computations, what they call, and the sizes of arrays."""

from __future__ import annotations

import math
import re

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_CALLED = re.compile(
    r"(?:body|to_apply|calls|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')

Shape = tuple[str, tuple[int, ...]]  # a dtype and sizes


def computations(text: str) -> tuple[dict[str, list[str]], str | None]:
    """The lines of each computation, by name, and the name of the first to run."""
    bodies: dict[str, list[str]] = {}
    entry = lines = None
    for line in text.splitlines():
        if found := _COMPUTATION.match(line):
            lines = bodies.setdefault(found[2], [])
            entry = found[2] if found[1] else entry
        elif lines is not None:
            lines.append(line)
    return bodies, entry


def called(line: str) -> list[str]:
    """The computations that an instruction calls."""
    found = _CALLED.findall(line)
    for branches in _BRANCHES.findall(line):
        found += [branch.strip().lstrip("%") for branch in branches.split(",")]
    return found


def shapes(text: str) -> tuple[Shape, ...]:
    """The shapes that stand in a text, such as `(f32[2,3], s32[])`."""
    found = re.findall(r"(\w+)\[([\d,]*)\]", text)
    return tuple((t, tuple(map(int, filter(None, s.split(","))))) for t, s in found)


def size_of(shape: Shape) -> int:
    """The bytes of an array; 0 of a token."""
    dtype, sizes = shape
    digits = re.search(r"\d+", dtype)
    bits = 8 if dtype == "pred" else int(digits[0]) if digits else 0
    return bits * math.prod(sizes) // 8
