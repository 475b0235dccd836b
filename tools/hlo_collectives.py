"""The collectives of a compiled program: what devices send to each other, counted in its text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tools.hlo import TRIPS, Shape, called, computations, shapes, size_of

_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_COLLECTIVE = re.compile(rf"= (\S.*?) ({'|'.join(_KINDS)})(?:-start)?\(")
# A range of devices, in a shape and transposed: `[8,2]T(1,0)`.
_ORDER = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
# Groups along axes of a mesh: `mesh['a'=8,'b'=2], device_ids=([2,8]T(1,0)) {'a'}`.
_MESH = re.compile(
    r"replica_groups=mesh\[(?P<axes>[^\]]*)\](?:, device_ids=\((?P<order>\S*)\))?"
    r" \{(?P<along>[^}]*)\}"
)


class Collective(NamedTuple):
    """A collective operation of a program.

    Attributes:
      kind: its name in XLA, such as "all-gather".
      shapes: the shapes of its result, `(dtype, sizes)` each.
      groups: the devices that talk to each other; of a permutation, pairs.
      times: how often the program runs it, loops included.
    """

    kind: str
    shapes: tuple[Shape, ...]
    groups: tuple[tuple[int, ...], ...]
    times: int

    @property
    def size(self) -> int:
        """The bytes of its result on a device."""
        return sum(map(size_of, self.shapes))

    @property
    def sent(self) -> float:
        """The bytes that a device sends each time, by a ring, or directly where kinds say so."""
        n = max(map(len, self.groups), default=1)
        factor = {
            "all-reduce": 2 * (n - 1) / n,
            "reduce-scatter": n - 1,
            "collective-permute": 1,
        }
        return self.size * factor.get(self.kind, (n - 1) / n)


def collectives(text: str) -> list[Collective]:
    """The collectives of a compiled program, from its text (`compiled.as_text()`).

    A loop whose number of rounds the text does not tell counts as one.
    """
    bodies, entry = computations(text)
    return list(_of_computation(bodies, entry, 1))


def _of_computation(bodies: dict[str, list[str]], name: str, times: int) -> Iterator[Collective]:
    for line in bodies.get(name, ()):
        if found := _COLLECTIVE.search(line):
            yield Collective(found[2], shapes(found[1]), _groups(line), times)
        rounds = int(trips[1]) if " while(" in line and (trips := TRIPS.search(line)) else 1
        for inner in called(line):
            yield from _of_computation(bodies, inner, times * rounds)


def _groups(line: str) -> tuple[tuple[int, ...], ...]:
    """Who talks to whom: lists of devices, a range of them transposed and reshaped, or axes.

    Raises:
      ValueError: groups that are written in no such way.
    """
    if found := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}", line):
        lists = re.findall(r"\{([\d,]+)\}", found[1])
        return tuple(tuple(map(int, numbers.split(","))) for numbers in lists)
    if found := re.search(rf"replica_groups=\[([\d,]+)\]<={_ORDER}", line):
        groups = _ordered(*found.groups()[1:]).reshape(_numbers(found[1]))
    elif found := _MESH.search(line):
        groups = _along(found["axes"], found["order"], found["along"])
    else:
        raise ValueError(f"unknown groups of devices in {line.strip()[:400]!r}: teach _groups them")
    return tuple(map(tuple, groups.tolist()))


def _along(axes: str, order: str | None, along: str) -> np.ndarray:
    """The groups that differ along some axes of a mesh; an axis may be a part of one, `a:(2)4`."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    wanted = re.findall(r"'([^':]+)'?(?::\((\d+)\)(\d+))?", along)
    shape, talking = [], []
    for axis, size in sizes.items():
        parts = sorted(
            (int(before or 1), int(n or size)) for name, before, n in wanted if name == axis
        )
        done = 1
        for before, n in parts:
            shape += [before // done, n]
            talking.append(len(shape) - 1)
            done = before * n
        shape.append(size // done)
    ids = re.fullmatch(_ORDER, order) if order else None
    devices = np.arange(math.prod(shape)) if ids is None else _ordered(*ids.groups())
    devices = np.moveaxis(devices.reshape(shape), talking, range(-len(talking), 0))
    return devices.reshape(-1, math.prod(shape[i] for i in talking))


def _ordered(source: str, order: str | None) -> np.ndarray:
    """The numbers of devices: a range in some shape, its axes transposed."""
    devices = np.arange(math.prod(_numbers(source))).reshape(_numbers(source))
    return (devices.transpose(_numbers(order)) if order else devices).ravel()


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))
