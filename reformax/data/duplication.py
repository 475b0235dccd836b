"""Duplicate a sequence of symbols: the task on which the Reformer paper studies LSH attention.

Kitaev, Kaiser, Levskaya 2020, "Reformer", section 2, "Analysis on a synthetic task": 0w0w for a
random word w of 511 symbols from 1 to 127. To write the second w, a position must find its
counterpart in the first, half the length before.
"""

from __future__ import annotations

import numpy as np

from reformax.data.synthetic import synthetic_task
from reformax.declared import SettingError, Size, VocabSize, checked
from reformax.task import Task


@checked
def duplication(length: Size = 1024, vocab_size: VocabSize = 128, n_eval: Size = 512) -> Task:
    """Predict the second w of 0w0w; the loss counts nowhere else.

    `reformax.data.synthetic` says how examples are drawn.

    Args:
      length: tokens of an example, even; w has length / 2 - 1 symbols.
      vocab_size: symbols of w are uniform in 1..vocab_size - 1.
      n_eval: examples of 'valid' and of 'test'.

    Raises:
      ValueError: length is odd or below 4, vocab_size below 2 or n_eval below 1.
    """
    if length < 4 or length % 2:
        raise SettingError(f"length={length} must be even and at least 4, for 0w0w")
    word_len = length // 2 - 1

    def examples(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
        word = rng.integers(1, vocab_size, size=(n, word_len), dtype=np.int32)
        half = np.pad(word, ((0, 0), (1, 0)))
        weights = np.zeros((n, length), np.float32)
        weights[:, -word_len:] = 1
        return np.concatenate([half, half], axis=1), weights

    return synthetic_task(
        "duplication",
        length=length,
        vocab_size=vocab_size,
        n_eval=n_eval,
        examples=examples,
        made_by=f"length={length}, vocab_size={vocab_size}, n_eval={n_eval}",
    )
