"""Runs that SIGKILL ends at random moments and that the same command resumes.

    python -m benchmarks.reliability kills --cases=200 --seed=0

A case is a run that is killed in the phase of its row: at a system call, a part of a write or a
time after it. The same command resumes it; a third of the runs are killed again, at any time. Once
it is done the run must be the uninterrupted one: the record without times, the score and every
tensor of every checkpoint bit for bit, and no temporary file.
"""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.output import Table
from benchmarks.reliability import command, runs
from benchmarks.reliability.calls import NAMES, Call, Strike, read_log

CASES = 200
AGAIN = 1 / 3  # the share of resumptions that are killed too
LOG, PLOT = "metrics.jsonl", "loss*"
ANY = ",".join(NAMES)
Draw = Callable[[random.Random], Strike]


class Traces(NamedTuple):
    """The calls of runs that nothing interrupts, in phases.

    Attributes:
      warm: of a run that finds its programs compiled.
      cold: of one that compiles.
      again: of one that goes on from a checkpoint that a signal left without its score.
    """

    warm: list[Call]
    cold: list[Call]
    again: list[Call]


def main(argv: Sequence[str] | None = None) -> int:
    args = command.parse(__doc__, CASES, argv)
    keep: list[Path] = []
    with runs.runner(keep) as runner:
        command.need_calls(runner)
        return campaign(runner, args.cases, random.Random(args.seed), keep)


def campaign(runner: runs.Runner, cases: int, rng: random.Random, keep: list[Path]) -> int:
    """Runs the cases and prints a row for each phase; returns the exit code."""
    unscored, traces, want = prepare(runner)
    phases = phases_of(traces, want["record"])
    title = "Runs killed by SIGKILL and resumed"
    table = Table("killed in", "kills", "bit for bit", "lines lost", "orphans", title=title)
    total = dict(kills=0, whole=0, lost=0, orphans=0)
    for number, (name, draw) in enumerate(phases.items()):
        n_cases = command.share(cases, number, len(phases))
        found = dict.fromkeys(total, 0)
        for case in runs.in_turn(range(n_cases), lambda case, name=name: name):
            run = runner.folder / f"{name}.{case}".replace(" ", "_")
            if name == "saving again":
                shutil.copytree(unscored, run)
            kills = kill_and_resume(runner, run, lambda draw=draw: draw(rng), name, rng)
            if not kills:  # all draws were of calls that these runs did not make
                continue
            harm = runs.differences(runner.state(run), want)
            found["kills"] += kills
            found["whole"] += 0 if harm else kills
            found["lost"] += any("record" in line for line in harm)
            found["orphans"] += any(line.startswith("orphans") for line in harm)
            if harm:
                keep.append(run)
                print(f"{run.name}: {'; '.join(harm)}")
            else:
                shutil.rmtree(run)
        table.row(name, *map(str, found.values()))
        total = {x: total[x] + found[x] for x in total}
    print(
        f"\nkills: {total['whole']} of {total['kills']} bit for bit, {total['lost']} records with "
        f"lines lost or doubled, {total['orphans']} runs with orphans"
    )
    return int(total["whole"] < total["kills"])


def prepare(runner: runs.Runner) -> tuple[Path, Traces, dict[str, Any]]:
    """A run stopped in its first evaluation, the traces, and the state of an uninterrupted run."""
    folder = runner.folder
    logs = {name: folder / f"{name}.log" for name in Traces._fields}
    # The first compiles for the others too.
    command.must_end(runner.train(folder / "first"))
    command.must_end(runner.train(folder / "cold", log=logs["cold"], cold=True))
    command.must_end(runner.train(folder / "warm", log=logs["warm"]))
    want = runner.state(folder / "warm")
    for name in ("first", "cold"):
        assert not (harm := runs.differences(runner.state(folder / name), want)), harm

    warm = read_log(logs["warm"])
    moments = Moments(warm, want["record"])
    strike = moments.after_line(moments.scored[0], 0.5, signal.SIGTERM)
    unscored = folder / "unscored"
    command.must_end(runner.train(unscored, strike=strike), code=128 + signal.SIGTERM)
    shutil.copytree(unscored, folder / "again")
    command.must_end(runner.train(folder / "again", log=logs["again"]))
    return unscored, Traces(*(read_log(log) for log in logs.values())), want


def kill_and_resume(
    runner: runs.Runner,
    run: Path,
    draw: Callable[[], Strike],
    phase: str,
    rng: random.Random,
) -> int:
    """Kills a run at a moment that `draw` draws, then runs it to its end; returns the kills."""
    kills = 0
    for _ in range(5):  # a run may make fewer calls than the one that the moment was drawn from
        ending = runner.train(run, strike=draw(), cold=phase == "compiling")
        if ending.code == -signal.SIGKILL:
            kills += 1
            break
        command.must_end(ending)
        if phase == "saving again":
            break
        shutil.rmtree(run)
    while kills:
        process = runner.start(run)
        if rng.random() < AGAIN:
            time.sleep(rng.uniform(0, 3))
            process.send(signal.SIGKILL)
        ending = process.ending()
        kills += ending.code == -signal.SIGKILL
        if ending.code != -signal.SIGKILL:
            if wrong := command.complaint(ending, run):
                print(wrong)
            break
    return kills


# Moments.


class Moments:
    """The moments of a traced run.

    Attributes:
      lines: the indices of the calls that write a line of the record.
      scored: the lines, counted from 0, that an evaluation follows.
      gaps: the seconds from each line to the next.
    """

    def __init__(self, trace: list[Call], record: list[dict[str, Any]]):
        self.lines = [i for i, call in enumerate(trace) if is_line(call)]
        assert len(self.lines) == len(record), "a line of the record is one write"
        times = [trace[i].time for i in self.lines]
        self.gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
        splits = [line["split"] for line in record]
        self.scored = [i - 1 for i, split in enumerate(splits) if split != "train"]
        self.stepping = [i for i in range(len(self.gaps)) if i not in self.scored]

    def after_line(self, line: int, share: float, number: int = signal.SIGKILL) -> Strike:
        """A signal at a share of the time from a line to the next."""
        return Strike("write", LOG, line + 1, signal=number, delay=share * self.gaps[line])


def phases_of(traces: Traces, record: list[dict[str, Any]]) -> Mapping[str, Draw]:
    """For each phase a function that draws the moment of a kill in it."""
    warm, cold, again = traces
    moments = Moments(warm, record)
    begun, compiling = longest_gap(cold[: Moments(cold, record).lines[0] + 1])
    in_save = sum(map(in_checkpoints, warm))
    # The first save of a run that goes on at an evaluation is that of the same step.
    in_again = sum(in_checkpoints(call) for call in again[: first_of_next(again)])
    n_unlinks = sum(in_checkpoints(call) and call.name == "unlink" for call in warm)

    def kill(rng, calls, pattern, n_calls):
        half = rng.random() < 0.5
        return Strike(calls, pattern, rng.randint(1, n_calls), signal=signal.SIGKILL, half=half)

    def start(rng):
        at = rng.randrange(moments.lines[0])
        delay = rng.choice([0, rng.uniform(0, warm[at + 1].time - warm[at].time)])
        return Strike(ANY, "*", at + 1, signal=signal.SIGKILL, delay=delay)

    def compile(rng):
        delay = rng.uniform(0, compiling)
        return Strike(ANY, "*", begun + 1, signal=signal.SIGKILL, delay=delay)

    def evaluate(rng):
        in_time = moments.after_line(rng.choice(moments.scored), rng.random())
        return rng.choice([in_time, kill(rng, ANY, PLOT, 10)])

    return {
        "starting": start,
        "compiling": compile,
        "stepping": lambda rng: moments.after_line(rng.choice(moments.stepping), rng.random()),
        "writing a line": lambda rng: kill(rng, "write", LOG, len(moments.lines)),
        "evaluating": evaluate,
        "saving": lambda rng: kill(rng, ANY, "checkpoints/*", in_save),
        "saving again": lambda rng: kill(rng, ANY, "checkpoints/*", in_again),
        "pruning": lambda rng: kill(rng, "unlink", "checkpoints/*", n_unlinks),
    }


def is_line(call: Call) -> bool:
    return call.name == "write" and call.path == LOG


def in_checkpoints(call: Call) -> bool:
    return call.path.startswith("checkpoints/")


def longest_gap(trace: list[Call]) -> tuple[int, float]:
    """The call after which nothing is called for longest, and the seconds."""
    times = [call.time for call in trace]
    gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
    return gaps.index(max(gaps)), max(gaps)


def first_of_next(trace: list[Call]) -> int:
    """The first call of the second save."""
    begun = [
        i for i, call in enumerate(trace) if call.name == "mkdir" and call.path.count("/") == 1
    ]
    return begun[1]
