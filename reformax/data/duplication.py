"""Duplicate a sequence of symbols: the task on which the Reformer paper studies LSH attention.

Kitaev, Kaiser, Levskaya 2020, "Reformer", section 2, "Analysis on a synthetic task": 0w0w for a
random word w of 511 symbols from 1 to 127. To write the second w, a position must find the same
place in the first, half the length before.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from reformax.data.base import (
    Batch,
    Task,
    check_held_out,
    check_sizes,
    check_split,
    full_batch,
    generator,
    philox,
)
from reformax.declared import SettingError, Size, VocabSize, checked


@checked
def duplication(length: Size = 1024, vocab_size: VocabSize = 128, n_eval: Size = 512) -> Task:
    """Predict the second w of 0w0w; the loss counts nowhere else.

    Every step draws new training examples. 'valid' and 'test' are `n_eval` fixed examples each,
    drawn by keys from 2^63 on, above every seed of training.

    Args:
      length: tokens of an example, even; w has length / 2 - 1 symbols. Batches have this length,
        and the stride of an evaluation is the length too.
      vocab_size: symbols of w are uniform in 1..vocab_size - 1.
      n_eval: examples of 'valid' and of 'test'.

    Raises:
      ValueError: length is odd or below 4, vocab_size below 2 or n_eval below 1. The task's
        functions raise it for another length or stride, and for the endless split 'train'.
    """
    if length < 4 or length % 2:
        raise SettingError(f"length={length} must be even and at least 4, for 0w0w")
    check_held_out(n_eval, length)
    word_len = length // 2 - 1
    held_out = ("valid", "test")

    def examples(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
        word = rng.integers(1, vocab_size, size=(n, word_len), dtype=np.int32)
        half = np.pad(word, ((0, 0), (1, 0)))
        weights = np.zeros((n, length), np.float32)
        weights[:, -word_len:] = 1
        return np.concatenate([half, half], axis=1), weights

    def check_length(argument: str, value: int) -> None:
        if value != length:
            raise SettingError(f"{argument}={value} must be {length}, duplication's own length")

    def train_batch(seed: int, step: int, batch_size: int, length: int) -> Batch:
        check_sizes(batch_size=batch_size)
        check_length("length", length)
        tokens, weights = examples(generator(seed, step), batch_size)
        return Batch(tokens, tokens, weights)

    def eval_batches(split: str, batch_size: int, length: int, stride: int) -> Iterator[Batch]:
        check_sizes(batch_size=batch_size)
        check_split("duplication", split, held_out)
        check_length("length", length)
        check_length("stride", stride)
        # One draw for the split: its examples do not depend on the batch size.
        tokens, weights = examples(philox(2**63, held_out.index(split)), n_eval)
        starts = range(0, n_eval, batch_size)
        parts = (slice(start, start + batch_size) for start in starts)
        return (full_batch(tokens[part], weights[part], batch_size) for part in parts)

    def n_targets(split: str) -> int:
        check_split("duplication", split, held_out)
        return n_eval * word_len

    made_by = f"length={length}, vocab_size={vocab_size}, n_eval={n_eval}"
    return Task(
        "duplication",
        vocab_size,
        train_batch,
        eval_batches,
        n_targets,
        fingerprint=lambda split: made_by,
    )
