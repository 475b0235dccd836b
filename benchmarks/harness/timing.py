"""Timing of calls, in any framework."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

N_QUEUED = 20


class Times(NamedTuple):
    """Milliseconds a call, measured in two ways. Rows are compared by the first."""

    ms: float
    other_ms: float

    def __str__(self) -> str:
        return f"{self.ms:.3f} ({self.other_ms:.3f})"


def time_calls(call: Callable[[], Any], wait: Callable[[Any], Any], repeats: int) -> Times:
    """Times `call`, which starts work whose result `wait` waits for, after two rounds.

    Returns:
      The median of `repeats` calls that are waited for one by one, and the mean of `N_QUEUED` calls
      that are waited for together.
    """
    for _ in range(2):
        wait(call())
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        wait(call())
        seconds.append(time.perf_counter() - start)
    start = time.perf_counter()
    for _ in range(N_QUEUED):
        result = call()
    wait(result)
    queued = (time.perf_counter() - start) / N_QUEUED
    return Times(statistics.median(seconds) * 1e3, queued * 1e3)


def in_turn(functions: Mapping[Any, Callable[[], Any]], repeats: int) -> dict[Any, float]:
    """The median seconds of each function. They take turns, after one call each that may compile.

    Other load on the machine then slows all of them alike.
    """
    times: dict[Any, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    for _ in range(repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken) for name, taken in times.items()}
