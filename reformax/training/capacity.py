"""The largest size of a step, its batch or its length, that the memory of a device holds.

A step's bytes are known once it is compiled. They grow nearly as a polynomial of the size, so a few
sizes suffice: each next one is where the polynomial through those known reaches the memory. The
search ends at a size that fits, if its bytes are as the polynomial has them and it is near the end,
or if a size at most `CLOSE` times as large does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

CLOSE = 1.08
_MOST_PROGRAMS = 8
_EXACT = 0.01  # relative error of the bytes that were expected
_STEP = 64  # times as large or as small as any size known, at most
_DIGITS = 64  # sizes are rounded to about a part in so many


class Capacity(NamedTuple):
    """The largest sizes that a search found to fit.

    Attributes:
      fits: the largest size known to fit; 0 if none is.
      n_bytes: its bytes.
      refused: why a larger size cannot be compiled, where the memory is not what ends the sizes.
      is_close: whether the end is known to be near; otherwise the search was given up.
      n_programs: how many were compiled.
    """

    fits: int
    n_bytes: int
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
    guess: tuple[int, int] | None = None,
) -> Capacity:
    """The largest size whose bytes are at most `limit`.

    Args:
      bytes_at: of a size; raises `ValueError` for one that cannot be.
      begin: a size and its bytes.
      fixed: bytes that do not grow with the size, such as the state's.
      limit: the bytes that there are.
      unit: of which sizes are multiples.
      most: the largest size to try.
      guess: another size and about its bytes, near the limit. If they are right, one program is
        enough.
    """
    guessed = {} if guess is None else dict([guess])
    known, refused, above, n = dict([begin]), "", most // unit * unit + unit, 0
    is_close = False
    while True:
        fits = max((x for x, b in known.items() if b <= limit), default=0)
        too_large = min([above, *(x for x, b in known.items() if b > limit)])
        is_close = is_close or too_large <= max(fits * CLOSE, fits + unit)
        if is_close or n == _MOST_PROGRAMS:
            refused = refused if too_large == above else ""
            return Capacity(fits, known.get(fits, 0), refused, is_close, n)
        points, guessed = guessed | known, {}
        curve = _Curve.through(points, fixed, limit)
        if curve.end >= too_large > max(points) and not refused:
            size = too_large - unit  # the largest of all
        else:
            size = _next(curve, points, unit, fits, too_large)
        n += 1
        try:
            found = bytes_at(size)
        except ValueError as error:  # larger ones are refused as well
            above, refused = size, str(error)
            continue
        foreseen = len(points) > 1 and abs(curve.at(size) - found) < _EXACT * found
        known[size] = found
        if foreseen and found <= limit:
            is_close = max(size * CLOSE**0.75, size + unit) > _line(known, limit)


class _Curve(NamedTuple):
    """A polynomial through the known bytes of up to three sizes."""

    bytes_above: np.polynomial.Polynomial  # the limit
    scale: float  # of its argument
    limit: int
    end: float  # the size at which it reaches the limit

    @classmethod
    def through(cls, known: dict[int, int], fixed: int, limit: int) -> _Curve:
        """Takes those nearest to the limit; of a single size, `fixed` are the bytes of size 0.

        Bytes that grow ever more slowly are continued by a line.
        """
        points = sorted(known.items(), key=lambda point: abs(point[1] - limit))[:3]
        points += [(0, min(fixed, points[0][1] - 1))] * (len(points) == 1)
        scale = max(size for size, _ in points)
        while True:
            sizes, n_bytes = (np.array(x, float) for x in zip(*points, strict=True))
            fit = np.polynomial.Polynomial.fit
            curve = fit(sizes / scale, n_bytes - limit, len(points) - 1, domain=[])
            if len(points) == 2 or curve.convert().coef[2] >= 0:
                break
            points.pop()
        roots = [r.real for r in curve.roots() if abs(r.imag) < 1e-9 and r.real > 0]
        nearest = sizes[0] / scale
        end = min(roots, key=lambda r: abs(math.log(r / nearest)), default=math.inf)
        return cls(curve, scale, limit, end * scale)

    def at(self, size: int) -> float:
        """The bytes of a size."""
        return self.bytes_above(size / self.scale) + self.limit


def _line(known: dict[int, int], limit: int) -> float:
    """The size at which the line through the largest that fits and the next reaches the limit."""
    last = max(size for size, n_bytes in known.items() if n_bytes <= limit)
    other = min(known.keys() - {last}, key=lambda size: abs(size - last))
    slope = (known[last] - known[other]) / (last - other)
    return last + (limit - known[last]) / slope if slope > 0 else math.inf


def _next(curve: _Curve, known: dict[int, int], unit: int, fits: int, too_large: int) -> int:
    """A size between these two: a little below or above where the memory is expected to end."""
    wanted = min(max(curve.end, min(known) / _STEP), max(known) * _STEP)
    if fits < wanted / CLOSE**0.5:
        wanted = wanted / CLOSE**0.25 if wanted > unit * _DIGITS else wanted
    else:
        wanted = max(wanted, fits) * CLOSE**0.5
    if not fits < wanted < too_large:
        wanted = (max(fits, unit / 2) * too_large) ** 0.5
    rounding = unit
    while 2 * rounding * _DIGITS <= wanted:
        rounding *= 2
    size = int(wanted / rounding) * rounding
    if not fits < size < too_large:
        size = int(wanted / unit) * unit
    return min(max(size, fits + unit), (too_large - 1) // unit * unit)
