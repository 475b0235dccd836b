"""Several texts as one task: each row of a batch is of one of them, by their weights."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import numpy as np

from reformax.data.rng import Stream, apart, generator
from reformax.declared import Called, Positive, SettingError, checked
from reformax.task import Batch, Documents, Task, TextVocabulary

Text = Annotated[Task, Called("a text, such as text.text()")]


class _Mixture(Task):
    """What `mixture` returns; no part of another mixture, which would draw by the same numbers."""


class _Shared:
    """One vocabulary for several texts: that of the first which has one. The run keeps it."""

    def __init__(self, vocabularies: Sequence[TextVocabulary]):
        self._all = vocabularies

    @property
    def size(self) -> int:
        return self._all[0].size

    def encode(self, text: str) -> list[int]:
        return self._all[0].encode(text)

    def decode(self, ids: list[int]) -> str:
        return self._all[0].decode(ids)

    def keep_in(self, folder, begun: bool) -> str | None:
        """As the first one's; the others read what it wrote there."""
        found = self._all[0].keep_in(folder, begun)
        for other in self._all[1:]:
            other.keep_in(folder, begun=True)
        return found


@checked
def mixture(tasks: Sequence[Text], weights: Sequence[Positive]) -> Task:
    """A language model of several texts.

    Each row of a training batch is of one text, drawn by (seed, step), with the tokens that its own
    task has in that row. Held-out text is that of all texts, whole, one after the other.

    Args:
      tasks: texts of one vocabulary, such as two of `text.text`, each by a scope of gin. Pieces
        that are learnt are learnt from the first text with a vocabulary; give the others its
        size. A text of ids without a vocabulary is taken to have the same.
      weights: how often a row is of each text, in proportion.

    Raises:
      ValueError: there are not as many weights as texts; a task is no text, is itself a mixture or
        takes windows in turn; or texts differ in `vocab_size`, in `document_mask`, or in whether
        their tokens are bytes.
    """
    if not tasks or len(tasks) != len(weights):
        raise SettingError(
            f"weights has {len(weights)} numbers and tasks {len(tasks)}: give one for each text"
        )
    first = tasks[0]
    for task in tasks:
        if task.kind != "text":
            raise SettingError(f"task {task.name} is no text: give texts, such as text.text()")
        if isinstance(task, _Mixture):
            raise SettingError(
                f"task {task.name} is a mixture itself: give its texts, with weights of the whole"
            )
        if task.in_order:
            raise SettingError(
                f"task {task.name} takes its rows in turn, and a mixture draws: leave out "
                "windows='each_once', or give another task"
            )
        for name in ("vocab_size", "document_mask", "of_bytes"):
            if getattr(task, name) != getattr(first, name):
                raise SettingError(
                    f"{name} is {getattr(first, name)} of {first.name} and {getattr(task, name)} "
                    f"of {task.name}: set it alike in a mixture"
                )
    shares = np.array(weights) / sum(weights)

    def train_rows(seed: int, step: int, batch_size: int, length: int, rows) -> Batch:
        rng = apart(generator(seed, step), Stream.TEXTS_OF_A_MIXTURE)
        chosen = rng.choice(len(tasks), size=batch_size, p=shares)[rows]
        numbers = np.arange(batch_size)[rows]
        order, parts = [], []
        for k in np.unique(chosen):
            of_task = np.flatnonzero(chosen == k)
            order.append(of_task)
            parts.append(tasks[k].rows_of_batch(seed, step, batch_size, length, numbers[of_task]))
        return _in_order(parts, np.argsort(np.concatenate(order)))

    def eval_batches(split: str, batch_size: int, length: int, stride: int) -> Iterator[Batch]:
        found = [task.eval_batches(split, batch_size, length, stride) for task in tasks]
        return (batch for batches in found for batch in batches)

    def fingerprint(split: str) -> str:
        of_texts = [task.fingerprint(split) for task in tasks]
        if split == "train":  # weights are no part of held-out text, which is read whole
            of_texts = [f"{x:.6g} of {one}" for x, one in zip(shares, of_texts, strict=True)]
        return "; ".join(of_texts)

    def summary() -> list[str]:
        return [
            f"{share:.1%} of rows: {line}"
            for task, share in zip(tasks, shares, strict=True)
            for line in (task.summary() if task.summary else [task.name])
        ]

    vocabularies = [task.vocabulary for task in tasks if task.vocabulary is not None]
    has_bytes = all(task.n_bytes is not None for task in tasks)
    return _Mixture(
        "mixture",
        first.vocab_size,
        functools.partial(train_rows, rows=slice(None)),
        eval_batches,
        lambda split: sum(task.n_targets(split) for task in tasks),
        fingerprint=fingerprint if all(task.fingerprint for task in tasks) else None,
        vocabulary=_Shared(vocabularies) if vocabularies else None,
        n_bytes=(lambda split: sum(task.n_bytes(split) for task in tasks)) if has_bytes else None,
        train_rows=train_rows,
        borders=lambda split: np.zeros(0, np.int64),  # texts have no common positions
        document_mask=first.document_mask,
        summary=summary,
        of_bytes=first.of_bytes,
    )


def _in_order(parts: list[Batch], order: np.ndarray) -> Batch:
    """The rows of batches, joined and brought into an order."""

    def rows(arrays) -> np.ndarray:
        return np.concatenate(arrays)[order]

    targets = rows([part.targets for part in parts])
    inputs: Any = targets
    if isinstance(parts[0].inputs, Documents):
        ids = rows([part.inputs.segment_ids for part in parts])
        inputs = Documents(targets, ids)
    return Batch(inputs, targets, rows([part.weights for part in parts]))
