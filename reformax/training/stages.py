"""Stages: a run whose first steps have other batches, other data or another attention.

Parameters, the optimizer's state and the learning rate's schedule are one over all stages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, Protocol, runtime_checkable

from reformax.declared import Bounds, Called, Size, check_fields


@runtime_checkable
class TaskLike(Protocol):
    """What training asks of a task; `reformax.data.base.Task` says what each does."""

    name: str
    vocab_size: int
    train_batch: Callable
    eval_batches: Callable
    n_targets: Callable
    translation: Any


Task = Annotated[TaskLike, Called("a task, such as stdlib.stdlib()")]
Share = Annotated[float, Bounds(above=0, below=1, name="a share of the run's steps")]
Model = Annotated[Callable, Called("a model without its call, such as lm.ReformerLM")]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The first steps of a run, or the next ones after another stage; None is the run's own value.

    Attributes:
      until: the last step of the stage; below 1 the share of the run's steps that end with it,
        rounded down, which may leave a stage out of a short run.
      model: the model to train, such as `@short/lm.ReformerLM`, the same with other attention. Its
        parameters must be those of the run's.
      task: the data to train on, such as easier examples: of the kind of the run's, which scores
        throughout, without a vocabulary that a run learns.
      batch_size: sequences per step.
      length: tokens per sequence.

    Raises:
      ValueError: a value out of bounds.
    """

    until: Size | Share
    model: Model | None = None
    task: Task | None = None
    batch_size: Size | None = None
    length: Size | None = None

    def __post_init__(self):
        check_fields(self)


class Filled(NamedTuple):
    """A stage with the run's values in place of None; `until` is a step."""

    until: int
    model: Callable
    task: TaskLike
    batch_size: int
    length: int

    @classmethod
    def of(cls, stage: Stage, steps: int, **own: Any) -> Filled:
        """A stage of a run of so many steps, whose own values are given."""
        until = int(stage.until * steps) if stage.until < 1 else stage.until
        given = {name: getattr(stage, name) for name in own}
        return cls(until, **own | {k: v for k, v in given.items() if v is not None})
