"""A task without data, for a dry run: batches of the shapes that a model reads, all zeros."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np

from reformax.cli import messages, parsed
from reformax.data.vocabulary import Numbers
from reformax.task import (
    CLASSIFIERS,
    Batch,
    DocumentPairs,
    Labels,
    SentencePairs,
    Task,
    TaskModel,
    Translation,
)
from reformax.training import loop
from reformax.training.settings import build

_TARGETS = 1  # of a split
_CLASSES = 2  # where the model takes their number from the data


def reported(report: Callable[..., Iterator[str]]) -> tuple[dict[str, Any], Iterator[str]]:
    """The settings of `loop.train`, and the lines of `report(**settings)`.

    A task whose data cannot be read, or that needs an extra, is replaced; the first line says so.

    Raises:
      Exception: that of the task, where a stage has data of its own; and those of `report`.
    """
    try:
        settings = parsed.bindings(loop.train)
        return settings, report(**settings)
    except (OSError, ImportError, TypeError) as error:
        without = isinstance(error, TypeError)
        if without and "'data_dir'" not in str(error):
            raise
        names = parsed.arguments_of(loop.train) - {"task"}
        why = "no data_dir" if without else messages.first_line(error)
        lines = None
        with suppress(OSError, ImportError, TypeError):
            settings = parsed.bindings(loop.train, names)
            settings["task"] = task_of(build(settings["model"], "train"))
            lines = report(**settings, has_data=False)
        if lines is None:  # raised here, the error has no other as its context
            raise
    note = f"note: the data is not read ({why}): batches of zeros replace it"
    return settings, chain([note], lines)


def task_of(model: TaskModel) -> Task:
    """A task of the kind and the sizes of a model."""
    kind = model.task_kind
    labelled = kind in CLASSIFIERS
    labels = Labels(model.n_classes or _CLASSES, kind == "pairs") if labelled else None
    translation = None
    vocab_size = model.vocab_size
    if kind == "translation":
        vocab_size = min(model.vocab_size, model.source_vocab_size)
        translation = Translation(Numbers(vocab_size), lambda split: ([], []))

    def batch(batch_size: int, length: int) -> Batch:
        tokens = np.zeros((batch_size, length), np.int32)
        if labelled:
            inputs = DocumentPairs(tokens, tokens) if kind == "pairs" else tokens
            return Batch(inputs, tokens[:, :1], np.ones((batch_size, 1), np.float32))
        inputs = SentencePairs(tokens, tokens, tokens, tokens) if translation else tokens
        return Batch(inputs, tokens, np.ones(tokens.shape, np.float32))

    def eval_batches(split: str, batch_size: int, length: int, stride: int) -> Iterator[Batch]:
        return iter([batch(batch_size, length)])

    return Task(
        "stand-in",
        vocab_size,
        lambda seed, step, batch_size, length: batch(batch_size, length),
        eval_batches,
        lambda split: _TARGETS,
        translation=translation,
        labels=labels,
        masked=kind == "masked",
    )
