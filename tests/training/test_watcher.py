"""The watchers beside the processes of a run, here beside processes that do nothing."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from reformax.training import watcher

ROOT = Path(__file__).resolve().parents[2]

# Starts a watcher, prints its process and what it says; then passes on lines until an empty one.
PROCESS = """
import subprocess, sys
command = [sys.executable, "-I", *sys.argv[1:]]
watcher = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
print(watcher.pid, flush=True)
while (said := watcher.stdout.readline().decode().strip()) != "met":
    print(said, flush=True)
    if said.startswith("refused"):
        sys.exit(2)
print("met", flush=True)
while line := sys.stdin.readline().strip():
    watcher.stdin.write(line.encode() + b"\\n")
    watcher.stdin.flush()
watcher.stdin.write(b"done\\n")
watcher.stdin.close()
"""


class Process(subprocess.Popen):
    """A process with its watcher, whose number is `watching`."""

    def __init__(self, index: int, count: int, port: str, *timeouts: float):
        numbers = [*map(str, (index, count, *(*timeouts, 60, 60, 60)[:3]))]
        super().__init__(
            [sys.executable, "-c", PROCESS, watcher.__file__, *numbers, "localhost", port],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.watching = int(self.said())

    def said(self) -> str:
        """The next line."""
        return self.stdout.readline().strip()


class Run:
    """Three processes."""

    def __init__(self, timeout: float, step_timeout: float):
        first = Process(0, 3, "0", timeout, step_timeout)
        self.port = first.said().removeprefix("listening ")
        others = [Process(index, 3, self.port, timeout, step_timeout) for index in (1, 2)]
        self.processes = [first, *others]
        self.watchers = [process.watching for process in self.processes]
        assert [process.said() for process in self.processes] == ["met"] * 3

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
        pytest.param((7,) * 3, 0, "and 2 more ", marks=pytest.mark.slow),
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


@pytest.mark.slow
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


def test_a_process_is_done_though_it_ends_before_its_watcher_looks(run):
    found = run()
    os.kill(found.watchers[1], signal.SIGSTOP)
    for process, watching in zip(found.processes[1:], found.watchers[1:], strict=True):
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(20) == 0
        with suppress(ProcessLookupError):  # the second one is not stopped
            os.kill(watching, signal.SIGCONT)
    time.sleep(0.3)
    assert found.processes[0].poll() is None
    found.processes[0].stdin.write("\n")
    found.processes[0].stdin.flush()
    assert found.ended() == [(0, "")] * 3


def test_strangers_are_not_heard():
    first = Process(0, 2, "0")
    port = first.said().removeprefix("listening ")
    with socket.create_connection(("localhost", int(port)), timeout=20) as stranger:
        stranger.sendall(b"hello 1\ndead 0\n")
        assert stranger.recv(10) == b""
    with socket.create_connection(("localhost", int(port))):
        second = Process(1, 2, port)
        assert first.said() == second.said() == "met"
    with pytest.raises(OSError):  # the port is JAX's from now on
        socket.create_connection(("localhost", int(port)))
    assert first.poll() is None
    for process in (second, first):
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(20) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "first, others, told",
    [
        (2, [(1, 3), (2, 3)], "num_processes is 2 in process 0 and 3 in process 1"),
        (3, [(1, 3), (1, 3)], "process_id=1 is given to two processes: number them from 0 to 2"),
        (2, [(0, 2)], "process_id=0 is given to two processes: number them from 0 to 1"),
    ],
)
def test_processes_that_are_no_run_are_told_in_a_line(first, others, told):
    begin = time.monotonic()
    started = [Process(0, first, "0")]
    port = started[0].said().removeprefix("listening ")
    for index, count in others:
        started.append(Process(index, count, port))
        time.sleep(0.3)
    for process in started:
        assert process.said().startswith(f"refused {told}")
        assert process.wait(20) == 2
    assert time.monotonic() - begin < 20


def test_a_process_that_comes_to_another_service_is_told():
    with socket.create_server(("localhost", 0)) as server:
        process = Process(1, 2, str(server.getsockname()[1]))
        other, _ = server.accept()
        other.sendall(b"\0\0\x12\4")
        assert "is no process 0 that begins: give a free port there" in process.said()
        other.close()
        assert process.wait(20) == 2


def test_a_process_that_is_killed_before_all_have_come_ends_the_others():
    first = Process(0, 3, "0")
    second = Process(1, 3, first.said().removeprefix("listening "))
    time.sleep(0.5)
    second.kill()
    assert first.wait(20) == -signal.SIGKILL
    assert first.stderr.read() == LINE.format(1, KILLED)


@pytest.mark.slow
def test_a_process_that_never_comes_ends_those_that_came():
    begin = time.monotonic()
    first = Process(0, 3, "0", 60, 60, 1)
    second = Process(1, 3, first.said().removeprefix("listening "))
    for process in (first, second):
        assert process.said().startswith("refused process 2 did not come within 1 s: start all")
        assert process.wait(20) == 2 and "was killed" not in process.stderr.read()
    assert time.monotonic() - begin < 20


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_who_is_left_by_a_kill_before_the_connection_ends_within_30_s(index, tmp_path):
    """The command at its default settings; the other process is killed as soon as it runs."""
    with socket.socket() as server:
        server.bind(("", 0))
        address = f"localhost:{server.getsockname()[1]}"
    command = [sys.executable, "-m", "reformax", "train", f"--coordinator_address={address}"]
    begun = [
        subprocess.Popen(
            [*command, "--num_processes=2", f"--process_id={i}"],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    begun[1 - index].kill()
    begin = time.monotonic()
    _, err = begun[index].communicate(timeout=60)
    assert begun[index].returncode == 2 and "--start_timeout" in err.splitlines()[-1], err
    begun[1 - index].communicate()
    imports = 15  # of the process that is left, beside other tests
    assert time.monotonic() - begin < 30 + imports


def test_a_watcher_that_is_killed_ends_the_others(run):
    found = run()
    os.kill(found.watchers[0], signal.SIGKILL)
    for process in found.processes[1:]:
        assert (process.wait(20), process.stderr.read()) == (
            -signal.SIGKILL,
            LINE.format(0, KILLED),
        )


@pytest.mark.parametrize("how", ["closed", pytest.param("full", marks=pytest.mark.slow)])
def test_a_process_is_ended_where_nobody_reads_its_errors(how):
    reader, writer = os.pipe()
    if how == "closed":
        os.close(reader)
    else:
        os.set_blocking(writer, False)
        with pytest.raises(BlockingIOError):
            while True:
                os.write(writer, b"-" * 4096)
        os.set_blocking(writer, True)
    first = Process(0, 2, "0")
    numbers = ["1", "2", "60", "60", "60", "localhost", first.said().removeprefix("listening ")]
    second = subprocess.Popen(
        [sys.executable, "-c", PROCESS, watcher.__file__, *numbers],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=writer,
    )
    assert first.said() == "met" and second.stdout.readline() and second.stdout.readline()
    first.kill()
    assert second.wait(20) == -signal.SIGKILL
    os.close(writer)
