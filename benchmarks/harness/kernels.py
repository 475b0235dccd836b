"""The kernels of a GPU in a trace of `jax.profiler`."""

from __future__ import annotations

import collections
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

COLLECTIVE = re.compile("nccl|all-?reduce|all-?gather|reduce-?scatter|all-?to-?all|permute", re.I)


class Spent(NamedTuple):
    """Milliseconds of a device."""

    all: float  # from its first kernel's begin to its last one's end
    computing: float
    waiting: float  # a collective runs, and nothing else
    idle: float


def spent(folder: Path) -> dict[str, Spent]:
    """Where each device's time goes. `all` is the sum of the others."""
    found = {}
    for plane in _planes(folder):
        events = [(x, x.start_ns, x.start_ns + x.duration_ns) for x in _events(plane)]
        if not events:
            continue
        computes = _union((a, b) for x, a, b in events if not COLLECTIVE.search(x.name))
        busy = _union((a, b) for _, a, b in events)
        whole = max(b for _, _, b in events) - min(a for _, a, _ in events)
        ns = whole, computes, busy - computes, whole - busy
        found[plane.name] = Spent(*(x / 1e6 for x in ns))
    return found


def _union(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of a union of intervals."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(intervals):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


def times(folder: Path) -> dict[str, tuple[float, int]]:
    """Milliseconds and calls of each kernel, the longest first; numbers of fusions are left out."""
    found = collections.defaultdict(lambda: [0.0, 0])
    for plane in _planes(folder):
        for event in _events(plane):
            name = re.sub(r"[._]\d+$", "", event.name)
            found[name][0] += event.duration_ns / 1e6
            found[name][1] += 1
    both = {name: (ms, calls) for name, (ms, calls) in found.items()}
    return dict(sorted(both.items(), key=lambda item: -item[1][0]))


def of(run: Callable[[], Any]) -> dict[str, tuple[float, int]]:
    """The `times` of what a function runs, which waits for it."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        return times(Path(folder))


def _planes(folder: Path) -> Iterator[Any]:
    """Those of GPUs, of the one trace in a folder."""
    from jax.profiler import ProfileData

    (path,) = folder.glob("**/*.xplane.pb")
    data = ProfileData.from_file(str(path))
    yield from (plane for plane in data.planes if "GPU" in plane.name)


def _events(plane: Any) -> Iterator[Any]:
    """The kernels and copies of a GPU."""
    for line in plane.lines:
        if "Stream" in line.name:
            yield from line.events
