"""The watchers beside the processes of a run, here beside processes that do nothing."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from reformax.training import watcher

# Starts a watcher, prints its process and what it says, passes on lines, and ends at an empty one.
PROCESS = """
import subprocess, sys
command = [sys.executable, "-I", *sys.argv[1:]]
watcher = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
print(watcher.pid, watcher.stdout.readline().decode().strip(), flush=True)
while line := sys.stdin.readline().strip():
    watcher.stdin.write(line.encode() + b"\\n")
    watcher.stdin.flush()
watcher.stdin.write(b"done\\n")
watcher.stdin.close()
"""


class Run:
    """Three processes."""

    def __init__(self, timeout: float, step_timeout: float):
        self.processes, self.watchers = [], []
        port = "0"
        for index in range(3):
            where = [port] if index == 0 else [port, "localhost"]
            arguments = [
                watcher.__file__,
                *map(str, (index, timeout, step_timeout)),
                "token",
                *where,
            ]
            process = subprocess.Popen(
                [sys.executable, "-c", PROCESS, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            pid, said = process.stdout.readline().split()
            port = self.port = said if index == 0 else port
            assert index == 0 or said == "connected"
            self.processes.append(process)
            self.watchers.append(int(pid))
        time.sleep(0.2)  # until watcher 0 has read who they are

    def tell(self, *steps: int) -> None:
        """Each process says how far it is."""
        for process, step in zip(self.processes, steps, strict=True):
            process.stdin.write(f"{step}\n")
            process.stdin.flush()

    def ended(self) -> list[tuple[int, str]]:
        """The code and the errors of each."""
        return [(process.wait(20), process.stderr.read()) for process in self.processes]


@pytest.fixture
def run():
    made = []
    yield lambda timeout=60, step_timeout=60: made.append(Run(timeout, step_timeout)) or made[-1]
    for process in made[-1].processes:
        process.kill()
        process.wait()


LINE = "error: process {} {}: the same command goes on from the latest checkpoint\n"
KILLED = "was killed, or its machine failed"


@pytest.mark.parametrize("killed", [0, 2])
def test_a_process_that_is_killed_ends_the_others(run, killed):
    found = run()
    for pid in found.watchers:  # a terminal or a scheduler sends these to all that there is
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(pid, number)
    time.sleep(0.1)
    assert all(process.poll() is None for process in found.processes)
    found.processes[killed].kill()
    begin = time.monotonic()
    ended = found.ended()
    assert time.monotonic() - begin < 30  # half of what silence takes
    for index, end in enumerate(ended):
        line = "" if index == killed else LINE.format(killed, KILLED)
        assert end == (-signal.SIGKILL, line)


@pytest.mark.slow
def test_a_machine_that_falls_silent_ends_the_others(run):
    found = run(timeout=5)
    os.kill(found.watchers[1], signal.SIGSTOP)
    try:
        begin = time.monotonic()
        codes = [found.processes[i].wait(20) for i in (0, 2)]
        assert codes == [-signal.SIGKILL] * 2 and 3 < time.monotonic() - begin < 20
        told = [found.processes[i].stderr.readline() for i in (0, 2)]
        assert told == [LINE.format(1, "gave no sign of life for 5 s")] * 2
    finally:
        os.kill(found.watchers[1], signal.SIGKILL)


def test_a_process_that_is_stopped_ends_all(run):
    found = run(timeout=1)
    begin = time.monotonic()
    os.kill(found.processes[1].pid, signal.SIGSTOP)
    line = LINE.format(1, "was stopped for 1 s")
    assert found.ended() == [(-signal.SIGKILL, line)] * 3
    assert 0.7 < time.monotonic() - begin < 20


@pytest.mark.parametrize(
    "steps, hanging, how",
    [
        ((8, 7, 8), 1, ""),
        pytest.param((7, 8, 9), 0, "", marks=pytest.mark.slow),
        pytest.param((8, 7, 7), 1, "and 1 more ", marks=pytest.mark.slow),
        ((7,) * 3, 0, "and 2 more "),
    ],
)
def test_processes_that_do_not_go_on_end_all(run, steps, hanging, how):
    found = run(step_timeout=1)
    for step in (5, 6):  # before the first one, and from each to the next, they may take their time
        time.sleep(0.6)
        found.tell(step, step, step)
    begin = time.monotonic()
    found.tell(*steps)
    line = LINE.format(hanging, f"{how}did not go on for 1 s (--step_timeout)")
    assert found.ended() == [(-signal.SIGKILL, line)] * 3
    assert 0.7 < time.monotonic() - begin < 20


def test_who_is_done_lets_nobody_wait(run):
    found = run(step_timeout=0.8)
    found.tell(3, 3, 3)
    found.processes[2].stdin.write("\n")
    found.processes[2].stdin.flush()
    for step in range(4, 8):
        time.sleep(0.4)
        for process in found.processes[:2]:
            process.stdin.write(f"{step}\n")
            process.stdin.flush()
    assert all(process.poll() is None for process in found.processes[:2])
    for process in found.processes[1::-1]:
        process.stdin.write("\n")
        process.stdin.flush()
        time.sleep(0.1)
    assert found.ended() == [(0, "")] * 3


def test_processes_that_are_done_end_in_silence(run):
    found = run()
    for process in found.processes[::-1]:
        process.stdin.write("\n")
        process.stdin.flush()
        time.sleep(0.1)
    assert found.ended() == [(0, "")] * 3


def test_a_process_is_done_though_it_ends_before_its_watcher_looks(run):
    found = run()
    os.kill(found.watchers[1], signal.SIGSTOP)
    for process, watching in zip(found.processes[1:], found.watchers[1:], strict=True):
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(20) == 0
        os.kill(watching, signal.SIGCONT)
    time.sleep(0.3)
    assert found.processes[0].poll() is None
    found.processes[0].stdin.write("\n")
    found.processes[0].stdin.flush()
    assert found.ended() == [(0, "")] * 3


def test_strangers_are_not_heard(run):
    found = run()
    port = int(found.port)
    with socket.create_connection(("localhost", port), timeout=20) as stranger:
        stranger.sendall(b"hello 1\ndead 0\n")
        assert stranger.recv(10) == b""
    with socket.create_connection(("localhost", port)):
        pass
    time.sleep(0.2)
    assert all(process.poll() is None for process in found.processes)
