"""Peers in processes of their own, asked by lines of JSON.

Two frameworks in one process would share CUDA libraries, and each wants its own version of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from benchmarks.harness.failures import reason

ROOT = Path(__file__).resolve().parents[2]


class Peers:
    """A module that `serve`s, in a process that is started again where the last one died.

    Args:
      module: its dotted name.
      python: the interpreter that runs it.
      seconds: the time allowed for all answers to one request; None for no limit.
    """

    def __init__(self, module: str, python: str = sys.executable, seconds: float | None = None):
        self.command = [python, "-m", module]
        self._seconds = seconds
        self._process: subprocess.Popen | None = None

    def ask(self, **request: Any) -> Iterator[dict[str, Any]]:
        """The answers, as they come. The last one has an `error` if the process failed."""
        try:
            process = self._running()
            watch = threading.Timer(self._seconds or threading.TIMEOUT_MAX, process.kill)
            watch.daemon = True
            watch.start()
            try:
                print(json.dumps(request), file=process.stdin, flush=True)
                while answer := json.loads(process.stdout.readline() or "null"):
                    yield answer
                if answer is None:
                    raise RuntimeError(f"ended with status {process.wait()}")
            finally:
                watch.cancel()
        except Exception as error:
            if self._process is not None:
                self._process.kill()  # or it would answer the next request with the rest of this
            yield {"error": reason(error)}

    def _running(self) -> subprocess.Popen:
        if self._process is None or self._process.poll() is not None:
            pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._process = subprocess.Popen(self.command, text=True, cwd=ROOT, **pipes)
        return self._process

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()


def serve(answer: Callable[..., Iterator[dict[str, Any]]]) -> None:
    """Answers the requests on stdin, `answer(**request)`, and ends each with an empty object."""
    with _answers_alone() as answers:
        for line in sys.stdin:
            try:
                for one in answer(**json.loads(line)):
                    print(json.dumps(one), file=answers, flush=True)
            except Exception as error:
                traceback.print_exc()
                print(json.dumps({"error": reason(error)}), file=answers)
            print("{}", file=answers, flush=True)


@contextlib.contextmanager
def _answers_alone() -> Iterator[TextIO]:
    """The process's stdout, for answers alone; other output goes to stderr."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        yield answers
