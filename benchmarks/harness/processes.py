"""Rows and peers in processes of their own, which answer a request by lines of JSON.

Two frameworks in one process would share CUDA libraries, and each wants its own version of them.
A process can also be ended: one that takes longer than it said for a stage is.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import importlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.harness.calls import PeerError, attempt, reason

ROOT = Path(__file__).resolve().parents[2]
SHARED = 0.84  # of a device's memory, by the processes that are at once on it
SAVING = 30.0  # seconds that a process that is late has to save what it has
_BEGIN = time.monotonic()

T = TypeVar("T")
Answer = dict[str, Any]

_held: list[Any] = []  # files


def tell(text: str) -> None:
    """A line on stderr, with the seconds since this process began."""
    print(f"[{time.monotonic() - _BEGIN:6.1f} s] {text}", file=sys.stderr, flush=True)


def stage(what: str, limit: float | None = None) -> Answer:
    """Not an answer but news: what a process does now. It is ended after `limit` seconds of it."""
    return {"stage": what, "limit": limit}


def sharing(at_once: int) -> dict[str, str]:
    """The environment of a process that shares a device's memory: so many are at once on it."""
    return {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{SHARED / at_once:.2f}"} | os.environ


def ask(
    python: str,
    function: str,
    *,
    patience: float | None = None,
    env: Mapping[str, str] | None = None,
    **request: Any,
) -> Iterator[Answer]:
    """Starts a process: its answers, as they come. The last is an `error` if the process failed.

    It calls a function of `benchmarks.rows` or `benchmarks.peers`, which yields answers and stages.
    Stages are told on stderr.

    Args:
      python: the interpreter that runs it.
      function: as `rows.module.function`.
      patience: seconds until the first stage, and after an answer; None: any.
      env: variables of its environment besides those of this one.
      request: the function's arguments.
    """
    command = [python, "-m", "benchmarks.harness.processes", function, json.dumps(request)]
    environment = os.environ | (env or {})
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    )
    return _answers(process, patience)


def _answers(process: subprocess.Popen, patience: float | None) -> Iterator[Answer]:
    doing, late = "begin", ""

    def end(what: str, seconds: float) -> None:
        nonlocal late
        late = f"TimeoutError: more than {seconds:g} s: {what}"
        process.terminate()
        try:
            process.wait(SAVING)
        except subprocess.TimeoutExpired:
            process.kill()

    def watch(what: str, seconds: float | None) -> threading.Timer:
        timer = threading.Timer(1e6 if seconds is None else seconds, end, (what, seconds))
        timer.daemon = True
        if seconds is not None:
            timer.start()
        return timer

    timer = watch(doing, patience)
    try:
        for line in process.stdout:
            timer.cancel()
            message = json.loads(line)
            if late:
                continue  # what it says of its end
            if "stage" in message:
                doing = message["stage"]
                tell(doing)
                timer = watch(doing, message["limit"])
            else:
                timer = watch(f"after {doing}", patience)
                yield message
        status = process.wait()
        if late or status:
            yield {"error": late or f"ended with status {status}"}
    finally:
        timer.cancel()
        process.kill()


def answers_of(answers: Iterator[Answer]) -> Iterator[Answer]:
    """What `ask` gives; raises `PeerError` for an `error`."""
    for answer in answers:
        if "error" in answer:
            raise PeerError(answer["error"])
        yield answer


def ask_each(
    asked: Mapping[T, Callable[[], Iterator[Answer]]], at_once: int
) -> Iterator[tuple[T, Answer]]:
    """The answers of several processes, with their names, as they come.

    Args:
      asked: starts each of them, in this order.
      at_once: how many run side by side.
    """
    found: queue.SimpleQueue[tuple[T, Answer | None]] = queue.SimpleQueue()

    def one(name: T) -> None:
        error = attempt(lambda: [found.put((name, answer)) for answer in asked[name]()])
        if isinstance(error, Exception):
            found.put((name, {"error": reason(error)}))
        found.put((name, None))

    with ThreadPoolExecutor(at_once) as pool:
        for name in asked:
            pool.submit(one, name)
        left = len(asked)
        while left:
            name, answer = found.get()
            if answer is None:
                left -= 1
            else:
                yield name, answer


@contextlib.contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Waits for the processes that hold this file, and holds it."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def alone_until_the_end(lock: Path) -> None:
    """As `alone`, until this process has ended, and with it what it holds of a device's memory."""
    _held.append(lock.open("w"))
    fcntl.flock(_held[-1], fcntl.LOCK_EX)


@contextlib.contextmanager
def together(lock: Path) -> Iterator[None]:
    """Waits for the process that holds this file alone, and keeps others from doing so."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def wait_for(folder: Path, name: str) -> Path:
    """The file `{name}.npz` that another process writes, once it is there.

    Raises:
      RuntimeError: the file `{name}.failed` is there, which says why.
    """
    file, failed = folder / f"{name}.npz", folder / f"{name}.failed"
    while not file.exists():
        if failed.exists():
            raise RuntimeError(failed.read_text())
        time.sleep(0.05)
    return file


def main(function: str, request: str) -> None:
    """Prints the answers, alone on stdout. A stage shows where it is shortly before its limit."""

    def answer() -> None:
        module, name = function.rsplit(".", 1)
        module = importlib.import_module(f"benchmarks.{module}")
        for one in getattr(module, name)(**json.loads(request)):
            faulthandler.cancel_dump_traceback_later()
            if one.get("limit"):
                faulthandler.dump_traceback_later(0.9 * one["limit"])
            print(json.dumps(one), file=stdout, flush=True)

    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as stdout:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print
        error = attempt(answer)
        if error is not None:
            print(json.dumps({"error": reason(error)}), file=stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
