"""The interfaces of tasks and models: what training, evaluation and generation ask of them.

Letters in the shapes: B batch, T length, S length of the source in translation.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64

Kind = Literal["text", "translation", "labels", "pairs", "masked"]
CLASSIFIERS = ("labels", "pairs")  # the kinds of tasks that have classes


class SentencePairs(NamedTuple):
    """Packed rows: segment k of a row of `target` translates segment k of its row of `source`.

    Segments are contiguous and numbered 1, 2, 3, ... along a row; 0 is padding, at the end.
    Booleans say that each row is one pair, whose tokens they mark. Every sentence ends in `EOS`.
    """

    source: Int32[np.ndarray, "B S"]
    target: Int32[np.ndarray, "B T"]
    source_segment_ids: Int32[np.ndarray, "B S"] | Bool[np.ndarray, "B S"]
    target_segment_ids: Int32[np.ndarray, "B T"] | Bool[np.ndarray, "B T"]


class Documents(NamedTuple):
    """Rows of a text, in which each document is a segment.

    Ids grow along a row, from 1 on; 0 is padding, at the end.
    """

    tokens: Int32[np.ndarray, "B T"]
    segment_ids: Int32[np.ndarray, "B T"]


class DocumentPairs(NamedTuple):
    """Rows of tokens in pairs, of which each has one label. 0 is padding, at the end."""

    first: Int32[np.ndarray, "B T"]
    second: Int32[np.ndarray, "B T"]


class Batch(NamedTuple):
    """A batch: position t predicts targets[t] from inputs[<t] of its own segment.

    The model shifts the inputs. So `inputs` (in translation `inputs.target`, of documents
    `inputs.tokens`) and `targets` are the same array: do not write to it.

    Where a task has labels, a row has one target, its class. Where tokens are masked, `inputs` have
    them hidden, position t predicts targets[t] from all inputs, and nothing is shifted.
    """

    inputs: Int32[np.ndarray, "B T"] | Documents | SentencePairs | DocumentPairs
    targets: Int32[np.ndarray, "B T"]  # with labels [B, 1]
    weights: Float32[np.ndarray, "B T"]  # 1 where the loss counts, 0 elsewhere


class Kept(Protocol):
    """A vocabulary that stays with its run."""

    size: int

    def keep_in(self, folder: str | os.PathLike, begun: bool) -> str | None:
        """Reads the vocabulary from a run's folder, or learns it and writes it there.

        Args:
          folder: the run's folder.
          begun: whether the run has trained with it; the file must then exist.

        Returns:
          A fingerprint; None for a vocabulary that learns nothing.

        Raises:
          ValueError: the file is missing though the run has begun, damaged, or another vocabulary.
        """


class Vocabulary(Kept, Protocol):
    """Turns sentences into ids and back; see `reformax.data.vocabulary`."""

    def encode(self, sentence: str) -> list[int]:
        """The ids of a sentence and `EOS`."""

    def decode(self, ids: list[int]) -> str:
        """The sentence of the ids before the first `EOS`."""


class TextVocabulary(Kept, Protocol):
    """Turns any text into ids and back; see `reformax.data.pieces`."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""

    def decode(self, ids: list[int]) -> str:
        """The text of ids."""


class Translation(NamedTuple):
    """The vocabulary and the sentences of a task of sentence pairs."""

    vocabulary: Vocabulary
    # split -> (sources, references), all its sentences in order
    sentences: Callable[[str], tuple[list[str], list[str]]]


class Labels(NamedTuple):
    """The classes that the rows of a task have, or its pairs of rows."""

    n_classes: int
    pairs: bool = False  # the inputs are `DocumentPairs`


@dataclasses.dataclass(eq=False)
class Task:
    """The data that a model is trained on and scored on.

    Callers ask for these attributes alone. A task is made of functions, or is a subclass that has
    them as methods.

    Attributes:
      name: of the task, in logs and errors.
      vocab_size: ids are below it.
      train_batch: (seed, step, batch_size, length) -> the batch of that step. It is a pure
        function, so a resumed run sees the batches of an uninterrupted one.
      eval_batches: (split, batch_size, length, stride) -> batches in which each target has weight 1
        exactly once. It checks its arguments when it is called, not at the first batch.
      n_targets: split -> its number of targets; raises ValueError for an unknown split.
      translation: set if the inputs are `SentencePairs`.
      fingerprint: split -> what its data is, in a few words; another text gives other words.
        Checkpoints keep them, and a run that goes on compares. None: nothing is compared.
      vocabulary: set if the tokens are pieces of a text.
      n_bytes: split -> the bytes of its text; set with `vocabulary`.
      train_rows: (seed, step, batch_size, length, rows) -> these rows of the batch of that step, by
        number, and no others. None: `rows_of_batch` makes the batch and takes its rows.
      labels: set if a row's target is its class.
      masked: whether the inputs hide tokens, which are the targets.
      borders: split -> the tokens, by place, that documents of a text begin with, sorted. The
        windows of evaluations then lie as `byte_language_model` says. None: they are not known, or
        there is one.
      document_mask: whether the inputs are `Documents`.
      in_order: whether steps take their examples in turn: step n begins with the n * batch_size-th.
      summary: lines on what is trained on, and on what is left out and why: the first of a run.
      of_bytes: whether the tokens are the bytes of a text, so that bits per dim are bits per byte.
    """

    name: str
    vocab_size: int
    train_batch: Callable[[int, int, int, int], Batch]
    eval_batches: Callable[[str, int, int, int], Iterator[Batch]]
    n_targets: Callable[[str], int]
    translation: Translation | None = None
    fingerprint: Callable[[str], str] | None = None
    vocabulary: TextVocabulary | None = None
    n_bytes: Callable[[str], int] | None = None
    train_rows: Callable[[int, int, int, int, np.ndarray], Batch] | None = None
    labels: Labels | None = None
    masked: bool = False
    borders: Callable[[str], Int64[np.ndarray, " d"]] | None = None
    document_mask: bool = False
    in_order: bool = False
    summary: Callable[[], Sequence[str]] | None = None
    of_bytes: bool = False

    @property
    def kind(self) -> Kind:
        """What the task is: a model is for tasks of one kind."""
        if self.labels is not None:
            return "pairs" if self.labels.pairs else "labels"
        if self.masked:
            return "masked"
        return "text" if self.translation is None else "translation"

    @property
    def n_classes(self) -> int | None:
        """The classes of its rows; None if rows have none."""
        return None if self.labels is None else self.labels.n_classes

    @property
    def kept_vocabulary(self) -> Kept | None:
        """The vocabulary that stays with its run; None for bytes and other ids."""
        return self.vocabulary if self.translation is None else self.translation.vocabulary

    def rows_of_batch(
        self, seed: int, step: int, batch_size: int, length: int, rows: np.ndarray | slice
    ) -> Batch:
        """These rows of the batch of a step, by number: what one of several processes loads."""
        if self.train_rows is not None:
            return self.train_rows(seed, step, batch_size, length, rows)
        inputs, *others = self.train_batch(seed, step, batch_size, length)
        if isinstance(inputs, tuple):
            inputs = type(inputs)(*(part[rows] for part in inputs))
        else:
            inputs = inputs[rows]
        return Batch(inputs, *(x[rows] for x in others))

    def replace(self, **changes: Any) -> Task:
        """The task with other values of some attributes."""
        return dataclasses.replace(self, **changes)


class TaskModel:
    """A model of a task: what training and evaluation ask of one.

    A subclass has `vocab_size` and three functions of its parameters:

    * `init_params(rng, shape)`: first parameters, a tree of arrays, for tokens of shape (B, T).
    * `features(params, inputs, rng=None)`: `[B, T, D]` from the inputs of a `Batch`.
    * `logits(params, features)`: `[B, T, vocab_size]`; for classes `[B, 1, n_classes]`.

    Attributes:
      vocab_size: ids are below it.
      task_kind: the kind of tasks that it is for; see `Task.kind`.
      n_classes: of a classifier; None: it has none, or training takes them from the task.
      source_vocab_size: of a model of sentence pairs: ids of the source are below it.
      max_length: the longest row that its positions hold; None: any.
      dtype: of its products.
      backbone_names: the parameters that are no heads; empty: it does not say.
      kept_mass_layers: the numbers, from 1 on, of the layers that `kept_mass` measures.
      endless_from: the capacity from which on its texts go on without end; None: there is none.
      reads_ahead: whether a prompt may be read in pieces, at the cost of reading it whole.
      angles_change_after: the length beyond which all positions of a text rotate otherwise; None:
        there is none.
    """

    task_kind: Kind = "text"
    n_classes: int | None = None
    source_vocab_size: int | None = None
    max_length: int | None = None
    dtype: str = "float32"
    backbone_names: Sequence[str] = ()
    kept_mass_layers: Sequence[int] = ()
    endless_from: int | None = None
    reads_ahead: bool = False
    angles_change_after: int | None = None

    def is_endless(self, capacity: int) -> bool:
        """Whether texts whose caches have this capacity go on without end."""
        return self.endless_from is not None and capacity >= self.endless_from

    def with_n_hashes(self, n: int) -> TaskModel | None:
        """The model with `n` hashes in all attention that hashes; None where none does."""
        del n
        return None

    def kept_mass(self, params: Any, inputs: Any, rng: Any = None) -> dict[int, Any]:
        """The share of dense attention's mass on the keys that queries see, by layer.

        Of each layer whose attention chooses keys, and of a sample of queries. The other arguments
        are those of `features`.
        """
        del params, inputs, rng
        return {}
