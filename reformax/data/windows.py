"""Where the windows of a text begin, and the segments of their documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int, Int32, Int64, UInt

from reformax.data.lengths import Lengths, Range
from reformax.data.rng import Stream, apart, generator, in_epochs
from reformax.data.stored import windows_of

# Where training windows of a text begin; see `document_starts` and `each_once`.
Windows = Literal["anywhere", "documents", "each_once"]


class WindowDraw(NamedTuple):
    """The windows that a process draws for a step.

    Attributes:
      borders: the tokens, by position, that documents begin with, sorted; None: windows begin
        anywhere.
      n: tokens of the text, at least `length`.
      seed, step: of the draws.
      batch_size, length: rows of the batch, and tokens of one.
      rows: the rows that are drawn, by number.
    """

    borders: Int64[np.ndarray, " d"] | None
    n: int
    seed: int
    step: int
    batch_size: int
    length: int
    rows: np.ndarray | slice


def window_starts(
    where: Windows, draw: WindowDraw
) -> tuple[Int64[np.ndarray, " B"], Int64[np.ndarray, " B"]]:
    """Where training windows begin, and from which of their tokens on they are targets."""
    borders, n, seed, step, batch_size, length, rows = draw
    rng = generator(seed, step)
    if where == "each_once":
        return each_once(n, length, seed, step * batch_size + np.arange(batch_size)[rows])
    if where == "anywhere":
        starts = rng.integers(n - length + 1, size=batch_size)[rows]
    else:
        positions, back = (rng.integers(end, size=batch_size)[rows] for end in (n, length))
        starts = document_starts(borders, n, length, positions, back)
    return starts, np.zeros_like(starts)


def each_once(
    n: int, length: int, seed: int, numbers: Int[np.ndarray, " B"]
) -> tuple[Int64[np.ndarray, " B"], Int64[np.ndarray, " B"]]:
    """Where windows begin, by their numbers, and from which of their tokens on they are targets.

    An epoch has the windows that cover the text one after the other, in an order of its own. Each
    token is a target once in it: the last window is moved back to end with the text, and what
    another one has counts there alone.

    Args:
      n: tokens of the text, at least `length`.
      length: of a window.
      seed: of all orders.
      numbers: of windows since the first step.
    """
    n_windows = -(-n // length)
    found = in_epochs(numbers, n_windows, seed)
    starts = np.minimum(found * length, n - length)
    return starts, found * length - starts


def document_starts(
    borders: Int64[np.ndarray, " d"],
    n: int,
    length: int,
    positions: Int[np.ndarray, " B"],
    back: Int[np.ndarray, " B"],
) -> Int64[np.ndarray, " B"]:
    """Where windows begin by documents, each by a position in the text.

    The document that holds the position decides:

    * One of at most `length` tokens is seen from its begin: the window begins at the nearer end of
      the document, which is its own begin or the next one's. Were it always its own, a short
      document after one of about `length` tokens would hardly be a target.
    * Of a longer one any window that holds the position is as likely: the window begins `back`
      tokens before the position, but not before the document. So (length + 1) / 2 in D windows of a
      document of D tokens begin with it, and its middle is seen no less.

    Windows have `length` tokens, so what follows a document goes on in them. With `positions`
    uniform in [0, n) and `back` in [0, length), a token that is at least `length` from the text's
    ends is a target at least 3/8 and at most twice as often as the mean token, whatever the lengths
    of documents; as often as the mean where a document is longer than two windows and the token a
    window from its ends. A window that would pass the text's end ends there.

    Args:
      borders: the tokens, by position, that documents begin with, sorted.
      n: tokens of the text, at least `length`.
      length: of a window.
      positions: in the text, below n.
      back: below `length`.
    """
    begin, end = document_bounds(borders, n, positions)
    return np.minimum(_starts_within(begin, end, length, positions, back), n - length)


def document_bounds(
    borders: Int64[np.ndarray, " d"], n: int, positions: Int[np.ndarray, " B"]
) -> tuple[Int64[np.ndarray, " B"], Int64[np.ndarray, " B"]]:
    """The begins and ends of the documents that hold some positions."""
    after = borders.searchsorted(positions, "right")
    begin = np.where(after > 0, borders[after - 1], 0)
    end = np.where(after < len(borders), borders[np.minimum(after, len(borders) - 1)], n)
    return begin, end


def _starts_within(begin, end, length: int, positions, back) -> Int64[np.ndarray, " B"]:
    """`document_starts` of documents whose bounds are known, before the text's end counts."""
    nearer = np.where(positions - begin < end - positions, begin, end)
    return np.where(end - begin <= length, nearer, np.maximum(begin, positions - back))


def range_starts(
    found: Sequence[Range], lengths: Lengths, draw: WindowDraw
) -> tuple[Int64[np.ndarray, " B"], Int64[np.ndarray, " B"]]:
    """The range of lengths of each row, and where in the range's text its window begins.

    Args:
      found: the ranges of the text.
      lengths: how often a row is of each.
      draw: the windows.
    """
    borders, n, seed, step, batch_size, length, rows = draw
    rng = generator(seed, step)
    of_ranges = apart(rng, Stream.RANGES_OF_LENGTHS)
    chosen = of_ranges.choice(len(found), size=batch_size, p=lengths.shares())
    sizes = np.array([len(one) for one in found])[chosen]
    if borders is None:
        return chosen[rows], rng.integers(sizes - length + 1)[rows]
    indices, back = rng.integers(sizes)[rows], rng.integers(length, size=batch_size)[rows]
    chosen, sizes = chosen[rows], sizes[rows]
    positions = [found[k].positions(index) for k, index in zip(chosen, indices, strict=True)]
    before = np.array(positions, np.int64) - indices
    begin, end = (x - before for x in document_bounds(borders, n, indices + before))
    return chosen, np.minimum(_starts_within(begin, end, length, indices, back), sizes - length)


def range_windows(
    found: Sequence[Range],
    chosen: Int64[np.ndarray, " B"],
    starts: Int64[np.ndarray, " B"],
    data: UInt[np.ndarray, " n"],
    segments: Int64[np.ndarray, " d"] | None,
    length: int,
) -> tuple[UInt[np.ndarray, "B {length}"], Int32[np.ndarray, "B {length}"] | None]:
    """The tokens of windows of ranges, and their segments where documents are hidden."""
    tokens = np.empty((len(starts), length), data.dtype)
    ids = None if segments is None else np.empty((len(starts), length), np.int32)
    for row, (k, start) in enumerate(zip(chosen, starts, strict=True)):
        at = last = 0
        for first, n in found[k].spans(int(start), length):
            span, position = slice(at, at + n), np.array([first])
            tokens[row, span] = windows_of(data, position, n)[0]
            if ids is not None:  # what follows a run is another document
                ids[row, span] = segment_ids_of(segments, position, n)[0] + last
                last = ids[row, at + n - 1]
            at += n
    return tokens, ids


def segment_ids_of(
    borders: Int64[np.ndarray, " d"], starts: Int64[np.ndarray, " B"], length: int
) -> Int32[np.ndarray, "B {length}"]:
    """The segments of windows: tokens of a row's first document have id 1, and so on upwards.

    Args:
      borders: the tokens, by position, that documents begin with, sorted.
      starts: the positions that windows begin at.
      length: of a window.
    """
    first, last = (borders.searchsorted(starts + n, "right") for n in (0, length - 1))
    ids = [
        np.asarray(borders[a:b]).searchsorted(start + np.arange(length), "right")
        for a, b, start in zip(first, last, starts, strict=True)
    ]
    return np.array(ids, np.int32).reshape(len(starts), length) + 1
