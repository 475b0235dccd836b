"""Evaluations besides the run's own: other splits, tasks and lengths, each with a name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from reformax import task as task_lib
from reformax.declared import Name, SettingError, Size, check_fields
from reformax.training.loss import metric_name
from reformax.training.metrics import METRICS
from reformax.training.stages import Task, check_vocabulary

# What other lines of the record have as their split.
RESERVED = ("train", "data", "note", "sample")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """An evaluation; None is the value of the run's own.

    Attributes:
      split: of the task.
      task: the data, of the kind and the vocabulary of the run's.
      metric: the one that is printed, such as 'accuracy'; None: bits, as the task has them.
      batch_size: windows scored together.
      length: context, in tokens.
      stride: tokens that the window moves by; None: its length.
      tokens: targets to score, up to whole batches; None: the whole split.
      whole: whether the last one scores the whole split as well.
      every: steps between two of them; None: with each of the run's own. The last step has one.

    Raises:
      ValueError: a value out of bounds.
    """

    split: Name | None = None
    task: Task | None = None
    metric: Name | None = None
    batch_size: Size | None = None
    length: Size | None = None
    stride: Size | None = None
    tokens: Size | None = 2**18
    whole: bool = True
    every: Size | None = None

    def __post_init__(self):
        check_fields(self)


class ResolvedEvaluation(NamedTuple):
    """An evaluation with the run's values where it has None.

    Attributes:
      label: the `split` of its lines in the record.
      name: in errors; empty for the run's own.
      task, split, metric, batch_size, length, stride, tokens, whole, every: as in `Evaluation`.
    """

    label: str
    name: str
    task: task_lib.Task
    split: str
    metric: str
    batch_size: int
    length: int
    stride: int
    tokens: int | None
    whole: bool
    every: int | None

    @property
    def sizes(self) -> dict[str, int]:
        """batch_size, length and stride."""
        return {"batch_size": self.batch_size, "length": self.length, "stride": self.stride}


def sizes_of(
    batch_size: int | None, length: int | None, stride: int | None, default: Mapping[str, int]
) -> dict[str, int]:
    """The sizes of an evaluation. None is the default's, but for the stride of a given length.

    That is the length itself: the default's stride belongs to the default's length.
    """
    if stride is None:
        stride = default["stride"] if length is None else length
    return {
        "batch_size": batch_size or default["batch_size"],
        "length": length or default["length"],
        "stride": stride,
    }


def resolved(label: str, given: Evaluation, main: ResolvedEvaluation) -> ResolvedEvaluation:
    """An evaluation with the values of the run's own.

    Raises:
      SettingError: a name that lines have, or a task, a stride or a metric that does not fit.
    """
    name, task = f"evaluations[{label!r}]", given.task or main.task
    sizes = sizes_of(given.batch_size, given.length, given.stride, main.sizes)
    if label in (*RESERVED, main.label):
        raise SettingError(
            f"{name} has the name of other lines of the record: choose another than "
            f"{', '.join((*RESERVED, main.label))}"
        )
    check_vocabulary(name, task, main.task)
    if sizes["stride"] > sizes["length"]:
        raise SettingError(
            f"{name}.stride={given.stride} must not be above its length of {sizes['length']}"
        )
    metrics = _metrics(task)
    if given.metric not in (None, *metrics):
        raise SettingError(f"{name}.metric={given.metric!r} is none of {', '.join(metrics)}")
    return ResolvedEvaluation(
        label=label,
        name=name,
        task=task,
        split=given.split or main.split,
        metric=given.metric or metrics[0],
        **sizes,
        tokens=given.tokens,
        whole=given.whole,
        every=given.every,
    )


def data_key(evaluation: ResolvedEvaluation) -> str:
    """The name that the fingerprint of its data has in a checkpoint."""
    of_run = not evaluation.name
    return evaluation.split if of_run else f"{evaluation.name} of {evaluation.split}"


def _metrics(task: task_lib.Task) -> list[str]:
    """The metrics that an evaluation on a task has."""
    of_text = task.labels is None and (task.of_bytes or task.n_bytes is not None)
    of_predictions = [name for name in METRICS if name != "nats"]
    return [metric_name(task), *["bits_per_byte"] * of_text, *of_predictions]
