"""Items of several lengths, such as sentences or conversations, in rows of one length.

Letters in the shapes: P items, R rows, S sides of an item, such as a sentence and its translation.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int64

# Packing starts with rows for 98% fill: then few items do not fit.
_FILL = 0.98


class Rows(NamedTuple):
    """Items in rows: row r holds `items[starts[r]:starts[r + 1]]`."""

    items: Int[np.ndarray, " P"]
    starts: Int[np.ndarray, " R+1"]

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.starts) - 1


class RowLayout(NamedTuple):
    """Where the tokens of some rows lie.

    Attributes:
      sources: the tokens, by position in the array of all.
      positions: the position of each in the rows, which are laid end to end.
      segment_ids: the segment of each, from 1 on in a row.
      items: the item that each is of.
    """

    sources: Int64[np.ndarray, " n"]
    positions: Int64[np.ndarray, " n"]
    segment_ids: Int64[np.ndarray, " n"]
    items: Int64[np.ndarray, " n"]


def pack(lengths: Int[np.ndarray, "P S"], items: Int[np.ndarray, " N"], length: int) -> Rows:
    """Puts items into rows that hold `length` tokens of each side.

    Items are dealt by falling length, one to each row at a time, the longest to the row with most
    room. Items that do not fit are packed in the same way into further rows.

    Args:
      lengths: tokens of each side of every item; from 1 to `length` for the packed ones.
      items: the items to pack; among equal lengths their order decides.
      length: tokens of a row.
    """
    longest = lengths.max(axis=1)
    row_of = np.empty(len(lengths), np.int64)
    left = items[np.argsort(-longest[items], kind="stable")]
    n_rows = 0
    while len(left):
        n_new = int(np.ceil(lengths[left].sum(axis=0).max() / (_FILL * length)))
        room = np.full((n_new, lengths.shape[1]), length, lengths.dtype)
        misfits = []
        for first in range(0, len(left), n_new):
            dealt = left[first : first + n_new]
            rows = np.argsort(-room.min(axis=1), kind="stable")[: len(dealt)]
            fits = (lengths[dealt] <= room[rows]).all(axis=1)
            room[rows[fits]] -= lengths[dealt[fits]]
            row_of[dealt[fits]] = n_rows + rows[fits]
            misfits.append(dealt[~fits])
        n_rows, left = n_rows + n_new, np.concatenate(misfits)
    in_rows = items[np.argsort(row_of[items], kind="stable")]
    counts = np.bincount(row_of[items], minlength=n_rows)
    starts = np.concatenate([[0], np.cumsum(counts[counts > 0])])
    return Rows(in_rows, starts)


def laid_out(
    rows: Rows,
    chosen: Int[np.ndarray, " B"],
    begins: Int[np.ndarray, " P"],
    ends: Int[np.ndarray, " P"],
    length: int,
) -> RowLayout:
    """Where the tokens of the chosen rows lie; those of item p are from begins[p] to ends[p]."""
    slots, row, k = _ranges(rows.starts[chosen], rows.starts[chosen + 1])
    items = rows.items[slots]
    first, last = begins[items], ends[items]
    sources, slot, position = _ranges(first, last)
    # Where an item begins in its row: the tokens before it, less those of earlier rows.
    before = np.concatenate([[0], np.cumsum(last - first)])[:-1]
    begin = before - before[np.searchsorted(row, row)]
    positions = row[slot] * length + begin[slot] + position
    return RowLayout(sources, positions, k[slot] + 1, items[slot])


def in_rows(
    layout: RowLayout, values: np.ndarray, n_rows: int, length: int, dtype: type
) -> np.ndarray:
    """An array `[n_rows, length]` with a value for each token of a layout, and 0 elsewhere."""
    found = np.zeros(n_rows * length, dtype)
    found[layout.positions] = values
    return found.reshape(n_rows, length)


def _ranges(begins: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All integers of the ranges [begin, end), each with its range's index and its offset there."""
    counts = ends - begins
    index = np.repeat(np.arange(len(counts)), counts)
    offset = np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)
    return begins[index] + offset, index, offset
