"""Tasks and models of a user's own: subclasses of `Task` and `TaskModel`."""

import numpy as np
import pytest

from reformax.declared import SettingError
from reformax.task import Labels, Task, TaskModel
from reformax.training import evaluation, loop
from tests.training import tiny, worker


class Counting(Task):
    """A task by methods, with attributes of its own."""

    name = "counting"

    def __init__(self, vocab_size):
        self.vocab_size, self._other = vocab_size, tiny.counting(vocab_size)

    def train_batch(self, seed, step, batch_size, length):
        return self._other.train_batch(seed, step, batch_size, length)

    def eval_batches(self, split, batch_size, length, stride):
        return self._other.eval_batches(split, batch_size, length, stride)

    def n_targets(self, split):
        return self._other.n_targets(split)


def test_a_task_by_methods_is_one_by_functions(tmp_path):
    for name, task in (("functions", tiny.counting(16)), ("methods", Counting(16))):
        loop.train(tmp_path / name, **worker.arguments(steps=4) | {"task": task})
    assert worker.record(tmp_path / "functions") == worker.record(tmp_path / "methods")


def test_what_a_task_is_follows_from_its_attributes():
    task = tiny.counting()
    assert (task.kind, task.n_classes, task.kept_vocabulary) == ("text", None, None)
    assert task.replace(masked=True).kind == "masked" and task.kind == "text"
    one, two = task.replace(labels=Labels(3)), task.replace(labels=Labels(2, pairs=True))
    assert (one.kind, one.n_classes, two.kind, two.n_classes) == ("labels", 3, "pairs", 2)
    assert task.replace(vocabulary="pieces").kept_vocabulary == "pieces"


class Duck:
    """Has what a model has, and does not say what it is for."""

    vocab_size = 16
    init_params = features = logits = lambda *args, **options: np.zeros(1)

    def __init__(self, mode="eval"):
        del mode


def test_what_is_no_task_and_no_model_is_one_line(tmp_path):
    assert not isinstance(Duck(), TaskModel)
    with pytest.raises(SettingError, match="^model is .*: expected a model without its call"):
        loop.train(tmp_path, **worker.arguments() | {"model": Duck})
    sizes = dict(batch_size=2, length=8)
    with pytest.raises(SettingError, match="model Duck is no reformax.task.TaskModel: make its"):
        evaluation.evaluate(Duck(), {}, tiny.counting(), "valid", **sizes)
    with pytest.raises(SettingError, match="task is .*: expected a task, such as stdlib.stdlib()"):
        loop.train(tmp_path, **worker.arguments() | {"task": Duck()})
