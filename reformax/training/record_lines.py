"""metrics.jsonl: one JSON object a line, cut back to the checkpoint that a run goes on from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class RecordLines:
    """The lines of a run that goes on from `step`, as a sequence; later steps' are deleted."""

    def __init__(self, path: Path, step: int):
        self._lines = _read_until(path, step)
        _write_lines(path, self._lines)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._lines)

    def __len__(self) -> int:
        return len(self._lines)

    def append(self, line: dict[str, Any]) -> None:
        """Adds a line, which other programs see at once."""
        self._lines.append(line)
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _read_until(path: Path, step: int) -> list[dict[str, Any]]:
    lines = []
    if path.exists():
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                break  # a killed run was writing this line, the last one
            if line["step"] <= step:
                lines.append(line)
    return lines


def _write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    temporary.replace(path)
