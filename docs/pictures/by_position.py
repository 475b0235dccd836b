"""Bits by the position in the window, of runs that `reformax evaluate --by_position` scored.

python docs/pictures/by_position.py runs/dense runs/lsh --out=runs/by_position

writes by_position-light.svg and by_position-dark.svg: the bits of each run, and what they are
more or less than those of the first. The newest evaluations of a split count; the runs were scored
at the same length. A line's points are at the ends of the bands of positions, and a run has the
name of its folder.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lines
import of_runs
from matplotlib.figure import Figure
from style import Palette

OTHERS = {"first", "end", "n_targets"}  # of a band's entries, besides its bits
MOST = 6  # lines of a panel, as many as there are colours


class Bands(NamedTuple):
    """What a run scored: the metric's name, and its bits by the end of each band."""

    metric: str
    bits: dict[int, float]


def read(run: Path, split: str) -> Bands:
    """The bands that an evaluation of the split left in a run's folder.

    Raises:
      ValueError: there are none; with the command that makes them.
    """
    path = run / "evaluations.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    found = [one for one in found if one.get("split") == split and one.get("by_position")]
    if not found:
        command = f"reformax evaluate --output_dir={run} --split={split} --by_position"
        raise ValueError(f"{path} has no bits by position: {command} writes them")
    return bands_of(found[-1])


def bands_of(evaluation: Mapping[str, Any]) -> Bands:
    """The bands of what an evaluation wrote."""
    found = evaluation["by_position"]
    (metric,) = found[0].keys() - OTHERS
    return Bands(metric, {band["end"]: band[metric] for band in found})


def read_all(runs: Sequence[Path], split: str) -> dict[str, Bands]:
    """The bands of two or more runs by their names.

    Raises:
      ValueError: too few or too many runs, two of one name, or bands that do not compare.
    """
    if not 2 <= len({run.name for run in runs}) == len(runs) <= MOST:
        names = ", ".join(map(str, runs))
        raise ValueError(f"RUN is {names}: expected 2 to {MOST} folders of different names")
    found = {run.name: read(run, split) for run in runs}
    first, *others = found.items()
    for name, bands in others:
        if (bands.metric, [*bands.bits]) != (first[1].metric, [*first[1].bits]):
            raise ValueError(
                f"{first[0]} has {_scored(first[1])} and {name} {_scored(bands)}: evaluate both "
                "with the same --length"
            )
    return found


def _scored(bands: Bands) -> str:
    return f"{bands.metric} of windows of {max(bands.bits):,}"


def draw(colors: Palette, found: Mapping[str, Bands]) -> Figure:
    """A panel of bits, and one of their differences from the first run's."""
    first, *_ = found.values()
    ends = [*first.bits]
    bits = {name: [*bands.bits.items()] for name, bands in found.items()}
    less = {
        name: [(end, bands.bits[end] - first.bits[end]) for end in ends]
        for name, bands in found.items()
    }
    x = {end: f"{end:,}" for end in ends[:: -(-len(ends) // 6)]}
    what = first.metric.replace("_", " ")
    panels = [
        _panel(what[0].upper() + what[1:], bits, x, ends),
        _panel(f"The same, less {[*found][0]}'s", less, x, ends, "{:+g}"),
    ]
    title = f"Bits by position in windows of {ends[-1]:,} tokens, lower is better"
    return lines.draw(colors, title, panels, room=0.3, xlabel="position, up to")


def _panel(
    title: str,
    points: lines.Lines,
    x: Mapping[float, str],
    ends: Sequence[int],
    form: str = "{:g}",
) -> lines.Panel:
    """A panel whose axis of y ends at round numbers around the points."""
    values = [y for line in points.values() for _, y in line]
    spread = max(values) - min(values) or 1.0
    step = 10.0 ** math.floor(math.log10(spread))
    step = next(s for s in (step / 5, step / 2, step, 2 * step, 5 * step) if spread / s <= 5)
    low, high = math.floor(min(values) / step), math.ceil(max(values) / step)
    ticks = lines.ticks([round(n * step, 9) for n in range(low, high + 1)], form)
    xticks = {**x, ends[-1]: ""} if ends[-1] not in x else x  # the axis reaches the last point
    ylim = (low - 0.25) * step, (high + 0.25) * step
    return lines.Panel(title, points, xticks, ylim, ticks)


def main(argv: Sequence[str] | None = None) -> None:
    """Writes OUT-light and OUT-dark."""
    flags = of_runs.parser(__doc__)
    flags.add_argument("--split", default="valid", choices=("train", "valid", "test"))
    of_runs.write(flags, argv, lambda args: read_all(args.runs, args.split), draw)


if __name__ == "__main__":
    main()
