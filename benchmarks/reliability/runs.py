"""The run that the campaigns interrupt: it starts, ends and is compared with another.

A server imports everything once and forks a process for each run. It never touches a device, for
JAX's threads would not survive the fork.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.reliability import calls

CONFIG = Path(__file__).with_name("run.gin")
SCRIPT = Path(__file__).resolve().parents[2] / "train.py"
PRELOADED = (
    "train",
    "reformax.training.loop",
    "reformax.models.lm",
    "reformax.data.text",
    "orbax.checkpoint",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "benchmarks.reliability.runs",
)
CLOSED, BROKEN_PIPE = "closed", "broken pipe"  # in place of a file for output
LIMIT = 120.0  # seconds; a run that takes longer hangs
# XLA compiles quickly and its programs run on one thread. Killed runs leak the semaphores of their
# queues; the tracker that frees them need not say so.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "PYTHONWARNINGS": "ignore:resource_tracker",
    "PYTHONPATH": str(SCRIPT.parent),
}


class Ending(NamedTuple):
    """How a process ended.

    Attributes:
      code: its exit code; minus the number of the signal that killed it; None if it hung.
      out, err: what it printed.
      seconds: how long it took.
    """

    code: int | None
    out: str
    err: str
    seconds: float


class Runner:
    """Starts runs of one config over one text.

    Attributes:
      folder: for everything; each run takes a folder of its own in it.
      can_strike: whether calls can be watched, which takes a C compiler.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.data = folder / "text"
        words = np.random.default_rng(0).choice(["a ", "few ", "words\n", "of ", "text "], 2000)
        self.data.write_text("".join(words))
        self.warm = folder / "compiled"
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(PRELOADED))
        server = ENVIRONMENT
        try:
            server = server | {"LD_PRELOAD": str(calls.build(folder))}
            self.can_strike = True
        except OSError:
            self.can_strike = False
        before = os.environ.copy()
        os.environ.update(server)
        try:
            self._context.Process(target=int).start()  # the server starts now
        finally:
            os.environ.clear()
            os.environ.update(before)

    def start(
        self,
        run: Path,
        strike: calls.Strike | None = None,
        log: Path | None = None,
        cold: bool = False,
        flags: Sequence[str] = (),
        outputs: tuple[str, str] | None = None,
    ) -> Process:
        """Starts `train.py --output_dir=RUN`, or what goes on of it.

        Args:
          run: the run's folder.
          strike: what happens at which call under that folder.
          log: gets the calls under that folder.
          cold: whether XLA compiles; else it finds its programs where the first run put them.
          flags: more flags of train.py.
          outputs: files for stdout and stderr, `CLOSED` or `BROKEN_PIPE`; None for `RUN.out` and
            `RUN.err`.
        """
        run.parent.mkdir(parents=True, exist_ok=True)
        outputs = outputs or (f"{run}.out", f"{run}.err")
        argv = [str(SCRIPT), f"--config_file={CONFIG}", f"--data_dir={self.data}"]
        argv += [f"--output_dir={run}", *flags]
        compiled = None if cold else self.warm
        process = self._context.Process(
            target=_train, args=(argv, outputs, run, strike, log, compiled), daemon=True
        )
        process.start()
        return Process(process, outputs, time.monotonic())

    def train(self, run: Path, **options: Any) -> Ending:
        """The same, to its end."""
        return self.start(run, **options).ending()

    def state(self, run: Path) -> dict[str, Any]:
        """What must not depend on interruptions: see `_state`."""
        answer = run.with_name(run.name + ".state")
        process = self._context.Process(target=_write_state, args=(run, answer), daemon=True)
        process.start()
        process.join(LIMIT)
        return json.loads(answer.read_text())


class Process:
    """A run in progress."""

    def __init__(self, process: Any, outputs: tuple[str, str], started: float):
        self._process, self._outputs, self._started = process, outputs, started
        self.pid = process.pid

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def send(self, number: int) -> None:
        """Sends a signal, if it still runs."""
        if self.alive:
            os.kill(self.pid, number)

    def wait_for_stop(self) -> None:
        """Waits until SIGSTOP stopped it, or until it ended."""
        until = time.monotonic() + LIMIT
        while self.alive and time.monotonic() < until:
            state = _read(f"/proc/{self.pid}/stat").rpartition(")")[2].split()[:1]
            if state == ["T"]:
                return
            time.sleep(0.005)

    def ending(self, limit: float = LIMIT) -> Ending:
        """Waits for the end, at most `limit` seconds."""
        self._process.join(limit)
        code = self._process.exitcode
        if code is None:
            self._process.kill()
            self._process.join()
        texts = (_read(path) for path in self._outputs)
        return Ending(code, *texts, time.monotonic() - self._started)


@contextmanager
def runner(keep: list[Path]) -> Iterator[Runner]:
    """A runner in a folder that is deleted, unless runs of `keep` in it failed."""
    folder = Path(tempfile.mkdtemp(prefix="reliability."))
    try:
        yield Runner(folder)
    finally:
        if keep:
            print(f"kept for a look: {', '.join(map(str, keep))}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def differences(got: dict[str, Any], want: dict[str, Any]) -> list[str]:
    """What two states differ in, in words; empty if they are the same bit for bit.

    An older checkpoint may be left if it is whole: a run that ended before deleting it, and has no
    more to save, leaves it.
    """
    found = []
    got = dict(got)
    if "checkpoints" in want:
        known = [x for x in got["checkpoints"] if x in want["checkpoints"] or not is_whole(got, x)]
        got |= {"checkpoints": known, "tensors": {x: got["tensors"][x] for x in known}}
    for name in want:
        if name == "record":
            lost = [line for line in want[name] if line not in got[name]]
            more = len(got[name]) - len(want[name]) + len(lost)
            if lost or more:
                found.append(f"{len(lost)} lines of the record lost, {more} too many")
            elif got[name] != want[name]:
                found.append("lines of the record in another order")
        elif got[name] != want[name]:
            found.append(f"{name}: {_short(got[name])} for {_short(want[name])}")
    return found


def is_whole(state: dict[str, Any], checkpoint: str) -> bool:
    """Whether a checkpoint could be read; `_state` has the error in place of its tensors if not."""
    return isinstance(state["tensors"][checkpoint], list)


def end_of(state: dict[str, Any]) -> dict[str, Any]:
    """The part of a state that a signal does not change: it saves a checkpoint more."""
    steps = filter(str.isdigit, state["checkpoints"])
    latest = max(steps, key=int, default=None)
    tensors = state["tensors"].get(latest)
    return {"record": state["record"], "latest": tensors, "orphans": state["orphans"]}


def in_turn(cases: Sequence[Any], what: Callable[[Any], str]) -> Iterator[Any]:
    """The cases, with a line of progress on stderr where that is a terminal."""
    for number, case in enumerate(cases, start=1):
        if sys.stderr.isatty():
            print(f"\r{number}/{len(cases)} {what(case):<60.60}", end="", file=sys.stderr)
        yield case
    if sys.stderr.isatty():
        print("\r" + " " * 75 + "\r", end="", file=sys.stderr)


# In the processes.


def _train(argv, outputs, run, strike, log, compiled) -> None:
    """Is train.py, with this command line."""
    for fd, path in enumerate(outputs, start=1):
        _redirect(fd, path)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as Python has it
    import jax

    from reformax.cli import errors, train

    if compiled is not None:
        jax.config.update("jax_compilation_cache_dir", str(compiled))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    sys.argv = argv
    if strike is not None or log is not None:
        calls.watch(run, log, strike)
    code = errors.exit_code(train.main)
    atexit._run_exitfuncs()  # as an interpreter does that ends; multiprocessing leaves them out
    sys.exit(code)


def _redirect(fd: int, path: str) -> None:
    if path == CLOSED:
        os.close(fd)
        name = {1: "stdout", 2: "stderr"}[fd]  # as Python begins where one is closed
        setattr(sys, name, None)
        setattr(sys, f"__{name}__", None)
        return
    if path == BROKEN_PIPE:
        reader, opened = os.pipe()
        os.close(reader)
    else:
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(opened, fd)
    os.close(opened)


def _write_state(run: Path, answer: Path) -> None:
    answer.write_text(json.dumps(_state(run)))


def _state(run: Path) -> dict[str, Any]:
    """The record without times, every tensor of every checkpoint, and the names of the files.

    Where something cannot be read the error stands in its place.
    """
    state: dict[str, Any] = {"record": _record(run)}
    kept = sorted((run / "checkpoints").iterdir()) if (run / "checkpoints").is_dir() else []
    state["checkpoints"] = [path.name for path in kept if "tmp" not in path.name]
    state["tensors"] = {path.name: _attempt(_tensors, path) for path in kept}
    state["config"] = _read(run / "config.gin")
    state["orphans"] = sorted(
        str(path.relative_to(run)) for path in run.rglob("*") if "tmp" in path.name
    )
    return state


def _record(run: Path) -> list[Any]:
    lines = []
    for text in _read(run / "metrics.jsonl").splitlines():
        try:
            line = json.loads(text)
            lines.append({name: x for name, x in line.items() if name != "timing"})
        except ValueError:
            lines.append(f"no JSON: {text}")
    return lines


def _tensors(folder: Path) -> list[Any]:
    """The score of a checkpoint and a digest of its tensors, once it is found whole."""
    import orbax.checkpoint as ocp

    from reformax.training import manifest

    if (harm := manifest.damage(folder)) is not None:
        raise ValueError(harm)
    digest = hashlib.sha256()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that orbax takes the shardings as they were
        tensors = ocp.PyTreeCheckpointer().restore(folder / "arrays")
    for name, array in sorted(tensors.items()):
        array = np.asarray(array)
        digest.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    described = json.loads((folder / "checkpoint.json").read_text())
    # The record has times in it, and so have its size and its CRC-32.
    extra = described["extra"] | {"record": described["extra"]["record"]["lines"], "timing": None}
    return [described["step"], described["score"], extra, digest.hexdigest()]


def _attempt(function: Callable[[Path], Any], path: Path) -> Any:
    try:
        return function(path)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _read(path: str | Path) -> str:
    path = Path(path)
    return path.read_text(errors="replace") if path.is_file() else ""


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 200 else f"{text[:150]}... ({len(text)} characters)"
