"""Runs whose disk loses its power at random moments, and that go on from what the disk then holds.

    python -m benchmarks.reliability power_cuts --cases=50 --seed=0

A run writes to an ext4 file system in a file. It is stopped at a random moment, in two rows of
three at a system call of a save or a line, and the file is copied as it is: what the kernel had not
yet written for want of an fsync is lost. The file system waits 300 s with what it need not write,
and in half of the cases writes names before data. The copy is mounted and the same command goes on
there: from a checkpoint at most one interval older than the latest that had its name, to the end of
the run that nothing interrupts, bit for bit. Needs root and loop devices.
"""

from __future__ import annotations

import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from benchmarks.harness.output import Table
from benchmarks.reliability import command, runs
from benchmarks.reliability.calls import NAMES, Call, Strike, read_log

CASES = 50
SIZE = 64 << 20  # bytes of the disk
OPTIONS = {
    "data with names": "commit=300",
    "names before data": "commit=300,data=writeback,noauto_da_alloc",
}
MOMENTS = "any time", "a save", "a line"


def main(argv: Sequence[str] | None = None) -> int:
    args = command.parse(__doc__, CASES, argv)
    keep: list[Path] = []
    with runs.runner(keep) as runner:
        command.need_calls(runner)
        try:
            with disk(runner.folder / "probe", OPTIONS["names before data"], new=True):
                pass
        except (OSError, subprocess.CalledProcessError) as error:
            sys.exit(f"this campaign mounts loop devices, and here it cannot: {error}")
        return campaign(runner, args.cases, random.Random(args.seed), keep)


def campaign(runner: runs.Runner, cases: int, rng: random.Random, keep: list[Path]) -> int:
    """Cuts the power `cases` times and prints a row for each kind; returns the exit code."""
    log = runner.folder / "calls"
    command.must_end(runner.train(runner.folder / "first"))
    command.must_end(runner.train(runner.folder / "whole", log=log))
    trace, want = read_log(log), runner.state(runner.folder / "whole")
    steps = every_step(trace)
    columns = "file system", "cut in", "images", "usable", "bit for bit", "most steps behind"
    table = Table(*columns, title="Power cuts")
    rows = [(options, moment) for options in OPTIONS for moment in MOMENTS]
    total = dict(images=0, usable=0, whole=0)
    for number, row in enumerate(rows):
        found, behind = dict.fromkeys(total, 0), 0
        for case in runs.in_turn(range(command.share(cases, number, len(rows))), str):
            image = runner.folder / f"{number}.{case}"
            latest = cut(runner, image, OPTIONS[row[0]], draw(row[1], trace, rng))
            first, harm = go_on(runner, image, OPTIONS[row[0]], want)
            older = sum(first < step <= latest for step in steps)
            harm += [f"went on from {first}, and {latest} had its name"] * (older > 1)
            found["images"] += 1
            found["usable"] += older <= 1
            found["whole"] += not harm
            behind = max(behind, latest - first)
            if harm:
                keep.append(image)
                print(f"{image}: {'; '.join(harm)}", flush=True)
            else:
                image.unlink()
        table.row(*row, *map(str, found.values()), str(behind))
        total = {name: total[name] + found[name] for name in total}
    print(
        f"\npower_cuts: {total['usable']} of {total['images']} with a usable checkpoint at most "
        f"one interval old, {total['whole']} bit for bit"
    )
    return int(total["whole"] < total["images"])


def cut(runner: runs.Runner, image: Path, options: str, moment: float | Strike) -> int:
    """Copies the disk of a run to `image`; returns the latest step whose folder had its name."""
    with disk(runner.folder / "live", options, new=True) as mounted:
        run = mounted / "run"
        strike = moment if isinstance(moment, Strike) else None
        outputs = str(image) + ".out", str(image) + ".err"
        process = runner.start(run, strike=strike, outputs=outputs)
        if strike is None:
            time.sleep(moment)
            process.send(signal.SIGSTOP)
        process.wait_for_stop()  # or its end
        latest = max(named_steps(run), default=0)
        shutil.copyfile(mounted.with_suffix(".img"), image)
        process.send(signal.SIGKILL)
        process.ending()
    return latest


def go_on(
    runner: runs.Runner, image: Path, options: str, want: dict[str, Any]
) -> tuple[int, list[str]]:
    """Resumes the run of an image; returns the step that it went on from, and what is wrong."""
    with disk(image, options) as mounted:
        run = mounted / "run"
        outputs = str(image) + ".out2", str(image) + ".err2"
        ending = runner.train(run, outputs=outputs)
        begun = re.search(r"(?:going on from|at) step (\d+) (?:to|of) ", ending.out)
        harm = [*filter(None, [command.complaint(ending, run)])]
        harm += runs.differences(runner.state(run), want)
    return int(begun[1]) if begun else 0, harm


@contextmanager
def disk(image: Path, options: str, new: bool = False) -> Iterator[Path]:
    """Mounts an ext4 file system in a file; yields where.

    Args:
      image: the file; of a new disk without its suffix.
      options: of the mount.
      new: whether to make it.
    """
    mounted = image.with_name(image.name + ".disk")
    mounted.mkdir(exist_ok=True)
    if new:
        image = mounted.with_suffix(".img")
        with open(image, "wb") as file:
            file.truncate(SIZE)
        subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True, capture_output=True)
    subprocess.run(["mount", "-o", f"loop,{options}", image, mounted], check=True)
    try:
        yield mounted
    finally:
        subprocess.run(["umount", mounted], check=True)


def draw(moment: str, trace: list[Call], rng: random.Random) -> float | Strike:
    """When the power is cut: after some seconds, or at a call."""
    if moment == "any time":
        return rng.uniform(0.2, 1.1) * (trace[-1].time - trace[0].time)
    pattern = "checkpoints/*" if moment == "a save" else "metrics*"
    names = [name for name in NAMES if name != "read"]
    n_calls = sum(call.name in names and fnmatch(call.path, pattern) for call in trace)
    return Strike(",".join(names), pattern, rng.randint(1, n_calls), signal=signal.SIGSTOP)


def named_steps(run: Path) -> list[int]:
    """The steps of the checkpoints that have their names."""
    found = run.glob("checkpoints/*")
    return sorted(int(path.name) for path in found if path.name.isdigit())


def every_step(trace: list[Call]) -> list[int]:
    """The steps that a run saves."""
    found = (re.fullmatch(r"checkpoints/(\d+)", x.path) for x in trace if x.name == "rename")
    return sorted({int(match[1]) for match in found if match})
