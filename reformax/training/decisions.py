"""Whether a run goes on: by clocks, signals and callbacks, and alike in all processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from reformax.training.callbacks import Callbacks
from reformax.training.interrupt import Interrupt
from reformax.training.processes import Processes, go_on


class Tick(NamedTuple):
    """The state that decides whether a run goes on, the same in all processes.

    Attributes:
      minutes: since the run was made.
      since_save: minutes since the last checkpoint was begun, or since the run was made.
      stopping: whether a signal or an error of a callback requests to save and to stop.
      signal: the number of that signal.
    """

    minutes: float
    since_save: float
    stopping: bool
    signal: int | None


class Decisions:
    """The decisions that process 0 takes for all.

    Attributes:
      started: when the run was made, by the monotonic clock.
      saved_at: when its last checkpoint was begun; the run sets it.
    """

    def __init__(
        self,
        processes: Processes,
        interrupt: Interrupt,
        callbacks: Callbacks,
        say: Callable[[str], None],
    ):
        """Takes what stops a run; `say` gets a line when that is in another process."""
        self._processes, self._interrupt, self._callbacks = processes, interrupt, callbacks
        self._say, self._requested = say, False
        self.started = self.saved_at = time.monotonic()

    def now(self) -> Tick:
        """Reads clocks, signals and callbacks; every process gets the answer of process 0."""
        if self._stopping and not (self._processes.first or self._requested):
            self._requested = True
            self._processes.request_stop(str(int(self._interrupt.signal or 0)))
        if not self._processes.first:
            go_on()
        tick = Tick(*self._processes.broadcast(self._decide))
        if self._processes.first:
            go_on()
        return tick

    @property
    def _stopping(self) -> bool:
        return bool(self._interrupt) or self._callbacks.error is not None

    def _decide(self) -> list[Any]:
        requests = self._processes.stop_requests()
        if requests and not self._requested:
            self._requested = True
            index, number = min(requests.items())
            why = "an error of a callback" if number == "0" else "a signal"
            self._say(f"{why} in process {index}: stopping after this step, saved")
        signals = [self._interrupt.signal, *map(int, requests.values())]
        number = next((int(number) for number in signals if number), None)
        clock = time.monotonic()
        minutes = [(clock - begin) / 60 for begin in (self.started, self.saved_at)]
        return [*minutes, self._stopping or bool(requests), number]
