"""The loss of a run as a curve of characters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

ROWS, COLUMNS = 10, 64


def of_run(folder: str, metric: str) -> str:
    """The smoothed training loss of a run's record."""
    from reformax.training import curves, record_lines

    steps, values = curves.losses(record_lines.read(Path(folder) / "metrics.jsonl"), metric)
    return drawn(steps.tolist(), curves.smooth(values).tolist(), metric.replace("_", " "))


def drawn(steps: Sequence[int], values: Sequence[float], name: str) -> str:
    """A curve in `ROWS` lines of ASCII: stars, the highest and the lowest value, the last step.

    Args:
      steps: ascending.
      values: at these steps; those that are not finite are left out.
      name: what the values are.
    """
    points = [(s, v) for s, v in zip(steps, values, strict=True) if math.isfinite(v)]
    if not points:
        return f"{name} of training batches: no step was recorded"
    low, high = min(v for _, v in points), max(v for _, v in points)
    first, last = points[0][0], points[-1][0]
    rows = [[" "] * COLUMNS for _ in range(ROWS)]
    at = 0
    for column in range(COLUMNS):
        step = first + (last - first) * column / (COLUMNS - 1)
        while at + 1 < len(points) and points[at + 1][0] <= step:
            at += 1
        value = points[at][1]
        if at + 1 < len(points):  # on the line to the next point
            (s, _), (next_s, next_v) = points[at], points[at + 1]
            value += (next_v - value) * (step - s) / (next_s - s)
        rows[round((high - value) / (high - low or 1.0) * (ROWS - 1))][column] = "*"
    labels = [f"{high:8.3f}", *[" " * 8] * (ROWS - 2), f"{low:8.3f}"]
    lines = [f"{label} |{''.join(row)}".rstrip() for label, row in zip(labels, rows, strict=True)]
    axis = f"{'':8} +{'-' * COLUMNS}"
    ends = f"{'':8}  step {first:,}{f'step {last:,}':>{COLUMNS - len(f'step {first:,}')}}"
    return "\n".join([f"{name} of training batches", *lines, axis, ends])
