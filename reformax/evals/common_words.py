"""Common words: whether a model counts over all of its context.

The text is a list of words of which one is `TIMES` as frequent as each other (Hsieh et al. 2024,
"RULER", section 3: aggregation, common words). The question is which one. Every mention tells a
little and none tells all, so attention to a few chosen keys may fail where it finds needles. As
with `needles`, a question is the beginning of a sentence, which greedy decoding must complete.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from reformax.evals.likelihood import LanguageScorer
from reformax.evals.needles import N_QUESTIONS, Encode, Question, answered, longest

NAME = "common_words"
WORDS = (
    *("apple", "bridge", "candle", "desert", "engine", "forest", "garden", "hammer", "island"),
    *("jacket", "kettle", "ladder", "mirror", "needle", "orange", "pencil", "rabbit", "silver"),
    *("table", "window"),
)
TIMES = 2  # fewer: a larger part of the list is needed to tell


def question(n_words: int, seed: int, number: int) -> Question:
    """A list of at most so many words, and the question for the most common one.

    They are whole rounds, each of `TIMES` the common word and once each other, and all of them in
    any order: a part of the list shows another word as the most common.
    """
    rng = np.random.default_rng([seed, number])
    common, *others = rng.permutation(WORDS)
    n_rounds = n_words // (len(others) + TIMES)
    text = ", ".join(rng.permutation([*others, *[common] * TIMES] * n_rounds))
    return Question(f"The words are: {text}. The most common word is", f" {common}.", 0.0)


def questions(n: int, length: int, encode: Encode, seed: int) -> list[Question]:
    """Questions of at most `length` tokens with the answer, whose lists are whole rounds.

    Raises:
      SettingError: one round is longer.
    """
    n_round = len(WORDS) - 1 + TIMES
    of_round = len(encode(f"{', '.join(WORDS)}, ")) / len(WORDS) * n_round

    def one(number: int) -> Question:
        def built(n_more: int) -> Question:
            return question((1 + n_more) * n_round, seed, number)

        return longest(built, length, encode, of_round, "the words of a round")

    return [one(number) for number in range(n)]


def score(
    scorer: LanguageScorer, encode: Encode, n: int = N_QUESTIONS, seed: int = 0
) -> dict[str, Any]:
    """The share of questions answered; a guess among the words is right once in `len(WORDS)`.

    Args are those of `needles.score`.

    Returns:
      accuracy; n_questions and length.
    """
    right = answered(scorer, encode, questions(n, scorer.max_length, encode, seed))
    return {"accuracy": float(right.mean()), "n_questions": n, "length": scorer.max_length}
