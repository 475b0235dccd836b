"""What a task is, and the language model over the bytes of a text.

Letters in the shapes: B batch, T length, S length of the source in translation. Text is modelled as
its bytes, 256 symbols, so that a loss of l nats a target is l / ln 2 bits per dim ("bits per
character" of enwik8 in the literature).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Protocol

import numpy as np
from jaxtyping import Float32, Int32, UInt8

SPLITS = ("train", "valid", "test")


# The ids that every vocabulary of sentences begins with. 0 also stands before the first token.
PAD, EOS, UNKNOWN = 0, 1, 2


class SentencePairs(NamedTuple):
    """Packed rows: segment k of a row of `target` translates segment k of its row of `source`.

    Segments are contiguous and numbered 1, 2, 3, ... along a row; 0 is padding, at the end. Every
    sentence ends in `EOS`.
    """

    source: Int32[np.ndarray, "B S"]
    target: Int32[np.ndarray, "B T"]
    source_segments: Int32[np.ndarray, "B S"]
    target_segments: Int32[np.ndarray, "B T"]


class Batch(NamedTuple):
    """A batch: position t predicts targets[t] from inputs[<t], in translation of its own segment.

    The shift is the model's, so `inputs`, or `inputs.target`, and `targets` are the same array: do
    not write to it.
    """

    inputs: Int32[np.ndarray, "B T"] | SentencePairs
    targets: Int32[np.ndarray, "B T"]
    weights: Float32[np.ndarray, "B T"]  # 1 where the loss counts, else 0


class Vocabulary(Protocol):
    """Sentences as ids, and back; see `reformax.data.vocabulary`."""

    size: int

    def encode(self, sentence: str) -> list[int]:
        """The ids of a sentence, ended by `EOS`."""

    def decode(self, ids: list[int]) -> str:
        """The sentence of ids, which ends before the first `EOS` if there is one."""

    def keep_in(self, folder: str | os.PathLike, begun: bool) -> str | None:
        """Reads what was learnt from data in a run's folder, or learns it and writes it there.

        Args:
          folder: of the run.
          begun: whether the run has trained on it: then it must be there.

        Returns:
          A fingerprint of what was learnt; None of a vocabulary that learns nothing.

        Raises:
          ValueError: it is not there and should be, is damaged or is another's.
        """


class Translation(NamedTuple):
    """What a task of sentence pairs has besides its batches."""

    vocabulary: Vocabulary
    # split -> (sources, references), every sentence of it as it was read, in order
    sentences: Callable[[str], tuple[list[str], list[str]]]


class Task(NamedTuple):
    """What a model is trained on and scored on.

    `train_batch` is a pure function: who resumes at step n sees the batches that an uninterrupted
    run sees. `eval_batches` checks its arguments when it is called, not at the first batch.
    """

    name: str
    vocab_size: int
    # (seed, step, batch_size, length) -> the batch of that step
    train_batch: Callable[[int, int, int, int], Batch]
    # (split, batch_size, length, stride) -> batches in which each target has weight 1 exactly once
    eval_batches: Callable[[str, int, int, int], Iterator[Batch]]
    # split -> how many targets it has
    n_targets: Callable[[str], int]
    # of a task of sentence pairs, whose inputs are `SentencePairs`
    translation: Translation | None = None


def split_bytes(data: UInt8[np.ndarray, " n"], source: str) -> dict[str, UInt8[np.ndarray, " n"]]:
    """The first 90% of `data` to train on, the next 5% to choose by, the last 5% to report.

    The customary split of enwik8: its 10^8 bytes give 90M, 5M and 5M. Fractions are rounded in
    favour of train.

    Args:
      data: the bytes of the text, in order.
      source: what the bytes are, for the error.

    Returns:
      {'train': ..., 'valid': ..., 'test': ...}, views of `data`.

    Raises:
      ValueError: a split would be empty.
    """
    held_out = len(data) * 5 // 100
    if not held_out:
        raise ValueError(
            f"{source}: {len(data)} bytes are too few to split 90/5/5, give a text of 20 or more"
        )
    train, valid, test = np.split(data, [len(data) - 2 * held_out, len(data) - held_out])
    return {"train": train, "valid": valid, "test": test}


def byte_language_model(
    name: str, splits: Mapping[str, UInt8[np.ndarray, " n"]], offset: int = 0
) -> Task:
    """The task of predicting each byte of a text from those before it.

    Training batches are windows at uniformly random places of `splits['train']`. Evaluation moves a
    window of `length` by `stride` <= `length`; each window is scored on its last `stride` bytes, so
    that every byte is predicted once and, but for the first `length` of a split, from at least
    `length - stride` bytes before it. The first window is scored on all of its bytes. The last is
    moved back to lie inside the split. Rows that fill up the last batch have weight 0, and so has
    the right padding of a split that is shorter than a window.

    Args:
      name: of the task, for logs and errors.
      splits: the bytes of 'train', 'valid' and 'test', none of them empty.
      offset: a byte's id is the byte plus this; the ids below are some model's own.

    Returns:
      a Task with vocab_size 256 + offset. Its functions raise ValueError for an unknown split, for
      a stride outside 1..length, for another size below 1, and for a training length above the
      text's.
    """

    def bytes_of(split: str) -> np.ndarray:
        check_split(name, split, tuple(splits))
        return splits[split]

    def train_batch(seed: int, step: int, batch_size: int, length: int) -> Batch:
        check_sizes(batch_size=batch_size, length=length)
        data = splits["train"]
        if length > len(data):
            raise ValueError(
                f"length={length} must be at most {len(data)}, the bytes that {name} trains on"
            )
        starts = generator(seed, step).integers(len(data) - length + 1, size=batch_size)
        # Rows of a strided view are contiguous, so this copies bytes in runs and widens them once.
        windows = np.lib.stride_tricks.sliding_window_view(data, length)[starts]
        tokens = windows.astype(np.int32) + offset
        return Batch(tokens, tokens, np.ones(tokens.shape, np.float32))

    def eval_batches(split: str, batch_size: int, length: int, stride: int) -> Iterator[Batch]:
        check_sizes(batch_size=batch_size, length=length, stride=stride)
        if stride > length:
            raise ValueError(f"stride={stride} must be at most length={length}")
        data = bytes_of(split)
        n = len(data)
        if n < length:
            data = np.pad(data, (0, length - n))
        n_windows = 1 + max(0, -(-(n - length) // stride))
        # Window k is scored from where window k - 1 ends up to its own end.
        ends = np.minimum(length + stride * np.arange(n_windows), len(data))
        scored_from = np.concatenate([[0], ends[:-1]])

        def batches() -> Iterator[Batch]:
            for first in range(0, n_windows, batch_size):
                rows = slice(first, first + batch_size)
                positions = ends[rows, None] - length + np.arange(length)
                weights = (positions >= scored_from[rows, None]) & (positions < n)
                yield full_batch(data[positions].astype(np.int32) + offset, weights, batch_size)

        return batches()

    if not 0 <= offset < 2**16:
        raise ValueError(f"offset={offset} must be from 0 to {2**16 - 1}")
    return Task(name, 256 + offset, train_batch, eval_batches, lambda split: len(bytes_of(split)))


def generator(seed: int, step: int) -> np.random.Generator:
    """The random numbers of a step: Philox keyed by (seed, step), each from 0 up to 2^63 - 1.

    A counter-based generator has independent streams for neighbouring keys and needs no state from
    the steps before.

    Raises:
      ValueError: seed or step out of range.
    """
    for argument, value in (("seed", seed), ("step", step)):
        if not 0 <= value < 2**63:
            raise ValueError(f"{argument}={value} must be from 0 to 2^63 - 1")
    return philox(seed, step)


def philox(high: int, low: int) -> np.random.Generator:
    """A generator for a key of two words below 2^64; `generator` uses high words below 2^63."""
    return np.random.Generator(np.random.Philox(key=np.array([high, low], np.uint64)))


def full_batch(tokens: np.ndarray, weights: np.ndarray, batch_size: int) -> Batch:
    """A batch of `tokens` [b, T] scored at `weights` [b, T], filled up to B rows of weight 0."""
    fill = ((0, batch_size - len(tokens)), (0, 0))
    tokens = np.pad(tokens.astype(np.int32), fill)
    return Batch(tokens, tokens, np.pad(weights.astype(np.float32), fill))


def check_split(name: str, split: str, splits: tuple[str, ...]) -> None:
    """Raises ValueError if the task `name` has no such split."""
    if split not in splits:
        raise ValueError(f"split={split!r} must be one of {', '.join(splits)} (task {name})")


def check_sizes(**sizes: int) -> None:
    """Raises ValueError for a size below 1."""
    for argument, value in sizes.items():
        if value < 1:
            raise ValueError(f"{argument}={value} must be at least 1")
