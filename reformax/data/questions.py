"""Questions about a long text whose answers stand in it: the kinds of tasks of RULER, and two more.

Hsieh et al. 2024, "RULER: What's the Real Context Size of Your Long-Context Language Models?",
section 3: one needle, needles of several keys, several values of a key, several keys asked for,
variable tracking, common words. `recall` is pairs alone over the whole text (associative recall,
Arora et al. 2023), and `copy` hides a passage.

No instruction is followed: a question is the beginning of a sentence, which the model completes, so
any language model can be asked. Needles lie in a text that is given (`Hay`); `common_words` and
`recall` fill it by themselves. Keys, numbers, passages and sentences for training are others than
those for evaluation.
"""

from __future__ import annotations

import hashlib
import math
import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from reformax.data.question_words import Draw
from reformax.declared import SettingError

Encode = Callable[[str], Sequence[int]]
Name = Literal[
    "needle", "needles", "multi_value", "multi_query", "variables", "common_words", "recall", "copy"
]
FILLER = (
    "The grass is green. ",
    "The sky is blue. ",
    "The sun is yellow. ",
    "Here we go. ",
    "There and back again. ",
)
N_KEYS, N_VALUES = 8, 4  # of a text, of a key
N_ASKED = 4  # keys, together or one after the other
N_CHAINS, N_VARIABLES = 3, 5  # of a text, of a chain
TIMES = 2  # a common word among others that are listed once; more would need less of the list
# The most characters of a part of a text between which needles may lie.
_PART = 400


class Ask(NamedTuple):
    """The beginning of a sentence, and how it goes on."""

    begin: str
    answer: str


class Episode(NamedTuple):
    """Sentences that are hidden in a text, and the questions that follow it.

    Attributes:
      hidden: (depth, sentence), from 0, the beginning of the text, to 1.
      asked: questions; an evaluation asks the first alone.
      depth: where its answer lies; None: in several places.
    """

    hidden: list[tuple[float, str]]
    asked: list[Ask]
    depth: float | None


class Question(NamedTuple):
    """A text with a question at its end, the answer, and its depth from 0 to 1, if it has one."""

    text: str
    answer: str
    depth: float | None


def _split(template: str, *fields: str) -> Ask:
    """A sentence of which the last field and what follows is the answer."""
    begin, _, end = template.format(*fields[:-1], "\0").partition("\0")
    return Ask(begin.rstrip(" "), " " * begin.endswith(" ") + fields[-1] + end)


def _joined(ask: Ask) -> str:
    return ask.begin + ask.answer


def _list(items: Sequence[str]) -> str:
    return ", ".join(items)


def _facts(draw: Draw, depth: float, n: int) -> Episode:
    """Facts of `n` keys, of which the first lies at `depth`."""
    template, keys = draw.sentence("fact"), draw.keys(n)
    facts = [_split(template, *pair) for pair in zip(keys, draw.numbers(n), strict=True)]
    depths = [depth, *draw.rng.random(n - 1)]
    hidden = [(at, _joined(one)) for at, one in zip(depths, facts, strict=True)]
    return Episode(hidden, facts[:N_ASKED], depth)


def needle(draw: Draw, depth: float, n: int) -> Episode:
    """One number is hidden."""
    del n
    return _facts(draw, depth, 1)


def needles(draw: Draw, depth: float, n: int) -> Episode:
    """Numbers of several keys, one of which is asked for (RULER: multiple keys)."""
    del n
    return _facts(draw, depth, N_KEYS)


def multi_query(draw: Draw, depth: float, n: int) -> Episode:
    """Numbers of several keys, some of which are asked for in one sentence."""
    del depth, n
    template, keys, numbers = draw.sentence("fact"), draw.keys(N_KEYS), draw.numbers(N_KEYS)
    pairs = list(zip(keys, numbers, strict=True))
    hidden = [(at, _joined(_split(template, *x))) for at, x in _at_depths(draw, pairs)]
    asked = _split(draw.sentence("of_keys"), _list(keys[:N_ASKED]), _list(numbers[:N_ASKED]))
    return Episode(hidden, [asked], None)


def multi_value(draw: Draw, depth: float, n: int) -> Episode:
    """Several numbers of one key, which all are asked for, in the text's order."""
    del depth, n
    template, (key, other) = draw.sentence("one_of"), draw.keys(2)
    numbers, others = draw.numbers(2 * N_VALUES)[:N_VALUES], draw.numbers(N_VALUES)
    pairs = [(key, x) for x in numbers] + [(other, x) for x in others]
    found = sorted(_at_depths(draw, pairs), key=lambda one: one[0])
    hidden = [(at, _joined(_split(template, *pair))) for at, pair in found]
    values = [value for _, (named, value) in found if named == key]
    return Episode(hidden, [_split(draw.sentence("values"), key, _list(values))], None)


def variables(draw: Draw, depth: float, n: int) -> Episode:
    """Chains of variables, each set to the one before; asked are those of one number.

    A chain's variables follow one another in the text, those of other chains among them.
    """
    del depth, n
    number, same = draw.sentence("number"), draw.sentence("same")
    values, names = draw.numbers(N_CHAINS), draw.names(N_CHAINS * N_VARIABLES, 5)
    hidden, chains = [], np.reshape(names, (N_CHAINS, N_VARIABLES)).tolist()
    for value, chain in zip(values, chains, strict=True):
        depths = np.sort([at for at, _ in _at_depths(draw, chain)]).tolist()
        lines = [number.format(chain[0], value)]
        lines += [same.format(one, before) for before, one in zip(chain, chain[1:], strict=False)]
        hidden += zip(depths, lines, strict=True)
    asked = [
        _split(draw.sentence("variables"), value, _list(chain))
        for value, chain in zip(values, chains, strict=True)
    ]
    return Episode(hidden, asked, None)


def copy(draw: Draw, depth: float, n: int) -> Episode:
    """A passage is hidden, and asked for by its beginning."""
    del n
    passage = _split(draw.sentence("passage"), draw.keys(1)[0], draw.passage())
    return Episode([(depth, _joined(passage))], [passage], depth)


def recall(draw: Draw, depth: float, n: int) -> Episode:
    """`n` pairs and nothing else; a name is asked for, in training further ones."""
    n = max(n, N_ASKED)
    template = draw.sentence("pair")
    pairs = [_split(template, x, y) for x, y in zip(draw.names(n, 5), draw.numbers(n), strict=True)]
    hidden = [(i / n, _joined(one)) for i, one in enumerate(pairs)]
    others = draw.rng.choice(n, N_ASKED - 1, replace=False)
    return Episode(hidden, [pairs[i] for i in (round(depth * (n - 1)), *others)], depth)


def common_words(draw: Draw, depth: float, n: int) -> Episode:
    """A list of words in which one occurs twice as often as each other: which one.

    They are n whole rounds, each of `TIMES` the common word and once each other, in any order. No
    mention tells and all do, so attention to a few chosen keys may fail where it finds needles.
    """
    del depth
    common, *others = draw.rng.permutation(draw.templates.words).tolist()
    rounds = [*others, *[common] * TIMES] * max(n, 1)
    begin, _, end = draw.sentence("common").partition("{}")
    words = f"{begin}{_list(draw.rng.permutation(rounds).tolist())}"
    asked = _split(end, common)
    return Episode([(0.0, words + asked.begin)], [Ask("", asked.answer)], None)


def _at_depths(draw: Draw, items: Sequence) -> list[tuple[float, Any]]:
    """Items, each with a depth in the text, drawn uniformly."""
    return list(zip(draw.rng.random(len(items)).tolist(), items, strict=True))


KINDS: dict[Name, Callable[[Draw, float, int], Episode]] = {
    one.__name__: one
    for one in (needle, needles, multi_value, multi_query, variables, common_words, recall, copy)
}
# Those whose sentences are the whole text, as many as fit.
FILLING: tuple[Name, ...] = ("common_words", "recall")


class Hay:
    """A text whose parts needles lie between: lines, or parts of long ones."""

    def __init__(self, parts: Sequence[str], begins_anywhere: bool = True):
        """Keeps the parts of a text; what is taken begins at any of them, or at the first."""
        self._parts, self._begins_anywhere = parts, begins_anywhere
        self._per_part: dict[Encode, float] = {}

    @classmethod
    def of_text(cls, text: str) -> Hay:
        """The lines of a text; those of more than `_PART` characters are cut at spaces.

        Raises:
          SettingError: the text is empty.
        """
        lines = text.splitlines(keepends=True)
        cut = re.compile(rf".{{1,{_PART}}}(?:\s+|$)|.{{1,{_PART}}}", re.DOTALL)
        parts = [part for line in lines for part in cut.findall(line)]
        if not "".join(parts).strip():
            raise SettingError("the text that needles shall lie in is empty: give another one")
        return cls(parts)

    def tokens_per_part(self, encode: Encode) -> float:
        """The tokens of a part, about."""
        if encode not in self._per_part:
            some = self._parts[:: max(1, len(self._parts) // 1000)]
            self._per_part[encode] = len(encode("".join(some))) / len(some)
        return self._per_part[encode]

    def take(self, n: int, rng: np.random.Generator) -> list[str]:
        """`n` parts that follow one another; after the last comes the first."""
        first = int(rng.integers(len(self._parts))) if self._begins_anywhere else 0
        return [self._parts[(first + i) % len(self._parts)] for i in range(n)]


REPEATED = Hay(FILLER, begins_anywhere=False)


def assembled(episode: Episode, parts: Sequence[str], ask: Ask) -> Question:
    """The text of parts with what is hidden in it, and a question."""
    text, done = [], 0
    for at, sentence in sorted(episode.hidden, key=lambda one: one[0]):  # stable
        end = round(at * len(parts))
        text += parts[done:end]
        done = max(done, end)
        text.append(sentence + ("\n" if not text or text[-1].endswith("\n") else " "))
    text += parts[done:]
    if not parts and not ask.begin:  # a sentence goes on
        return Question("".join(text).rstrip(), ask.answer, episode.depth)
    return Question("".join(text) + ask.begin, ask.answer, episode.depth)


def longest(
    build: Callable[[int], Question], length: int, encode: Encode, per_part: float, what: str
) -> Question:
    """The question `build(n)` of about the most parts n, at most `length` tokens with its answer.

    Its room for more is less than `per_part`, or than the next part.

    Args:
      build: makes a question of so many parts.
      length: in tokens.
      encode: text -> tokens.
      per_part: tokens of a part, about.
      what: a question without parts, in errors.

    Raises:
      SettingError: `build(0)` is longer.
    """

    def room(one: Question) -> int:
        return length - len(encode(one.text + one.answer))

    best = build(0)
    left = room(best)
    if left < 0:
        raise SettingError(
            f"length is {length}: {what} alone have {length - left} tokens, raise it"
        )
    n_best, n_over = 0, math.inf  # so many fit, so many do not
    while True:
        if left >= 0:
            n = min(n_best + int(left / per_part), n_over - 1)
        else:
            n = n_over - max(1, round(-left / per_part))
            if n <= n_best:  # the parts in this place are longer than most
                n = (n_best + n_over) // 2
        if n == n_best:
            return best
        one = build(n)
        left = room(one)
        if left >= 0:
            best, n_best = one, n
        else:
            n_over = n


def builder(
    name: Name, number: int, depth: float, seed: int, hay: Hay
) -> Callable[[int], Question]:
    """Makes a question of a kind for evaluation, of so many parts of `hay`.

    Of kinds that fill the text by themselves (`FILLING`) a part is one of their sentences.

    Args:
      name: of the kind.
      number: of the question; each has its own draws.
      depth: where the answer lies, in kinds with a depth.
      seed: of all draws, any whole number.
      hay: the text that needles lie in.
    """
    key = [seed % 2**64, zlib.crc32(name.encode()), number]

    def build(n: int) -> Question:
        rng = np.random.default_rng(key)
        parts = [] if name in FILLING else hay.take(n, np.random.default_rng([*key, 1]))
        episode = KINDS[name](Draw(rng, held_out=True), depth, n)
        return assembled(episode, parts, episode.asked[0])

    return build


def question(
    name: Name, number: int, depth: float, length: int, encode: Encode, seed: int, hay: Hay
) -> Question:
    """A question of a kind for evaluation, of at most `length` tokens with its answer.

    Args:
      name, number, depth, seed, hay: see `builder`.
      length: in tokens.
      encode: text -> tokens.

    Raises:
      SettingError: what is hidden is longer.
    """
    build = builder(name, number, depth, seed, hay)
    if name in FILLING:
        short, long = (len(encode(build(n).text)) for n in (N_ASKED, 3 * N_ASKED))
        per_part = max((long - short) / (2 * N_ASKED), 1)
    else:
        per_part = hay.tokens_per_part(encode)
    return longest(build, length, encode, per_part, f"the sentences of {name}")


def checksum(questions: Sequence[Question]) -> str:
    """Tells whether two evaluations asked the same."""
    texts = "\0".join(x for one in questions for x in (one.text, one.answer))
    return hashlib.sha256(texts.encode()).hexdigest()[:16]
