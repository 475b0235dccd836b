"""Tasks of naming the class of a row, or of a pair of rows, out of a fixed set of examples.

Letters in the shapes: n examples, L the longest of them, B batch, T length.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from jaxtyping import Int, UInt8

from reformax.data.base import SPLITS, fingerprint
from reformax.data.checks import check_sizes, check_split, check_stride, of_split
from reformax.data.rng import generator
from reformax.declared import SettingError
from reformax.task import Batch, DocumentPairs, Labels, Task

# Tokens, and the classes, of examples by number.
Examples = Callable[
    [str, Int[np.ndarray, " n"]],
    tuple[Int[np.ndarray, "n L"] | tuple[Int[np.ndarray, "n L"], ...], Int[np.ndarray, " n"]],
]

_HELD_OUT = 10


def labelled_task(
    name: str,
    *,
    vocab_size: int,
    labels: Labels,
    sizes: Mapping[str, int] | Callable[[str], int],
    examples: Examples,
    made_by: Callable[[str], str],
    longest: int | None = None,
    in_order: bool = False,
) -> Task:
    """The task of predicting the class of each example of a split, each with weight 1.

    A step of training draws its examples uniformly, with replacement, by (seed, step). With
    `in_order` it takes the next `batch_size`, from an index that goes by the seed, and goes round.

    Args:
      name: the task's name in logs and errors.
      vocab_size: tokens are below it; 0 is padding.
      labels: the classes; their `pairs` says that an example is two rows.
      sizes: the number of examples of each split, or a function that checks a split's name and
        returns it.
      examples: (split, numbers) -> tokens `[n, L]`, or those of both documents, with 0 after
        shorter ones, and labels `[n]`.
      made_by: split -> what its data is, in words.
      longest: tokens of the longest example; a shorter length of batches is refused. None: what is
        longer than a batch is cut.
      in_order: for examples that are drawn alike, and made many at once when they are first read.

    Raises:
      ValueError: by the task's functions, for an unknown split, a length below `longest`, a stride
        that is not the length, and a size below 1.
    """

    def check_length(length: int, stride: int) -> None:
        if longest is not None and length < longest:
            raise SettingError(f"length={length} must be at least {longest}, the longest of {name}")
        check_stride(stride, length, "examples do not overlap")

    size = sizes if callable(sizes) else functools.partial(of_split, name, sizes)

    def batch(split: str, numbers: np.ndarray, batch_size: int, length: int) -> Batch:
        tokens, classes = examples(split, numbers)
        fill = batch_size - len(numbers)
        rows = [_fitted(x, fill, length) for x in (tokens if labels.pairs else (tokens,))]
        targets = np.pad(classes.astype(np.int32), (0, fill))[:, None]
        weights = np.pad(np.ones(len(numbers), np.float32), (0, fill))[:, None]
        return Batch(DocumentPairs(*rows) if labels.pairs else rows[0], targets, weights)

    def train_rows(
        seed: int, step: int, batch_size: int, length: int, rows: np.ndarray | slice
    ) -> Batch:
        check_sizes(batch_size=batch_size, length=length)
        check_length(length, length)
        n = size("train")
        if in_order:
            first = int(generator(seed, 0).integers(n)) + step * batch_size
            numbers = (first % n + np.arange(batch_size)) % n
        else:
            numbers = generator(seed, step).integers(n, size=batch_size)
        numbers = numbers[rows]
        return batch("train", numbers, len(numbers), length)

    def eval_batches(split: str, batch_size: int, length: int, stride: int) -> Iterator[Batch]:
        check_sizes(batch_size=batch_size, length=length, stride=stride)
        check_length(length, stride)
        n = size(split)
        parts = (np.arange(i, min(i + batch_size, n)) for i in range(0, n, batch_size))
        return (batch(split, numbers, batch_size, length) for numbers in parts)

    return Task(
        name,
        vocab_size,
        functools.partial(train_rows, rows=slice(None)),
        eval_batches,
        size,
        fingerprint=made_by,
        train_rows=train_rows,
        labels=labels,
        in_order=in_order,
    )


def with_valid(
    read: Callable[[str], tuple[list[bytes], list[int]]],
) -> Callable[[str], tuple[list[bytes], list[int]]]:
    """Every tenth of the examples of 'train' as 'valid', for a set that is published without.

    Args:
      read: 'train' or 'test' -> its rows and their classes.
    """

    def split_of(split: str) -> tuple[list[bytes], list[int]]:
        if split == "test":
            return read("test")
        rows, classes = read("train")
        chosen = [i for i in range(len(rows)) if (i % _HELD_OUT == 0) == (split == "valid")]
        return [rows[i] for i in chosen], [classes[i] for i in chosen]

    return split_of


def stored_task(
    name: str,
    *,
    vocab_size: int,
    labels: Labels,
    read: Callable[[str], tuple[list[bytes] | list[tuple[bytes, bytes]], list[int]]],
    longest: int | None = None,
) -> Task:
    """A labelled task of examples that are stored as bytes; a token is a byte plus 1.

    Args:
      name, vocab_size, labels, longest: as in `labelled_task`.
      read: split, one of 'train', 'valid' and 'test' -> its rows, or pairs of rows, and their
        classes. It is called once a split, when that is first needed.

    Raises:
      ValueError: as in `labelled_task`; a split is empty, or has another class.
    """

    @functools.cache
    def stored(split: str) -> tuple[list, np.ndarray]:
        check_split(name, split, SPLITS)
        rows, classes = read(split)
        if not rows:
            raise ValueError(f"{name}: split {split} has no example: give data that has some")
        if not 0 <= min(classes) <= max(classes) < labels.n_classes:
            raise ValueError(
                f"{name}: split {split} has classes from {min(classes)} to {max(classes)}: "
                f"expected 0 to {labels.n_classes - 1}"
            )
        return rows, np.asarray(classes)

    def examples(split: str, numbers: Int[np.ndarray, " n"]):
        rows, classes = stored(split)
        chosen = [rows[i] for i in numbers]
        sides = zip(*chosen, strict=True) if labels.pairs else [chosen]
        tokens = tuple(padded([_tokens(row) for row in side]) for side in sides)
        return tokens if labels.pairs else tokens[0], classes[numbers]

    @functools.cache
    def made_by(split: str) -> str:
        rows, classes = stored(split)
        flat = [part for row in rows for part in row] if labels.pairs else rows
        numbers = classes.astype(np.uint8 if labels.n_classes <= 256 else "<u4").tobytes()
        text = np.frombuffer(b"\0".join([*flat, numbers]), np.uint8)
        return f"{len(rows):,} examples, {fingerprint(text)}"

    def summary() -> list[str]:
        sizes = []
        for split in SPLITS:
            with contextlib.suppress(ValueError, OSError):  # a run may do without 'test'
                sizes.append(f"{split} {len(stored(split)[0]):,}")
        return [f"{name}: {', '.join(sizes)} examples of {labels.n_classes} classes"]

    task = labelled_task(
        name,
        vocab_size=vocab_size,
        labels=labels,
        sizes=lambda split: len(stored(split)[0]),
        examples=examples,
        made_by=made_by,
        longest=longest,
    )
    return task.replace(summary=summary)


def _tokens(row: bytes) -> Int[np.ndarray, " _"]:
    return np.frombuffer(row, np.uint8).astype(np.int32) + 1


def padded(
    rows: list[UInt8[np.ndarray, " _"]], length: int | None = None
) -> Int[np.ndarray, "n L"]:
    """Rows as one array of a length, with 0 after; None: that of the longest."""
    if length is None:
        length = max(map(len, rows), default=0)
    tokens = np.zeros((len(rows), length), np.int32)
    for into, row in zip(tokens, rows, strict=True):
        into[: len(row)] = row
    return tokens


def _fitted(tokens: Int[np.ndarray, "n L"], fill: int, length: int) -> Int[np.ndarray, "B T"]:
    """Tokens cut or padded to a length, with `fill` rows of padding."""
    tokens = tokens[:, :length].astype(np.int32)
    return np.pad(tokens, ((0, fill), (0, length - tokens.shape[1])))
