"""The largest size of a step, its batch or its length, that the memory of a device holds.

A step's bytes are known once it is compiled. The next size to compile is near the end of the line
through the two known sizes nearest to the limit, where it reaches that. The search ends where a
size fits and one at most `CLOSE` times as large does not, or is known not to by a line that was
right about the last size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

CLOSE = 1.08
_MOST_PROGRAMS = 8
_EXACT = 0.01  # relative error of a line that is right
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
    known, above = {0: fixed, begin[0]: begin[1]}, most // unit * unit + unit
    refused, was_right = "", False
    for n in itertools.count():
        fits = max((size for size, found in known.items() if found <= limit), default=0)
        too_large = min([above, *(size for size, found in known.items() if found > limit)])
        line = _Line.through(known, limit)
        is_close = too_large <= max(fits * CLOSE, fits + unit)
        is_close = is_close or (was_right and line.end <= fits * CLOSE)
        if is_close or n == _MOST_PROGRAMS:
            return Capacity(fits, refused if too_large == above else "", is_close, n)
        if line.end >= above > max(known) and not refused:
            size = above - unit  # the largest of all
        else:
            size = _next(line.end, [size for size in known if size], unit, fits, too_large)
        try:
            known[size] = bytes_at(size)
        except ValueError as error:  # larger ones are refused as well
            above, refused = size, str(error)
            continue
        was_right = abs(line.at(size) - known[size]) < _EXACT * known[size]


class _Line(NamedTuple):
    """Bytes by size."""

    size: int  # of one point
    n_bytes: int
    slope: float
    end: float  # the size at which it reaches the limit

    @classmethod
    def through(cls, known: dict[int, int], limit: int) -> _Line:
        """Takes the two sizes whose bytes are nearest to the limit."""
        (one, n_bytes), other = sorted(known.items(), key=lambda x: abs(x[1] - limit))[:2]
        slope = (other[1] - n_bytes) / (other[0] - one)
        return cls(one, n_bytes, slope, one + (limit - n_bytes) / slope if slope > 0 else math.inf)

    def at(self, size: int) -> float:
        """The bytes of a size."""
        return self.n_bytes + self.slope * (size - self.size)


def _next(end: float, known: list[int], unit: int, fits: int, too_large: int) -> int:
    """A size between these two: a little below or above where the memory is expected to end."""
    end = min(max(end, min(known) / _STEP), max(known) * _STEP)
    wanted = end / CLOSE**0.25 if fits < end / CLOSE**0.5 else max(end, fits) * CLOSE**0.5
    if not fits < wanted < too_large:
        wanted = (max(fits, unit / 2) * too_large) ** 0.5
    return min(max(int(wanted / unit) * unit, fits + unit), (too_large - 1) // unit * unit)
