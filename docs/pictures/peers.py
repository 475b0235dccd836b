"""The times of benchmarks that keep them as JSON lines."""

from __future__ import annotations

import json
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1]


def read(name: str) -> dict[str, list[tuple[int, float]]]:
    """Milliseconds of both passes by length, of each row of docs/NAME.jsonl.

    They are of queued calls, or of calls waited for where these are shorter: among long calls that
    wait in a queue one may hold up the others.
    """
    found: dict[str, list[tuple[int, float]]] = {}
    for line in (FOLDER / f"{name}.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row.get("gradient_ms"):
            time = min(row["gradient_ms"], row["waited_ms"][1])
            found.setdefault(row["attention"], []).append((row["length"], time))
    return {attention: sorted(points) for attention, points in found.items()}
