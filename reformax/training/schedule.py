"""What is due after a step: evaluating, saving, stopping. A pure function of step and time."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from reformax.training.settings import TrainSettings


class Due(NamedTuple):
    """The things that a run does after a step, in this order."""

    evaluate: bool
    save: bool
    stop: bool
    save_temporary: bool = False  # by the clock alone, so that a killed run loses minutes
    others: tuple[str, ...] = ()  # the evaluations besides the run's own, last of all


def due_after(
    settings: TrainSettings, first: int, step: int, minutes: float, since_save: float = 0.0
) -> Due:
    """The things due after `step` steps.

    Args:
      settings: the run's.
      first: the step that the run began at or was resumed from.
      step: steps done.
      minutes: since this process began to train.
      since_save: minutes since it began or last saved.
    """
    # At least one step: under a limit below the compile time a run would never end.
    late = settings.max_minutes is not None and minutes > settings.max_minutes and step > first
    stop = step >= settings.steps or late
    evaluate = stop or _divides(settings.eval_every, step)
    save = evaluate or _divides(settings.checkpoint_every, step)
    limit = settings.checkpoint_minutes
    old = limit is not None and since_save > limit and step > first
    others = tuple(
        one.label
        for one in settings.other_evaluations
        if stop or (evaluate if one.every is None else _divides(one.every, step))
    )
    return Due(evaluate, save, stop, old and not save, others)


def _divides(every: int | None, step: int) -> bool:
    return every is not None and step > 0 and step % every == 0
