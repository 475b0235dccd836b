"""Ends a process of a run when another one has died; a program of its own, without JAX.

A process that is killed tells nobody. The system then closes its pipes and connections, and that is
what watchers listen for: `reformax.training.processes` starts one beside each process. It holds a
pipe to its process and a connection to the watcher of process 0, which passes on who died first.
Where a machine fails nothing is closed: a watcher from which nothing came for some time counts as
dead, and its process.

    python watcher.py INDEX TIMEOUT TOKEN PORT [HOST]

Watcher 0 is given port 0 and prints the one that it listens on; the others are given that and its
host. TOKEN keeps strangers out. Standard input is the pipe: `done` says that the process ends by
itself. The end of the pipe without it is a death.
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
      timeout: seconds after which a silent watcher counts as dead.
    """

    def __init__(self, index: int, timeout: float, token: str):
        """Begins with no connection; its parent is the process."""
        self.index, self.timeout, self._token = index, timeout, token
        self._process = os.getppid()
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
        self._selector.register(sys.stdin.buffer, selectors.EVENT_READ, "process")
        beat = min(1.0, self.timeout / 4)
        next_beat = time.monotonic()
        while True:
            ready = [key for key, _ in self._selector.select(max(0, next_beat - time.monotonic()))]
            gone = os.getppid() != self._process  # perhaps what it forked still holds the pipe
            if gone or any(key.data == "process" for key in ready):
                return self._process_ends()
            for key in ready:
                if key.data == "server":
                    self._add(key.fileobj.accept()[0], None)
                elif (end := self._read(key.fileobj)) is not None:
                    return self._end(*end)
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + beat
                self._tell("alive")
            for other, index in self._others.items():
                if now - self._heard[other] > self.timeout:
                    how = f"gave no sign of life for {self.timeout:g} s"
                    return self._end("dead", index, how)

    def _add(self, other: socket.socket, index: int | None) -> None:
        other.settimeout(5)
        self._rests[other], self._heard[other] = b"", time.monotonic()
        if index is not None:
            self._others[other] = index
        self._selector.register(other, selectors.EVENT_READ, "other")

    def _remove(self, other: socket.socket) -> None:
        self._selector.unregister(other)
        self._others.pop(other, None)
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
        os.set_blocking(0, False)  # nothing may be in a pipe that another still holds
        with suppress(BlockingIOError):
            if os.read(0, 100).startswith(b"done"):
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
        if self.index == 0:
            self._tell(f"dead {index} {how}")
        self._say(index, how)
        if os.getppid() == self._process:
            os.kill(self._process, signal.SIGKILL)

    def _say(self, index: int, how: str) -> None:
        if index != self.index:
            how = how or "was killed, or its machine failed"
            line = f"process {index} {how}: the same command goes on from the latest checkpoint"
            print(f"error: {line}", file=sys.stderr, flush=True)


def main(index: str, timeout: str, token: str, port: str, host: str = "") -> None:
    """The program."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the process decides on these
    watcher = Watcher(int(index), float(timeout), token)
    if watcher.index == 0:
        print(watcher.listen(), flush=True)
    else:
        watcher.connect((host, int(port)))
        print("connected", flush=True)
    watcher.watch()


if __name__ == "__main__":
    main(*sys.argv[1:])
