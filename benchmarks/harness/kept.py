"""What a benchmark knows of its rows at each length, kept in a file from one run to the next."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import lines, rows
from benchmarks.harness.calls import PeerError, was_late
from benchmarks.harness.processes import Answer
from benchmarks.harness.rows import Result


class Checked(NamedTuple):
    """The figures of a row, and its errors where they are known: of output and gradient."""

    result: Result
    errors: Sequence[float]


Known = Checked | Exception


class Figures:
    """What is known of each row at each length, in a file too.

    Args:
      shape: of the run: its `lengths`, and what `rows.about` reads.
      file: lines of JSON, which are read, and which figures are added to; None: no file.
      limit: seconds of a stage of a row.
    """

    def __init__(self, shape: Any, file: Path | None, limit: float = 0.0):
        self.lines: dict[tuple[str, int], dict[str, Any]] = {}
        self._shape, self._file, self._limit = shape, file, limit
        self._about = rows.about(shape)
        for line in lines.read(file):
            if all(line.get(key) == x for key, x in self._about.items()):
                self.lines[line["attention"], line["length"]] = line

    def add(self, name: str, of: str | None, length: int, answer: Answer) -> None:
        """Keeps an answer, and prints it."""
        if "error" in answer:
            line = self._about | dict(attention=name, of=of, length=length, error=answer["error"])
        else:
            line = rows.record(name, of, length, self._shape, rows.figures(answer))
            line |= dict(errors=list(answer["errors"]))
        self.lines[name, length] = line
        if self._file:
            lines.add(self._file, line)

    def known(self, name: str, length: int) -> Known | None:
        """The figures of a row at a length, why it has none, or None."""
        line = self.lines.get((name, length))
        if line is None:
            return None
        if "error" in line:
            return PeerError(line["error"])
        return Checked(rows.recorded(line), line["errors"])

    def of(self, name: str) -> dict[int, Known]:
        """Those of a row by length."""
        lengths = sorted(length for row, length in self.lines if row == name)
        return {length: self.known(name, length) for length in lengths}

    def missing(self, name: str) -> list[int]:
        """The lengths of the run that a row has nothing of, or took longer than a shorter limit."""

        def is_missing(line: dict[str, Any] | None) -> bool:
            return line is None or was_late(line.get("error", ""), self._limit)

        return [n for n in self._shape.lengths if is_missing(self.lines.get((name, n)))]
