"""Answers by length and depth, of runs that `reformax evaluate --tasks=ruler` scored.

python docs/pictures/answers.py runs/dense runs/lsh --tasks needle recall --out=runs/answers

writes answers-light.svg and answers-dark.svg: a heat map for each run and task, lengths along and
depths of the answer down, or one row where answers lie in several places. Lengths may be of several
evaluations, of which the newest one of a length counts. A run has the name of its folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import of_runs
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from style import Palette

Lines = dict[int, dict[str, Any]]  # what an evaluation says of a length
PANEL = 2.4, 1.9  # inches


def read(run: Path) -> dict[str, Lines]:
    """What a run answered, by task and length.

    Raises:
      ValueError: nothing, with the command that asks, or a task in several numbers of depths.
    """
    path, found = run / "evaluations.jsonl", {}
    for line in path.read_text().splitlines() if path.exists() else ():
        for task, figures in json.loads(line).get("tasks", {}).items():
            for of_length in figures.get("by_length", ()):
                found.setdefault(task, {})[of_length["length"]] = of_length
    if not found:
        command = f"reformax evaluate --output_dir={run} --tasks=ruler --lengths=4096,16384"
        raise ValueError(f"{path} has no answers: {command} asks for them")
    for task, lines in found.items():
        depths = {len(line.get("accuracy_by_depth", [None])) for line in lines.values()}
        if len(depths) > 1:
            counts = " and ".join(map(str, sorted(depths)))
            raise ValueError(
                f"{run} answered {task} in {counts} depths: evaluate its lengths with one --depths"
            )
    return found


def read_all(runs: Sequence[Path], tasks: Sequence[str]) -> dict[str, dict[str, Lines]]:
    """What runs answered of these tasks, of all that each has where none is named.

    Raises:
      ValueError: two runs of one name, or a run that was not asked one of the tasks.
    """
    if len({run.name for run in runs}) < len(runs):
        raise ValueError(f"RUN is {', '.join(map(str, runs))}: expected different names")
    found = {run.name: read(run) for run in runs}
    tasks = tasks or [*found[runs[0].name]]
    for name, answers in found.items():
        if missing := [task for task in tasks if task not in answers]:
            raise ValueError(f"{name} was not asked {', '.join(missing)}: evaluate it, or --tasks")
    return {name: {task: answers[task] for task in tasks} for name, answers in found.items()}


def draw(colors: Palette, found: Mapping[str, Mapping[str, Lines]]) -> Figure:
    """A row of panels for each run, a column for each task."""
    tasks = [*next(iter(found.values()))]
    size = 0.6 + PANEL[0] * len(tasks), 0.6 + PANEL[1] * len(found)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(found), len(tasks), squeeze=False)
    for row, (name, answers) in zip(panels, found.items(), strict=True):
        for axes, task in zip(row, tasks, strict=True):
            _panel(axes, colors, answers[task])
        row[0].set_ylabel(name, color=colors.text, size=10)
    for axes, task in zip(panels[0], tasks, strict=True):
        axes.set_title(task.replace("_", " "), color=colors.text, size=10)
    figure.supxlabel("tokens", color=colors.faint, size=9)
    return figure


def _panel(axes: Axes, colors: Palette, lines: Lines) -> None:
    """The share of questions answered, from white for none to full colour for all."""
    given = (lines[length] for length in sorted(lines))
    shares = (line.get("accuracy_by_depth", [line["accuracy"]]) for line in given)
    columns = [[float("nan") if x is None else x for x in column] for column in shares]
    rows = [list(row) for row in zip(*columns, strict=True)]
    axes.imshow(rows, vmin=0, vmax=1, cmap="Blues", aspect="auto")
    for y, row in enumerate(rows):
        for x, value in enumerate(row):
            if value == value:
                color = "#ffffff" if value > 0.6 else "#1f2430"
                axes.text(x, y, f"{value:.2f}", ha="center", va="center", size=7, color=color)
    axes.set_facecolor(colors.panel)
    axes.set_xticks(range(len(columns)), [f"{length:,}" for length in sorted(lines)], rotation=30)
    n = len(rows)
    axes.set_yticks(range(n), [f"{100 * i // n}%" for i in range(n)] if n > 1 else ["all"])
    axes.tick_params(colors=colors.faint, labelsize=7)
    for spine in axes.spines.values():
        spine.set_color(colors.line)


def main(argv: Sequence[str] | None = None) -> None:
    """Writes OUT-light and OUT-dark."""
    flags = of_runs.parser(__doc__)
    flags.add_argument("--tasks", nargs="+", default=(), help="default: all that were asked")
    of_runs.write(flags, argv, lambda args: read_all(args.runs, args.tasks), draw)


if __name__ == "__main__":
    main()
