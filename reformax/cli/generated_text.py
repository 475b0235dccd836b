"""Writes prompts and their continuations to stdout, and the speed to stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence

import numpy as np

from reformax.cli.report import counted
from reformax.generation.tokenizers import Tokenizer


def write(
    blocks: Iterable[np.ndarray],
    prompts: Sequence[Sequence[int]],
    tokenizer: Tokenizer,
    quiet: bool = False,
    ends: Sequence[int] = (),
) -> int:
    """Writes a single row as it comes, and several one after the other when they are done.

    Args:
      blocks: the new tokens of all rows, arrays [B, n]; see `generation.stream`.
      prompts: the B prompts, tokens each.
      tokenizer: see `generation.tokenizers`.
      quiet: whether to leave the speed out.
      ends: tokens that end a row, and are not written.

    Returns:
      The exit code: 0, or 130 after Ctrl-C, which keeps what was computed.
    """
    rows, alone, code = [list(prompt) for prompt in prompts], len(prompts) == 1, 0
    sys.stdout.reconfigure(encoding="utf-8")
    text = tokenizer.stream()  # of tokens as they come
    if alone:
        print(text(rows[0], False), end="", flush=True)
    ended = [False] * len(rows)
    progress = [(0, time.perf_counter())]
    try:
        for block in blocks:
            progress.append((progress[-1][0] + block.shape[1], time.perf_counter()))
            for i, new in enumerate(block.tolist()):
                if ended[i]:
                    continue
                found = [j for j, token in enumerate(new) if token in ends]
                ended[i] = bool(found)
                if ended[i]:
                    new = new[: found[0]]
                rows[i].extend(new)
                if alone:
                    print(text(new, False), end="", flush=True)
            if all(ended):
                break
    except KeyboardInterrupt:
        code = 130
    if alone:
        print(text([], True), flush=True)
    else:
        for i, row in enumerate(rows):
            print(f"--- {i + 1} of {len(rows)}")
            print(tokenizer.stream()(row, True), flush=True)
    if not quiet:
        print(_speed(progress, len(rows)), file=sys.stderr)
    return code


def _speed(progress: list[tuple[int, float]], n_rows: int) -> str:
    """The speed in words, from (new tokens of a row, time) after each block."""
    (_, start), *_, (n_new, end) = progress
    text = f"{counted(n_rows * n_new, 'token')} in {end - start:.1f} s"
    if len(progress) < 4:
        return f"{text}, compilation included"
    done, ready = progress[2]  # the first two blocks compile the two programs
    return (
        f"{text}: {ready - start:.1f} s with compilation, then "
        f"{n_rows * (n_new - done) / (end - ready):,.1f} tokens/s"
    )
