"""The kernels of a GPU in a trace of `jax.profiler`."""

from __future__ import annotations

import collections
import re
from pathlib import Path


def times(folder: Path) -> dict[str, tuple[float, int]]:
    """Milliseconds and calls of each kernel, the longest first; numbers of fusions are left out."""
    from jax.profiler import ProfileData

    (path,) = folder.glob("**/*.xplane.pb")
    planes = [p for p in ProfileData.from_file(str(path)).planes if "GPU" in p.name]
    found = collections.defaultdict(lambda: [0.0, 0])
    for plane in planes:
        for line in plane.lines:
            if "Stream" not in line.name:
                continue
            for event in line.events:
                name = re.sub(r"[._]\d+$", "", event.name)
                found[name][0] += event.duration_ns / 1e6
                found[name][1] += 1
    both = {name: (ms, calls) for name, (ms, calls) in found.items()}
    return dict(sorted(both.items(), key=lambda item: -item[1][0]))
