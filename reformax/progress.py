"""Reports progress: a bar at a terminal, elsewhere a line every 30 seconds."""

from __future__ import annotations

import os
import time
from typing import TextIO

from tqdm import tqdm

INTERVAL = 30.0  # seconds between lines where there is no terminal
# The bar takes the rest of the line.
_FORMAT = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}, {remaining} left{postfix}"


def _has_width(terminal: TextIO) -> bool:
    """Whether the terminal has columns: those of containers may have none, and show no bar."""
    try:
        return os.get_terminal_size(terminal.fileno()).columns > 0
    except (OSError, ValueError):  # another kind of stream
        return True


class Progress:
    """Reports how much of some work is done; a context manager.

    Args:
      title: of the work, such as 'train'.
      total: how much there is.
      file: a stream, such as `sys.stderr`. It gets escape codes if it is a terminal alone.
      done: how much was done before.
      stays: whether the bar stays when it is closed; elsewhere, whether the end has a line.
      shown: whether anything is printed.
    """

    def __init__(
        self,
        title: str,
        total: int,
        file: TextIO,
        *,
        done: int = 0,
        stays: bool = False,
        shown: bool = True,
    ):
        self._title, self._total, self._file = title, total, file
        self._done, self._stays = done, stays
        at_terminal = shown and file.isatty() and _has_width(file)
        self._lines = shown and not at_terminal
        self._bar = tqdm(
            total=total, initial=done, desc=title, disable=not at_terminal, leave=stays,
            mininterval=0.2, dynamic_ncols=True, bar_format=_FORMAT, file=file,
        )  # fmt: skip
        self._first: tuple[int, float] | None = None  # done by then; the first advance compiles
        self._last = time.monotonic()  # of the last line

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def advance(self, n: int = 1, figures: str = "") -> None:
        """Adds `n` to what is done; `figures` are shown with it."""
        self._done += n
        if self._lines:
            self._write_if_due(figures)
        else:
            self._bar.set_postfix_str(figures, refresh=False)
            self._bar.update(n)

    def say(self, text: str, file: TextIO) -> None:
        """Prints a line to another stream without breaking the bar."""
        self._bar.clear()
        print(text, file=file, flush=True)
        self._bar.refresh()

    def close(self) -> None:
        """Ends the bar."""
        self._bar.close()

    def _write_if_due(self, figures: str) -> None:
        now = time.monotonic()
        self._first = self._first or (self._done, now)
        at_end = self._stays and self._done == self._total
        if now - self._last < INTERVAL and not at_end:
            return
        parts = [f"{self._title}: {self._done:,} of {self._total:,}"]
        before, then = self._first
        if before < self._done < self._total:
            left = (self._total - self._done) * (now - then) / (self._done - before)
            parts.append(f"{tqdm.format_interval(left)} left")
        print(*parts, *filter(None, [figures]), sep=", ", file=self._file, flush=True)
        self._last = now
