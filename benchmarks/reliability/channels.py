"""Runs whose output goes nowhere, whose disk is full for a moment, and that signals stop.

    python -m benchmarks.reliability channels --cases=60 --seed=0

Output: stdout or stderr on a full disk, closed, or a pipe that nobody reads. The run goes on to its
end. A full disk: for half a second at a random moment. The run goes on, or ends in one line and is
resumed. Signals: one of SIGTERM, SIGINT and SIGHUP at a random moment, or two of them at most 20 ms
apart. The run saves and is resumed. All end with the record and the tensors of the run that nothing
disturbs, and none hangs. A full disk needs root.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness.output import Table
from benchmarks.reliability import command, runs

CASES = 60
OUTPUTS = {
    "stdout on a full disk": ("/dev/full", None),
    "stderr on a full disk": (None, "/dev/full"),
    "stdout a closed pipe": (runs.BROKEN_PIPE, None),
    "stderr a closed pipe": (None, runs.BROKEN_PIPE),
    "stdout closed": (runs.CLOSED, None),
    "stderr closed": (None, runs.CLOSED),
    "both closed": (runs.CLOSED, runs.CLOSED),
}
SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
FULL_FOR = 0.5  # seconds
SIZE = 16 << 20  # bytes of the disk
Try = Callable[[Path], list[str]]  # what is wrong with the run in a folder


def main(argv: Sequence[str] | None = None) -> int:
    args = command.parse(__doc__, CASES, argv)
    keep: list[Path] = []
    with runs.runner(keep) as runner:
        return campaign(runner, args.cases, random.Random(args.seed), keep)


def campaign(runner: runs.Runner, cases: int, rng: random.Random, keep: list[Path]) -> int:
    """Runs the cases and prints a row for each kind; returns the exit code."""
    command.must_end(runner.train(runner.folder / "first"))
    whole = runner.train(runner.folder / "whole")
    command.must_end(whole)
    want = runs.end_of(runner.state(runner.folder / "whole"))
    table = Table("disturbed by", "runs", "right", title="Output, a full disk and signals")
    total = dict(runs=0, right=0)
    tries = kinds(runner, whole.seconds, want, rng)
    for number, (name, attempt) in enumerate(tries.items()):
        found = dict.fromkeys(total, 0)
        for case in runs.in_turn(range(command.share(cases, number, len(tries))), str):
            run = runner.folder / f"{name}.{case}".replace(" ", "_")
            harm = attempt(run)
            found["runs"] += 1
            found["right"] += not harm
            if harm:
                keep.append(run)
                print(f"{run.name}: {'; '.join(harm)}", flush=True)
            else:
                shutil.rmtree(run, ignore_errors=True)
        table.row(name, *map(str, found.values()))
        total = {name: total[name] + found[name] for name in total}
    print(f"\nchannels: {total['right']} of {total['runs']} right")
    return int(total["right"] < total["runs"])


def kinds(
    runner: runs.Runner, seconds: float, want: dict[str, Any], rng: random.Random
) -> Mapping[str, Try]:
    """For each kind of case a function that tries one, in `seconds` where nothing disturbs it."""

    def at_any_time() -> float:
        return rng.uniform(0.1, 1.0) * seconds

    def output(run: Path, outputs: tuple[str | None, str | None]) -> list[str]:
        names = f"{run}.out", f"{run}.err"
        ending = runner.train(run, outputs=[x or y for x, y in zip(outputs, names, strict=True)])
        return judged(ending, run, (0,))

    def full_disk(run: Path) -> list[str]:
        with small_disk(run) as disk:
            process = runner.start(disk / "run", outputs=(f"{run}.out", f"{run}.err"))
            time.sleep(at_any_time())
            fill(disk, FULL_FOR)
            return judged(process.ending(), disk / "run", (0, 1))

    def signals(run: Path, n: int) -> list[str]:
        process = runner.start(run)
        time.sleep(at_any_time())
        sent = [rng.choice(SIGNALS) for _ in range(n)]
        for number in sent:
            process.send(number)
            time.sleep(rng.uniform(0, 0.02))
        ending = process.ending()
        begun = (run / "metrics.jsonl").exists()
        codes = {0, *(128 + x for x in sent)} | (set() if begun else {-x for x in sent})
        return judged(ending, run, codes)

    def judged(ending: runs.Ending, run: Path, codes) -> list[str]:
        if ending.code is None:
            return ["hangs"]
        harm = [] if ending.code in codes else [f"ended with {ending.code}: {last_line(ending)}"]
        if "Traceback" in ending.err:
            harm.append(f"a traceback: {last_line(ending)}")
        if ending.code != 0:
            rest = (f"{runner.folder / run.name}.out2", f"{runner.folder / run.name}.err2")
            again = runner.train(run, outputs=rest)
            harm += filter(None, [command.complaint(again, run)])
        return harm + runs.differences(runs.end_of(runner.state(run)), want)

    found: dict[str, Try] = {
        name: lambda run, outputs=outputs: output(run, outputs) for name, outputs in OUTPUTS.items()
    }
    if os.geteuid() == 0:
        found["a full disk for half a second"] = full_disk
    else:
        print("no full disk: this takes root")
    found["a signal"] = lambda run: signals(run, 1)
    found["two signals"] = lambda run: signals(run, 2)
    return found


def last_line(ending: runs.Ending) -> str:
    return f"{ending.err.strip().splitlines()[-1:]!s:.300}"


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system in memory."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def fill(disk: Path, seconds: float) -> None:
    """Leaves no byte on a disk for a while."""
    until = time.monotonic() + seconds
    with open(disk / "rest", "wb", buffering=0) as file:
        while time.monotonic() < until:
            try:
                file.write(bytes(4096))
            except OSError:  # full; what the run deletes is taken as well
                time.sleep(0.001)
    (disk / "rest").unlink()
