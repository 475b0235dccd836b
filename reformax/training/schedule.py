"""The schedule of evaluating, saving and stopping: a pure function of step and time."""

from __future__ import annotations

from typing import NamedTuple


class Due(NamedTuple):
    """The things that a run does after a step, in this order."""

    evaluate: bool
    save: bool
    stop: bool


class Schedule(NamedTuple):
    """The settings that decide what is due.

    Attributes:
      first: the step that the run began at or was resumed from.
      steps, eval_every, checkpoint_every, max_minutes: see `settings.Settings`.
    """

    first: int
    steps: int
    eval_every: int | None = None
    checkpoint_every: int | None = None
    max_minutes: float | None = None

    def due(self, step: int, minutes: float) -> Due:
        """The things due after `step` steps, `minutes` after this process began to train."""
        # At least one step: under a limit below the compile time a run would never end.
        late = self.max_minutes is not None and minutes > self.max_minutes and step > self.first
        stop = step >= self.steps or late
        evaluate = stop or _divides(self.eval_every, step)
        return Due(evaluate, evaluate or _divides(self.checkpoint_every, step), stop)


def _divides(every: int | None, step: int) -> bool:
    return every is not None and step > 0 and step % every == 0
