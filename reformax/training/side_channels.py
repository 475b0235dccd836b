"""Side channels: a failure of the bar, prints, the plot or TensorBoard's events ends no run.

They are for people. A full disk, a terminal that was closed or a reader that went away ends them,
never a run.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import lru_cache
from typing import Any


class BestEffort:
    """A context that catches errors and reports the first one in a line.

    Args:
      name: of what is done there.
      file: gets the line; None for stderr.
    """

    def __init__(self, name: str, file=None):
        self._name, self._file, self._reported = name, file, False

    def __enter__(self) -> BestEffort:
        return self

    def __exit__(self, kind, error, traceback) -> bool:
        if not isinstance(error, Exception):
            return False
        if not self._reported:
            self._reported = True  # before the line is printed, which may fail in turn
            reason = " ".join(f"{kind.__name__}: {error}".split())
            text = f"note: {self._name} failed, and the work goes on ({reason})"
            with suppress(Exception):
                print(text, file=self._file or sys.stderr, flush=True)
        return True


class BestEffortStream:
    """A text stream that may be broken, closed or None: what cannot be written is dropped."""

    def __init__(self, stream, name: str, other):
        self._stream, self._best_effort = stream, BestEffort(name, other)

    def write(self, text: str) -> int:
        if self._stream is not None:
            with self._best_effort:
                self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        if self._stream is not None:
            with self._best_effort:
                self._stream.flush()

    def isatty(self) -> bool:
        try:
            return self._stream.isatty()
        except Exception:
            return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def stdout() -> BestEffortStream:
    """Standard output as it is now."""
    return _best_effort_stream(sys.stdout, "standard output", sys.stderr)


def stderr() -> BestEffortStream:
    """Standard error as it is now."""
    return _best_effort_stream(sys.stderr, "standard error", sys.stdout)


@lru_cache(maxsize=2)  # each reports its first error only
def _best_effort_stream(stream, name: str, other) -> BestEffortStream:
    return BestEffortStream(stream, name, other)
