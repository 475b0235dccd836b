"""Processes that call a function with tasks, side by side: each with a pipe, and no fork.

A process imports what the function needs and no script again. There are as many as cores, and no
more than memory has room for.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from reformax import memory
from reformax.data.sentencepieces import THREADS


class Workers(NamedTuple):
    """How many processes work, and why so many."""

    n: int
    words: str


def workers_for(n_tasks: int, memory_each: int, processes: int | None = None) -> Workers:
    """As many as there are cores and half of the memory has room for, or what a user says.

    The other half is for the files that the system keeps in memory, and for other programs.
    """
    cores, total = _cores(), memory.host()
    room = max(1, total // 2 // memory_each)
    n = max(1, min(n_tasks, processes or min(cores, room)))
    why = f"cores: {cores}; {memory.words(total)} of memory have room for {room:,}"
    return Workers(n, f"parts: {n_tasks:,}, processes: {n} ({why})")


def in_processes(
    function: Callable[[Any], Any], tasks: Sequence[Any], processes: int | None = None
) -> Iterator[tuple[Any, Any]]:
    """Calls a function with tasks, in processes; yields each task with its result, as they come.

    One task, or one process, is this process's own work. An error ends all.
    """
    n = min(len(tasks), processes or 1)
    if n <= 1:
        yield from ((task, function(task)) for task in tasks)
        return
    workers = [_Worker(function, max(1, _cores() // n)) for _ in range(n)]
    idle = queue.SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def call(task: Any) -> Any:
        worker = idle.get()
        try:
            return worker.call(task)
        finally:
            idle.put(worker)

    threads = ThreadPoolExecutor(n)
    try:
        task_of = {threads.submit(call, task): task for task in tasks}
        for done in as_completed(task_of):
            yield task_of[done], done.result()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.end()


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Worker:
    """A process that calls a function with what comes through a pipe."""

    def __init__(self, function: Callable[[Any], Any], threads: int):
        # Its libraries would each begin a thread for every core.
        threads = dict.fromkeys((THREADS, "RAYON_NUM_THREADS"), str(threads))
        # -P, and these paths: the working directory is no place to import from.
        path = os.pathsep.join(path for path in sys.path if path not in ("", os.getcwd()))
        root = str(Path(__file__).resolve().parents[2])
        code = (
            f"import sys; sys.path.append({root!r})\n"
            "from reformax.data import workers; workers.serve()"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | threads | {"PYTHONPATH": path},
        )
        self._send(function)

    def call(self, task: Any) -> Any:
        """The result of a call; raises its error."""
        try:
            self._send(task)
            result, error, number = pickle.load(self._process.stdout)
        except (EOFError, BrokenPipeError):
            code = self._process.wait()
            why = "it was killed; there may be too little memory" if code < 0 else f"exit {code}"
            raise OSError(f"a process that prepares text ended ({why}): start again") from None
        if number is not None:
            error.errno = number  # which an error of one argument leaves behind
        if error is not None:
            raise error
        return result

    def _send(self, what: Any) -> None:
        pickle.dump(what, self._process.stdin)
        self._process.stdin.flush()

    def end(self) -> None:
        """Ends the process, whatever it does."""
        self._process.kill()
        self._process.wait()


def serve() -> None:
    """The main loop of a `_Worker`'s process: it calls until its pipe ends."""
    source, results = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no result
    with contextlib.suppress(EOFError, KeyboardInterrupt, BrokenPipeError):
        function = pickle.load(source)
        while True:
            task = pickle.load(source)
            results.write(_answer(function, task))
            results.flush()


def _answer(function: Callable[[Any], Any], task: Any) -> bytes:
    """The result, the error and its number; of an error that cannot be pickled, its text."""
    try:
        return pickle.dumps((function(task), None, None))
    except Exception as error:
        number = error.errno if isinstance(error, OSError) else None
        try:
            return pickle.dumps((None, error, number))
        except Exception:
            return pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}"), None))
