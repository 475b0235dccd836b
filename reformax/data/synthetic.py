"""Language-model tasks whose examples are drawn, not read, all of one length."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np

from reformax.data.base import full_batch
from reformax.data.checks import check_fixed_length, check_held_out, check_sizes, check_split
from reformax.data.rng import generator, philox
from reformax.task import Batch, Task

HELD_OUT = ("valid", "test")


def synthetic_task(
    name: str,
    *,
    length: int,
    vocab_size: int,
    n_eval: int,
    examples: Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]],
    made_by: str,
) -> Task:
    """A task of fresh examples in every step, and of fixed ones in evaluations.

    'valid' and 'test' are drawn by keys from 2^63 on, above every seed of training.

    Args:
      name: the task's name in logs and errors.
      length: tokens of an example. Batches have this length, and so has an evaluation's stride.
      vocab_size: tokens are below it.
      n_eval: examples of 'valid' and of 'test'.
      examples: (rng, n) -> tokens and weights `[n, length]`.
      made_by: the settings that decide the examples, in words.

    Raises:
      ValueError: too many held-out tokens. The task's functions raise it for another length or
        stride, and for the endless split 'train'.
    """
    check_held_out(n_eval, length)

    check_length = functools.partial(check_fixed_length, length, f"{name}'s own length")

    def held_out(split: str) -> tuple[np.ndarray, np.ndarray]:
        check_split(name, split, HELD_OUT)
        # One draw for the split: its examples do not depend on the batch size.
        return examples(philox(2**63, HELD_OUT.index(split)), n_eval)

    def train_batch(seed: int, step: int, batch_size: int, length: int) -> Batch:
        check_sizes(batch_size=batch_size)
        check_length(length=length)
        tokens, weights = examples(generator(seed, step), batch_size)
        return Batch(tokens, tokens, weights)

    def eval_batches(split: str, batch_size: int, length: int, stride: int) -> Iterator[Batch]:
        check_sizes(batch_size=batch_size)
        check_length(length=length, stride=stride)
        tokens, weights = held_out(split)
        starts = range(0, n_eval, batch_size)
        parts = (slice(start, start + batch_size) for start in starts)
        return (full_batch(tokens[part], weights[part], batch_size) for part in parts)

    return Task(
        name,
        vocab_size,
        train_batch,
        eval_batches,
        n_targets=lambda split: int(held_out(split)[1].sum(dtype=np.int64)),
        fingerprint=lambda split: made_by,
    )
