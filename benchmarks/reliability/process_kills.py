"""Runs of two processes in which SIGKILL ends one process, or the watcher of one.

    python -m benchmarks.reliability process_kills --cases=200 --seed=0

A case is a run of which a process or a watcher is killed in the phase of its row. Within 30 s all
processes and watchers must be gone, with an exit code of each. The same command then goes on, in
each fifth case, to the checkpoints of a run that nothing interrupts, bit for bit.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness.output import Table
from benchmarks.reliability import command, runs

CASES = 200
RESUMED = 5  # each so many cases
IN_TIME = 30.0  # seconds
LIMIT = 90.0  # seconds, after which what is left counts as hanging
LOOK = 0.002  # seconds between looks
PHASES = ("start", "step", "save", "evaluation", "end")
VICTIMS = ("process 0", "process 1", "watcher 0", "watcher 1")


class Case(NamedTuple):
    """What became of a kill.

    Attributes:
      seconds: from the kill to the end of all; None if something was left.
      wrong: what is not as it must be, in words.
    """

    seconds: float | None
    wrong: list[str]


class Pair:
    """Two processes of a run."""

    def __init__(self, runner: runs.Runner, run: Path):
        """Starts them."""
        with socket.socket() as server:
            server.bind(("", 0))
            address = f"localhost:{server.getsockname()[1]}"
        self.run = run
        self.outputs = [(f"{run}.{i}.out", f"{run}.{i}.err") for i in range(2)]
        self.processes = [
            runner.start(
                run,
                flags=[
                    f"--coordinator_address={address}",
                    "--num_processes=2",
                    f"--process_id={index}",
                ],
                outputs=outputs,
            )
            for index, outputs in enumerate(self.outputs)
        ]

    @property
    def alive(self) -> bool:
        """Whether both live."""
        return all(process.alive for process in self.processes)

    def watcher(self, index: int) -> int | None:
        """The number of a process's watcher, once there is one."""
        parent = self.processes[index].pid
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            with suppress(OSError):
                for child in task.read_text().split():
                    if b"watcher.py" in Path(f"/proc/{child}/cmdline").read_bytes():
                        return int(child)
        return None

    def wait_for(self, found: Callable[[], object]) -> bool:
        """Whether something is found while both live."""
        while not found():
            if not self.alive:
                return False
            time.sleep(LOOK)
        return True

    def endings(self, limit: float) -> list[runs.Ending]:
        """How they ended."""
        end = time.monotonic() + limit
        return [process.ending(max(0.1, end - time.monotonic())) for process in self.processes]


def main(argv: Sequence[str] | None = None) -> int:
    args = command.parse(__doc__, CASES, argv)
    keep: list[Path] = []
    with runs.runner(keep) as runner:
        return campaign(runner, args.cases, random.Random(args.seed), keep)


def campaign(runner: runs.Runner, cases: int, rng: random.Random, keep: list[Path]) -> int:
    """Runs the cases and prints a row for each phase and victim; returns the exit code."""
    want, gaps = prepare(runner)
    rows = [(phase, victim) for phase in PHASES for victim in VICTIMS]
    table = Table(
        "killed", "in", "kills", "right", "slowest, s", title="Two processes, one of them killed"
    )
    n_kills, n_right, slowest, number = 0, 0, 0.0, 0
    for row, (phase, victim) in enumerate(rows):
        found: list[Case] = []
        for _ in runs.in_turn(
            range(command.share(cases, row, len(rows))), lambda _, phase=phase: phase
        ):
            number += 1
            run = runner.folder / f"{phase}.{victim}.{number}".replace(" ", "_")
            case = kill(runner, run, phase, victim, gaps, rng)
            if number % RESUMED == 0 and not case.wrong:
                case.wrong.extend(resume(runner, run, want))
            found.append(case)
            if case.wrong:
                keep.append(run)
                print(f"{run.name}: {'; '.join(case.wrong)}", flush=True)
            else:
                shutil.rmtree(run, ignore_errors=True)
        times = [case.seconds or LIMIT for case in found]
        right = sum(not case.wrong for case in found)
        worst = max(times, default=0.0)
        table.row(victim, phase, str(len(found)), str(right), f"{worst:.1f}")
        n_kills, n_right, slowest = n_kills + len(found), n_right + right, max(slowest, worst)
    print(f"\nkills: {n_right} of {n_kills} right, the slowest end after {slowest:.1f} s")
    return int(n_right < n_kills)


def prepare(runner: runs.Runner) -> tuple[dict, dict[str, float]]:
    """The state of a run that nothing interrupts, and the seconds that its phases take."""
    for name in ("first", "warm"):  # the first compiles for the others too
        begin = time.monotonic()
        pair = Pair(runner, runner.folder / name)
        pair.wait_for(lambda pair=pair: pair.watcher(0))
        watched = time.monotonic()
        pair.wait_for(lambda pair=pair: lines(pair.run) > 0)
        stepping = time.monotonic()
        pair.wait_for(lambda pair=pair: n_evaluations(pair.run) > 2)
        scored = time.monotonic()
        for ending in pair.endings(600):
            command.must_end(ending)
        ended = time.monotonic()
    gaps = {"start": stepping - watched, "step": (scored - stepping) / 12, "end": ended - scored}
    print(f"a run takes {ended - begin:.1f} s", flush=True)
    return runner.state(runner.folder / "warm"), gaps


def kill(
    runner: runs.Runner,
    run: Path,
    phase: str,
    victim: str,
    gaps: dict[str, float],
    rng: random.Random,
) -> Case:
    """Kills the victim at a moment of the phase; a run that ended before is begun again."""
    while True:
        pair, (what, index) = Pair(runner, run), (victim[:-2], int(victim[-1]))
        if pair.wait_for(lambda pair=pair, index=index: pair.watcher(index)):
            watchers = [pair.watcher(0), pair.watcher(1)]
            number = watchers[index] if what == "watcher" else pair.processes[index].pid
            if wait(pair, phase, gaps, rng) and pair.alive and number is not None:
                watchers = [pair.watcher(0) or watchers[0], pair.watcher(1) or watchers[1]]
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
                    return ended(pair, watchers, index if what == "process" else None)
        pair.endings(LIMIT)
        shutil.rmtree(run, ignore_errors=True)


def wait(pair: Pair, phase: str, gaps: dict[str, float], rng: random.Random) -> bool:
    """Waits for a moment of the phase; False where the run ended before."""
    run, turn = pair.run, rng.randrange(3)
    if phase == "start":
        time.sleep(rng.uniform(0, gaps["start"]))
        return True
    if phase == "step":
        met = pair.wait_for(lambda: lines(run) > rng.randrange(6))
        time.sleep(rng.uniform(0, gaps["step"]))
    elif phase == "save":
        met = pair.wait_for(lambda: n_evaluations(run) >= turn)
        met = met and pair.wait_for(lambda: any((run / "checkpoints").glob("tmp.[0-9]*")))
        time.sleep(rng.uniform(0, 0.05))
    elif phase == "evaluation":
        met = pair.wait_for(lambda: f'"step": {4 * turn + 4}' in record(run))
        time.sleep(rng.uniform(0, gaps["step"]))
    else:
        met = pair.wait_for(lambda: n_evaluations(run) > 2)
        time.sleep(rng.uniform(0, gaps["end"]))
    return met


def ended(pair: Pair, watchers: list[int | None], killed: int | None) -> Case:
    """Waits for the end of all that is left."""
    begin, wrong = time.monotonic(), []
    endings = pair.endings(LIMIT)
    while any(map(runs_still, watchers)) and time.monotonic() < begin + LIMIT:
        time.sleep(LOOK)
    seconds = time.monotonic() - begin
    for index, ending in enumerate(endings):
        if ending.code is None:
            wrong.append(f"process {index} hangs")
        elif index == killed and ending.code not in (-signal.SIGKILL, 0):
            wrong.append(f"process {index}, which was killed, ended with {ending.code}")
        if "Traceback" in ending.err:
            wrong.append(f"process {index} ended with a traceback")
    wrong += [f"watcher {i} is left" for i, number in enumerate(watchers) if runs_still(number)]
    for number in filter(runs_still, watchers):
        os.kill(number, signal.SIGKILL)
    if seconds > IN_TIME and not wrong:
        wrong.append(f"ended after {seconds:.0f} s")
    return Case(seconds, wrong)


def resume(runner: runs.Runner, run: Path, want: dict) -> list[str]:
    """Runs the same command to its end; returns what is not as in a run without a kill."""
    found = [command.complaint(ending, run) for ending in Pair(runner, run).endings(300)]
    return [*filter(None, found), *runs.differences(runner.state(run), want)]


def runs_still(number: int | None) -> bool:
    """Whether a watcher runs, which nobody but the system waits for."""
    try:
        stat = Path(f"/proc/{number}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def record(run: Path) -> str:
    """The record so far."""
    path = run / "metrics.jsonl"
    return path.read_text() if path.is_file() else ""


def lines(run: Path) -> int:
    """The lines of the record."""
    return record(run).count("\n")


def n_evaluations(run: Path) -> int:
    """The evaluations in the record."""
    return record(run).count('"valid"')
