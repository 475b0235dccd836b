"""What rows by length share: the lengths that would be too much, and the figures at the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.calls import attempt, reason
from benchmarks.harness.processes import Answer, stage
from benchmarks.harness.rows import Result

SLOW = 1.0  # seconds of a gradient


def save(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes a file that is whole once it is there."""
    part = path.with_suffix(".part.npz")
    np.savez(part, **arrays)
    part.rename(path)


def left_out(
    known: Mapping[int, Sequence[float]], length: int, memory_mib: float
) -> Exception | None:
    """Why a row is not run at a length, if so, by its gradient's ms and MiB at shorter ones.

    They are taken to grow from the last two lengths on as between them, and from one length on
    linearly. A row that is too much may take minutes to compile.
    """
    shorter = {n: x for n, x in known.items() if n < length}
    seconds = grown({n: ms / 1e3 for n, (ms, _) in shorter.items()}, length)
    mib = grown({n: mib for n, (_, mib) in shorter.items()}, length)
    if seconds > SLOW or mib > memory_mib:
        return TimeoutError(f"left out: about {seconds:.2g} s and {mib / 1024:.2g} GiB")
    return None


def grown(values: Mapping[int, float], length: int) -> float:
    """What values by length come to at a longer one."""
    known = sorted((n, x) for n, x in values.items() if x > 0)[-2:]
    if not known:
        return 0.0
    (first, low), (last, high) = known[0], known[-1]
    growth = math.log(high / low) / math.log(last / first) if last > first else 1.0
    return high * (length / last) ** max(1.0, growth)


def timed(
    name: str,
    programs: dict[int, Any],
    measure: Callable[[Any, int], Result],
    errors: Sequence[float],
    limit: float,
) -> Generator[Answer, None, dict[int, tuple[float, float]]]:
    """The figures of a row, one length after the other; one that fails has its error.

    Args:
      name: of the row.
      programs: by length, or the exception that kept them from being compiled. Each is dropped
        once it is measured.
      measure: of programs and their length.
      errors: of the row's check.
      limit: seconds of a length.

    Returns:
      Milliseconds of the gradient and MiB by length.
    """
    known = {}
    for length in list(programs):
        yield stage(f"{name}: time {length:,}", limit)
        one = programs.pop(length)
        one = one if isinstance(one, Exception) else attempt(measure, one, length)
        if isinstance(one, Exception):
            yield {"name": name, "length": length, "error": reason(one)}
        else:
            known[length] = one.gradient.queued_ms, one.temp_mib
            yield {"name": name, "length": length, "errors": errors} | one._asdict()
    return known
