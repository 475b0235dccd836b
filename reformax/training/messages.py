"""The lines that a run prints."""

from __future__ import annotations

import sys
from typing import NamedTuple

from reformax.training import side_channels


class Messages(NamedTuple):
    """Prints lines, in process 0 alone.

    Attributes:
      shown: whether progress is shown.
      first: whether this is process 0.
    """

    shown: bool
    first: bool

    def say(self, text: str) -> None:
        """Says what a user may like to know."""
        if self.shown:
            print(text, file=side_channels.stdout(), flush=True)

    def acknowledge(self, text: str) -> None:
        """Answers a signal."""
        if self.shown:
            print(f"\n{text}", file=sys.stderr, flush=True)  # below the bar

    def note(self, text: str) -> None:
        """Says what a user must know, even where progress is not shown."""
        if not self.first:
            return
        out = side_channels.stdout() if self.shown else side_channels.stderr()
        print(text, file=out, flush=True)
