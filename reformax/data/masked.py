"""The rows of another task, or windows of a text, with tokens hidden, which are to be filled in.

Devlin et al. 2018, "BERT", section 3.1: of the tokens that are chosen 80% become the token [MASK],
10% another token at random, and 10% stay. Amos et al. 2023, "Never Train from Scratch", pretrain so
on the inputs of the tasks of Long Range Arena.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Annotated

import numpy as np
from jaxtyping import Int

from reformax.data.base import SPLITS
from reformax.data.checks import check_fixed_length, check_sizes, check_stride
from reformax.data.rng import Stream, apart, generator, philox
from reformax.declared import Bounds, Called, SettingError, Size, checked
from reformax.task import Batch, Task

Rows = Annotated[Task, Called("a task of labels or a text, such as listops.listops()")]
Share = Annotated[float, Bounds(above=0, most=1)]
_MASKED, _REPLACED = 0.8, 0.9  # the share up to which a chosen token is hidden, or another one


@checked
def masked(task: Rows, length: Size, rate: Share = 0.15, mask_id: Size | None = None) -> Task:
    """Fill in the tokens of a task's rows that were chosen; labels are not read.

    The rows of a text are windows of it, in evaluations one after the other. Its id 0 is padding,
    as models of hidden tokens have it, and never chosen: bytes need `text.text.offset = 1`.

    In evaluations a row's choice is a function of its number among the split's rows with targets,
    in training of (seed, step).

    Args:
      task: gives the rows.
      length: of batches.
      rate: the share of tokens that is chosen.
      mask_id: [MASK], such as BERT's 103; None: the id after the task's own, so that the vocabulary
        has one more.

    Raises:
      ValueError: the task is neither a text nor one of single rows with labels, or it has
        `document_mask`. Its functions raise it for another length, for a stride that is not the
        length, and as the task's own do.
    """
    if task.kind not in ("labels", "text"):
        raise SettingError(
            f"task {task.name} is neither a text nor single rows with labels: give one, such as "
            "listops.listops()"
        )
    if task.document_mask:
        raise SettingError(
            f"document_mask is True (task {task.name}): hidden tokens are filled in from whole "
            "windows, leave it out"
        )
    mask_id_of = "" if mask_id is None else f", mask_id={mask_id}"
    vocab_size = task.vocab_size + (mask_id is None)
    mask_id = task.vocab_size if mask_id is None else mask_id
    if mask_id >= vocab_size:
        raise SettingError(f"mask_id is {mask_id}: expected an id below {vocab_size}")

    def check_length(given: int) -> None:
        check_fixed_length(length, "masked.masked.length", length=given)

    def draws(of_rows: np.random.Generator, shape: int | tuple[int, int]):
        """The number that decides whether a token is chosen, and the token that may replace it."""
        rng = apart(of_rows, Stream.HIDDEN_TOKENS)
        return rng.random(shape), rng.integers(1, task.vocab_size, size=shape)

    def hidden(tokens: Int[np.ndarray, "B T"], draw, others, real) -> Batch:
        chosen = (draw < rate) & (tokens > 0) & real
        share = draw / rate
        inputs = np.where(share < _MASKED, mask_id, np.where(share < _REPLACED, others, tokens))
        inputs = np.where(chosen, inputs, tokens).astype(np.int32)
        return Batch(inputs, tokens, chosen.astype(np.float32))

    def train_batch(seed: int, step: int, batch_size: int, given: int) -> Batch:
        check_length(given)
        tokens, _, weights = task.train_batch(seed, step, batch_size, length)
        return hidden(tokens, *draws(generator(seed, step), tokens.shape), weights > 0)

    def eval_batches(split: str, batch_size: int, given: int, stride: int) -> Iterator[Batch]:
        check_sizes(batch_size=batch_size)
        check_length(given)
        check_stride(
            stride, length, "a window's hidden tokens go by its number, leave eval_stride out"
        )
        batches = task.eval_batches(split, batch_size, length, stride)

        def every() -> Iterator[Batch]:
            next_key = 2**32 * SPLITS.index(split)
            for tokens, _, weights in batches:
                # Rows that fill a batch take no number: a mixture has them after each of its texts.
                counts = (weights > 0).any(axis=1)
                keys = next_key + np.cumsum(counts) - counts
                rows = [draws(philox(2**63, int(key)), length) for key in keys]
                draw, others = map(np.stack, zip(*rows, strict=True))
                yield hidden(tokens, draw, others, weights > 0)
                next_key += int(counts.sum())

        return every()

    @functools.cache
    def n_targets(split: str) -> int:
        task.n_targets(split)  # an unknown split fails
        batches = eval_batches(split, 64, length, length)
        return int(sum(batch.weights.sum(dtype=np.int64) for batch in batches))

    fingerprint = task.fingerprint
    return Task(
        f"masked {task.name}",
        vocab_size,
        train_batch,
        eval_batches,
        n_targets,
        fingerprint=fingerprint
        and (lambda split: f"{fingerprint(split)}, length={length}, rate={rate}{mask_id_of}"),
        masked=True,
        in_order=task.in_order,
        vocabulary=task.vocabulary,
        summary=task.summary,
    )
