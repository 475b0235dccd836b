"""Accuracy on the questions of `reformax.data.questions`, by length and by where the answer lies.

A question counts as answered if greedy decoding gives all of its answer. One forward pass says so:
greedy decoding gives an answer exactly where each of its tokens is the likeliest behind those
before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from reformax.data.questions import KINDS, REPEATED, Encode, Hay, Name, Question, checksum, question
from reformax.evals.likelihood import LanguageScorer

N_QUESTIONS = 50
N_DEPTHS = 5
# All kinds, by one name of the command's.
RULER = "ruler"


class Asked(NamedTuple):
    """The settings of questions: lengths, numbers, depths, and the text that needles lie in."""

    lengths: Sequence[int]
    n: int = N_QUESTIONS  # of each length
    n_depths: int = N_DEPTHS  # equal parts of a text
    hay: Hay = REPEATED
    seed: int = 0


def names_of(name: str) -> list[str]:
    """The kinds of a name: all of them of `RULER`."""
    return list(KINDS) if name == RULER else [name]


def questions(asked: Asked, name: Name, length: int, encode: Encode) -> list[Question]:
    """Questions whose depths are spread evenly, each of at most `length` tokens with its answer.

    Raises:
      TooShort: what is hidden is longer.
    """
    depths = np.linspace(0, 1, asked.n) if asked.n > 1 else [0.5]
    of_all = length, encode, asked.seed, asked.hay
    return [question(name, i, float(depth), *of_all) for i, depth in enumerate(depths)]


def answered(scorer: LanguageScorer, encode: Encode, given: Sequence[Question]) -> np.ndarray:
    """Whether greedy decoding gives the answer of each question, as booleans."""
    pairs = []
    for one in given:
        tokens, whole = encode(one.text), encode(one.text + one.answer)
        pairs.append((whole[: len(tokens)], whole[len(tokens) :]))
    return np.array([one.is_greedy for one in scorer.likelihoods(pairs)])


def score(scorer: LanguageScorer, encode: Encode, name: Name, asked: Asked) -> dict[str, Any]:
    """The share of questions answered.

    Args:
      scorer: the model; its `max_length` is at least the longest length.
      encode: text -> tokens.
      name: of a kind of questions.
      asked: the lengths, the number and the text of the questions.

    Returns:
      accuracy, the mean over lengths; n_questions of each length; and by_length, for each its
      length, accuracy, standard_error, the questions' checksum and, where an answer lies in one
      place, accuracy_by_depth: of equal parts of the text from its beginning, None for a part
      without a question.
    """
    lines = []
    for length in asked.lengths:
        given = questions(asked, name, length, encode)
        right = answered(scorer, encode, given)
        line = {"length": length, "accuracy": float(right.mean())}
        line["standard_error"] = float(right.std() / np.sqrt(len(right)))
        if given[0].depth is not None:
            depths = np.array([one.depth for one in given])
            part = np.minimum((depths * asked.n_depths).astype(int), asked.n_depths - 1)
            parts = [right[part == i] for i in range(asked.n_depths)]
            line["accuracy_by_depth"] = [float(x.mean()) if x.size else None for x in parts]
        lines.append(line | {"checksum": checksum(given)})
    accuracy = float(np.mean([line["accuracy"] for line in lines]))
    return {"accuracy": accuracy, "n_questions": asked.n, "by_length": lines}
