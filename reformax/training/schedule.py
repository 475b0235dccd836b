"""The schedule of evaluating, saving and stopping: a pure function of step and time."""

from __future__ import annotations

from typing import NamedTuple


class Due(NamedTuple):
    """The things that a run does after a step, in this order."""

    evaluate: bool
    save: bool
    stop: bool
    save_temporary: bool = False  # by the clock alone, so that a killed run loses minutes
    others: tuple[str, ...] = ()  # the evaluations besides the run's own, last of all


class Schedule(NamedTuple):
    """The settings that decide what is due.

    Attributes:
      first: the step that the run began at or was resumed from.
      others: the names of more evaluations, and the steps between those of each; None: as the
        run's own.
      steps, eval_every, checkpoint_every, checkpoint_minutes, max_minutes: see
        `settings.TrainSettings`.
    """

    first: int
    steps: int
    eval_every: int | None = None
    checkpoint_every: int | None = None
    checkpoint_minutes: float | None = None
    max_minutes: float | None = None
    others: tuple[tuple[str, int | None], ...] = ()

    def due(self, step: int, minutes: float, since_save: float = 0.0) -> Due:
        """The things due after `step` steps.

        Args:
          step: steps done.
          minutes: since this process began to train.
          since_save: minutes since it began or last saved.
        """
        # At least one step: under a limit below the compile time a run would never end.
        late = self.max_minutes is not None and minutes > self.max_minutes and step > self.first
        stop = step >= self.steps or late
        evaluate = stop or _divides(self.eval_every, step)
        save = evaluate or _divides(self.checkpoint_every, step)
        old = self.checkpoint_minutes is not None and since_save > self.checkpoint_minutes
        others = tuple(
            name
            for name, every in self.others
            if stop or (evaluate if every is None else _divides(every, step))
        )
        return Due(evaluate, save, stop, old and not save and step > self.first, others)


def _divides(every: int | None, step: int) -> bool:
    return every is not None and step > 0 and step % every == 0
