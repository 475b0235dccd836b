"""Reads prompts, and finds the tokenizer and the template that the parsed config reads them by."""

from __future__ import annotations

import argparse
import codecs
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from reformax.cli import flags
from reformax.declared import PathName, SettingError

if TYPE_CHECKING:
    from reformax.data.chat_templates import Written
    from reformax.generation.tokenizers import Tokenizer

MOST = 2**28  # bytes of a prompt or of lines to translate


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
    from reformax.generation.tokenizers import N_BYTES
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


def is_of_chats() -> bool:
    """Whether the parsed config trains on chats."""
    from reformax.cli import config, parsed
    from reformax.data import chats
    from reformax.training import loop

    try:
        task = parsed.described(loop.train, "task")
    except config.ConfigError:  # it has none
        return False
    return isinstance(task, parsed.Reference) and task.function is chats.chats


def chat_template(vocabulary: Any = None) -> Written:
    """The template of the parsed config's task, in the run's vocabulary, if it has one.

    Raises:
      SettingError: the task is not one of chats.
    """
    from reformax.cli import parsed
    from reformax.data import chat_templates
    from reformax.training import loop

    if not is_of_chats():
        raise SettingError(
            "--chat needs a run of chats.chats, whose template it writes prompts by: leave it out, "
            "and write the prompt as the run's text has it"
        )
    name = parsed.described(loop.train, "task").arguments.get("template", "auto")
    encoder = chat_templates.ByteEncoder() if vocabulary is None else vocabulary
    return chat_templates.chosen(name, encoder, "chats.chats")


def tokenizer(vocab_size: int, vocabulary: Any = None) -> Tokenizer:
    """The tokenizer of the parsed config's model.

    Args:
      vocab_size: the model's.
      vocabulary: the run's `reformax.data.pieces.PieceVocabulary`, if it has one.
    """
    from reformax.generation.tokenizers import tokenizer_of

    return tokenizer_of(vocabulary, None if vocabulary is not None else offset(vocab_size))
