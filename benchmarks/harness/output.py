"""The output of benchmarks: Markdown tables, and their rows as data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import lines
from benchmarks.harness.calls import reason

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
        lines.add(path, data)
