"""Prints the end of a run: its loss as a curve, and text that the model writes.

A config turns them on, as quickstart.gin does:

    ending.ending.curve = True
    ending.ending.prompt = 'def '
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reformax.cli import report
from reformax.declared import NonNegative, Size, checked

ROWS, COLUMNS = 10, 64  # of the curve


@checked
def ending(
    curve: bool = False,
    prompt: str | None = None,
    max_new_tokens: Size = 300,
    temperature: NonNegative = 0.8,
) -> dict[str, Any]:
    """Options of the output of `reformax train` at the end of a run.

    Args:
      curve: whether to draw the training loss in the terminal.
      prompt: the beginning of a sample of text; None for no sample.
      max_new_tokens: of the sample.
      temperature: of the sample; 0 takes the most probable token.
    """
    return dict(curve=curve, prompt=prompt, max_new_tokens=max_new_tokens, temperature=temperature)


def show(
    result: dict[str, Any],
    *,
    curve: bool,
    prompt: str | None,
    alone: bool = True,
    **options: float,
) -> None:
    """Prints the curve and the sample of a run that was not interrupted.

    The run is saved: where the sample fails, a note says why.

    Args:
      result: what `loop.train` returned.
      curve: see `ending`.
      prompt: see `ending`.
      alone: whether this process is the only one of the run; several write no sample.
      **options: `max_new_tokens` and `temperature` of `ending`.
    """
    if result["interrupted_by"] is not None:
        return
    if curve:
        print(_curve(result["output_dir"], result["metric"]))
    if prompt is None:
        return
    flags = [f"--output_dir={result['output_dir']}", f"--prompt={prompt}"]
    flags += [f"--{name}={value}" for name, value in options.items()]
    print(f"a sample: {shlex.join([*report.program('generate'), *flags])}")
    if not alone:
        print("note: no sample: one process writes text, and this run has several")
        return
    from reformax.cli import generate

    sys.stdout.flush()
    try:
        generate.main([*flags, "--quiet", "--trust_config"])  # the run's code has run already
    except Exception as error:
        print(f"note: no sample: {error}")


def _curve(folder: str, metric: str) -> str:
    """The smoothed training loss of a run's record, drawn in characters."""
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
