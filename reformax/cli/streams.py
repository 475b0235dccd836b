"""A script's standard streams: a reader that goes or a full disk behind them ends no work."""

from __future__ import annotations

import io
import os
import select
import signal
import sys

PATIENCE = 1.0  # seconds that a reader may keep a write waiting


class Stream(io.FileIO):
    """An open descriptor; what cannot be written to it is dropped, and said once on `other`.

    Attributes:
      error: the first error; None if all was written.
    """

    error: OSError | None = None
    other: Stream | None = None

    def __init__(self, descriptor: int, title: str):
        super().__init__(descriptor, "w", closefd=False)
        self._title = title

    def write(self, data) -> int:
        """Writes some of `data`, or drops it; returns the number of bytes."""
        try:
            # A pipe or a terminal that is ready takes PIPE_BUF bytes without waiting.
            if not select.select([], [self], [], 0 if self.error else PATIENCE)[1]:
                raise TimeoutError("its reader does not read")
            n = super().write(memoryview(data)[: select.PIPE_BUF])
            if n is None:
                raise BlockingIOError("it takes nothing now")
            return n
        except OSError as error:
            if self.error is None:
                self.error = error
                self._tell(error)
            return len(data)

    def _tell(self, error: OSError) -> None:
        if self.other is not None and self.other.error is None:
            line = f"note: {self._title} failed ({error}): what cannot be written is dropped\n"
            self.other.write(line.encode())


class Result(Stream):
    """The same where the output is the script's result: the first error is raised."""

    def write(self, data) -> int:
        if self.error is not None:
            return len(data)  # the script ends; Python flushes its buffer once more
        try:
            return io.FileIO.write(self, data)
        except OSError as error:
            self.error = error
            raise


def guard(stdout: type[Stream]) -> None:
    """Puts streams that do not break in the place of Python's own.

    A closed descriptor is opened on the null device. Otherwise the next file would get its number,
    and with it what libraries print there.

    Args:
      stdout: the kind of standard output.
    """
    if sys.stdout is not sys.__stdout__:
        return  # a caller's stream, such as a test's
    if stdout is Result:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader such as head may stop first
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number, this one
    out, err = stdout(1, "standard output"), Stream(2, "standard error")
    out.other, err.other = err, out
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = _text(out, sys.stdout), _text(err, sys.stderr)


def _text(raw: Stream, before: io.TextIOWrapper | None) -> io.TextIOWrapper:
    """A text stream on `raw`; it buffers as `before`, or lines where that did not buffer."""
    unbuffered = before is not None and before.write_through
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=getattr(before, "encoding", None),
        errors="backslashreplace",  # a path that the encoding lacks is no reason to stop
        line_buffering=unbuffered or getattr(before, "line_buffering", False),
    )
