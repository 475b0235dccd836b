"""Metrics of steps: fetched late, so that the device never waits, then shown and recorded."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

import jax

from reformax.training.loss import bits_of, bits_per_dim
from reformax.training.metrics import Bar, Record
from reformax.training.settings import TrainSettings

# Steps dispatched before the first one's metrics are waited for: the device is never idle, and the
# host notices a bad loss or a signal within this many steps.
IN_FLIGHT = 2


class StepLog:
    """Writes a line to the record every `log_every` steps, and moves the bar at each.

    Attributes:
      window: [bits, accuracy] of each step since the last line; a checkpoint keeps it.
      tokens: those of all steps fetched so far.
    """

    def __init__(
        self,
        settings: TrainSettings,
        record: Record,
        bar: Bar,
        window: list[list[float]],
        tokens: int,
        seconds: Callable[[], float],
        on_step: Callable[[int, dict[str, float]], None] = lambda step, values: None,
    ):
        """Takes the window and the tokens that a checkpoint kept, and the run's clock.

        `on_step` gets each step's metrics, once they are fetched.
        """
        self.window, self.tokens, self._seconds = window, tokens, seconds
        self._record, self._bar, self._task = record, bar, settings.task
        self._on_step = on_step
        self._log_every, self._last_step = settings.log_every, settings.steps
        self._stage_after = settings.stage_after
        self._step_tokens = [stage.batch_size * stage.length for stage in settings.all_stages]
        self._in_flight: deque = deque()
        self._last_time: float | None = None  # when the last step ended; None if work came between
        self._busy, self._timed = 0.0, 0  # seconds, and the tokens that took them

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
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        if not (math.isfinite(values["nats"]) and math.isfinite(values["grad_norm"])):
            raise FloatingPointError(
                f"loss is {values['nats']} and the gradient's norm {values['grad_norm']} at step "
                f"{step}"
            )
        tokens = self._step_tokens[self._stage_after(step - 1)]
        speed = self._speed(tokens)
        bits = bits_per_dim(values["nats"], 1.0)
        self._bar.advance(bits, speed)
        self.window.append([bits, values["accuracy"]])
        self.tokens += tokens
        if step % self._log_every == 0 or step == self._last_step:
            self._write(step, values, speed)
        del values["nats"]
        self._on_step(step, bits_of(self._task, "train", bits) | values)

    def _speed(self, tokens: int) -> float | None:
        """Tokens per second since the last line, this step's included; None at first."""
        now = time.monotonic()
        if self._last_time is not None:
            self._busy, self._timed = self._busy + now - self._last_time, self._timed + tokens
        self._last_time = now
        return self._timed / self._busy if self._busy else None

    def _write(self, step: int, values: dict[str, float], speed: float | None) -> None:
        means = [sum(column) / len(column) for column in zip(*self.window, strict=True)]
        line = {
            **bits_of(self._task, "train", means[0]),
            "accuracy": means[1],
            "grad_norm": values["grad_norm"],
        }
        if "learning_rate" in values:
            line["learning_rate"] = values["learning_rate"]
        line["tokens"] = self.tokens
        timing = {"seconds": self._seconds()}
        if speed is not None:
            timing["tokens_per_second"] = speed
        self._record.write(step, "train", line, timing)
        self.window.clear()
        self._busy, self._timed = 0.0, 0
