"""Ends a process of a run when another one has died or hangs; a program of its own, without JAX.

A process that is killed tells nobody. The system then closes its pipes and connections, and that is
what watchers listen for: `reformax.training.processes` starts one beside each process. It holds a
pipe to its process and a connection to the watcher of process 0, which passes on who died first.
Where a machine fails nothing is closed: a watcher from which nothing came for some time counts as
dead, and its process. A process that hangs is there, with its heartbeat. It says how far it is
through its pipe, and watcher 0 hears that of all: those that stay behind are what the others wait
for.

    python watcher.py INDEX TIMEOUT STEP_TIMEOUT TOKEN PORT [HOST]

Watcher 0 is given port 0 and prints the one that it listens on; the others are given that and its
host. TOKEN keeps strangers out. Standard input is the pipe: a number says how far the process is,
and `done` that it ends by itself. The end of the pipe without it is a death.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress

_LINGER = 1.0  # seconds in which a dead process's watcher hears of a death before its own
_CONNECT = 30.0  # seconds to reach watcher 0


class Watcher:
    """One of a run's watchers.

    Attributes:
      index: of the process.
      timeout: seconds after which a silent watcher, or a stopped process, counts as dead.
      step_timeout: seconds after which processes that do not go on count as hanging, once they did.
    """

    def __init__(self, index: int, timeout: float, step_timeout: float, token: str):
        """Begins with no connection; its parent is the process."""
        self.index, self._token = index, token
        self.timeout, self.step_timeout = timeout, step_timeout
        self._process = os.getppid()
        self._said, self._done = b"", False  # an unfinished line of the process, and its last word
        self._ran = self._went_on = time.monotonic()  # not stopped; any of them went on
        self._steps = {index: 0}  # how far each process is, as far as is known here
        self._selector = selectors.DefaultSelector()
        self._others: dict[socket.socket, int] = {}  # those who said who they are
        self._rests: dict[socket.socket, bytes] = {}  # unfinished lines
        self._heard: dict[socket.socket, float] = {}

    def listen(self) -> int:
        """Waits for other watchers at the port that is returned."""
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        server = socket.create_server(
            ("", 0), family=family, dualstack_ipv6=family == socket.AF_INET6
        )
        self._selector.register(server, selectors.EVENT_READ, "server")
        return server.getsockname()[1]

    def connect(self, address: tuple[str, int]) -> None:
        """Joins watcher 0."""
        end = time.monotonic() + _CONNECT
        while True:
            try:
                other = socket.create_connection(address, timeout=5)
                break
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.2)
        self._add(other, 0)
        self._send(other, f"{self._token} {self.index}")

    def watch(self) -> None:
        """Returns when the run is over, or the process of this watcher."""
        os.set_blocking(0, False)  # nothing may be in a pipe that another still holds
        self._selector.register(sys.stdin.buffer, selectors.EVENT_READ, "process")
        beat = min(1.0, self.timeout / 4, self.step_timeout / 4)
        next_beat = time.monotonic()
        while True:
            ready = [key for key, _ in self._selector.select(max(0, next_beat - time.monotonic()))]
            gone = os.getppid() != self._process  # perhaps what it forked still holds the pipe
            said = gone or any(key.data == "process" for key in ready)
            if said and (not self._process_goes_on() or gone):
                return self._process_ends()
            for key in ready:
                if key.data == "server":
                    self._add(key.fileobj.accept()[0], None)
                elif key.data == "other" and (end := self._read(key.fileobj)) is not None:
                    return self._end(*end)
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + beat
                self._tell(f"alive {self._steps[self.index]}")
                if (end := self._hangs(now)) is not None:
                    return self._end(*end)
            for other, index in self._others.items():
                if now - self._heard[other] > self.timeout:
                    how = f"gave no sign of life for {self.timeout:g} s"
                    return self._end("dead", index, how)

    def _process_goes_on(self) -> bool:
        """Hears what the process says; False where it ended."""
        try:
            data = os.read(0, 2**16)  # all that a pipe holds
        except BlockingIOError:
            return True
        *lines, self._said = (self._said + data).split(b"\n")
        self._done = self._done or b"done" in lines
        if numbers := [int(line) for line in lines if line.isdigit()]:
            self._is_at(self.index, numbers[-1])
        return bool(data) and not self._done

    def _is_at(self, index: int, steps: int) -> None:
        if steps > self._steps.get(index, 0):
            self._went_on = time.monotonic()
        self._steps[index] = steps

    def _hangs(self, now: float) -> tuple[str, int, str] | None:
        """The end that this watcher knows of: its process is stopped, or one lets all others wait.

        Processes in step wait for each other, so that none goes on where one does not. Those that
        wait were further, unless all stopped within one step.
        """
        if not _is_stopped(self._process):
            self._ran = now
        elif now - self._ran > self.timeout:
            return "dead", self.index, f"was stopped for {self.timeout:g} s"
        least = min(self._steps.values())
        if self.index or not least or now - self._went_on <= self.step_timeout:
            return None
        behind = sorted(index for index, steps in self._steps.items() if steps == least)
        others = "" if len(behind) == 1 else f"and {len(behind) - 1} more "
        how = f"{others}did not go on for {self.step_timeout:g} s (--step_timeout)"
        return "dead", behind[0], how

    def _add(self, other: socket.socket, index: int | None) -> None:
        other.settimeout(5)
        self._rests[other], self._heard[other] = b"", time.monotonic()
        if index is not None:
            self._others[other] = index
        self._selector.register(other, selectors.EVENT_READ, "other")

    def _remove(self, other: socket.socket) -> None:
        self._selector.unregister(other)
        self._steps.pop(self._others.pop(other, None), None)
        del self._rests[other], self._heard[other]
        other.close()

    def _send(self, other: socket.socket, line: str) -> None:
        with suppress(OSError):  # its end is read, or it stays silent
            other.sendall(line.encode() + b"\n")

    def _tell(self, line: str) -> None:
        for other in self._others:
            self._send(other, line)

    def _read(self, other: socket.socket) -> tuple[str, int, str] | None:
        """What came: "dead" or "done", of whom, and how; None where the run goes on."""
        try:
            data = other.recv(4096)
        except OSError:
            data = b""
        if not data:
            index = self._others.get(other)
            self._remove(other)
            return None if index is None else ("lost", index, "")
        self._heard[other] = time.monotonic()
        *lines, self._rests[other] = (self._rests[other] + data).split(b"\n")
        for line in lines:
            word, _, rest = line.decode(errors="replace").partition(" ")
            if other not in self._others:
                if word != self._token or not rest.isdigit():
                    self._remove(other)
                    return None
                self._others[other] = int(rest)
            elif word == "alive":
                self._is_at(self._others[other], int(rest))
            elif word == "done" and self.index == 0:
                self._remove(other)  # the others may go on for a moment
                return None
            elif word in ("done", "dead"):
                index, _, how = rest.partition(" ")
                return word, int(index), how
        return None

    def _process_ends(self) -> None:
        """Tells the others how the own process ended.

        What is heard afterwards of another's death is told too: the own one may follow from it, as
        by an abort of Gloo or JAX.
        """
        if self._done:
            return self._tell(f"done {self.index}")
        self._tell(f"dead {self.index}")
        self._selector.unregister(sys.stdin.buffer)
        end = time.monotonic() + _LINGER
        while (left := end - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                if key.data == "other" and (heard := self._read(key.fileobj)) is not None:
                    word, index, how = heard
                    if word == "dead" or (word == "lost" and index == 0):
                        return self._say(index, how)
        return None

    def _end(self, word: str, index: int, how: str) -> None:
        """Ends the own process, unless the run is over; watcher 0 tells the others why."""
        if word == "done":
            return
        if self.index == 0 or index == self.index:
            self._tell(f"dead {index} {how}")
        self._say(index, how)
        if os.getppid() == self._process:
            os.kill(self._process, signal.SIGKILL)

    def _say(self, index: int, how: str) -> None:
        if how or index != self.index:
            how = how or "was killed, or its machine failed"
            line = f"process {index} {how}: the same command goes on from the latest checkpoint"
            print(f"error: {line}", file=sys.stderr, flush=True)


def _is_stopped(process: int) -> bool:
    """Whether a process is stopped, as by SIGSTOP; False where the system does not tell."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except OSError:
        return False


def main(
    index: str, timeout: str, step_timeout: str, token: str, port: str, host: str = ""
) -> None:
    """The program."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the process decides on these
    watcher = Watcher(int(index), float(timeout), float(step_timeout), token)
    if watcher.index == 0:
        print(watcher.listen(), flush=True)
    else:
        watcher.connect((host, int(port)))
        print("connected", flush=True)
    watcher.watch()


if __name__ == "__main__":
    main(*sys.argv[1:])
