"""Tokenizers: text to tokens, and tokens to text as they come.

A model of bytes reads and writes UTF-8; byte 0 is its token `offset`, and ids below are reserved. A
model of pieces has the vocabulary of its run. Every other model reads and writes numbers separated
by spaces.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from reformax.declared import SettingError

N_BYTES = 256  # the vocabulary of a model of bytes, without reserved ids
_CHARACTER = 8  # pieces: a character has at most 4 bytes


class Tokenizer(Protocol):
    """Encodes prompts and decodes tokens of a model."""

    def encode(self, text: bytes) -> list[int]:
        """The tokens of a prompt; `ValueError` for what the model cannot read."""

    def stream(self) -> Callable[[Sequence[int], bool], str]:
        """A function of the next tokens and whether they are the last; returns what is complete."""


def tokenizer_of(vocabulary: Any = None, offset: int | None = None) -> Tokenizer:
    """The tokenizer of a model.

    Args:
      vocabulary: the run's `reformax.task.Vocabulary`, if it has one.
      offset: the token of byte 0; None if the model is not one of bytes.
    """
    if vocabulary is not None:
        return PieceTokenizer(vocabulary)
    return NumberTokenizer() if offset is None else ByteTokenizer(offset)


class ByteTokenizer:
    """UTF-8. The border after a document, byte 0, is written as a newline."""

    def __init__(self, offset: int):
        self._offset = offset

    def encode(self, text: bytes) -> list[int]:
        """The tokens of the bytes."""
        return (np.frombuffer(text, np.uint8).astype(int) + self._offset).tolist()

    def stream(self) -> Callable[[Sequence[int], bool], str]:
        """Gives each character when all of its bytes are there; leaves reserved ids out."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

        def text(tokens: Sequence[int], final: bool) -> str:
            known = bytes(t - self._offset for t in tokens if t >= self._offset)
            return decoder.decode(known, final).replace("\0", "\n")

        return text


class PieceTokenizer:
    """The pieces of a vocabulary."""

    def __init__(self, vocabulary: Any):
        self._vocabulary = vocabulary

    def encode(self, text: bytes) -> list[int]:
        """The tokens of a text in UTF-8."""
        try:
            return self._vocabulary.encode(text.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise SettingError(
                f"the prompt is not UTF-8: byte {text[error.start]:#04x}: convert it, as with iconv"
            ) from None

    def stream(self) -> Callable[[Sequence[int], bool], str]:
        """Gives the text of pieces that are whole characters together."""
        before: list[int] = []  # decoded again: whether a space is written depends on it
        waiting: list[int] = []

        def text(tokens: Sequence[int], final: bool) -> str:
            nonlocal before, waiting
            waiting += tokens
            whole = self._vocabulary.decode(before + waiting)
            inside = whole.endswith("\ufffd") and len(waiting) < _CHARACTER
            if inside and not final:
                return ""
            new = whole[len(self._vocabulary.decode(before)) :]
            before, waiting = waiting or before, []
            return new

        return text


class NumberTokenizer:
    """Numbers separated by spaces."""

    def encode(self, text: bytes) -> list[int]:
        """The numbers of a prompt."""
        try:
            return [int(word) for word in text.split()]
        except ValueError:
            raise SettingError(
                f"prompt is {text.decode(errors='replace')!r}: this is no model of bytes, give "
                "numbers apart by spaces"
            ) from None

    def stream(self) -> Callable[[Sequence[int], bool], str]:
        """Gives every number at once."""
        return lambda tokens, final: "".join(f"{token} " for token in tokens)
