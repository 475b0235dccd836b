"""SIGTERM, SIGINT and SIGHUP as a flag that the loop reads, not an exception in mid-step."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# A launcher signals the process and its group: what comes this soon after is the same request.
SAME_REQUEST = 1.0  # seconds
CAUGHT_UP = 0  # no signal's number


class Interrupt:
    """While the context is open, the first signal sets `signal`; a later one acts as usual.

    One within `SAME_REQUEST` is ignored. So is SIGHUP where it was ignored before: nohup does that.

    Args:
      say: gets a line at the first signal, at once: also while the main thread is in a compiler or
        waits for a device, where Python's handlers have to wait. Another thread may call it.
    """

    signal: signal.Signals | None = None

    def __init__(self, say: Callable[[str], None] = lambda text: None):
        self._say = say
        self._said = threading.Lock()  # taken, for good, by the thread that says it
        self._writer: int | None = None
        self._arrived: list[float] = []  # when; handlers wait for the main thread to leave C
        self._asked = self._answered = 0  # whether all that arrived is noted, see `_between`

    def __enter__(self) -> Interrupt:
        # Only the main thread may set handlers; in any other the caller keeps its own.
        in_main = threading.current_thread() is threading.main_thread()
        nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        numbers = [s for s in SIGNALS if in_main and not (nohup and s is signal.SIGHUP)]
        self._before = {s: signal.signal(s, self._note) for s in numbers}
        if numbers:
            with suppress(OSError):  # too many open files: the handler alone says it
                self._listen()
        return self

    def __exit__(self, *exception) -> None:
        self._restore()
        if self._writer is not None:
            signal.set_wakeup_fd(-1)
            os.close(self._writer)
            self._listener.join(SAME_REQUEST)  # not for ever: it may wait for a reader

    def _listen(self) -> None:
        """Starts a thread that gets the numbers of signals from Python's handler in C."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        if before != -1:  # an event loop's
            signal.set_wakeup_fd(before)
            os.close(reader)
            os.close(writer)
            return
        self._writer = writer
        arguments = reader, [int(number) for number in self._before]
        self._listener = threading.Thread(
            target=self._read, args=arguments, name="signals", daemon=True
        )
        self._listener.start()

    def _read(self, reader: int, numbers: list[int]) -> None:
        with open(reader, "rb", buffering=0) as pipe:
            while data := pipe.read(16):
                for number in data:
                    if number == CAUGHT_UP:
                        self._answered += 1
                    elif number in numbers:
                        self._arrived.append(time.monotonic())
                        self._acknowledge(number)

    def _acknowledge(self, number: int) -> None:
        if self._said.acquire(blocking=False):
            with suppress(Exception):  # such as a print that the handler interrupted
                self._say(
                    f"{signal.Signals(number).name}: stopping after this step, saved; again after "
                    f"{SAME_REQUEST:g} s: at once, unsaved"
                )

    def _note(self, number, frame) -> None:
        if self.signal is None:
            self.signal, self._since = signal.Signals(number), time.monotonic()
            self._acknowledge(number)
        elif self._between() > SAME_REQUEST:
            self._restore()
            signal.raise_signal(number)

    def _between(self) -> float:
        """Seconds from the first signal to the last.

        The thread may have yet to read the last one: what is written after it says that it has.
        """
        if self._writer is not None:
            self._asked += 1
            with suppress(OSError):  # full: the thread waits for a reader of its line
                os.write(self._writer, bytes([CAUGHT_UP]))
            for _ in range(100):
                if self._answered >= self._asked:
                    break
                time.sleep(1e-3)
        if len(self._arrived) > 1:
            return self._arrived[-1] - min(self._since, self._arrived[0])
        return time.monotonic() - self._since

    def _restore(self) -> None:
        for number, handler in self._before.items():
            # None is a handler that is not Python's; Python cannot set it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def __bool__(self) -> bool:
        return self.signal is not None
