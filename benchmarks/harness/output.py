"""The output of benchmarks: Markdown tables and figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.calls import reason

Lines = Mapping[str, Mapping[int, float]]  # of a panel: y by x, by name


class Table:
    """A Markdown table on stdout, whose rows are printed as they become known."""

    def __init__(self, *columns: str, title: str = ""):
        self._n_columns = len(columns)
        print(f"\n{title}\n" if title else "")
        self.row(*columns)
        self.row("---", *["---:"] * (len(columns) - 1))

    def row(self, *cells: str) -> None:
        """Prints a row; cells that are missing at its end are dashes."""
        cells += ("-",) * (self._n_columns - len(cells))
        print(f"| {' | '.join(cells)} |", flush=True)

    def result(self, *names: str, known: Any, cells: Callable[[Any], Sequence[str]]) -> None:
        """Prints a row of figures, or the exception that stands for them."""
        self.row(*names, *([reason(known)] if isinstance(known, Exception) else cells(known)))


def plot(
    path: Path, panels: Mapping[str, Lines], title: str = "", yscale: str = "log", **options: Any
) -> None:
    """Draws panels of lines, by what their y axes show, and writes them to `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    size = 4.5 * len(panels) + 3.5, 4.5
    fig, grid = plt.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
    fig.suptitle(title, fontsize=9)
    for axes, (label, lines) in zip(grid[0], panels.items(), strict=True):
        for name, points in lines.items():
            style = "ks-" if name.startswith("dense") else "o-"
            axes.plot(list(points), list(points.values()), style, ms=4, label=name)
        axes.set(xscale="log", yscale=yscale, ylabel=label, **options)
        ticks = sorted({x for points in lines.values() for x in points})
        axes.set_xticks(ticks, [f"{x:,}" for x in ticks], fontsize=8)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    fig.legend(*axes.get_legend_handles_labels(), loc="outside right center", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=150)
    plt.close(fig)
