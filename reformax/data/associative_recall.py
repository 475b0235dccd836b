"""Multi-query associative recall: name the value that a key was given earlier.

Arora, Eyuboglu, Timalsina, Johnson, Poli, Zou, Rudra, Ré 2023, "Zoology: Measuring and Improving
Recall in Efficient Language Models", section 4 and appendix E. A row is pairs of a key and a value,
then noise, in which each key comes once more with its value after it. Only the second coming of the
value is scored. Attention looks the key up; a state of constant size must hold all pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np

from reformax.data.synthetic import synthetic_task
from reformax.declared import Bounds, SettingError, Size, VocabSize, checked
from reformax.task import Task

Power = Annotated[float, Bounds(above=0)]


@checked
def associative_recall(
    length: Size = 512,
    n_pairs: Sequence[Size] = (4, 8, 16, 32, 64),
    vocab_size: VocabSize = 8192,
    power: Power = 0.01,
    n_eval: Size = 512,
) -> Task:
    """Predict the value after the second coming of each key; the loss counts nowhere else.

    Keys are distinct symbols of the vocabulary's first half without 0, values distinct symbols of
    the second half, noise any symbol. The distance d of a key's second coming from the end of the
    pairs, in steps of two tokens, has a probability in proportion to d^(power - 1): a power law, as
    between repetitions in a text. `reformax.data.synthetic` says how examples are drawn.

    Args:
      length: tokens of an example, even.
      n_pairs: each row draws its number of pairs from these.
      vocab_size: the symbols; the paper's claim needs thousands.
      power: 1 is a uniform distance.
      n_eval: examples of 'valid' and of 'test'.

    Raises:
      ValueError: length is odd or below four times a number of pairs; the halves of the vocabulary
        are smaller than a number of pairs.
    """
    most = max(n_pairs, default=0)
    if not most:
        raise SettingError("n_pairs is (): give the numbers of pairs of a row, such as (4, 8)")
    if length % 2 or length < 4 * most:
        raise SettingError(
            f"length={length} must be even and at least {4 * most}, 4 tokens for each of "
            f"n_pairs={most}"
        )
    n_keys, n_values = vocab_size // 2 - 1, vocab_size - vocab_size // 2
    if most > min(n_keys, n_values):
        raise SettingError(
            f"vocab_size={vocab_size} must be at least {2 * most + 2}, for n_pairs={most} keys"
        )

    def examples(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
        pairs = rng.choice(np.asarray(n_pairs), size=(n, 1))
        keys, values = (
            first + distinct(rng, size, n, most)
            for first, size in ((1, n_keys), (vocab_size // 2, n_values))
        )
        steps = np.arange(length // 2 - min(n_pairs))
        likely = (1.0 + steps) ** (power - 1) * (steps < length // 2 - pairs)
        index = np.arange(most)
        again = 2 * (pairs + without_replacement(rng, likely, most))
        tokens = rng.integers(vocab_size, size=(n, length), dtype=np.int32)
        weights = np.zeros((n, length), np.float32)
        row, pair = np.nonzero(index < pairs)
        for at in (np.broadcast_to(2 * index, again.shape), again):
            tokens[row, at[row, pair]] = keys[row, pair]
            tokens[row, at[row, pair] + 1] = values[row, pair]
        weights[row, again[row, pair] + 1] = 1
        return tokens, weights

    made_by = (
        f"length={length}, n_pairs={tuple(n_pairs)}, vocab_size={vocab_size}, power={power}, "
        f"n_eval={n_eval}"
    )
    return synthetic_task(
        "associative_recall",
        length=length,
        vocab_size=vocab_size,
        n_eval=n_eval,
        examples=examples,
        made_by=made_by,
    )


def distinct(rng: np.random.Generator, size: int, n_rows: int, n: int) -> np.ndarray:
    """`n` different numbers below `size` in each row, in any order with the same probability.

    Floyd's algorithm (Bentley and Floyd 1987, "A sample of brilliance"), for all rows at once: the
    i-th draw is below `size - n + i + 1`, and is the largest of these where it was drawn before.
    """
    found = np.empty((n_rows, n), np.int64)
    for i, largest in enumerate(range(size - n, size)):
        drawn = rng.integers(largest + 1, size=n_rows)
        before = (found[:, :i] == drawn[:, None]).any(axis=1)
        found[:, i] = np.where(before, largest, drawn)
    return rng.permuted(found, axis=1)


def without_replacement(rng: np.random.Generator, likely: np.ndarray, n: int) -> np.ndarray:
    """The indices of `n` draws from each row of `likely` `[b, m]`, each index at most once.

    The n largest of log likely plus Gumbel noise, in falling order, are draws one after another in
    proportion to what is left (Yellott 1977). An index of likelihood 0 comes after all others.
    """
    with np.errstate(divide="ignore"):
        noisy = np.log(likely) + rng.gumbel(size=likely.shape)
    best = np.argpartition(-noisy, n - 1, axis=1)[:, :n]
    order = np.argsort(-np.take_along_axis(noisy, best, axis=1), axis=1)
    return np.take_along_axis(best, order, axis=1)
