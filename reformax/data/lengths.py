"""Mixtures by length of document: a weight for the documents of each range of lengths.

The documents of a range are a text of their own, one after the other in the order of the source,
and windows lie in it as they do in a whole text. Nothing is copied: a range is an index of runs,
which are neighbouring documents of one range. It has 16 bytes a run, is made of the documents'
begins at each start, and is the same for texts in memory and in files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int64

from reformax.declared import NonNegative, SettingError, Size


class Lengths(NamedTuple):
    """The lengths that ranges are divided by, in tokens, and how often a row is of each range."""

    borders: Sequence[Size]
    weights: Sequence[NonNegative]

    def shares(self) -> np.ndarray:
        """The weights, as parts of 1."""
        return np.array(self.weights, float) / sum(self.weights)

    def words(self, k: int) -> str:
        """Range k, such as 'documents of 8,192 to 32,767 tokens'."""
        edges = [None, *self.borders, None]
        first, last = edges[k], edges[k + 1]
        if first is None:
            return f"documents below {last:,} tokens"
        return f"documents of {first:,} " + (
            "tokens and more" if last is None else f"to {last - 1:,} tokens"
        )

    def summary(self) -> list[str]:
        """Lines on the shares of rows."""
        return [f"{x:.1%} of rows: {self.words(k)}" for k, x in enumerate(self.shares())]


def checked_lengths(
    borders: Sequence[Size], weights: Sequence[NonNegative], windows: str
) -> Lengths | None:
    """The settings `length_borders` and `length_weights`; None where both are empty.

    Raises:
      ValueError: they do not fit each other, or windows are taken in turn.
    """
    if not borders and not weights:
        return None
    borders, weights = tuple(borders), tuple(weights)
    if not borders or len(weights) != len(borders) + 1:
        raise SettingError(
            f"length_weights has {len(weights)} numbers and length_borders {len(borders)}: give "
            "one weight more than borders, and a border at least"
        )
    if list(borders) != sorted(set(borders)) or borders[0] < 2:
        raise SettingError(f"length_borders is {borders}: give lengths from 2 on that grow")
    if not sum(weights):
        raise SettingError(f"length_weights is {weights}: give one above 0")
    if windows == "each_once":
        raise SettingError(
            "windows is 'each_once', and a mixture by length_weights draws: leave one of them out"
        )
    return Lengths(borders, weights)


class Range:
    """The documents of a range of lengths, as a text.

    A position in this text is called an index, one in the whole text a position.
    """

    def __init__(self, firsts: Int64[np.ndarray, " r"], counts: Int64[np.ndarray, " r"]):
        """Takes the runs: the positions that they begin at, and their tokens."""
        self._firsts, self._ends = firsts, np.cumsum(counts, dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def positions(self, indices: Int[np.ndarray, " B"]) -> Int64[np.ndarray, " B"]:
        """The positions of tokens."""
        run = self._ends.searchsorted(indices, "right")
        before = np.where(run > 0, self._ends[run - 1], 0)
        return self._firsts[run] + indices - before

    def spans(self, first: int, length: int) -> Iterator[tuple[int, int]]:
        """The spans that a window from an index on consists of: their positions and tokens."""
        run, last = int(self._ends.searchsorted(first, "right")), first + length
        while first < last:
            n = min(last, int(self._ends[run])) - first
            yield int(self.positions(np.array([first]))[0]), n
            first, run = first + n, run + 1


def ranges(begins, n: int, borders: Sequence[int]) -> list[Range]:
    """The documents of a text by their lengths: below the first border, from it on, and so on.

    Args:
      begins: the tokens, by position, that documents begin with, sorted; read by blocks.
      n: tokens of the text.
      borders: lengths that grow.
    """
    firsts, kinds = [], []
    kind_before, waiting = -1, np.zeros(1, np.int64)
    for block in _blocks(begins, n):
        positions = np.concatenate([waiting, block[block > waiting[-1]]])
        kind = np.searchsorted(borders, np.diff(positions), "right")
        new = np.flatnonzero(np.diff(kind, prepend=kind_before))
        firsts.append(positions[:-1][new])
        kinds.append(kind[new].astype(np.int16))
        kind_before = kind[-1] if len(kind) else kind_before
        waiting = positions[-1:]
    first, kind = np.concatenate(firsts), np.concatenate(kinds)
    counts = np.diff(first, append=n)
    of_kind = [kind == k for k in range(len(borders) + 1)]
    return [Range(first[mask], counts[mask]) for mask in of_kind]


def _blocks(begins, n: int) -> Iterator[np.ndarray]:
    yield from begins.blocks() if hasattr(begins, "blocks") else [np.asarray(begins)]
    yield np.array([n], np.int64)


def check_enough(found: Sequence[Range], lengths: Lengths, length: int) -> None:
    """Raises `SettingError` if a range that has a weight has fewer tokens than a window."""
    for k, (weight, part) in enumerate(zip(lengths.weights, found, strict=True)):
        if weight and len(part) < length:
            raise SettingError(
                f"length_weights has {weight:g} for {lengths.words(k)}, and the training text has "
                f"{len(part):,} tokens of them, below length={length:,}: set it to 0, or change "
                "length_borders"
            )
