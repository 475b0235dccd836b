"""Prompts as arrays: their tokens checked, padded to a few lengths, and the room that they need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int

from reformax.declared import SettingError, shown


def rows_of(prompts: Sequence[Sequence[int]], vocab_size: int) -> list[Int[np.ndarray, " n"]]:
    """The prompts' tokens, of which there are `vocab_size`."""
    rows = [as_tokens(f"prompts[{i}]", prompt) for i, prompt in enumerate(prompts)]
    if not rows:
        raise ValueError("prompts is empty: expected at least one prompt, which may be empty")
    for i, row in enumerate(rows):
        if row.size and not (row.min() >= 0 and row.max() < vocab_size):
            raise SettingError(
                f"prompts[{i}] has tokens from {row.min()} to {row.max()}: expected 0 to "
                f"{vocab_size - 1}, as the model's vocab_size is {vocab_size}"
            )
    return rows


def padded(
    rows: Sequence[Int[np.ndarray, " n"]], n_row_shards: int, most: float
) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, " B"]]:
    """The rows as an array padded on the right, and their lengths.

    Empty rows at the end make their number a multiple of `n_row_shards`. The array's length is
    `rounded`, but at most `most`.
    """
    lengths = np.array([len(row) for row in rows] + [0] * (-len(rows) % n_row_shards), np.int32)
    tokens = np.zeros((len(lengths), int(min(rounded(int(lengths.max())), most))), np.int32)
    for row, prompt in zip(tokens, rows, strict=False):
        row[: len(prompt)] = prompt
    return tokens, lengths


def in_pieces(
    rows: Sequence[Int[np.ndarray, " n"]], n_row_shards: int, size: int | None, most: float
) -> Iterator[tuple[Int[np.ndarray, "B T"], Int[np.ndarray, " B"]]]:
    """The rows as `padded` has them, `size` tokens at a time, with the number of tokens of each.

    All pieces have one length, `size` or less. None: there is one piece, of at most `most`.
    """
    longest = max(1, *map(len, rows))
    size = min(rounded(longest), size or most)
    for start in range(0, longest, size):
        parts = [row[start : start + size] for row in rows]
        tokens, lengths = padded(parts, n_row_shards, size)
        yield np.pad(tokens, ((0, 0), (0, size - tokens.shape[1]))), lengths


def as_tokens(name: str, tokens: Sequence[int]) -> Int[np.ndarray, " n"]:
    """Tokens as an array; raises `ValueError` for what is no sequence of whole numbers."""
    try:
        row = np.asarray(tokens)
    except ValueError:  # sequences of several lengths
        raise SettingError(f"{name} is {shown(tokens)}: expected token numbers alone") from None
    if row.ndim != 1 or (row.size and not np.issubdtype(row.dtype, np.integer)):
        raise ValueError(
            f"{name} has shape {row.shape} and dtype {row.dtype}: expected a sequence of token "
            "numbers"
        )
    return row


def rounded(length: int, step: int = 64) -> int:
    """The next of a few lengths: multiples of `step`, or of an eighth of the power of two below."""
    step = max(step, 2 ** max(0, length.bit_length() - 4))
    return -(-length // step) * step


def capacity_of(n_prompt: int, n_new: int, requested: int | None, most: int | None) -> int:
    """How many positions a cache needs: as requested, or rounded, and at most `most`."""
    needed = n_prompt + n_new
    for name, limit in (
        ("max_length", requested),
        ("the length that the model's positions hold", most),
    ):
        if limit is not None and needed > limit:
            raise SettingError(
                f"max_new_tokens is {n_new}: with a prompt of {n_prompt} tokens that is {needed}, "
                f"above {name}, {limit}: request fewer or shorten the prompt"
            )
    if requested is not None:
        if most is not None and requested > most:
            raise SettingError(
                f"max_length is {requested}: the model's positions hold {most}, lower it to that"
            )
        return requested
    return rounded(needed) if most is None else min(rounded(needed), most)
