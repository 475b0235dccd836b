"""Reads prompts and writes tokens as text, for models of bytes, of pieces of words and of numbers.

An alphabet turns a prompt into tokens, and tokens into text as they come. A model of bytes reads
and writes UTF-8; byte 0 is its token `offset`, and ids below are reserved. A model of pieces has
the vocabulary of its run. Every other model reads and writes numbers separated by spaces.
"""

from __future__ import annotations

import argparse
import codecs
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import numpy as np

from reformax.cli import flags
from reformax.declared import PathName, SettingError

if TYPE_CHECKING:
    from reformax.data.chat_templates import Written

MOST = 2**28  # bytes of a prompt or of lines to translate
_CHARACTER = 8  # pieces: a character has at most 4 bytes
N_BYTES = 256  # the vocabulary of a model of bytes, without reserved ids


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that `read` reads."""
    given = parser.add_mutually_exclusive_group()
    given.add_argument("--prompt", action="append", help="repeatable; may be empty")
    given.add_argument(
        "--prompt_file",
        type=flags.of(PathName),
        help="a file that is one prompt; - is standard input",
    )


def read(args: argparse.Namespace, terminal: bytes | None = b"") -> list[bytes]:
    """The prompts of --prompt, of --prompt_file or of standard input.

    Args:
      args: the flags of `add_flags`.
      terminal: the prompt where standard input is a terminal; None to read the terminal.

    Raises:
      ValueError: a file or standard input that holds more than `MOST` bytes.
      OSError: the file cannot be read.
    """
    if args.prompt is not None:
        return [os.fsencode(prompt) for prompt in args.prompt]
    if args.prompt_file not in (None, "-"):
        try:
            with Path(args.prompt_file).open("rb") as file:
                return [_content(file, args.prompt_file)]
        except OSError as error:
            raise OSError(
                f"--prompt_file={args.prompt_file} cannot be read ({error.strerror}): give a file "
                "that is one prompt"
            ) from None
    if terminal is not None and sys.stdin.isatty():
        return [terminal]
    return [_content(sys.stdin.buffer, "standard input")]


def _content(file: BinaryIO, name: str) -> bytes:
    """All that a file holds; `ValueError` for more than `MOST`."""
    content = file.read(MOST + 1)
    if len(content) > MOST:
        raise SettingError(f"{name} has more than {MOST:,} bytes: give a shorter prompt")
    return content


def read_lines(args: argparse.Namespace) -> list[str]:
    """The lines to translate: each --prompt is one, a file or standard input holds many.

    Raises:
      ValueError: a line is not UTF-8.
    """
    texts = read(args, terminal=None)
    if args.prompt is None:  # a file's last newline ends its last line
        text = texts[0].removeprefix(codecs.BOM_UTF8)
        texts = text.removesuffix(b"\n").split(b"\n") if text else []
    lines = []
    for number, text in enumerate(texts, start=1):
        try:
            lines.append(text.decode("utf-8").removesuffix("\r"))
        except UnicodeDecodeError as error:
            raise SettingError(
                f"line {number} is not UTF-8: byte {text[error.start]:#04x}: convert it, as with "
                "iconv"
            ) from None
    return lines


def offset(vocab_size: int) -> int | None:
    """The token of byte 0 in the parsed config's task; None if the model is not one of bytes."""
    from reformax.cli import config, parsed
    from reformax.training import loop

    try:
        task = parsed.described(loop.train, "task")
        first = task.arguments.get("offset", 0) if isinstance(task, parsed.Reference) else 0
    except config.ConfigError:  # generation does not need a task
        first = 0
    return first if vocab_size == N_BYTES + first else None


def encode_message(template: Written, text: bytes) -> list[int]:
    """The tokens of a user's message, and of the text before and after it up to the answer.

    Raises:
      SettingError: training would leave such a message out.
    """
    message = text.decode("utf-8", "replace")
    if message.endswith("\n"):  # of a line that was typed
        message = message[:-1].removesuffix("\r")
    return template.prompt(message)


def chat_template(vocabulary: Any = None) -> Written:
    """The template of the parsed config's task, in the run's vocabulary, if it has one.

    Raises:
      SettingError: the task is not one of chats.
    """
    from reformax.cli import parsed
    from reformax.data import chat_templates, chats
    from reformax.training import loop

    task = parsed.described(loop.train, "task")
    if not isinstance(task, parsed.Reference) or task.function is not chats.chats:
        raise SettingError(
            "--chat needs a run of chats.chats, whose template it writes prompts by: leave it out, "
            "and write the prompt as the run's text has it"
        )
    name = task.arguments.get("template", "auto")
    alphabet = chat_templates.ByteEncoder() if vocabulary is None else vocabulary
    return chat_templates.chosen(name, alphabet, "chats.chats")


class Alphabet(Protocol):
    """Encodes prompts and decodes tokens of a model."""

    def encode(self, text: bytes) -> list[int]:
        """The tokens of a prompt; `ValueError` for what the model cannot read."""

    def stream(self) -> Callable[[Sequence[int], bool], str]:
        """A function of the next tokens and whether they are the last; returns what is complete."""


def alphabet(vocab_size: int, vocabulary: Any = None) -> Alphabet:
    """The alphabet of the parsed config's model.

    Args:
      vocab_size: the model's.
      vocabulary: the run's `reformax.data.pieces.PieceVocabulary`, if it has one.
    """
    if vocabulary is not None:
        return PieceAlphabet(vocabulary)
    first = offset(vocab_size)
    return NumberAlphabet() if first is None else ByteAlphabet(first)


class ByteAlphabet:
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


class PieceAlphabet:
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


class NumberAlphabet:
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
