"""The loss of a run as a curve of characters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

ROWS, COLUMNS = 10, 64


def of_run(folder: str, metric: str) -> str:
    """The smoothed training loss of a run's record."""
    from reformax.training import curves, record_lines

    steps, values = curves.losses(record_lines.read(Path(folder) / "metrics.jsonl"), metric)
    return drawn(steps, curves.smooth(values), metric.replace("_", " "))


def drawn(steps: Sequence[int], values: Sequence[float], name: str) -> str:
    """A curve in `ROWS` lines of ASCII: stars, the highest and the lowest value, the last step.

    One value alone is a line without a curve.

    Args:
      steps: ascending.
      values: at these steps; those that are not finite are left out.
      name: what the values are.
    """
    import numpy as np

    finite = np.isfinite(values)
    steps, values = np.asarray(steps)[finite], np.asarray(values)[finite]
    if not len(steps):
        return f"{name} of training batches: no step was recorded"
    if len(steps) == 1:
        return f"{name} of training batches: {values[0]:.3f} at step {steps[0]:,}"
    low, high, first, last = values.min(), values.max(), steps[0], steps[-1]
    heights = np.interp(np.linspace(first, last, COLUMNS), steps, values)
    rows = [[" "] * COLUMNS for _ in range(ROWS)]
    for column, height in enumerate(heights):
        rows[round((high - height) / (high - low or 1.0) * (ROWS - 1))][column] = "*"
    labels = [f"{high:8.3f}", *[" " * 8] * (ROWS - 2), f"{low:8.3f}"]
    lines = [f"{label} |{''.join(row)}".rstrip() for label, row in zip(labels, rows, strict=True)]
    axis = f"{'':8} +{'-' * COLUMNS}"
    ends = f"{'':8}  step {first:,}{f'step {last:,}':>{COLUMNS - len(f'step {first:,}')}}"
    return "\n".join([f"{name} of training batches", *lines, axis, ends])
