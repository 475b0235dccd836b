"""Runs in which one system call of a save, a line or an evaluation fails.

    python -m benchmarks.reliability failing_calls --seed=0

Each call of a kind is made to fail once with each error that it can have: that of a full disk, of a
faulty one, and of too many open files. The run then ends right but for the checkpoint that it says
it could not save, or with one line that names the error and advises nothing that destroys; the same
command then ends as if nothing had happened.
Either way no temporary file is left, and what only shows the run, its plot and TensorBoard, never
ends it. --cases=N takes N of the cases at random.
"""

from __future__ import annotations

import collections
import errno
import itertools
import os
import random
import re
import shutil
import signal
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.output import Table
from benchmarks.reliability import command, runs
from benchmarks.reliability.calls import Call, Strike, read_log

SPACE, FAULTY, FILES, STALE = errno.ENOSPC, errno.EIO, errno.EMFILE, errno.ESTALE
ERRORS = {
    "write": (SPACE, FAULTY),
    "fsync": (SPACE, FAULTY),
    "rename": (SPACE, FAULTY),
    "mkdir": (SPACE, FAULTY),
    "open": (SPACE, FAULTY, FILES),
    "read": (FAULTY, FILES, STALE),
}
# The parts of a run by the paths of their calls. The last two show the run and may not end it.
SAVE, GOING_ON = "a save", "going on"
PARTS = {
    SAVE: "checkpoints/*",
    GOING_ON: "checkpoints/*",
    "the record": "metrics*",
    "the settings": "config*",
    "the plot": "loss*",
    "TensorBoard": "tensorboard*",
}
SHOWN = ("the plot", "TensorBoard")
HARMFUL = re.compile(r"delete (that|the|it)|out of memory|lower batch|begin again", re.IGNORECASE)
_UNSAVED = re.compile(r"checkpoint of step (\d+) is not saved")


class Case(NamedTuple):
    """The call of a name in a part of the run fails with an error, for the `at`-th time."""

    part: str
    name: str
    at: int
    error: int

    def __str__(self) -> str:
        return f"{self.part}: {self.name} {self.at} {errno.errorcode[self.error]}"

    @property
    def strike(self) -> Strike:
        return Strike(self.name, PARTS[self.part], self.at, self.error)


class Prepared(NamedTuple):
    """A run that was stopped; the calls and the states of a whole run and of what goes on."""

    stopped: Path
    whole: list[Call]
    rest: list[Call]
    whole_state: dict[str, Any]
    rest_state: dict[str, Any]


class Verdict(NamedTuple):
    """What became of a case: whether its call was made, and failed; and what is wrong."""

    reached: bool
    ended: bool
    harm: list[str]


def main(argv: Sequence[str] | None = None) -> int:
    args = command.parse(__doc__, 10_000, argv)
    keep: list[Path] = []
    with runs.runner(keep) as runner:
        command.need_calls(runner)
        return campaign(runner, args.cases, random.Random(args.seed), keep)


def campaign(runner: runs.Runner, cases: int, rng: random.Random, keep: list[Path]) -> int:
    """Runs the cases and prints a row for each part and kind of call; returns the exit code."""
    prepared = prepare(runner)
    drawn = every_case(prepared.whole, prepared.rest)
    if cases < len(drawn):
        drawn = sorted(rng.sample(drawn, cases), key=drawn.index)
    columns = "call of", "made", "went on", "ended, then resumed", "wrong"
    table = Table(*columns, title="Runs in which one system call fails")
    total = collections.Counter()
    for row, group in itertools.groupby(drawn, lambda case: f"{case.part}: {case.name}"):
        found = collections.Counter()
        for case in runs.in_turn(list(group), str):
            run = runner.folder / re.sub(r"\W+", "_", str(case))
            want = prepared.whole_state
            if case.part == GOING_ON:
                shutil.copytree(prepared.stopped, run)
                want = prepared.rest_state
            verdict = try_case(runner, run, case, want)
            outcome = "wrong" if verdict.harm else "ended" if verdict.ended else "went on"
            found.update([outcome] if verdict.reached else [])
            if verdict.harm:
                keep.append(run)
                print(f"{case}: {'; '.join(verdict.harm)}", flush=True)
            else:
                shutil.rmtree(run)
        outcomes = (found[x] for x in ("went on", "ended", "wrong"))
        table.row(row, str(found.total()), *map(str, outcomes))
        total += found
    print(f"\nfailing_calls: {total.total() - total['wrong']} of {total.total()} right")
    return int(total["wrong"] > 0)


def prepare(runner: runs.Runner) -> Prepared:
    """The runs that nothing disturbs."""
    logs = runner.folder / "whole.log", runner.folder / "rest.log"
    command.must_end(runner.train(runner.folder / "first"))
    command.must_end(runner.train(runner.folder / "whole", log=logs[0]))
    stopped = runner.folder / "stopped"
    stop = Strike("rename", "checkpoints/8", 1, signal=signal.SIGTERM)
    command.must_end(runner.train(stopped, strike=stop), code=128 + signal.SIGTERM)
    shutil.copytree(stopped, runner.folder / "rest")
    command.must_end(runner.train(runner.folder / "rest", log=logs[1]))
    states = runner.state(runner.folder / "whole"), runner.state(runner.folder / "rest")
    return Prepared(stopped, *map(read_log, logs), *states)


def every_case(whole: list[Call], rest: list[Call]) -> list[Case]:
    """Each call of one save, each until a run that goes on saves, and each of the other parts."""
    fourth, fifth = saves(whole)[3:5]  # after an evaluation, and with something to prune
    parts = {part: (whole, 0, len(whole)) for part in PARTS}
    parts[SAVE] = whole, fourth, fifth
    parts[GOING_ON] = rest, 0, saves(rest)[0]
    cases = []
    for part, (trace, begin, end) in parts.items():
        for name, errors in ERRORS.items():
            if part == GOING_ON and name != "read":
                continue
            alike = [
                i
                for i, call in enumerate(trace)
                if call.name == name and fnmatch(call.path, PARTS[part])
            ]
            numbers = [at for at, i in enumerate(alike, start=1) if begin <= i < end]
            cases += [Case(part, name, at, error) for at in numbers for error in errors]
    return cases


def saves(trace: list[Call]) -> list[int]:
    """The call that begins each save: it makes a folder in checkpoints."""
    begun: dict[str, int] = {}
    for i, call in enumerate(trace):
        if (
            call.name == "mkdir"
            and fnmatch(call.path, "checkpoints/*")
            and call.path.count("/") == 1
        ):
            begun.setdefault(call.path, i)
    return list(begun.values())


def try_case(runner: runs.Runner, run: Path, case: Case, want: dict[str, Any]) -> Verdict:
    """Makes the call fail, and resumes the run if that ended it."""
    log = run.with_name(run.name + ".log")
    ending = runner.train(run, strike=case.strike, log=log)
    made = [c for c in read_log(log) if c.name == case.name and fnmatch(c.path, PARTS[case.part])]
    reached, ended = len(made) >= case.at, ending.code != 0
    harm = told_badly(ending, case, run) if reached else []
    unsaved = _UNSAVED.findall(ending.out + ending.err)
    if ending.code not in (0, None):
        ending = runner.train(run)
        harm += filter(None, [command.complaint(ending, run)])
    if ending.code == 0:
        harm += runs.differences(runner.state(run), without(want, unsaved))
    return Verdict(reached, ended, harm)


def without(state: dict[str, Any], steps: Sequence[str]) -> dict[str, Any]:
    """A state without the checkpoints that a run could not save, and said so."""
    kept = [x for x in state["checkpoints"] if x not in steps]
    return state | {"checkpoints": kept, "tensors": {x: state["tensors"][x] for x in kept}}


def told_badly(ending: runs.Ending, case: Case, run: Path) -> list[str]:
    """What is wrong with how the run took the error."""
    if ending.code is None:
        return ["hangs"]
    reason = os.strerror(case.error)
    printed = [line for line in (ending.out + ending.err).splitlines() if reason in line]
    shown = case.part in SHOWN
    harm = []
    if ending.code < 0 or "Traceback" in ending.err:
        harm.append(f"crashed with {ending.code}" if ending.code else "printed a traceback")
    if ending.code != 0 and shown:
        harm.append(f"{case.part} ended the run")
    if (ending.code != 0 or shown) and len(printed) != 1:
        harm.append(f"'{reason}' in {len(printed)} lines instead of one")
    if any(HARMFUL.search(line) for line in ending.err.splitlines()):
        harm.append("advice that destroys")
    if orphans := [str(path.relative_to(run)) for path in run.rglob("*tmp*")]:
        harm.append(f"left {', '.join(orphans[:3])}")
    if harm:
        harm.append(f"said {ending.err.strip().splitlines()[-1:]!s:.300}")
    return harm
