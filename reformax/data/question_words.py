"""What questions about a long text are made of: sentences, words, keys and numbers.

Those for training are others than those for evaluation.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

N_DIGITS = 7  # of a number
N_WORDS = 12  # of a passage
_ADJECTIVES = (
    *("amber", "bitter", "calm", "distant", "early", "faint", "gentle", "hollow", "icy", "jolly"),
    *("keen", "lucky", "mellow", "narrow", "odd", "pale", "quiet", "rapid", "silent", "tender"),
    *("upper", "vivid", "warm", "young"),
)
_NOUNS = (
    *("anchor", "barrel", "canyon", "donkey", "ember", "falcon", "goblet", "harbor", "inlet"),
    *("jungle", "kernel", "lantern", "meadow", "nickel", "orchard", "parcel", "quarry", "ribbon"),
    *("saddle", "temple", "umbrella", "valley", "walnut", "zebra"),
)


class Templates(NamedTuple):
    """Sentences, each a choice of several, and words; the last field of a sentence is asked for."""

    fact: Sequence[str]
    one_of: Sequence[str]  # a fact of a key that has several
    values: Sequence[str]
    of_keys: Sequence[str]
    number: Sequence[str]  # a variable's
    same: Sequence[str]  # a variable that has another's number
    variables: Sequence[str]
    passage: Sequence[str]
    pair: Sequence[str]
    common: Sequence[str]
    words: Sequence[str]


TRAINING = Templates(
    fact=(
        "The code of {} is {}.",
        "Write down that {} has {}.",
        "In the book of keys, {} stands for {}.",
        "Whoever asks for {} is told {}.",
    ),
    one_of=("A code of {} is {}.", "Add to the list of {}: {}."),
    values=("The codes of {} are {}.", "The whole list of {}: {}."),
    of_keys=("The codes of {} are {}.", "In this order, {} have {}."),
    number=("Let {} be {}.", "Set {} to {}."),
    same=("Let {} be as {}.", "Set {} to that of {}."),
    variables=("The number {} belongs to {}.", "Set to {} are {}."),
    passage=("The saying of {} goes: {}.", "On the wall of {} is written {}."),
    pair=("{} has {}.", "{}: {}."),
    common=("Count these words: {}. Most of all there is {}.", "Many of {}. They are mostly {}."),
    words=(
        *("anvil", "basket", "carpet", "dagger", "feather", "glove", "helmet", "insect", "jewel"),
        *("kitten", "lemon", "magnet", "napkin", "oyster", "pillow", "quiver", "rocket", "shovel"),
        *("turtle", "violin"),
    ),
)
HELD_OUT = Templates(
    fact=("The number of {} is {}.", "As everyone knows, the secret of {} was {}."),
    one_of=("One number of {} is {}.", "Among the secrets of {} was {}."),
    values=("All numbers of {}, as they come: {}.", "Together, the secrets of {} were {}."),
    of_keys=("The numbers of {} are {}.", "As everyone knows, the secrets of {} were {}."),
    number=("VAR {} = {}.", "Variable {} begins at {}."),
    same=("VAR {} = VAR {}.", "Variable {} follows {}."),
    variables=("The variables with the value {} are {}.", "All that come to {}: {}."),
    passage=("The song of {} begins with {}.", "A letter from {} reads {}."),
    pair=("{} -> {}.", "{} goes with {}."),
    common=("The words are: {}. The most common word is {}.", "Of {}, the most frequent is {}."),
    words=(
        *("apple", "bridge", "candle", "desert", "engine", "forest", "garden", "hammer", "island"),
        *("jacket", "kettle", "ladder", "mirror", "needle", "orange", "pencil", "rabbit"),
        *("silver", "table", "window"),
    ),
)


class Draw:
    """Draws keys, numbers and sentences for training, or others for evaluation."""

    def __init__(self, rng: np.random.Generator, held_out: bool):
        self.rng, self.held_out = rng, held_out
        self.templates = HELD_OUT if held_out else TRAINING

    def sentence(self, kind: str) -> str:
        """One of the sentences of a kind."""
        choices = getattr(self.templates, kind)
        return choices[self.rng.integers(len(choices))]

    def different(self, n: int, draw: Callable[[int], list[str]]) -> list[str]:
        """`n` different texts of this side: an eighth of all is for evaluation.

        Args:
          n: how many.
          draw: makes so many texts. Two calls draw the texts of one call for as many.
        """
        generator = self.rng.bit_generator
        found: dict[str, None] = {}
        while len(found) < n:
            before, size = generator.state, (n - len(found)) * (8 if self.held_out else 1)
            for used, one in enumerate(draw(size), start=1):
                if (zlib.crc32(one.encode()) % 8 == 0) == self.held_out:
                    found[one] = None
                if len(found) == n:  # what is drawn next follows the last that is used
                    generator.state = before
                    draw(used)
                    break
        return list(found)

    def numbers(self, n: int) -> list[str]:
        """Different numbers of `N_DIGITS` digits."""
        low, high = 10 ** (N_DIGITS - 1), 10**N_DIGITS
        return self.different(
            n, lambda size: list(map(str, self.rng.integers(low, high, size).tolist()))
        )

    def keys(self, n: int) -> list[str]:
        """Different keys, each of two words."""
        return self.different(
            n, lambda size: [f"{self._one(_ADJECTIVES)} {self._one(_NOUNS)}" for _ in range(size)]
        )

    def names(self, n: int, length: int) -> list[str]:
        """Different names of so many letters."""

        def draw(size: int) -> list[str]:
            letters = self.rng.integers(ord("A"), ord("Z") + 1, size * length)
            text = letters.astype(np.uint8).tobytes().decode()
            return [text[i : i + length] for i in range(0, len(text), length)]

        return self.different(n, draw)

    def passage(self) -> str:
        """`N_WORDS` words."""
        words = (*_ADJECTIVES, *_NOUNS, *self.templates.words)

        def draw(size: int) -> list[str]:
            return [" ".join(self.rng.choice(words, N_WORDS)) for _ in range(size)]

        return self.different(1, draw)[0]

    def _one(self, words: Sequence[str]) -> str:
        return words[self.rng.integers(len(words))]
