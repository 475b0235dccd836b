"""The output of benchmarks: Markdown tables, their rows as data, and figures."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.calls import reason

Lines = Mapping[str, Mapping[int, float]]  # of a panel: y by x, by name


_recorded: list[Path] = []  # where rows are written besides, if anywhere


def record(path: str) -> Path:
    """Has all tables from now on write their rows to this file too, as lines of JSON."""
    _recorded[:] = [Path(path)]
    return _recorded[0]


class Table:
    """A Markdown table on stdout, whose rows are printed as they become known."""

    def __init__(self, *columns: str, title: str = ""):
        self._n_columns = len(columns)
        print(f"\n{title}\n" if title else "")
        print(head(columns), flush=True)
        _write(title=title, columns=columns)

    def row(self, *cells: str) -> None:
        """Prints a row; cells that are missing at its end are dashes."""
        cells += ("-",) * (self._n_columns - len(cells))
        print(line(cells), flush=True)
        _write(cells=cells)

    def result(self, *names: str, known: Any, cells: Callable[[Any], Sequence[str]]) -> None:
        """Prints a row of figures, or the exception that stands for them."""
        self.row(*names, *([reason(known)] if isinstance(known, Exception) else cells(known)))


def head(columns: Sequence[str]) -> str:
    """The first two lines of a Markdown table."""
    return line(columns) + "\n" + line(["---", *["---:"] * (len(columns) - 1)])


def line(cells: Sequence[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def _write(**data: Any) -> None:
    for path in _recorded:
        with path.open("a") as file:
            file.write(json.dumps(data) + "\n")


_MOST_INSIDE = 6  # names of a legend inside the axes


def plot(
    path: Path,
    panels: Mapping[str, Lines],
    title: str = "",
    yscale: str = "log",
    styles: Mapping[str, Mapping[str, Any]] | None = None,
    ticks: Sequence[float] | None = None,
    **options: Any,
) -> None:
    """Draws panels of lines, by what their y axes show, and writes them to `path`.

    `styles` has options of matplotlib by a line's name; others have a colour and a marker each.
    `ticks` are of the x axes; None: wherever a line has a point.
    """
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    inside = len(names) <= _MOST_INSIDE
    size = 5 * len(panels) + (2 if inside else 4.5), 4.5
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    figure.suptitle(title, fontsize=9)
    for axes, (label, lines) in zip(grid, panels.items(), strict=True):
        for name, points in lines.items():
            style = (styles or {}).get(name) or _style(name, names.index(name))
            axes.plot(list(points), list(points.values()), label=name, **style)
        axes.set(xscale="log", yscale=yscale, ylabel=label, **options)
        at = ticks or sorted({x for points in lines.values() for x in points})
        axes.set_xticks(at, [f"{x:,}" for x in at], fontsize=8)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    handles = grid[-1].get_legend_handles_labels()
    if len(panels) > 1:
        figure.legend(*handles, loc="outside lower center", ncols=_MOST_INSIDE, fontsize=8)
    elif inside:
        grid[0].legend(fontsize=8)
    else:
        figure.legend(*handles, loc="outside right center", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _style(name: str, n: int) -> dict[str, Any]:
    if name.startswith("dense"):
        return dict(color="k", marker="s", ms=5)
    return dict(color=f"C{n % 10}", marker="oDv^Xp"[n % 6], ms=5)
