"""A text, some rows of which have tasks in context: facts that are hidden and asked for later.

The tasks are those of `reformax.data.questions`, in sentences and of keys that its evaluation
(`reformax evaluate --tasks=ruler`) does not have. What is hidden lies in the row's own text.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np

from reformax.data import question_words, questions
from reformax.declared import Bounds, Called, Positive, SettingError, Size, checked
from reformax.task import Batch, Documents, Task

Text = Annotated[Task, Called("a text, such as text.text()")]
Share = Annotated[float, Bounds(0.0, 1.0, name="a number from 0 to 1")]
TASKS = tuple(questions.KINDS)
# A sentence is put where a line begins, at most so many bytes after its depth, or before it.
_LINE = 200

Encode = Callable[[str], np.ndarray]


@checked
def in_context(
    task: Text,
    share: Share = 0.1,
    tasks: Sequence[questions.Name] = TASKS,
    least_length: Size = 512,
    answer_weight: Positive = 1.0,
) -> Task:
    """A text with tasks in context in a share of the training rows; held-out text stays as it is.

    Such a row is cut into parts of any lengths from `least_length` to the row's, their logarithms
    drawn uniformly. In each part one task's sentences are hidden, and its questions and answers
    follow the part's text. All draws are a function of (seed, step) and the row's number.

    Args:
      task: of bytes or of pieces; a row of tasks hides tokens in the text that it has there.
      share: the share of the rows that have tasks.
      tasks: the kinds of `reformax.data.questions`, drawn uniformly from those that fit.
      least_length: tokens of the shortest part.
      answer_weight: the loss's weight of an answer's tokens; that of others is 1.

    Raises:
      ValueError: the task is no text, is of chats, or has neither bytes nor a vocabulary; there are
        no tasks.
    """
    if task.kind != "text":
        raise SettingError(f"task is {task.name}: give a text, such as text.text()")
    if task.document_mask and task.borders is None:  # no row would have tasks
        raise SettingError(
            f"task is {task.name}, whose rows have tokens that are not predicted: give a text, "
            "such as text.text()"
        )
    if not tasks:
        raise SettingError(f"tasks is (): give some of {', '.join(TASKS)}")
    encode = encoder_of(task)

    def row(tokens: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        return _row(tokens, rng, encode, tasks, least_length, answer_weight, task.of_bytes)

    def with_tasks(batch: Batch, seed: int, step: int, numbers: Sequence[int]) -> Batch:
        targets, weights = batch.targets.copy(), batch.weights.copy()
        changed = []
        for index, number in enumerate(numbers):
            rng = np.random.default_rng([seed, step, int(number), zlib.crc32(b"in_context")])
            if rng.random() < share and (weights[index] > 0).all():
                targets[index], weights[index] = row(targets[index], rng)
                changed.append(index)
        inputs: Any = targets
        if isinstance(batch.inputs, Documents):
            ids = batch.inputs.segment_ids.copy()
            ids[changed] = 1  # a question sees what is hidden
            inputs = Documents(targets, ids)
        return Batch(inputs, targets, weights)

    def train_rows(seed: int, step: int, batch_size: int, length: int, rows) -> Batch:
        batch = task.rows_of_batch(seed, step, batch_size, length, rows)
        return with_tasks(batch, seed, step, np.arange(batch_size)[rows])

    words = (
        f"{share:.6g} of rows with {', '.join(tasks)} of {least_length} tokens and more, answers "
        f"weighted {answer_weight:.6g}"
    )

    def fingerprint(split: str) -> str:
        of_text = task.fingerprint(split)
        return f"{of_text}; {words}" if split == "train" else of_text

    def summary() -> list[str]:
        return [*(task.summary() if task.summary else []), words]

    return task.replace(
        name="in_context",
        train_batch=functools.partial(train_rows, rows=slice(None)),
        train_rows=train_rows,
        fingerprint=None if task.fingerprint is None else fingerprint,
        summary=summary,
    )


def encoder_of(task: Task) -> Encode:
    """Turns words into the ids of a text's tokens.

    Raises:
      SettingError: its ids are neither bytes nor pieces of a known vocabulary.
    """
    if task.of_bytes:
        offset = task.vocab_size - 256
        return lambda words: np.frombuffer(words.encode(), np.uint8).astype(np.int32) + offset
    if task.vocabulary is None:
        raise SettingError(
            f"task is {task.name}, whose ids are no bytes and have no vocabulary: give a text "
            "of bytes or of pieces, such as text.text()"
        )
    return lambda words: np.asarray(task.vocabulary.encode(words), np.int32)


def _row(
    tokens: np.ndarray,
    rng: np.random.Generator,
    encode: Encode,
    tasks: Sequence[questions.Name],
    least: int,
    answer_weight: float,
    of_bytes: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of a row with tasks, and their weights, from the row's text."""
    length, read = len(tokens), 0
    found, weights, left = [], [], len(tokens)
    newline = encode("\n")[-1] if of_bytes else None
    while left >= least:
        size = int(np.exp(rng.uniform(np.log(least), np.log(left + 1))))
        size = left if left - size < least else size
        for name in rng.permutation(tasks).tolist():
            part = _part(name, tokens[read:], size, rng, encode, newline)
            if part is not None:
                break
        else:  # no kind is so short
            break
        of_part, is_answer, n_read = part
        found.append(of_part)
        weights.append(np.where(is_answer, answer_weight, 1.0))
        read, left = read + n_read, left - len(of_part)
    found.append(tokens[read : read + left])
    weights.append(np.ones(len(found[-1])))
    return np.concatenate(found)[:length], np.concatenate(weights)[:length].astype(np.float32)


def _part(
    name: questions.Name,
    hay: np.ndarray,
    size: int,
    rng: np.random.Generator,
    encode: Encode,
    newline: int | None,
) -> tuple[np.ndarray, np.ndarray, int] | None:
    """At most `size` tokens with a task, which of them are answers, and how much hay they have."""
    kind, depth, seed = questions.KINDS[name], float(rng.random()), int(rng.integers(2**31))

    def episode(n: int) -> questions.Episode:
        return kind(question_words.Draw(np.random.default_rng(seed), held_out=False), depth, n)

    def tokens_of(made: questions.Episode) -> tuple[list, np.ndarray, np.ndarray]:
        hidden = [
            (at, encode(f"{sentence}\n" if made.asked[0].begin else sentence))
            for at, sentence in sorted(made.hidden, key=lambda one: one[0])
        ]
        asked, is_answer = [], []
        for ask in made.asked:
            n_begin, whole = len(encode(ask.begin)), encode(f"{ask.begin}{ask.answer}")
            asked += [whole, encode("\n")]
            is_answer += [np.arange(len(whole)) >= n_begin, np.zeros(len(asked[-1]), bool)]
        return hidden, np.concatenate(asked), np.concatenate(is_answer)

    def n_of(made) -> int:
        hidden, asked, _ = made
        return sum(len(x) for _, x in hidden) + len(asked)

    made = tokens_of(episode(0))
    if n_of(made) > size:
        return None
    if name in questions.FILLING:
        short, long = (n_of(tokens_of(episode(n * questions.N_ASKED))) for n in (1, 3))
        of_each = max((long - short) / (2 * questions.N_ASKED), 1)
        n = questions.N_ASKED + int((size - short) // of_each)
        while n > 1:  # sentences differ in tokens
            more = tokens_of(episode(n))
            if n_of(more) <= size:
                made = more
                break
            n -= math.ceil((n_of(more) - size) / of_each)
        n_read = 0
    else:
        n_read = max(min(size - n_of(made) - len(encode("\n")), len(hay)), 0)
    hidden, asked, is_answer = made
    before = _with_hidden(hay[:n_read], hidden, newline, encode)
    is_scored = np.concatenate([np.zeros(len(before), bool), is_answer])
    return np.concatenate([before, asked]).astype(np.int32), is_scored, n_read


def _with_hidden(
    hay: np.ndarray, hidden: Sequence[tuple[float, np.ndarray]], newline: int | None, encode: Encode
) -> np.ndarray:
    """The tokens of a text with sentences in it, each near its depth, and a newline at its end."""
    pieces, done = [], 0
    for at, sentence in hidden:
        end = max(done, round(at * len(hay)))
        if newline is not None:  # the next line's begin, or at the end of the part the line's own
            lines = np.flatnonzero(hay[done:] == newline) + done + 1
            near = lines[(lines >= end) & (lines < end + _LINE)]
            end = int(near[0]) if len(near) else int(max(lines[lines <= end], default=done or end))
        pieces += [hay[done:end], sentence]
        done = end
    pieces.append(hay[done:])
    if hidden and len(hay[done:]) and hay[-1] != newline:
        pieces.append(encode("\n"))
    return np.concatenate(pieces)
