"""Ends a process of a run when another one has died or hangs; a separate program, without JAX.

`reformax.training.processes` starts a watcher for each process. A watcher holds a pipe to its
process and a connection to the watcher of process 0.

A killed process cannot report its end. The system closes its pipe, its watcher notices that, and
watcher 0 reports to all which process died first. A machine that fails closes nothing: a watcher
that was silent for `timeout` counts as dead, and its process too. A process that hangs still has
its heartbeat. Each process reports its number of steps through the pipe, and watcher 0 collects
these numbers: the process with the lowest number is the one that the others wait for.

    python watcher.py INDEX COUNT TIMEOUT STEP_TIMEOUT START_TIMEOUT HOST PORT

Watchers meet before JAX starts. Watcher 0 listens at the port until all others are connected; JAX
takes the port afterwards. Each of the others sends its index and its count. Watcher 0 refuses the
run if these do not fit. Each watcher then prints `met`, or `refused` and a line.

Standard input is the pipe of the process. A number is its steps, and `done` announces an orderly
end. The end of the pipe without `done` is a death. No watcher ends before its process, which takes
that for the watcher's death.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import threading
import time
from contextlib import suppress

_LINGER = 1.0  # seconds in which a dead process's watcher still receives an earlier death
_NOTICE = 5.0  # seconds after which a process prints whom it waits for
_LATE = 3.0  # seconds in which processes that come later are refused too
_GREETING = 15.0  # seconds for watcher 0 to answer
_PRINTING = 2.0  # seconds for stderr to take a line
_HELLO = "reformax"  # the first word of both sides


class Refused(Exception):
    """The processes do not form a run."""


class Watcher:
    """One of a run's watchers.

    Attributes:
      index: of the process.
      count: of all processes.
      timeout: seconds after which a silent watcher, or a stopped process, counts as dead.
      step_timeout: seconds after which processes that do not go on count as hanging, once they did.
      start_timeout: seconds for all processes to come. A process that is killed before it connects
        is not seen: only this timeout ends the others.
    """

    def __init__(
        self, index: int, count: int, timeout: float, step_timeout: float, start_timeout: float
    ):
        """Begins with no connection; its parent is the process."""
        self.index, self.count = index, count
        self.timeout, self.step_timeout = timeout, step_timeout
        self.start_timeout = start_timeout
        self._process = os.getppid()
        self._partial, self._done = b"", False  # an unfinished line; the last word
        self._ran = self._went_on = self._began = time.monotonic()  # not stopped; any went on
        self._steps = {index: 0}  # of each process, as reported
        self._selector = selectors.DefaultSelector()
        self._others: dict[socket.socket, int] = {}  # whose index is known
        self._rests: dict[socket.socket, bytes] = {}  # unfinished lines
        self._received: dict[socket.socket, float] = {}
        self._server: socket.socket | None = None
        self._address = ""
        self._met = self._greeted = self._noticed = False
        self._refusal: tuple[float, str] | None = None  # since when

    def listen(self, host: str, port: int) -> int:
        """Waits for other watchers at the port that is returned; raises `Refused` if taken."""
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        try:
            self._server = socket.create_server(
                ("", port), family=family, dualstack_ipv6=family == socket.AF_INET6
            )
        except OSError as error:
            self._refuse_second(host, port)
            raise Refused(
                f"coordinator_address: port {port} cannot be had ({os.strerror(error.errno)}): "
                "give another one to all processes"
            ) from None
        self._selector.register(self._server, selectors.EVENT_READ, "server")
        return self._server.getsockname()[1]

    def _refuse_second(self, host: str, port: int) -> None:
        """Raises `Refused` if another waiting process 0 listens at the port."""
        with suppress(OSError), socket.create_connection((host, port), timeout=5) as other:
            other.sendall(f"{_HELLO} 0 {self.count}\n".encode())
            with other.makefile() as lines:
                for line in lines:
                    word, _, rest = line.strip().partition(" ")
                    if word == "refused":
                        raise Refused(rest)

    def connect(self, host: str, port: int) -> None:
        """Joins watcher 0; raises `Refused` if nothing answers."""
        self._address = f"{host}:{port}"
        while True:
            try:
                other = socket.create_connection((host, port), timeout=5)
                break
            except OSError as error:
                if os.getppid() != self._process:
                    sys.exit()
                if time.monotonic() > self._began + self.start_timeout:
                    raise Refused(
                        f"coordinator_address={self._address} does not answer for "
                        f"{self.start_timeout:g} s ({error}): start process 0 there within "
                        "--start_timeout, and let the others reach that port"
                    ) from None
                self._notice(f"process 0 at {self._address}")
            time.sleep(0.2)
        self._began_to_greet = time.monotonic()
        self._add(other, 0)
        self._send(other, f"{_HELLO} {self.index} {self.count}")

    def _notice(self, whom: str) -> None:
        """Prints once whom the process waits for."""
        if not self._noticed and time.monotonic() > self._began + _NOTICE:
            self._noticed = True
            limit = f"{self.start_timeout:g} s at most (--start_timeout)"
            _print(f"note: process {self.index} waits for {whom}, for {limit}")

    def _welcome(self, index: int, count: int) -> str | None:
        """The reason to refuse a process; None if it fits the run."""
        if count != self.count:
            return (
                f"num_processes is {self.count} in process 0 and {count} in process {index}: give "
                "all processes the same"
            )
        if index == 0 or index in self._others.values():
            return (
                f"process_id={index} is given to two processes: number them from 0 to "
                f"{self.count - 1}"
            )
        return None

    def _meet(self, now: float) -> None:
        """In watcher 0, while processes connect; raises `Refused` if they do not form a run."""
        missing = sorted({*range(1, self.count)} - {*self._others.values()})
        if self._refusal is not None:
            since, why = self._refusal
            if now > since + _LATE:
                raise Refused(why)
        elif not missing:
            self._selector.unregister(self._server)
            self._server.close()  # JAX listens there from now on
            self._broadcast("met")
            self._met = True
            _answer("met")
        else:
            s = "es" * (len(missing) > 1)
            whom = f"process{s} {', '.join(map(str, missing[:8]))}{', ...' * (len(missing) > 8)}"
            self._notice(whom)
            if now > self._began + self.start_timeout:
                self._refuse(
                    f"{whom} did not come within {self.start_timeout:g} s: start all that "
                    f"num_processes={self.count} says within --start_timeout, and let them reach "
                    "process 0"
                )

    def _refuse(self, why: str) -> None:
        """In watcher 0: refuses the processes that are connected and those that still connect."""
        self._refusal = time.monotonic(), why
        self._broadcast(f"refused {why}")

    def watch(self) -> None:
        """Returns when the process of this watcher has ended.

        Raises:
          Refused: the processes do not form a run.
        """
        os.set_blocking(0, False)  # nothing may be in a pipe that another still holds
        self._selector.register(sys.stdin.buffer, selectors.EVENT_READ, "process")
        beat = min(1.0, self.timeout / 4, self.step_timeout / 4, self.start_timeout / 4)
        next_beat = time.monotonic()
        while True:
            ready = [key for key, _ in self._selector.select(max(0, next_beat - time.monotonic()))]
            gone = os.getppid() != self._process  # perhaps what it forked still holds the pipe
            said = gone or any(key.data == "process" for key in ready)
            if said and (not self._process_goes_on() or gone):
                return self._process_ends()
            for key in ready:
                if self._selector.get_map().get(key.fd) is not key:
                    continue
                if key.data == "server":
                    self._add(key.fileobj.accept()[0], None)
                elif key.data == "other" and (end := self._read(key.fileobj)) is not None:
                    return self._end(*end)
            now = time.monotonic()
            if self.index == 0 and not self._met:
                self._meet(now)
            if self.index and not self._greeted and now > self._began_to_greet + _GREETING:
                raise self._stranger()
            if now >= next_beat:
                next_beat = now + beat
                self._broadcast(f"alive {self._steps[self.index]}")
                if (end := self._hangs(now)) is not None:
                    return self._end(*end)
            for other, index in self._others.items():
                if now - self._received[other] > self.timeout:
                    how = f"gave no sign of life for {self.timeout:g} s"
                    return self._end("dead", index, how)

    def _stranger(self) -> Refused:
        return Refused(
            f"what answers at coordinator_address={self._address} is no process 0 that begins: "
            "give a free port there, the same to all processes"
        )

    def _process_goes_on(self) -> bool:
        """Reads the reports of the process; False if it has ended."""
        try:
            data = os.read(0, 2**16)  # all that a pipe holds
        except BlockingIOError:
            return True
        *lines, self._partial = (self._partial + data).split(b"\n")
        self._done = self._done or b"done" in lines
        if numbers := [int(line) for line in lines if line.isdigit()]:
            self._is_at(self.index, numbers[-1])
        return bool(data) and not self._done

    def _is_at(self, index: int, steps: int) -> None:
        if steps > self._steps.get(index, 0):
            self._went_on = time.monotonic()
        self._steps[index] = steps

    def _hangs(self, now: float) -> tuple[str, int, str] | None:
        """The end that this watcher detects: its process is stopped, or a process hangs.

        The processes of a step wait for each other, so one that hangs stops all. Those that wait
        have reported more steps, unless all stopped within one step.
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
        self._rests[other], self._received[other] = b"", time.monotonic()
        if index is not None:
            self._others[other] = index
        self._selector.register(other, selectors.EVENT_READ, "other")

    def _remove(self, other: socket.socket) -> None:
        self._selector.unregister(other)
        self._steps.pop(self._others.pop(other, None), None)
        del self._rests[other], self._received[other]
        other.close()

    def _send(self, other: socket.socket, line: str) -> None:
        with suppress(OSError):  # its end is read, or it stays silent
            other.sendall(line.encode() + b"\n")

    def _broadcast(self, line: str) -> None:
        for other in self._others:
            self._send(other, line)

    def _read(self, other: socket.socket) -> tuple[str, int, str] | None:
        """The end that was received: "dead" or "lost", the index, the cause; None if none was."""
        try:
            data = other.recv(4096)
        except OSError:
            data = b""
        if not data and self.index and not self._greeted:
            raise self._stranger()
        if not data:
            index = self._others.get(other)
            self._remove(other)
            refused = self._refusal is not None  # a refused process ends
            return None if index is None or refused else ("lost", index, "")
        self._received[other] = time.monotonic()
        *lines, self._rests[other] = (self._rests[other] + data).split(b"\n")
        if self.index and not (self._greeted or data.startswith(_HELLO.encode())):
            raise self._stranger()
        for line in lines:
            word, _, rest = line.decode(errors="replace").partition(" ")
            if self.index and not self._greeted:
                self._greeted = True
            elif other not in self._others:
                if not self._comes(other, word, rest):
                    return None
            elif word == "met":
                _answer("met")
            elif word == "refused":
                raise Refused(rest)
            elif word == "alive":
                self._is_at(self._others[other], int(rest))
            elif word == "done":
                self._remove(other)  # the others may go on for a moment
                return None
            elif word == "dead":
                index, _, how = rest.partition(" ")
                return word, int(index), how
        return None

    def _comes(self, other: socket.socket, word: str, rest: str) -> bool:
        """In watcher 0: reads who connects; False for a stranger, whose connection is closed."""
        numbers = rest.split()
        if word != _HELLO or len(numbers) != 2 or not all(x.isdecimal() for x in numbers):
            self._remove(other)
            return False
        index, count = map(int, numbers)
        self._send(other, _HELLO)
        why = self._welcome(index, count)
        if why is not None and self._refusal is None:
            self._refuse(why)
        if self._refusal is not None:
            self._send(other, f"refused {self._refusal[1]}")
            return False
        self._others[other] = index
        return True

    def _process_ends(self) -> None:
        """Reports the end of this watcher's process to the others.

        An earlier death of another process may be received afterwards. It is printed, since the
        end of this process may follow from it, as by an abort of Gloo or JAX.
        """
        if self._done:
            return self._broadcast(f"done {self.index}")
        self._broadcast(f"dead {self.index}")
        self._selector.unregister(sys.stdin.buffer)
        end = time.monotonic() + _LINGER
        while (left := end - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                if key.data == "other" and (received := self._read(key.fileobj)) is not None:
                    word, index, how = received
                    if word == "dead" or (word == "lost" and index == 0):
                        return self._report(index, how)
        return None

    def _end(self, word: str, index: int, how: str) -> None:
        """Ends this watcher's process; watcher 0 reports the cause to the others."""
        del word
        if self.index == 0 or index == self.index:
            self._broadcast(f"dead {index} {how}")
        self._report(index, how)
        if os.getppid() == self._process:
            os.kill(self._process, signal.SIGKILL)

    def _report(self, index: int, how: str) -> None:
        if how or index != self.index:
            how = how or "was killed, or its machine failed"
            line = f"process {index} {how}: the same command goes on from the latest checkpoint"
            _print(f"error: {line}")


def _is_stopped(process: int) -> bool:
    """Whether a process is stopped, as by SIGSTOP; False where the system does not report it."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except OSError:
        return False


def _print(line: str) -> None:
    """Prints on stderr, which may be closed or full: the process is ended all the same."""

    def write() -> None:
        with suppress(OSError):
            os.write(2, f"{line}\n".encode())

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(_PRINTING)


def _answer(line: str) -> None:
    """Sends a line to this watcher's process."""
    with suppress(OSError):
        os.write(1, f"{line}\n".encode())


def main(index: str, count: str, *timeouts_and_address: str) -> None:
    """The program."""
    *timeouts, host, port = timeouts_and_address
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the process decides on these
    watcher = Watcher(int(index), int(count), *map(float, timeouts))
    try:
        if watcher.index == 0:
            _answer(f"listening {watcher.listen(host, int(port))}")
        else:
            watcher.connect(host, int(port))
        watcher.watch()
    except Refused as refused:
        _answer(f"refused {refused}")
    os._exit(0)  # a thread may wait for a full stderr


if __name__ == "__main__":
    main(*sys.argv[1:])
