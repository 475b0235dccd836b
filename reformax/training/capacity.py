"""The largest size of a step, its batch or its length, that the memory of a device holds.

A step's bytes are known once it is compiled. They grow nearly as a polynomial of the size, so a few
sizes suffice: each next one is where the polynomial through those known reaches the memory. The
search ends between a size that fits and one that does not, at most `CLOSE` apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

CLOSE = 1.08
_MOST_PROGRAMS = 8
_STEP = 64  # times as large or as small as any size known, at most
_DIGITS = 64  # sizes are rounded to about a part in so many


class Capacity(NamedTuple):
    """What a search found.

    Attributes:
      fits: the largest size known to fit; 0 if none is.
      above: the smallest known not to fit; None if none is.
      refused: why no size above `fits` can be compiled, if that is so.
      n_programs: how many were compiled.
    """

    fits: int
    above: int | None
    refused: str
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
    known, refused, above, n = dict([begin]), "", most // unit * unit + unit, 0
    while n < _MOST_PROGRAMS:
        fits = max((x for x, b in known.items() if b <= limit), default=0)
        too_large = min([above, *(x for x, b in known.items() if b > limit)])
        if too_large <= max(fits * CLOSE, fits + unit):
            break
        size = _next(known, fixed, limit, unit, fits, too_large)
        n += 1
        try:
            known[size] = bytes_at(size)
        except ValueError as error:  # larger ones are refused as well
            above, refused = size, str(error)
    fits = max((x for x, b in known.items() if b <= limit), default=0)
    too_large = min((x for x, b in known.items() if b > limit), default=None)
    if too_large is not None and too_large <= above:
        refused = ""
    return Capacity(fits, too_large, refused, n)


def _next(known, fixed: int, limit: int, unit: int, fits: int, too_large: int) -> int:
    """A size between these two: a little below or above where the memory is expected to end."""
    sizes = sorted(known, key=lambda x: abs(known[x] - limit))[:3]
    wanted = _reaching(sizes, [known[x] for x in sizes], fixed, limit)
    wanted = min(max(wanted, min(known) / _STEP), max(known) * _STEP)
    if fits < wanted / CLOSE**0.75:
        wanted = wanted / CLOSE**0.25
    else:
        wanted = max(wanted, fits) * CLOSE**0.5
    if wanted >= too_large and too_large > max(known):
        return too_large - unit  # the largest of all, or the last one that is not refused
    if not fits < wanted < too_large:
        wanted = (max(fits, unit / 2) * too_large) ** 0.5
    rounding = unit
    while 2 * rounding * _DIGITS <= wanted:
        rounding *= 2
    size = int(wanted / rounding) * rounding
    if not fits < size < too_large:
        size = int(wanted / unit) * unit
    return min(max(size, fits + unit), (too_large - 1) // unit * unit)


def _reaching(sizes: list[int], n_bytes: list[int], fixed: int, limit: int) -> float:
    """The size at which the polynomial through known sizes reaches the limit."""
    if len(sizes) == 1:
        growing = max(n_bytes[0] - fixed, 1)
        return sizes[0] * max(limit - fixed, 1) / growing
    degree = len(sizes) - 1
    scale = max(sizes)
    x = np.array(sizes) / scale
    curve = np.polynomial.Polynomial.fit(x, np.array(n_bytes, float) - limit, degree, domain=[])
    roots = [r.real for r in curve.roots() if abs(r.imag) < 1e-9 and r.real > 0]
    nearest = x[0]
    return scale * min(roots, key=lambda r: abs(np.log(r / nearest)), default=nearest)
