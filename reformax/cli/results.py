"""The files of a result. A folder that cannot be written costs the files, not the result."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from zlib import crc32

from reformax import durable

RECORD = "evaluations.jsonl"


def picture_name(stem: str, steps: Sequence[int], length: int, **others: Any) -> str:
    """The name of an evaluation's picture, which no evaluation of other settings has.

    Args:
      stem: its beginning.
      steps: of the checkpoints.
      length: in tokens; the longest of several.
      **others: all else that the picture depends on, as JSON has it. Where one is set, the name
        ends with a checksum of them.
    """
    parts = [stem, f"step{'-'.join(map(str, steps))}", f"length{length}"]
    if given := {name: value for name, value in others.items() if value}:
        parts.append(f"{crc32(json.dumps(given, sort_keys=True).encode()):08x}")
    return f"{'_'.join(parts)}.png"


class ResultFiles:
    """Writes files whole or not at all, and remembers those that could not be written."""

    def __init__(self, folder: str | os.PathLike, writes: bool = True):
        """Says at once if the folder exists and cannot be written.

        Args:
          folder: of the files.
          writes: whether there are any; of several processes one writes.
        """
        self._folder, self._writes = durable.user_path("output_dir", folder), writes
        self._failed: dict[str, str] = {}
        self._recorded: str | None = None
        if not writes or not self._folder.is_dir():  # reading the run says what is wrong
            return
        try:
            with tempfile.TemporaryFile(dir=self._folder):
                pass
        except OSError as error:
            print(
                f"note: {self._folder} cannot be written ({error.strerror}): the result will be "
                "printed alone",
                file=sys.stderr,
            )

    def write_result(self, name: str, value: Any) -> None:
        """Writes a value without NaN as JSON, and as a line of `RECORD`.

        A later result replaces the file. The record keeps those of other commands, and of this one
        what it wrote last; of equal lines it keeps one.
        """
        self.write_text(name, json.dumps(value, indent=1, allow_nan=False) + "\n")
        before, self._recorded = self._recorded, json.dumps(value, allow_nan=False)
        line = self._recorded

        def with_line(path: Path) -> bytes:
            old = path.read_text().splitlines() if path.exists() else []
            kept = [x for x in old if x not in (before, line)]
            return "".join(f"{x}\n" for x in (*kept, line)).encode()

        self._write(RECORD, with_line)

    def write_text(self, name: str, text: str) -> None:
        """Writes a text as UTF-8, with its line ends as they are."""
        self.write(name, text.encode())

    def write(self, name: str, data: bytes) -> None:
        """Writes a file; a later one replaces it."""
        self._write(name, lambda path: data)

    def _write(self, name: str, bytes_of: Callable[[Path], bytes]) -> None:
        if not self._writes:
            return
        path = self._folder / name
        try:
            with _alone_in(self._folder):
                durable.write(path, bytes_of(path))
            self._failed.pop(name, None)
        except OSError as error:
            self._failed[name] = str(error)

    def named(self, name: str) -> str:
        """The path of a file, in words."""
        return "not in a file" if name in self._failed else f"in {self._folder / name}"

    def exit_code(self) -> int:
        """0 if all were written; else 1, after a line on stderr for the first that was not."""
        for name, why in self._failed.items():
            old = "; the file there is of before" if (self._folder / name).exists() else ""
            print(f"error: {why}; the result is printed above{old}", file=sys.stderr)
            return 1
        return 0


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Holds a lock of the folder, for which others that write results in it wait."""
    with ExitStack() as held:
        with suppress(OSError):  # without locks or a folder `durable.write` says what is wrong
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            held.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
