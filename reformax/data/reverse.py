"""Reverse a sequence of symbols: a toy of translation that needs no data.

The first target is the last symbol of the source. Only attention from the decoder to the encoder,
at distances up to the length, can learn that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import numpy as np

from reformax.data.base import EOS, SPLITS, UNKNOWN
from reformax.data.checks import check_held_out, check_sizes, check_split, check_stride
from reformax.data.rng import generator, philox
from reformax.data.vocabulary import Numbers
from reformax.declared import LARGEST, Bounds, SettingError, Size, checked
from reformax.task import Batch, SentencePairs, Task, Translation

Symbols = Annotated[int, Bounds(UNKNOWN + 2, LARGEST)]


@checked
def reverse(max_symbols: Size = 15, vocab_size: Symbols = 32, n_eval: Size = 512) -> Task:
    """The pairs (w, w reversed) of random words of 1 to `max_symbols` symbols, one pair a row.

    Every step draws new training pairs. 'valid' and 'test' are `n_eval` fixed pairs each, drawn by
    keys from 2^63 on, above every seed of training. As text, a word is its ids separated by spaces.

    Args:
      max_symbols: the longest word. Batches must be longer, for EOS, and the stride of an
        evaluation is the length.
      vocab_size: symbols are uniform in 3..vocab_size - 1, after padding, EOS and unknown.
      n_eval: pairs of 'valid' and of 'test'.

    Raises:
      ValueError: max_symbols or n_eval below 1, vocab_size below 4. The task's functions raise it
        for a length that is too short, another stride, and the endless split 'train'.
    """
    check_held_out(n_eval, max_symbols)
    held_out = SPLITS[1:]

    def pairs(rng: np.random.Generator, n: int, length: int) -> SentencePairs:
        lengths = rng.integers(1, max_symbols + 1, size=(n, 1))
        symbols = rng.integers(UNKNOWN + 1, vocab_size, size=(n, max_symbols), dtype=np.int32)
        symbols = np.pad(symbols, ((0, 0), (0, length - max_symbols)))
        position = np.arange(length)
        backwards = np.take_along_axis(symbols, np.maximum(lengths - 1 - position, 0), axis=1)
        source, target = (
            np.where(position < lengths, ids, EOS * (position == lengths)).astype(np.int32)
            for ids in (symbols, backwards)
        )
        segment_ids = position <= lengths
        return SentencePairs(source, target, segment_ids, segment_ids)

    def batch(rows: SentencePairs, batch_size: int) -> Batch:
        fill = ((0, batch_size - len(rows.source)), (0, 0))
        rows = SentencePairs(*(np.pad(part, fill) for part in rows))
        return Batch(rows, rows.target, rows.target_segment_ids.astype(np.float32))

    def check_length(length: int) -> None:
        if length <= max_symbols:
            raise SettingError(
                f"length={length} must be above {max_symbols}, reverse.max_symbols, for EOS"
            )

    def fixed(split: str, length: int) -> SentencePairs:
        check_split("reverse", split, held_out)
        # One draw for the split: its pairs do not depend on the batch size.
        return pairs(philox(2**63, held_out.index(split)), n_eval, length)

    def train_batch(seed: int, step: int, batch_size: int, length: int) -> Batch:
        check_sizes(batch_size=batch_size)
        check_length(length)
        return batch(pairs(generator(seed, step), batch_size, length), batch_size)

    def eval_batches(split: str, batch_size: int, length: int, stride: int) -> Iterator[Batch]:
        check_sizes(batch_size=batch_size)
        check_length(length)
        check_stride(stride, length, "pairs do not overlap")
        rows = fixed(split, length)
        starts = range(0, n_eval, batch_size)
        parts = (slice(start, start + batch_size) for start in starts)
        return (batch(SentencePairs(*(x[part] for x in rows)), batch_size) for part in parts)

    def n_targets(split: str) -> int:
        return int(fixed(split, max_symbols + 1).target_segment_ids.sum())

    def sentences(split: str) -> tuple[list[str], list[str]]:
        rows = fixed(split, max_symbols + 1)
        sources, references = (
            [vocabulary.decode(ids) for ids in side.tolist()] for side in (rows.source, rows.target)
        )
        return sources, references

    vocabulary = Numbers(vocab_size)
    made_by = f"max_symbols={max_symbols}, vocab_size={vocab_size}, n_eval={n_eval}"
    return Task(
        "reverse",
        vocab_size,
        train_batch,
        eval_batches,
        n_targets,
        Translation(vocabulary, sentences),
        fingerprint=lambda split: made_by,
    )
