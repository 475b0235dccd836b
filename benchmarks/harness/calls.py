"""Calls that may fail, and their times. They need no framework: PyTorch's processes import them."""

from __future__ import annotations

import functools
import math
import os
import re
import resource
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

MIB = 2**20
N_QUEUED = 20
_ATTEMPT = "attempt"  # the name of the threads of `attempt_within`
COMPILERS = min(16, os.cpu_count() or 1)  # threads
HIDDEN = 1.5  # times the host's time for a program: up to this the device's is not seen


class PeerError(Exception):
    """A failure in another process, described by that process."""


def attempt(function: Callable[..., Any], *args: Any) -> Any:
    """The result of `function(*args)`, or the exception that it raised.

    The traceback goes to stderr, except a missing package's, and is then dropped: its frames would
    keep arrays alive.
    """
    try:
        return function(*args)
    except Exception as error:
        if not isinstance(error, ImportError):
            traceback.print_exc()
        return error.with_traceback(None)


def attempt_each(
    function: Callable[[Any], Any], rows: Mapping[Any, Any], threads: int = 1
) -> dict[Any, Any]:
    """`function` of each row by name. A row that has failed, or fails, is its exception."""

    def one(row: Any) -> Any:
        return row if isinstance(row, Exception) else attempt(function, row)

    with ThreadPoolExecutor(threads) as pool:
        return dict(zip(rows, pool.map(one, rows.values()), strict=True))


def attempt_within(
    seconds: float, function: Callable[[Any], Any], rows: Iterable[tuple[Any, Any]], threads: int
) -> dict[Any, Any]:
    """As `attempt_each`, of rows as they come, by name, less those that take more than `seconds`.

    The threads of these go on, in vain, and end with the process; others take their place. An
    error of `rows` itself is raised here.
    """
    left, lock, done, begun, ended = iter(rows), threading.Lock(), {}, {}, []

    def take() -> Any:
        with lock:
            try:
                return next(left, None)
            except Exception as error:
                ended.append(error)

    def work() -> None:
        while (found := take()) is not None:
            name, row = found
            begun[name] = time.monotonic()
            done[name] = row if isinstance(row, Exception) else attempt(function, row)

    workers, late = [], set()
    while True:
        while len(workers) < threads + len(late):
            workers.append(threading.Thread(target=work, name=_ATTEMPT, daemon=True))
            workers[-1].start()
        is_done = sum(worker.is_alive() for worker in workers) <= len(late - done.keys())
        if ended:
            raise ended[0]
        if is_done:
            return dict(done)
        time.sleep(0.01)
        now = time.monotonic()
        late |= {x for x, start in list(begun.items()) if now - start > seconds and x not in done}


def is_late_at_work() -> bool:
    """Whether a row that `attempt_within` has given up still goes on."""
    return any(thread.name == _ATTEMPT for thread in threading.enumerate())


def reason(error: Exception) -> str:
    """An exception in one short line that fits a cell of a Markdown table."""
    if isinstance(error, PeerError):
        return str(error)
    text = " ".join(f"{type(error).__name__}: {error}".replace("|", "/").split())
    # Some messages begin with where a layer was made; all end with what happened.
    return text if len(text) < 160 else f"{text[:60]} ... {text[-95:]}"


def was_late(error: str, limit: float) -> bool:
    """Whether something was given up after fewer seconds than `limit`, by the error's line."""
    found = re.match(r"TimeoutError: (?:not compiled in|more than) (\S+) s\b", error)
    return found is not None and float(found[1]) < limit


def is_hidden(ms: float, host_ms: float) -> bool:
    """Whether a time is not the device's, which takes no longer than the host for a program."""
    return ms <= HIDDEN * host_ms


def exit_if(failed: Iterable[str]) -> None:
    """Exits with an error that names the rows that failed, if any."""
    if names := ", ".join(failed):
        sys.exit(f"failed: {names}")


def host_mib() -> float:
    """The most MiB of memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Program(NamedTuple):
    """A compiled function, the seconds of its compilation and its temporary memory."""

    call: Callable[..., Any]
    seconds: float
    temp_mib: float


def compiled(lowered: Any) -> Program:
    """Compiles what `jax.jit(...).lower(...)` gives."""
    start = time.perf_counter()
    call = lowered.compile()
    seconds = time.perf_counter() - start
    return Program(call, seconds, call.memory_analysis().temp_size_in_bytes / MIB)


class Times(NamedTuple):
    """Milliseconds a call: the median of calls waited for one by one, and the mean of queued ones.

    The latter is a device's time where that exceeds the host's.
    """

    ms: float
    queued_ms: float

    def __str__(self) -> str:
        return f"{self.ms:.3f} ({self.queued_ms:.3f})"


def seconds_of(call: Callable[[], Any], wait: Callable[[Any], Any], times: int = 1) -> float:
    """The mean seconds of queued calls."""
    start = time.perf_counter()
    for _ in range(times):
        result = call()
    wait(result)
    return (time.perf_counter() - start) / times


def time_calls(
    call: Callable[[], Any], wait: Callable[[Any], Any], repeats: int, most: float = math.inf
) -> Times:
    """Times `call`, which starts work whose result `wait` waits for, after two rounds.

    Where all calls would take more than `most` seconds, fewer are made; at worst the second alone
    is both figures.
    """
    wait(call())
    taken = seconds_of(call, wait)
    if taken > most / 2:
        return Times(taken * 1e3, taken * 1e3)
    n_queued = N_QUEUED
    if taken * (repeats + 2 + n_queued) > most:
        repeats = n_queued = max(1, int(most / 2 / taken) - 1)
    one_by_one = statistics.median([seconds_of(call, wait) for _ in range(repeats)])
    seconds_of(call, wait, min(2, n_queued))  # what two results take is allocated first
    return Times(one_by_one * 1e3, seconds_of(call, wait, n_queued) * 1e3)


def in_turn(functions: Mapping[Any, Callable[[], Any]], repeats: int) -> dict[Any, float]:
    """The median seconds of each function, as `medians` has them."""

    def seconds(function: Callable[[], Any]) -> float:
        start = time.perf_counter()
        function()
        return time.perf_counter() - start

    timed = {name: functools.partial(seconds, x) for name, x in functions.items()}
    return medians(timed, repeats)


def medians(functions: Mapping[Any, Callable[[], float]], repeats: int) -> dict[Any, float]:
    """The median of what each returns. They take turns, after one call each that may compile.

    Other load on the machine then slows all of them alike.
    """
    for function in functions.values():
        function()
    turns = [{name: x() for name, x in functions.items()} for _ in range(repeats)]
    return {name: statistics.median(turn[name] for turn in turns) for name in functions}


def decoder_seconds(
    forward: Callable[[], Any], generate: Callable[[int], Any], n_new: int
) -> dict[str, float]:
    """Seconds of a forward pass, and of a step of generating `n_new` tokens after the first ones.

    Both calls wait for their results.
    """
    few = 1 + n_new // 8
    calls = {n: functools.partial(generate, n) for n in (n_new, few)}
    seconds = in_turn(calls | {"forward": forward}, repeats=3)
    return {"forward": seconds["forward"], "step": (seconds[n_new] - seconds[few]) / (n_new - few)}
