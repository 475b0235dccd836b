"""The task of modelling the bytes or the tokens of a text.

Letters in the shapes: B batch, T length. A text is its bytes, 256 symbols. A loss of l nats a byte
is l / ln 2 bits per dim, which the literature on enwik8 calls bits per character.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64, UInt, UInt8

from reformax.data.checks import check_sizes, check_windows, of_split
from reformax.data.lengths import Lengths, Range, check_enough, ranges
from reformax.data.stored import crc32_of, windows_of
from reformax.data.windows import (
    WindowDraw,
    Windows,
    range_starts,
    range_windows,
    segment_ids_of,
    window_starts,
)
from reformax.declared import SettingError
from reformax.task import Batch, Documents, Task

SPLITS = ("train", "valid", "test")
# The most bytes or ids of valid and of test that are cut from a text of any size.
MAX_HELD_OUT = 1_000_000

# The first ids of every vocabulary of sentences. 0 also precedes the first token.
PAD, EOS, UNKNOWN = 0, 1, 2


class WindowSettings(NamedTuple):
    """How a text is divided into windows.

    Attributes:
      where: where training windows begin.
      document_mask: whether a window's documents are hidden from each other.
      lengths: how often a training window is of documents of each range of lengths; None: they are
        of the whole text.
    """

    where: Windows = "anywhere"
    document_mask: bool = False
    lengths: Lengths | None = None


ANYWHERE = WindowSettings()


def held_out_size(n: int, most: int = MAX_HELD_OUT) -> int:
    """The bytes or ids, of n, that each held-out split has where it is cut from the text: 5%."""
    return min(n * 5 // 100, most)


def split_bytes(data: UInt8[np.ndarray, " n"], source: str) -> dict[str, UInt8[np.ndarray, " n"]]:
    """The first 90% of `data` to train on, the next 5% to choose by, the last 5% to report.

    This is the usual split of enwik8: 90, 5 and 5 million bytes. The remainder goes to train.

    Args:
      data: the bytes of the text, in order.
      source: the name of the text in errors.

    Returns:
      {'train': ..., 'valid': ..., 'test': ...}, views of `data`.

    Raises:
      ValueError: a split would be empty.
    """
    held_out = held_out_size(len(data), len(data))
    if not held_out:
        raise ValueError(
            f"{source}: {len(data)} bytes are too few to split 90/5/5, give a text of 20 or more"
        )
    train, valid, test = np.split(data, [len(data) - 2 * held_out, len(data) - held_out])
    return {"train": train, "valid": valid, "test": test}


def split_borders(
    begins: Mapping[str, Int64[np.ndarray, " d"]], splits: Mapping[str, UInt8[np.ndarray, " n"]]
) -> dict[str, Int64[np.ndarray, " d"]] | None:
    """Where documents begin in each split of a text.

    Args:
      begins: where they begin in each text, sorted. Splits without one of their own are cut, in
        order, from that of 'train'.
      splits: the bytes of each split.

    Returns:
      The positions in each split, which may begin within a document; None for one document.
    """
    if max(map(len, begins.values())) < 2:
        return None
    found, whole, first = dict(begins), begins["train"], 0
    for split in SPLITS:
        if split == "train" or split not in begins:
            end = first + len(splits[split])
            found[split] = whole[slice(*whole.searchsorted([first, end]))] - first
            first = end
    return found


def byte_language_model(
    name: str,
    splits: Mapping[str, UInt8[np.ndarray, " n"]],
    offset: int = 0,
    borders: Mapping[str, Int64[np.ndarray, " d"]] | None = None,
    windows: WindowSettings = ANYWHERE,
    segments: Mapping[str, Int64[np.ndarray, " d"]] | None = None,
) -> Task:
    """The task of predicting each byte of a text from those before it.

    Training batches are windows of `splits['train']`, at uniformly random positions or as
    `document_starts` has them. Evaluation moves a window of `length` by `stride` <= `length` and
    scores its last `stride` bytes, so every byte is predicted once, and from at least
    `length - stride` bytes after the first window. The first window is scored whole; the last is
    moved back to lie inside the split. Rows that fill the last batch have weight 0, and so has the
    padding of a split that is shorter than a window.

    With `document_mask` a byte is predicted from those of its own document alone, in training and
    in evaluation: the inputs are `Documents`. Where windows lie stays as it is.

    Args:
      name: the task's name in logs and errors.
      splits: the bytes of 'train', 'valid' and 'test', none of them empty.
      offset: a byte's id is the byte plus this; lower ids are reserved.
      borders: the bytes, by position, that documents begin with, sorted; None: one document. Those
        after a split's end are left out.
      windows: how the text is divided into windows.
      segments: as `borders`, of what the mask hides from each other; None: the documents.

    Returns:
      A Task with vocab_size 256 + offset. Its functions raise ValueError for an unknown split, a
      stride outside 1..length, another size below 1, and a training length above the text's.

    Raises:
      ValueError: an offset out of range, or settings by the documents of a text without.
    """
    if not 0 <= offset < 2**16:
        raise SettingError(f"offset={offset} must be from 0 to {2**16 - 1}")
    borders, segments = (
        x and {s: positions[: positions.searchsorted(len(splits[s]))] for s, positions in x.items()}
        for x in (borders, segments)
    )
    check_documents(borders, windows, segments)
    bytes_of = functools.partial(of_split, name, splits)
    task = language_model(
        *(name, 256 + offset, bytes_of, offset),
        borders_of=None if borders is None else functools.partial(of_split, name, borders),
        windows=windows,
        segments_of=None if segments is None else functools.partial(of_split, name, segments),
    )
    made_by = text_fingerprint(bytes_of, windows.document_mask)
    return task.replace(fingerprint=made_by, of_bytes=True)


def language_model(
    name: str,
    vocab_size: int,
    tokens_of: Callable[[str], UInt[np.ndarray, " n"]],
    offset: int = 0,
    borders_of: Callable[[str], Int64[np.ndarray, " d"]] | None = None,
    windows: WindowSettings = ANYWHERE,
    segments_of: Callable[[str], Int64[np.ndarray, " d"]] | None = None,
) -> Task:
    """The task of predicting each token of a text from those before it, by windows.

    Tokens and borders may be a `StoredArray`: then a batch reads its own windows alone.
    `byte_language_model` says how windows lie and what is read in them.

    Args:
      name: the task's name in logs and errors.
      vocab_size: ids are below it.
      tokens_of: split -> its tokens, in order; checks the split's name.
      offset: is added to each token.
      borders_of: split -> the tokens, by position, that documents begin with, sorted; keeps them.
      windows: how the text is divided into windows.
      segments_of: as `borders_of`, of what the mask hides from each other; None: the documents.
    """
    segments_of = segments_of or borders_of
    where, document_mask, lengths = windows

    @functools.cache
    def ranges_of_train() -> list[Range]:
        return ranges(borders_of("train"), len(tokens_of("train")), lengths.borders)

    def train_rows(seed: int, step: int, batch_size: int, length: int, rows) -> Batch:
        check_sizes(batch_size=batch_size, length=length)
        data = tokens_of("train")
        if length > len(data):
            unit = "bytes" if data.dtype == np.uint8 else "tokens"
            raise SettingError(
                f"length={length} must be at most {len(data)}, the {unit} that {name} trains on"
            )
        segments = segments_of("train") if document_mask else None
        borders = borders_of("train") if where == "documents" else None
        draw = WindowDraw(borders, len(data), seed, step, batch_size, length, rows)
        if lengths is None:
            starts, scored_from = window_starts(where, draw)
            tokens = windows_of(data, starts, length)
            ids = None if segments is None else segment_ids_of(segments, starts, length)
        else:
            found = ranges_of_train()
            check_enough(found, lengths, length)
            drawn = range_starts(found, lengths, draw)
            tokens, ids = range_windows(found, *drawn, data, segments, length)
            scored_from = np.zeros(len(tokens), np.int64)
        tokens = tokens.astype(np.int32) + offset
        weights = (np.arange(length) >= scored_from[:, None]).astype(np.float32)
        return Batch(tokens if ids is None else Documents(tokens, ids), tokens, weights)

    def eval_batches(split: str, batch_size: int, length: int, stride: int) -> Iterator[Batch]:
        check_windows(batch_size, length, stride)
        data = tokens_of(split)
        n = len(data)
        if n < length:
            data = np.pad(np.asarray(data), (0, length - n))
        n_windows = 1 + max(0, -(-(n - length) // stride))
        # Window k is scored from where window k - 1 ends up to its own end.
        ends = np.minimum(length + stride * np.arange(n_windows), len(data))
        scored_from = np.concatenate([[0], ends[:-1]])

        def batches() -> Iterator[Batch]:
            for first in range(0, n_windows, batch_size):
                rows = slice(first, first + batch_size)
                starts = ends[rows] - length
                positions = starts[:, None] + np.arange(length)
                weights = (positions >= scored_from[rows, None]) & (positions < n)
                tokens = windows_of(data, starts, length).astype(np.int32) + offset
                segment_ids = None
                if document_mask:
                    segment_ids = segment_ids_of(segments_of(split), starts, length) * (
                        positions < n
                    )
                yield full_batch(tokens, weights, batch_size, segment_ids)

        return batches()

    train_batch = functools.partial(train_rows, rows=slice(None))
    task = Task(name, vocab_size, train_batch, eval_batches, lambda split: len(tokens_of(split)))
    return task.replace(
        train_rows=train_rows,
        borders=segments_of,
        document_mask=document_mask,
        in_order=where == "each_once",
    )


def check_documents(
    borders: Mapping[str, np.ndarray] | None,
    windows: WindowSettings,
    segments: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Raises `SettingError` for settings by documents if the training text has none, or one.

    The mask goes by `segments` where they are given, and else by documents.
    """
    asked = {
        "windows is 'documents'": windows.where == "documents",
        "document_mask is True": windows.document_mask and segments is None,
        "length_weights is set": windows.lengths is not None,
    }
    setting = next((words for words, is_asked in asked.items() if is_asked), None)
    if setting is not None and (borders is None or len(borders["train"]) < 2):
        raise SettingError(
            f"{setting}: the text to train on is one document, give a table or a folder of files, "
            "or leave it out"
        )


def text_fingerprint(
    bytes_of: Callable[[str], UInt8[np.ndarray, " n"]], document_mask: bool
) -> Callable[[str], str]:
    """Split -> the fingerprint of its bytes, and whether its documents are predicted apart."""
    mask = ", document_mask=True" * document_mask
    return functools.cache(lambda split: fingerprint(bytes_of(split)) + mask)


def fingerprint(data: UInt8[np.ndarray, " n"]) -> str:
    """The length and the CRC-32 of bytes, in words.

    Of the checksums in the standard library CRC-32 costs least: 0.2 seconds for 1 GB, or 1 second
    with a zlib that has no instructions for it. It finds accidents, not forgeries.
    """
    return f"{len(data):,} bytes of CRC-32 {crc32_of(data):08x}"


def full_batch(
    tokens: np.ndarray, weights: np.ndarray, batch_size: int, segment_ids: np.ndarray | None = None
) -> Batch:
    """A batch of `tokens` [b, T] scored at `weights` [b, T], filled to B rows with weight 0.

    With `segment_ids` [b, T] the inputs are `Documents`.
    """
    fill = ((0, batch_size - len(tokens)), (0, 0))
    tokens = np.pad(tokens.astype(np.int32), fill)
    inputs = tokens if segment_ids is None else Documents(tokens, np.pad(segment_ids, fill))
    return Batch(inputs, tokens, np.pad(weights.astype(np.float32), fill))
