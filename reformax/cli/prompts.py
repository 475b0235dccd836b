"""Reads prompts and writes tokens as text, for models of bytes and of numbers.

A model of bytes reads and writes UTF-8; byte 0 is its token `offset`, and ids below are reserved.
Every other model reads and writes numbers separated by spaces, and its offset is None.
"""

from __future__ import annotations

import argparse
import codecs
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from reformax.cli import flags
from reformax.declared import PathName

MOST = 2**28  # bytes of a prompt or of lines to translate
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
    """
    if args.prompt is not None:
        return [os.fsencode(prompt) for prompt in args.prompt]
    if args.prompt_file not in (None, "-"):
        with Path(args.prompt_file).open("rb") as file:
            return [_content(file, args.prompt_file)]
    if terminal is not None and sys.stdin.isatty():
        return [terminal]
    return [_content(sys.stdin.buffer, "standard input")]


def _content(file: BinaryIO, name: str) -> bytes:
    """All that a file holds; `ValueError` for more than `MOST`."""
    content = file.read(MOST + 1)
    if len(content) > MOST:
        raise ValueError(f"{name} has more than {MOST:,} bytes: give a shorter prompt")
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
            raise ValueError(
                f"line {number} is not UTF-8: byte {text[error.start]:#04x}: convert it, as with "
                "iconv"
            ) from None
    return lines


def offset(train: Callable, vocab_size: int) -> int | None:
    """The token of byte 0 in the parsed config's task; None if the model is not one of bytes.

    Args:
      train: `loop.train`.
      vocab_size: the model's.
    """
    from reformax.cli import config

    try:
        task = config.described(train, "task")
        first = task.arguments.get("offset", 0) if isinstance(task, config.Reference) else 0
    except config.ConfigError:  # generation does not need a task
        first = 0
    return first if vocab_size == N_BYTES + first else None


def encode(text: bytes, offset: int | None) -> list[int]:
    """The tokens of a prompt; ValueError if a model of numbers gets something else."""
    if offset is not None:
        return [byte + offset for byte in text]
    try:
        return [int(word) for word in text.split()]
    except ValueError:
        raise ValueError(
            f"prompt is {text.decode(errors='replace')!r}: this is no model of bytes, give numbers "
            "apart by spaces"
        ) from None


class Writer:
    """Writes tokens to stdout as text, each character when all of its bytes are there."""

    def __init__(self, offset: int | None):
        self._offset = offset
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def write(self, tokens: Sequence[int], final: bool = False) -> None:
        """Writes the next tokens, without reserved ids; `final` ends the line."""
        if self._offset is None:
            text = "".join(f"{token} " for token in tokens)
        else:
            known = bytes(t - self._offset for t in tokens if t >= self._offset)
            text = self._decoder.decode(known, final)
        print(text, end="\n" if final else "", flush=True)
