"""Bad input: every wrong flag, setting, file and prompt is refused in one line.

A case is a call of a script's `main` in a process that has imported everything before. Training
goes as far as its first step, which is traced and not computed. What must be refused ends with
exit code 1 or 2 and one line on stderr; what may be right also ends well. Tracebacks, cases that
take a minute and cases that take more memory than `LIMIT` are counted.
"""

from __future__ import annotations

import argparse
import collections
import io
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from benchmarks.harness.command_line import positive
from benchmarks.harness.output import Table
from benchmarks.reliability import input_cases
from benchmarks.reliability.input_cases import ROOT, SCRIPTS, Case
from reformax.cli import errors

SECONDS = 60
LIMIT = 4 * 2**30  # bytes of a process; the machine is said to have as many
# A process whose memory has grown to this, by programs that jax keeps, makes room for another.
STALE = LIMIT // 2
VERDICTS = ("refused", "taken", "wrongly taken", "not one line", "traceback", "hang", "memory")
GOOD = VERDICTS[:2]


class Accepted(BaseException):
    """Training has come to its first step."""


class Result(NamedTuple):
    """What became of a case: one of `VERDICTS`, and the last line of stderr."""

    verdict: str
    line: str


def run_here(case: Case, root: Path) -> Result:
    """Calls the script of a case in this process and in a folder of its own."""
    argv = [flag.replace("{root}", str(root)) for flag in case.argv]
    streams = sys.argv, sys.stdin, sys.stdout, sys.stderr
    before, err = os.getcwd(), io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace")
    script = SCRIPTS[case.script]
    with tempfile.TemporaryDirectory() as folder:
        try:
            os.chdir(folder)
            sys.argv = [script.__file__, *argv]
            sys.stdin, sys.stdout = io.TextIOWrapper(io.BytesIO(case.stdin)), _text()
            sys.stderr = err
            code = errors.exit_code(script.main)
        except Accepted:
            code = 0
        except SystemExit as stop:
            code = stop.code
        except Exception as error:
            return Result("traceback", f"{type(error).__name__}: {error}".partition("\n")[0])
        finally:
            sys.argv, sys.stdin, sys.stdout, sys.stderr = streams
            os.chdir(before)
    err.flush()
    return judged(case, code, err.buffer.getvalue().decode())


def judged(case: Case, code: int, err: str) -> Result:
    """The verdict on an exit code and on what stands on stderr."""
    lines = [line for line in err.replace("\r", "\n").splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    if code == 0:
        return Result("wrongly taken" if case.must_refuse else "taken", last)
    errors = [line for line in lines if line.startswith("error: ")]
    one = code in (1, 2) and errors == [last] and len(last) < 1000
    return Result("refused" if one else "not one line", f"{code} {last}")


def _text() -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), "utf-8")


def stop_at_first_step() -> None:
    """Makes training end with `Accepted` where it would compile its first step."""
    from reformax import memory
    from reformax.training import step

    step_fn = step.step_fn

    def accepted():
        raise Accepted

    def traced(*args, **kwargs) -> SimpleNamespace:
        compiled = step_fn(*args, **kwargs)

        def trace(*inputs) -> SimpleNamespace:
            return SimpleNamespace(jaxpr=compiled.trace(*inputs).jaxpr, lower=accepted)

        return SimpleNamespace(trace=trace)

    step.step_fn = traced
    memory.available = lambda: LIMIT


def serve(connection, root: Path) -> None:
    """Runs the cases that come until None comes."""
    stop_at_first_step()
    while (case := connection.recv()) is not None:
        connection.send(run_here(case, root))


class Worker:
    """A process that runs cases, and another one after each that it must kill."""

    def __init__(self, root: Path):
        self._root, self._process = root, None

    def run(self, case: Case) -> Result:
        """The result of a case; the process may not survive it."""
        if self._process is None or self._resident() > STALE:
            self.close()
            context = multiprocessing.get_context("spawn")
            self._connection, other = context.Pipe()
            self._process = context.Process(target=serve, args=(other, self._root), daemon=True)
            self._process.start()
            other.close()
            self._connection.send(Case("train", ("--help",)))  # it imports everything
            self._connection.recv()
        self._connection.send(case)
        start = time.monotonic()
        while not self._connection.poll(0.02):
            if self._resident() > LIMIT:
                return self._killed("memory")
            if time.monotonic() - start > SECONDS:
                return self._killed("hang")
        try:
            return self._connection.recv()
        except EOFError:
            return self._killed("traceback")

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None

    def _killed(self, verdict: str) -> Result:
        self.close()
        return Result(verdict, "")

    def _resident(self) -> int:
        pages = Path(f"/proc/{self._process.pid}/statm").read_text().split()
        return int(pages[1]) * os.sysconf("SC_PAGE_SIZE") if len(pages) > 1 else 0


def campaign(cases: Sequence[Case], root: Path, n_workers: int) -> Iterator[tuple[Case, Result]]:
    """The results of the cases, as they come."""
    left, lock, done = iter(cases), threading.Lock(), []
    ready = threading.Condition()

    def work():
        worker = Worker(root)
        while True:
            with lock:
                case = next(left, None)
            if case is None:
                break
            result = worker.run(case)
            with ready:
                done.append((case, result))
                ready.notify()
        worker.close()

    for _ in range(n_workers):
        threading.Thread(target=work, daemon=True).start()
    for i in range(len(cases)):
        with ready:
            while len(done) <= i:
                ready.wait()
        yield done[i]


def make_runs(root: Path) -> None:
    """Trains the two runs that the cases read, a step each, and damages copies of one."""
    for name in ("lm", "pairs"):
        flags = [f"--config_file={root / name}.gin", f"--output_dir={root / name}"]
        command = [sys.executable, str(ROOT / "train.py"), *flags]
        subprocess.run(command, check=True, capture_output=True)
    input_cases.damage(root)


def sampled(cases: Sequence[Case], n: int | None, seed: int) -> list[Case]:
    """As many of the cases, in an order of their own; None for all."""
    return random.Random(seed).sample(cases, len(cases) if n is None else min(n, len(cases)))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the campaign and prints its table and what went wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=positive, help="default: all")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of cases; default: 0")
    parser.add_argument("--workers", type=positive, default=2, help="default: 2")
    parser.add_argument("--only", default="", help="cases whose command has this in it")
    args = parser.parse_args(argv)
    counts: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        input_cases.prepare(root)
        make_runs(root)
        cases = [case for case in input_cases.all_cases() if args.only in str(case)]
        cases = sampled(cases, args.cases, args.seed)
        for case, result in campaign(cases, root, args.workers):
            counts[case.script][result.verdict] += 1
            if result.verdict not in GOOD:
                wrong.append((case, result))
                print(f"{result.verdict}: {case}: {result.line[:200]}", flush=True)
    table = Table("script", "cases", *VERDICTS)
    for script, of_script in [
        *counts.items(),
        ("all", sum(counts.values(), collections.Counter())),
    ]:
        table.row(script, str(of_script.total()), *(str(of_script[v]) for v in VERDICTS))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
