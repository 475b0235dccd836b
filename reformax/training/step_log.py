"""Metrics of steps: fetched late, so that the device never waits, then shown and recorded."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from reformax.task import Task
from reformax.training.loss import bits_of, bits_per_dim
from reformax.training.metrics import METRICS, Ratio
from reformax.training.record import Bar, Record
from reformax.training.settings import TrainSettings

# Steps dispatched before the first one's metrics are waited for: the device is never idle, and the
# host notices a bad loss or a signal within this many steps.
IN_FLIGHT = 2


class StepLog:
    """Writes a line to the record every `log_every` steps, and moves the bar at each.

    Attributes:
      window: {metric: [mean, weight]} of each step since the last line; a checkpoint keeps it.
      tokens: those of all steps fetched so far.
      record, bar: what shows the run.
      seconds: the run's clock.
    """

    def __init__(
        self,
        settings: TrainSettings,
        record: Record,
        bar: Bar,
        window: list[Any],
        tokens: int,
        seconds: Callable[[], float],
        on_step: Callable[[int, dict[str, float]], None] = lambda step, values: None,
        at_peak: Mapping[int, float] | None = None,
    ):
        """Takes the window and the tokens that a checkpoint kept, and the run's clock.

        `on_step` gets each step's metrics, once they are fetched. `at_peak` has the seconds that a
        step takes at the devices' peak, by the number of its stage, where they are known.
        """
        self.window, self.tokens, self.seconds = list(window), tokens, seconds
        self._at_peak = at_peak or {}
        self.record, self.bar = record, bar
        self._on_step = on_step
        self._log_every, self._last_step = settings.log_every, settings.steps
        self._stages, self._stage_after = settings.all_stages, settings.stage_after
        self._in_flight: deque = deque()
        self._last_time: float | None = None  # when the last step ended; None if work came between
        # Seconds, the tokens that took them, and the seconds at the devices' peak.
        self._busy, self._timed, self._timed_at_peak = 0.0, 0, 0.0

    def add(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Takes the metrics of a step that was dispatched."""
        self._in_flight.append((step, metrics))
        if len(self._in_flight) > IN_FLIGHT:
            self._fetch()

    def drain(self) -> None:
        """Waits for all steps dispatched.

        Raises:
          FloatingPointError: a step's loss or gradient is not finite.
        """
        while self._in_flight:
            self._fetch()

    def pause(self) -> None:
        """The time until the next step does not count as training."""
        self._last_time = None

    def _fetch(self) -> None:
        step, metrics = self._in_flight.popleft()
        metrics = jax.device_get(metrics)
        means = {name: _mean(x) for name, x in metrics.items() if isinstance(x, Ratio)}
        numbers = {name: float(x) for name, x in metrics.items() if not isinstance(x, Ratio)}
        nats, grad_norm = means["nats"][0], numbers["grad_norm"]
        if not (math.isfinite(nats) and math.isfinite(grad_norm)):
            raise FloatingPointError(
                f"loss is {nats} and the gradient's norm {grad_norm} at step {step}"
            )
        number = self._stage_after(step - 1)
        stage = self._stages[number]
        tokens = stage.batch_size * stage.length
        speed = self._speed(tokens, self._at_peak.get(number, math.nan))
        self.bar.advance(bits_per_dim(nats, 1.0), speed)
        self.window.append(means)
        self.tokens += tokens
        if step % self._log_every == 0 or step == self._last_step:
            self._write(step, self._shown(self.window, stage.task) | numbers, speed)
        self._on_step(step, self._shown([means], stage.task) | numbers)

    def _shown(self, rows: list[dict[str, Any]], task: Task) -> dict[str, float]:
        """The means of steps, the last one of a task, each metric over those that have it."""
        means = {}
        for name in METRICS:
            found = [row[name] for row in rows if name in row]
            total = sum(weight for _, weight in found)
            if total or name == "nats":
                means[name] = sum(x * weight for x, weight in found) / total if total else 0.0
        return bits_of(task, "train", bits_per_dim(means.pop("nats"), 1.0)) | means

    def _speed(self, tokens: int, at_peak: float) -> float | None:
        """Tokens per second since the last line, this step's included; None at first."""
        now = time.monotonic()
        if self._last_time is not None:
            self._busy, self._timed = self._busy + now - self._last_time, self._timed + tokens
            self._timed_at_peak += at_peak
        self._last_time = now
        return self._timed / self._busy if self._busy else None

    def _write(self, step: int, values: dict[str, float], speed: float | None) -> None:
        mfu = self._timed_at_peak / self._busy if self._busy else math.nan
        timing = {"seconds": self.seconds(), "tokens_per_second": speed}
        timing["mfu"] = mfu if math.isfinite(mfu) else None
        self.record.write(step, "train", values | {"tokens": self.tokens}, timing, tag="train")
        self.window.clear()
        self._busy, self._timed, self._timed_at_peak = 0.0, 0, 0.0


def _mean(ratio: Ratio) -> list[float]:
    """[mean, weight], the mean as the device would round it."""
    total, weight = map(np.float32, ratio)
    return [float(total / max(weight, np.finfo(np.float32).tiny)), float(weight)]
