"""Learning rates by the updates done: schedules, which may be as long as their run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from reformax.declared import Called, NonNegative, SettingError, shown

LearningRate = Annotated[
    NonNegative | optax.Schedule,
    Called("a number of at least 0, or a schedule such as optimizer.rsqrt()"),
]


@dataclasses.dataclass(frozen=True)
class RateSchedule:
    """A learning rate by the updates done: a warm-up, and what follows to the last step.

    Attributes:
      name: of the factory, for errors.
      rate: (updates done, steps of the run) -> the learning rate.
      warmup_steps: updates until the peak.
      steps: the last step; None: not known until `build`.
      decay: (steps of the run) -> those at its end that lower the rate once more.
      endless: whether the rate does not depend on `steps`.
    """

    name: str
    rate: Callable
    warmup_steps: int
    steps: int | None = None
    decay: Callable[[int], int] = lambda steps: 0
    endless: bool = False

    def __call__(self, count):
        if self.steps is None and not self.endless:
            raise SettingError(
                f"{self.name} is as long as its run, whose length only optimizers of "
                f"reformax.training.optimizer get: set {self.name}.steps, or call "
                "optimizer.build(adamw(...), num_train_steps)"
            )
        return self.rate(count, self.steps)

    def build(self, num_train_steps: int) -> RateSchedule:
        """The schedule of a run of so many steps; one that has a length keeps it."""
        return self if self.steps else dataclasses.replace(self, steps=num_train_steps)

    def unfinished_warmup(self, num_train_steps: int) -> str | None:
        """A line on a warm-up that a run of so many steps does not finish; None for others."""
        falling = self.decay(num_train_steps) if self.steps is None else 0
        free = num_train_steps - falling
        if self.warmup_steps < max(free, 1):
            return None
        return (
            f"{self.name}.warmup_steps={self.warmup_steps} is not below "
            f"{'' if free == num_train_steps else f'the first {free} of '}steps={num_train_steps}: "
            "the learning rate does not reach its peak; set "
            f"{self.name}.warmup_steps={min(free // 10, self.warmup_steps)}"
        )


def rising(step, warmup_steps: int):
    """The share of the peak that a linear warm-up has reached; `step` counts from 1."""
    return jnp.minimum(1.0, step / max(warmup_steps, 1))


def steps_in(share: float, steps: int) -> int:
    """The whole steps in a share of `steps`: 29 in 0.29 of 100, though the product is below 29."""
    return math.floor(share * steps + 1e-6)


def check_schedule(schedule: optax.Schedule) -> None:
    """Raises `SettingError` unless the function maps a count to a number."""
    try:
        rate = jax.eval_shape(schedule, jax.ShapeDtypeStruct((), jnp.int32))
        fits = rate.shape == () and jnp.issubdtype(rate.dtype, jnp.floating)
    except Exception:  # whatever another function makes of a number
        fits = False
    if not fits:
        raise SettingError(
            f"learning_rate is {shown(schedule)}: expected a number, or a schedule such as "
            "optimizer.rsqrt()"
        )
