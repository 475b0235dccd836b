"""Accuracy on the questions of `reformax.data.questions`, by length and by where the answer lies.

A question counts as answered if greedy decoding gives all of its answer. One forward pass says so:
greedy decoding gives an answer exactly where each of its tokens is the likeliest after those
before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool

from reformax.data.questions import (
    KINDS,
    REPEATED,
    Encode,
    Hay,
    Name,
    Question,
    builder,
    checksum,
    question,
)
from reformax.evals.likelihood import LanguageScorer

N_QUESTIONS = 50
N_DEPTHS = 5
# All kinds, by one name of the command's.
RULER = "ruler"


class QuestionSettings(NamedTuple):
    """Questions: their lengths in tokens, number, depths, and the text that needles lie in."""

    lengths: Sequence[int]
    n_questions: int = N_QUESTIONS  # of each kind and length
    n_depths: int = N_DEPTHS  # equal parts of a text, of which accuracies are
    hay: Hay = REPEATED
    seed: int = 0


def names_of(name: str) -> list[str]:
    """The kinds of a name: all of them of `RULER`."""
    return list(KINDS) if name == RULER else [name]


def shortest(settings: QuestionSettings, name: Name, encode: Encode) -> int:
    """The fewest tokens that have room for each question of a kind, with its answer."""
    seed, hay = settings.seed, settings.hay
    found = (builder(name, i, depth, seed, hay)(0) for i, depth in _numbered(settings))
    return max(len(encode(one.text + one.answer)) for one in found)


def questions(
    settings: QuestionSettings, name: Name, length: int, encode: Encode
) -> list[Question]:
    """Questions whose depths are spread evenly, each of at most `length` tokens with its answer.

    Raises:
      SettingError: what is hidden is longer.
    """
    of_all = length, encode, settings.seed, settings.hay
    return [question(name, i, depth, *of_all) for i, depth in _numbered(settings)]


def _numbered(settings: QuestionSettings) -> list[tuple[int, float]]:
    """The number of each question and the depth of its answer."""
    n = settings.n_questions
    depths = np.linspace(0, 1, n) if n > 1 else np.array([0.5])
    return list(enumerate(depths.tolist()))


def answered(
    scorer: LanguageScorer, encode: Encode, given: Sequence[Question], length: int
) -> Bool[np.ndarray, " n"]:
    """Whether greedy decoding gives the answer of each question.

    Args:
      scorer: the model.
      encode: text -> tokens.
      given: the questions.
      length: of the longest one, in tokens; rows are padded to it, so that one program has all.
    """
    pairs = []
    for one in given:
        n_text, whole = len(encode(one.text)), encode(one.text + one.answer)
        pairs.append((whole[:n_text], whole[n_text:]))
    return np.array([one.is_greedy for one in scorer.likelihoods(pairs, least=length)])


def score(
    scorer: LanguageScorer, encode: Encode, name: Name, settings: QuestionSettings
) -> Iterator[dict[str, Any]]:
    """The share of questions answered, after each length.

    Args:
      scorer: the model; its `max_length` is at least the longest length.
      encode: text -> tokens.
      name: of a kind of questions.
      settings: the lengths, the number and the text of the questions.

    Yields:
      The figures of the lengths so far: accuracy, the mean over them; n_questions of each length;
      and by_length, for each its length, accuracy, standard_error, the questions' checksum and,
      where an answer lies in one place, accuracy_by_depth: of equal parts of the text from its
      beginning, None for a part without a question.
    """
    lines: list[dict[str, Any]] = []
    for length in settings.lengths:
        given = questions(settings, name, length, encode)
        right = answered(scorer, encode, given, length)
        line = {"length": length, "accuracy": float(right.mean())}
        line["standard_error"] = float(right.std() / np.sqrt(len(right)))
        if given[0].depth is not None:
            depths = np.array([one.depth for one in given])
            part = np.minimum((depths * settings.n_depths).astype(int), settings.n_depths - 1)
            parts = [right[part == i] for i in range(settings.n_depths)]
            line["accuracy_by_depth"] = [float(x.mean()) if x.size else None for x in parts]
        lines = [*lines, line | {"checksum": checksum(given)}]
        accuracy = float(np.mean([line["accuracy"] for line in lines]))
        yield {"accuracy": accuracy, "n_questions": settings.n_questions, "by_length": lines}
