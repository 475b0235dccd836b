"""SIGTERM and SIGINT as a flag that the loop reads, not an exception in the middle of a step."""

from __future__ import annotations

import signal
import threading

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupt:
    """While the context is open, the first signal sets `signal`; a second one acts as usual."""

    signal: signal.Signals | None = None

    def __enter__(self) -> Interrupt:
        # Only the main thread may set handlers; in any other the caller keeps its own.
        in_main = threading.current_thread() is threading.main_thread()
        self._before = {s: signal.signal(s, self._note) for s in SIGNALS} if in_main else {}
        return self

    def __exit__(self, *exception) -> None:
        self._restore()

    def _note(self, number, frame) -> None:
        self.signal = signal.Signals(number)
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __bool__(self) -> bool:
        return self.signal is not None
