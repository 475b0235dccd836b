"""The largest size of a step, its batch or its length, that the memory of a device holds.

A step's bytes are known once it is compiled. Above what does not grow they are about a power of the
size: 1 by rows, from 1 to 2 by length. The next size to compile is near that at which the power
through the two known sizes nearest to the limit reaches it. The search ends where a size fits and
one at most `CLOSE` times as large does not, or is known not to by a power that was about right on
the last size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

CLOSE = 1.08
_MOST_PROGRAMS = 6
_EXACT = 0.05  # relative error of a curve that is about right
_LEAST_POWER, _MOST_POWER = 0.5, 3.0
_STEP = 64  # times as large or as small as any size known, at most


class Capacity(NamedTuple):
    """The largest sizes that a search found to fit.

    Attributes:
      fits: the largest size known to fit; 0 if none is.
      refused: why a larger size cannot be compiled, where the memory is not what ends the sizes.
      is_close: whether the end is known to be near; otherwise the search was given up.
      n_programs: how many were compiled.
    """

    fits: int
    refused: str
    is_close: bool
    n_programs: int


def search(
    bytes_at: Callable[[int], int],
    begin: tuple[int, int],
    fixed: int,
    limit: int,
    unit: int,
    most: int,
) -> Capacity:
    """The largest size whose bytes are at most `limit`.

    Args:
      bytes_at: of a size; raises `ValueError` for one that cannot be.
      begin: a size and its bytes.
      fixed: bytes that do not grow with the size, such as the state's.
      limit: the bytes that there are.
      unit: of which sizes are multiples.
      most: the largest size to try.
    """
    known, above = {begin[0]: begin[1]}, most // unit * unit + unit
    refused, was_right = "", False
    while True:
        n = len(known) - 1  # a size that is refused takes no compilation
        fits = max((size for size, found in known.items() if found <= limit), default=0)
        too_large = min([above, *(size for size, found in known.items() if found > limit)])
        curve = _Curve.through(known, fixed, limit)
        is_close = too_large <= max(fits * CLOSE, fits + unit)
        is_close = is_close or (was_right and curve.end <= fits * CLOSE)
        if is_close or n == _MOST_PROGRAMS:
            return Capacity(fits, refused if too_large == above else "", is_close, n)
        if curve.end >= above > max(known) and not refused:
            size = above - unit  # the largest of all
        else:
            size = _next(curve.end, list(known), unit, fits, too_large)
        try:
            known[size] = bytes_at(size)
        except ValueError as error:  # larger ones are refused as well
            above, refused = size, str(error)
            continue
        was_right = abs(curve.at(size) - known[size]) < _EXACT * known[size]


class _Curve(NamedTuple):
    """Bytes by size: `fixed` and a power of the size."""

    fixed: int
    size: int  # of one point
    n_bytes: int  # of it, above `fixed`
    power: float
    end: float  # the size at which it reaches the limit

    @classmethod
    def through(cls, known: dict[int, int], fixed: int, limit: int) -> _Curve:
        """Takes the two sizes whose bytes are nearest to the limit; one alone gives a line."""
        points = {size: max(found - fixed, 1) for size, found in known.items()}
        room = max(limit - fixed, 1)
        near = sorted(points, key=lambda size: abs(math.log(points[size] / room)))[:2]
        power = 1.0
        if len(near) == 2:
            sizes, found = math.log(near[0] / near[1]), math.log(points[near[0]] / points[near[1]])
            power = min(max(found / sizes, _LEAST_POWER), _MOST_POWER)
        end = near[0] * (room / points[near[0]]) ** (1 / power)
        return cls(fixed, near[0], points[near[0]], power, end)

    def at(self, size: int) -> float:
        """The bytes of a size."""
        return self.fixed + self.n_bytes * (size / self.size) ** self.power


def _next(end: float, known: list[int], unit: int, fits: int, too_large: int) -> int:
    """A size between these two: a little below or above where the memory is expected to end."""
    end = min(max(end, min(known) / _STEP), max(known) * _STEP)
    wanted = end / CLOSE**0.25 if fits < end / CLOSE**0.5 else max(end, fits) * CLOSE**0.5
    if not fits < wanted < too_large:
        wanted = (max(fits, unit / 2) * too_large) ** 0.5
    return min(max(int(wanted / unit) * unit, fits + unit), (too_large - 1) // unit * unit)
