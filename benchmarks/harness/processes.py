"""Peers in processes of their own, which answer a request by lines of JSON.

Two frameworks in one process would share CUDA libraries, and each wants its own version of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness.calls import attempt, reason

ROOT = Path(__file__).resolve().parents[2]


def ask(python: str, peer: str, **request: Any) -> Iterator[dict[str, Any]]:
    """Starts a peer: its answers, as they come. The last is an `error` if the process failed.

    A peer is a function that yields answers, as `module.function` of `benchmarks.peers`, and
    `request` its arguments. The interpreter `python` runs it.
    """
    command = [python, "-m", "benchmarks.harness.processes", peer, json.dumps(request)]
    return _answers(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT))


def _answers(process: subprocess.Popen) -> Iterator[dict[str, Any]]:
    yield from map(json.loads, process.stdout)
    if status := process.wait():
        yield {"error": f"ended with status {status}"}


@contextlib.contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Waits for the processes that hold this file, and holds it."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main(peer: str, request: str) -> None:
    """Prints the answers, alone on stdout."""

    def answer() -> None:
        module, function = peer.split(".")
        module = importlib.import_module(f"benchmarks.peers.{module}")
        for one in getattr(module, function)(**json.loads(request)):
            print(json.dumps(one), file=stdout, flush=True)

    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as stdout:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print
        error = attempt(answer)
        if error is not None:
            print(json.dumps({"error": reason(error)}), file=stdout)


def answers(rows: dict[str, Callable[[], dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """The result of each row with its name; one that fails has its error."""
    for name, measure in rows.items():
        known = attempt(measure)
        yield {"name": name} | ({"error": reason(known)} if isinstance(known, Exception) else known)


if __name__ == "__main__":
    main(*sys.argv[1:])
