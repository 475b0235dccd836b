"""The watchers beside the processes of a run, here beside processes that do nothing."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from reformax.training import watcher

# Starts a watcher, prints its process and what it says, and ends when it reads a line.
PROCESS = """
import subprocess, sys
command = [sys.executable, "-I", *sys.argv[1:]]
watcher = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
print(watcher.pid, watcher.stdout.readline().decode().strip(), flush=True)
sys.stdin.readline()
watcher.stdin.write(b"done\\n")
watcher.stdin.close()
"""


class Run:
    """Three processes."""

    def __init__(self, timeout: float):
        self.processes, self.watchers = [], []
        port = "0"
        for index in range(3):
            where = [port] if index == 0 else [port, "localhost"]
            arguments = [watcher.__file__, str(index), str(timeout), "token", *where]
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

    def ended(self) -> list[tuple[int, str]]:
        """The code and the errors of each."""
        return [(process.wait(20), process.stderr.read()) for process in self.processes]


@pytest.fixture
def run():
    made = []
    yield lambda timeout=60: made.append(Run(timeout)) or made[-1]
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
