"""A trace of a few steps: what the host and the devices do, and for how long."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax

from reformax.training import side_channels
from reformax.training.callbacks import Callback

SKIPPED, TRACED = 5, 3  # steps: those that compile and fill caches, and those of the trace


def profile(folder: Path) -> Callback:
    """A callback that writes a trace of steps into a folder, for TensorBoard or Perfetto.

    A trace that cannot be written is reported, and the run goes on.
    """
    return Callback(on_step=(found := _Profile(folder)).on_step, on_end=found.on_end)


class _Profile:
    """Counts the steps of this process, begins the trace and ends it."""

    def __init__(self, folder: Path):
        self._folder, self._seen, self._is_open = folder, 0, False
        self._best_effort = side_channels.BestEffort("the trace")

    def on_step(self, step: int, values: dict[str, float]) -> None:
        self._seen += 1
        if self._seen == SKIPPED:
            with self._best_effort:
                jax.profiler.start_trace(str(self._folder))
                self._is_open = True
        elif self._seen == SKIPPED + TRACED:
            self._close()

    def on_end(self, result: dict[str, Any]) -> None:
        self._close()
        if self._seen < SKIPPED:
            text = f"note: no trace: it begins after {SKIPPED} steps, and there were {self._seen}"
            print(text, file=sys.stderr)

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            with self._best_effort:
                jax.profiler.stop_trace()
