"""metrics.jsonl: one JSON object a line, cut back to the checkpoint that a run goes on from.

A checkpoint notes how many lines there were, their bytes and their CRC-32, and gets its name only
once they are on the disk. A resumed run therefore finds exactly those lines, or says what is lost.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
import zlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from reformax import durable
from reformax.training.lock import raise_if_lost

_UNSYNCED = 2**20  # bytes that are in memory until the disk has them
_BLOCK = 2**16  # bytes that are read together


class RecordLines:
    """The lines of a run, in their file; those that the disk may not have yet are in memory too.

    A line that cannot be written, as on a full disk, stays in memory and is written with a later
    one, or with the next checkpoint.
    """

    def __init__(
        self,
        path: Path,
        step: int,
        noted: dict[str, int] | None = None,
        scored: Collection[str] | None = None,
        say: Callable[[str], None] = print,
        check: Callable[[], None] = lambda: None,
    ):
        """Keeps the lines up to a checkpoint and deletes those after it.

        Args:
          path: of metrics.jsonl.
          step: the checkpoint's; 0 if the run begins.
          noted: what `mark` returned for the checkpoint; None if it has no such note.
          scored: the splits of the evaluations of its step that the checkpoint was saved after;
            None: all that there are.
          say: gets a line about lines that were lost, and about failing writes.
          check: called before the file is written; raises `Lost` if it is another training's now,
            and OSError if that is unknown: the file is then not written anew.

        Raises:
          OSError: the file cannot be read or written.
        """
        self._path, self._say, self._check = path, say, check
        noted = noted if _is_mark(noted) else None
        found = _read(path)
        kept = _whole_start(found, noted)
        if kept is None:
            kept = self._salvage(found, step, noted, scored)
        data = b"".join(kept)
        if found != data or not path.exists() or path.is_symlink():
            durable.write(path, data)
        self._n_lines, self._crc = len(kept), zlib.crc32(data)
        self._synced, self._unsynced = len(data), bytearray()
        self._lock = threading.Lock()
        self._failing = False
        self._descriptor = self._open()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The lines; few at a time are in memory, for a run has a hundred thousand."""
        with self._lock:
            end, last = self._synced, bytes(self._unsynced)
        rest = b""
        for block in itertools.chain(self._blocks(end), [last]):
            *texts, rest = (rest + block).split(b"\n")
            yield from (line for line in map(_parsed, texts) if line is not None)

    def _blocks(self, end: int) -> Iterator[bytes]:
        """The file up to `end`, by its descriptor: it may have been deleted or renamed."""
        start = 0
        while block := os.pread(self._descriptor, min(_BLOCK, end - start), start):
            start += len(block)
            yield block

    def __len__(self) -> int:
        return self._n_lines

    def append(self, line: dict[str, Any]) -> None:
        """Adds a line, which other programs see at once.

        Raises:
          Lost: the file is another training's now. Nothing is added.
        """
        raise_if_lost(self._check)
        text = _text(line)
        with self._lock:
            self._add(text)
            failed_before = self._failing
            try:
                if failed_before:
                    self._mend()
                    self._say(f"note: {self._path} is whole again")
                while text and not failed_before:
                    text = text[os.write(self._descriptor, text) :]
                if len(self._unsynced) > _UNSYNCED:
                    os.fsync(self._descriptor)
                    self._forget(self._size)
            except OSError as error:
                self._failing = True
                if not failed_before:
                    line = durable.explained(error, "written", self._path)
                    self._say(f"note: {line}; training goes on and writes the lines later")

    def mark(self) -> dict[str, int]:
        """The number of lines so far, their bytes and their CRC-32, for a checkpoint to note."""
        return {"lines": self._n_lines, "size": self._size, "crc32": self._crc}

    def sync(self) -> None:
        """Returns when the disk has every line so far; called from any thread.

        Raises:
          OSError: it does not have them.
        """
        with self._lock:
            if self._failing:
                self._mend()
                return
            descriptor, size = os.dup(self._descriptor), self._size
        try:
            # Without the lock, so that a step never waits for the disk.
            os.fsync(descriptor)
            with self._lock:
                self._forget(size)
        except OSError:
            # The system may have dropped what it could not write and succeed the next time.
            with self._lock:
                self._failing = True
            raise
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            try:
                if self._failing:
                    self._mend()
            except OSError as error:
                line = durable.explained(error, "written", self._path)
                self._say(f"note: {line}; its last lines are missing")
            self._close_file()

    @property
    def _size(self) -> int:
        return self._synced + len(self._unsynced)

    def _add(self, text: bytes) -> None:
        self._n_lines += 1
        self._unsynced += text
        self._crc = zlib.crc32(text, self._crc)

    def _forget(self, size: int) -> None:
        """Frees the lines among the first `size` bytes, which the disk has."""
        if size > self._synced:
            del self._unsynced[: size - self._synced]
            self._synced = size

    def _open(self) -> int:
        with durable.explaining("written", self._path):
            flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            return os.open(self._path, flags)

    def _close_file(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._descriptor)

    def _mend(self) -> None:
        """Writes the file anew after a write that failed: what is on the disk and later lines."""
        self._check()
        with durable.explaining("read", self._path):
            synced = b"".join(self._blocks(self._synced))
        durable.write(self._path, synced + self._unsynced)
        descriptor = self._open()
        self._close_file()
        self._descriptor, self._failing = descriptor, False
        self._forget(self._size)

    def _salvage(
        self, found: bytes, step: int, noted: dict[str, int] | None, scored: Collection[str] | None
    ) -> list[bytes]:
        """The lines up to `step`, and a note on those that are lost, if any."""
        kept, unreadable, last = [], 0, {}
        *texts, torn = found.split(b"\n")  # a killed run was writing what follows the last newline
        for text in texts:
            line = _parsed(text)
            if line is None:
                unreadable += 1
            elif line["step"] < step or (
                # Without its score an evaluation of the last step is still to come.
                line["step"] == step
                and (
                    line.get("tag") not in ("eval", "sample")
                    or scored is None
                    or line["split"] in scored
                )
            ):
                kept.append(text + b"\n")
                last = line
        n_kept = len(kept)
        # A run that was killed before its first checkpoint has noted what was lost by then.
        noted_before = last.get("lost_lines") if last.get("step") == step else None
        if noted_before is not None:
            n_kept -= 1
        lost = unreadable if noted is None else max(noted["lines"] - n_kept, unreadable)
        if step == 0 or lost == noted_before or (noted is None and not lost):
            return kept
        aside = durable.unused(self._path.with_name(f"{self._path.name}.damaged"))
        if found:
            durable.write(aside, found)
        what = f"{lost} lines up to step {step} are lost" if lost else "lines have changed"
        self._say(
            f"note: {self._path} is not what the checkpoint of step {step} noted: {what}, "
            f"{n_kept} are kept" + (f"; the file as it was is {aside}" if found else "")
        )
        return [*kept, _text({"step": step, "tag": "note", "split": "note", "lost_lines": lost})]


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file, of a run that goes on too; what is no line is left out."""
    found = map(_parsed, _read(path).split(b"\n"))
    return [line for line in found if line is not None]


def _read(path: Path) -> bytes:
    try:
        return durable.read(path)
    except FileNotFoundError:
        return b""


def _is_mark(noted: Any) -> bool:
    names = "lines", "size", "crc32"
    return isinstance(noted, dict) and all(type(noted.get(name)) is int for name in names)


def _whole_start(found: bytes, noted: dict[str, int] | None) -> list[bytes] | None:
    """The lines that a checkpoint noted; None if they are not there as they were."""
    if noted is None:
        return None
    start = found[: noted["size"]]
    if len(start) != noted["size"] or zlib.crc32(start) != noted["crc32"]:
        return None
    return start.splitlines(keepends=True)


def _parsed(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    fits = isinstance(line, dict) and type(line.get("step")) is int
    return line if fits and isinstance(line.get("split"), str) else None


def _text(line: dict[str, Any]) -> bytes:
    return (json.dumps(line) + "\n").encode()
