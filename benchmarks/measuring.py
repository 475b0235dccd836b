"""What the benchmarks share, of any framework: how a call is timed and a failure told."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

N_QUEUED = 20


class Times(NamedTuple):
    """Milliseconds a call."""

    blocked: float  # the median of calls that are waited for, each by itself
    queued: float  # the mean of N_QUEUED calls that only the last of is waited for


def time_calls(call: Callable[[], Any], wait: Callable[[Any], Any], repeats: int) -> Times:
    """Times `call`, which starts work, and `wait`, which waits for its result, after two rounds."""
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


def reason(error: Exception) -> str:
    """An exception in one short line that fits a cell of a Markdown table."""
    text = " ".join(f"{type(error).__name__}: {error}".replace("|", "/").split())
    # Some messages begin with where a layer was made; all end with what happened.
    return text if len(text) < 160 else f"{text[:60]} ... {text[-95:]}"
