"""Stages: a run whose first steps have batches of another size and length, or another attention.

Parameters, the optimizer's state and the learning rate's schedule are one over all stages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from reformax.declared import Called, Size, check_fields

Model = Annotated[Callable, Called("a model without its call, such as lm.ReformerLM")]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The first steps of a run, or the next ones after another stage; None is the run's own value.

    Attributes:
      until: the last step of the stage.
      model: the model to train, such as `@short/lm.ReformerLM`, the same with other attention. Its
        parameters must be those of the run's.
      batch_size: sequences per step.
      length: tokens per sequence.

    Raises:
      ValueError: a value out of bounds.
    """

    until: Size
    model: Model | None = None
    batch_size: Size | None = None
    length: Size | None = None

    def __post_init__(self):
        check_fields(self)
