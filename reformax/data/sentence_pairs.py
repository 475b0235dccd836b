"""The task of translating sentences: encoded once, packed into rows, shuffled in every epoch.

A row holds several pairs, numbered by segments, so a batch of fixed shape is nearly full of tokens.
A seed and a length decide which pairs share a row; every epoch takes the rows in another order.
Letters in the shapes: P pairs, R rows, B batch, T length.
"""

from __future__ import annotations

import functools
import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from reformax.data.base import SPLITS
from reformax.data.checks import check_sizes, check_split, check_stride
from reformax.data.packing import Rows, in_rows, laid_out, pack
from reformax.data.rng import generator, philox
from reformax.data.vocabulary import SentencePieces
from reformax.declared import SettingError
from reformax.task import Batch, SentencePairs, Task, Translation

_BLOCK = 1 << 16  # sentences encoded together: their ids are Python integers until they are joined


class _Side(NamedTuple):
    """Sentence p of one language is `ids[starts[p]:starts[p + 1]]`."""

    ids: np.ndarray
    starts: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.starts)


def sentence_pairs(
    name: str, sentences: Callable[[str], tuple[list[str], list[str]]], vocabulary: SentencePieces
) -> Task:
    """The task of translating the first sentence of a pair into the second.

    Training leaves out pairs with an empty side and pairs longer than a row; a warning counts them.
    Evaluation leaves out none: it scores long pairs in rows of twice the length, four times and so
    on, and a warning counts these too. An empty line is `EOS` alone.

    Args:
      name: the task's name in logs and errors.
      sentences: split -> (sources, targets), read when it is called.
      vocabulary: the vocabulary of both languages; the caller chooses its training text.

    Returns:
      A Task whose functions raise ValueError for an unknown split, a stride other than the length,
      another size below 1, and a length below every training pair's.
    """
    pairs = _Pairs(name, sentences, vocabulary)
    translation = Translation(vocabulary, pairs.sentences)
    return Task(
        name,
        vocabulary.size,
        pairs.train_batch,
        pairs.eval_batches,
        lambda split: len(pairs.encoded(split)[1].ids),
        translation,
        pairs.fingerprint,
        in_order=True,
    )


class _Pairs:
    """The pairs of a task: read and encoded once a split, packed once for a seed and a length."""

    def __init__(self, name: str, sentences: Callable, vocabulary: SentencePieces):
        self._name, self._sentences, self._vocabulary = name, sentences, vocabulary
        self._log = logging.getLogger(__name__)
        self.encoded = functools.cache(self._encoded)
        self.fingerprint = functools.cache(self._fingerprint)
        self._training_rows = functools.lru_cache(maxsize=1)(self._pack_training_pairs)
        # A batch may begin in one epoch and end in the next.
        self._order = functools.lru_cache(maxsize=2)(self._shuffled)

    def sentences(self, split: str) -> tuple[list[str], list[str]]:
        check_split(self._name, split, SPLITS)
        return self._sentences(split)

    def _fingerprint(self, split: str) -> str:
        """The number of pairs and the CRC-32 of the lines of both languages."""
        crc = 0
        sides = self.sentences(split)
        for side in sides:
            for first in range(0, len(side), _BLOCK):
                block = "\n".join([*side[first : first + _BLOCK], ""])
                crc = zlib.crc32(block.encode("utf-8", "surrogatepass"), crc)
        return f"{len(sides[0]):,} pairs of CRC-32 {crc:08x}"

    def _encoded(self, split: str) -> tuple[_Side, _Side]:
        sources, targets = self.sentences(split)
        if split == "train":
            sources, targets = self._without_empty(sources, targets)
        return _encode(self._vocabulary, sources), _encode(self._vocabulary, targets)

    def _without_empty(self, sources: Sequence[str], targets: Sequence[str]):
        kept = [pair for pair in zip(sources, targets, strict=True) if all(map(str.strip, pair))]
        if len(kept) < len(sources):
            self._log.warning(
                f"{self._name}: {len(sources) - len(kept):,} of {len(sources):,} training pairs "
                "have an empty side and are left out"
            )
        if not kept:
            raise ValueError(f"{self._name}: every training pair has an empty side: give it text")
        return zip(*kept, strict=True)

    def _lengths(self, split: str) -> Int[np.ndarray, "P 2"]:
        return np.stack([side.lengths for side in self.encoded(split)], axis=1)

    def _pack_training_pairs(self, seed: int, length: int) -> Rows:
        lengths = self._lengths("train")
        fits = np.flatnonzero(lengths.max(axis=1) <= length)
        if len(fits) < len(lengths):
            self._log.warning(
                f"{self._name}: {len(lengths) - len(fits):,} of {len(lengths):,} training pairs "
                f"are longer than length={length} tokens and are left out"
            )
        if not len(fits):
            raise SettingError(
                f"length={length} must be at least {lengths.max(axis=1).min()}, the tokens of "
                f"{self._name}'s shortest training pair"
            )
        fits = philox(seed, 2**63).permutation(fits)  # 2^63 is no epoch
        return pack(lengths, fits, length)

    def _shuffled(self, seed: int, epoch: int, n_rows: int) -> np.ndarray:
        return philox(seed, epoch).permutation(n_rows)

    def train_batch(self, seed: int, step: int, batch_size: int, length: int) -> Batch:
        check_sizes(batch_size=batch_size, length=length)
        generator(seed, step)  # checks the range of both
        rows = self._training_rows(seed, length)
        n_rows = len(rows)
        # The epochs' rows are one endless sequence, and each step takes its next batch.
        chosen: list[np.ndarray] = []
        first, end = step * batch_size, (step + 1) * batch_size
        while first < end:
            epoch, begin = divmod(first, n_rows)
            chosen.append(self._order(seed, epoch, n_rows)[begin : begin + end - first])
            first += len(chosen[-1])
        return _batch(self.encoded("train"), rows, np.concatenate(chosen), batch_size, length)

    def eval_batches(
        self, split: str, batch_size: int, length: int, stride: int
    ) -> Iterator[Batch]:
        check_sizes(batch_size=batch_size, length=length)
        check_stride(stride, length, "sentences do not overlap")
        lengths = self._lengths(split)
        longest = lengths.max(axis=1)
        row_lengths = [length]
        while row_lengths[-1] < longest.max():
            row_lengths.append(2 * row_lengths[-1])
        if n_long := int((longest > length).sum()):
            self._log.warning(
                f"{self._name}: {n_long:,} of {len(lengths):,} {split} pairs are longer than "
                f"length={length} tokens, up to {longest.max()}, and are scored in longer rows"
            )

        def batches() -> Iterator[Batch]:
            for shortest, row_length in zip([0, *row_lengths], row_lengths, strict=False):
                fits = np.flatnonzero((longest > shortest) & (longest <= row_length))
                rows = pack(lengths, fits, row_length)
                n_rows = len(rows)
                for first in range(0, n_rows, batch_size):
                    chosen = np.arange(first, min(first + batch_size, n_rows))
                    yield _batch(self.encoded(split), rows, chosen, batch_size, row_length)

        return batches()


def _encode(vocabulary: SentencePieces, sentences: Sequence[str]) -> _Side:
    dtype = np.uint16 if vocabulary.size <= 2**16 else np.int32
    ids, lengths = [np.zeros(0, dtype)], [np.zeros(1, np.int64)]
    for first in range(0, len(sentences), _BLOCK):
        block = vocabulary.encode_all(sentences[first : first + _BLOCK])
        lengths.append(np.array([len(sentence) for sentence in block], np.int64))
        ids.append(np.concatenate(block).astype(dtype))
    return _Side(np.concatenate(ids), np.cumsum(np.concatenate(lengths)))


def _batch(
    sides: tuple[_Side, _Side], rows: Rows, chosen: np.ndarray, batch_size: int, length: int
) -> Batch:
    """The chosen rows as a batch, filled with empty rows."""
    parts = []
    for ids, starts in sides:
        layout = laid_out(rows, chosen, starts[:-1], starts[1:], length)
        for values in (ids[layout.sources], layout.segment_ids):
            parts.append(in_rows(layout, values, batch_size, length, np.int32))
    source, source_segment_ids, target, target_segment_ids = parts
    weights = (target_segment_ids > 0).astype(np.float32)
    return Batch(
        SentencePairs(source, target, source_segment_ids, target_segment_ids), target, weights
    )
