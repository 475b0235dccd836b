"""Needles: whether a model finds a number in a text as long as its context.

The text is sentences that repeat (the passkey task of Mohtashami & Jaggi 2023, "Landmark
Attention", appendix). `needle` hides one number in it. `needles` hides those of several names and
asks for one of them (Hsieh et al. 2024, "RULER", section 3: retrieval with many keys). A question
counts as answered if greedy decoding gives all digits. No instruction is followed: the question is
the beginning of the sentence that was hidden, so any language model can be asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from reformax.declared import SettingError
from reformax.evals.likelihood import LanguageScorer

FILLER = (
    "The grass is green. ",
    "The sky is blue. ",
    "The sun is yellow. ",
    "Here we go. ",
    "There and back again. ",
)
NAMES = ("Anna", "Boris", "Clara", "David", "Elena", "Frank", "Grace", "Henry")
N_DIGITS = 7
BANDS = 5  # of depths, in results
N_QUESTIONS = 50
# Tasks by name: how many needles a text has.
TASKS = {"needle": 1, "needles": len(NAMES)}

Encode = Callable[[str], list[int]]


class Question(NamedTuple):
    """A text with a question at its end, and the answer."""

    text: str
    answer: str
    depth: float  # where the needle lies: 0 is the beginning of the text


def question(n_needles: int, depth: float, n_sentences: int, rng: np.random.Generator) -> Question:
    """A text of so many sentences besides its needles.

    Args:
      n_needles: numbers hidden, of as many names; the first one is asked for.
      depth: of that one; the others lie anywhere.
      n_sentences: of filler.
      rng: draws names, numbers and depths.
    """
    names = rng.permutation(NAMES)[:n_needles]
    numbers = rng.choice(np.arange(10 ** (N_DIGITS - 1), 10**N_DIGITS), n_needles, replace=False)
    depths = [depth, *rng.random(n_needles - 1)]
    hidden = [
        (round(at * n_sentences), f"The number of {name} is {number}. ")
        for at, name, number in zip(depths, names, numbers, strict=True)
    ]
    sentences = [(i, FILLER[i % len(FILLER)]) for i in range(n_sentences)]
    # Sorting is stable: a needle stands before the sentence of its index.
    text = "".join(one for _, one in sorted([*hidden, *sentences], key=lambda pair: pair[0]))
    return Question(f"{text}The number of {names[0]} is", f" {numbers[0]}.", depth)


def questions(n_needles: int, n: int, length: int, encode: Encode, seed: int) -> list[Question]:
    """Questions whose depths are spread evenly, each of at most `length` tokens with its answer.

    Raises:
      SettingError: the needles alone are longer.
    """
    found = []
    of_cycle = len(encode("".join(FILLER))) / len(FILLER)
    for i in range(n):
        depth = i / max(1, n - 1)

        def built(n_sentences: int, i=i, depth=depth) -> Question:
            return question(n_needles, depth, n_sentences, np.random.default_rng([seed, i]))

        found.append(longest(built, length, encode, of_cycle, "the needles"))
    return found


def longest(
    built: Callable[[int], Question], length: int, encode: Encode, of_each: float, what: str
) -> Question:
    """The question `built(n)` with the most parts n of at most `length` tokens with its answer.

    Args:
      built: makes a question of so many parts.
      length: in tokens.
      encode: text -> tokens.
      of_each: tokens of a part, about.
      what: a question without parts, in errors.

    Raises:
      SettingError: `built(0)` is longer.
    """

    def size(one: Question) -> int:
        return len(encode(one.text + one.answer))

    room = length - size(built(0))
    if room < 0:
        raise SettingError(
            f"length is {length}: {what} alone have {length - room} tokens, raise it"
        )
    n_parts = int(room / of_each)
    while n_parts and size(built(n_parts)) > length:
        n_parts -= 1
    return built(n_parts)


def answered(scorer: LanguageScorer, encode: Encode, asked: list[Question]) -> np.ndarray:
    """Whether greedy decoding gives the answer of each question, as booleans."""
    pairs = []
    for one in asked:
        tokens, whole = encode(one.text), encode(one.text + one.answer)
        pairs.append((whole[: len(tokens)], whole[len(tokens) :]))
    return np.array([one.is_greedy for one in scorer.likelihoods(pairs)])


def score(
    scorer: LanguageScorer, encode: Encode, name: str, n: int = N_QUESTIONS, seed: int = 0
) -> dict[str, Any]:
    """The share of questions answered, over all and by the needle's depth.

    Args:
      scorer: the model; texts are as long as its `max_length`.
      encode: text -> tokens.
      name: of `TASKS`.
      n: questions.
      seed: of names and numbers.

    Returns:
      accuracy; accuracy_by_depth, of fifths of the text from its beginning, None for one without
      a question; n_questions and length.
    """
    asked = questions(TASKS[name], n, scorer.max_length, encode, seed)
    right = answered(scorer, encode, asked)
    band = np.minimum((np.array([one.depth for one in asked]) * BANDS).astype(int), BANDS - 1)
    by_depth = [right[band == i] for i in range(BANDS)]
    return {
        "accuracy": float(right.mean()),
        "accuracy_by_depth": [float(x.mean()) if x.size else None for x in by_depth],
        "n_questions": n,
        "length": scorer.max_length,
    }
