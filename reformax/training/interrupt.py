"""SIGTERM, SIGINT and SIGHUP as a flag that the loop reads, not an exception in mid-step."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# A launcher signals the process and its group: what comes this soon after is the same request.
SAME_REQUEST = 1.0  # seconds


class Interrupt:
    """While the context is open, the first signal sets `signal`; a later one acts as usual.

    One within `SAME_REQUEST` is ignored. So is SIGHUP where it was ignored before: nohup does that.

    Args:
      say: gets a line at the first signal.
    """

    signal: signal.Signals | None = None

    def __init__(self, say: Callable[[str], None] = lambda text: None):
        self._say = say

    def __enter__(self) -> Interrupt:
        # Only the main thread may set handlers; in any other the caller keeps its own.
        in_main = threading.current_thread() is threading.main_thread()
        nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        numbers = [s for s in SIGNALS if in_main and not (nohup and s is signal.SIGHUP)]
        self._before = {s: signal.signal(s, self._note) for s in numbers}
        return self

    def __exit__(self, *exception) -> None:
        self._restore()

    def _note(self, number, frame) -> None:
        if self.signal is None:
            self.signal, self._since = signal.Signals(number), time.monotonic()
            with suppress(Exception):  # such as a print that this handler interrupted
                self._say(
                    f"{self.signal.name}: stopping after this step, saved; again after "
                    f"{SAME_REQUEST:g} s: at once, unsaved"
                )
        elif time.monotonic() - self._since > SAME_REQUEST:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            # None is a handler that is not Python's; it cannot be set from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def __bool__(self) -> bool:
        return self.signal is not None
