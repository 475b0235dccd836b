"""Stages: a run whose first steps have other batches, other data or another attention.

Parameters, the optimizer's state and the learning rate's schedule are one over all stages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from reformax import task as task_lib
from reformax.declared import Bounds, Called, SettingError, Size, check_fields
from reformax.training.fine_tuning import FineTuning
from reformax.training.learning_rates import steps_in

Task = Annotated[task_lib.Task, Called("a task, such as stdlib.stdlib()")]
Share = Annotated[
    float, Bounds(above=0, below=1, name="a share of the run's steps above 0 and below 1")
]
Model = Annotated[
    Callable, Called("a model without its call, such as lm.ReformerLM, or a function of mode")
]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The first steps of a run, or the next ones after another stage; None is the run's own value.

    Attributes:
      until: the last step of the stage; below 1 the share of `steps` that end with it, rounded
        down, which may leave a stage out of a short run. A run that goes on with more steps has
        longer stages then, and may go back to an earlier one.
      model: the model to train, such as `@short/lm.ReformerLM`, the same with other attention. Its
        parameters must be those of the run's.
      task: the data to train on, such as easier examples, of the kind and the vocabulary of the
        run's, which scores throughout.
      batch_size: sequences per step.
      length: tokens per sequence.
      fine_tuning: the weights that the stage's steps change, by `only`: the others wait. The
        optimizer's state is that of all weights, which no gradient reaches meanwhile.

    Raises:
      ValueError: a value out of bounds.
    """

    until: Size | Share
    model: Model | None = None
    task: Task | None = None
    batch_size: Size | None = None
    length: Size | None = None
    fine_tuning: FineTuning | None = None

    def __post_init__(self):
        check_fields(self)
        if self.fine_tuning is not None and self.fine_tuning.lora is not None:
            raise SettingError(
                "fine_tuning of a stage has lora, which has an optimizer's state of its own: leave "
                "it out, or set fine_tuning of the run"
            )


class ResolvedStage(NamedTuple):
    """A stage that has steps, with the run's values where the stage has None.

    Attributes:
      until: its last step.
      model, task, batch_size, length, fine_tuning: as in `Stage`.
      name: of the stage in errors; empty for the run's own values.
    """

    until: int
    model: Callable
    task: task_lib.Task
    batch_size: int
    length: int
    name: str = ""
    fine_tuning: FineTuning | None = None

    @property
    def program(self) -> tuple[Any, ...]:
        """The key of the compiled step."""
        has_segments = self.task.document_mask
        return self.model, self.batch_size, self.length, has_segments, self.fine_tuning


@contextlib.contextmanager
def naming(stage: Any, fix: str = "") -> Iterator[None]:
    """Errors of settings name the stage, or what else has a `name`, and end with `fix`."""
    try:
        yield
    except SettingError as error:
        if not stage.name:
            raise
        raise SettingError(f"{stage.name}: {error}{fix}") from None


def end_of(stage: Stage, steps: int) -> int:
    """The last step of a stage in a run of `steps` steps."""
    if stage.until < 1:
        return steps_in(float(stage.until), steps)
    return int(stage.until)


def check_vocabulary(name: str, task: task_lib.Task, of_run: task_lib.Task) -> None:
    """Raises `SettingError` for a task, of what has this name, of another vocabulary."""
    if task.kept_vocabulary is not of_run.kept_vocabulary:
        raise SettingError(
            f"{name}.task is {task.name}, whose vocabulary is not the run's: leave it out, or make "
            "it of the same vocabulary object as task"
        )
    of_bytes = task.of_bytes and of_run.of_bytes
    if of_bytes and task.vocab_size != of_run.vocab_size:
        raise SettingError(
            f"{name}.task is {task.name}, whose bytes are the last of {task.vocab_size} ids, and "
            f"the run's of {of_run.vocab_size}: set the same offset"
        )


def resolved(stages: Sequence[Stage], last: ResolvedStage) -> list[ResolvedStage]:
    """The stages that have steps, in order, and `last`, which has the run's own values."""
    found, before = [], 0
    for number, stage in enumerate(stages):
        names = "model", "task", "batch_size", "length", "fine_tuning"
        given = {name: getattr(stage, name) for name in names}
        given = {name: value for name, value in given.items() if value is not None}
        if (until := end_of(stage, last.until)) > before:
            found.append(last._replace(until=until, name=f"stages[{number}]", **given))
        before = until
    return [*found, last]
