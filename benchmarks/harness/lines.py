"""Files of JSON lines, which commands add to and go on from. An interruption may cut the last."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any


def read(path: Path | None) -> list[Any]:
    """The lines of a file but those that were cut; none if there is no file."""
    found = []
    for line in path.read_text().splitlines() if path and path.exists() else ():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def add(path: Path, line: Any) -> None:
    """Adds a line, after one that was cut too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        file.seek(max(0, file.tell() - 1))
        cut = file.read() not in (b"", b"\n")
        file.write(("\n" * cut + json.dumps(line) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())
