"""Translates lines for a script: to stdout as they come, or a split to files with its scores."""

from __future__ import annotations

import csv
import io
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from reformax.cli.report import counted

LINES = 10_000  # translated, and then written, together


def write_lines(
    model,
    params,
    vocabulary,
    lines: Sequence[str],
    trained_length: int,
    *,
    quiet: bool = False,
    mesh=None,
    **options,
) -> None:
    """Writes the translation of each line to stdout, in order, and the speed to stderr.

    Args:
      model: as in `generation.translate_lines`, and the next two.
      params: its weights.
      vocabulary: encodes and decodes lines.
      lines: the text.
      trained_length: the longest source that the model was trained on, in tokens.
      quiet: whether to leave progress and speed out.
      mesh: the devices.
      **options: those of `generation.translate`.
    """
    from reformax.generation import prepare, translate_lines

    start = time.perf_counter()
    sys.stdout.reconfigure(encoding="utf-8")
    n_tokens = n_long = 0
    params = prepare(model, params, mesh)
    for first in range(0, len(lines), LINES):
        block = lines[first : first + LINES]
        found = translate_lines(
            model, params, vocabulary, block, first_line=first + 1, progress=not quiet, **options
        )
        sys.stdout.write("".join(f"{line.text}\n" for line in found))
        sys.stdout.flush()
        n_tokens += sum(line.n_tokens for line in found)
        n_long += sum(line.n_source > trained_length for line in found)
    seconds = time.perf_counter() - start
    if n_long:
        print(
            f"note: {counted(n_long, 'line')} of more than {trained_length} tokens, the longest "
            "that the model was trained on",
            file=sys.stderr,
        )
    if not quiet:
        print(
            f"{counted(len(lines), 'line')}, {counted(n_tokens, 'token')} in {seconds:.1f} s, "
            "compilation included",
            file=sys.stderr,
        )


def score_split(
    model, params, translation, split: str, write: Callable[[str, str], None], **options
) -> dict[str, Any]:
    """Translates a split, writes translations_SPLIT.txt and .tsv, and scores them.

    Args:
      model: an encoder-decoder built for evaluation.
      params: its weights.
      translation: a `reformax.task.Translation`.
      split: 'train', 'valid' or 'test'.
      write: takes the name of a file and its text.
      **options: those of `generation.translate`.

    Returns:
      What `generation.scores.score` returns, and n_sentences.
    """
    from reformax.generation import translate_lines
    from reformax.generation.scores import score

    sources, references = translation.sentences(split)
    lines = translate_lines(model, params, translation.vocabulary, sources, **options)
    texts = [line.text for line in lines]
    write(f"translations_{split}.txt", "".join(f"{text}\n" for text in texts))
    file = io.StringIO(newline="")
    table = csv.writer(file, "excel-tab", lineterminator="\n")
    table.writerow(["score", "log_p", "tokens", "translation", "source", "reference"])
    for line, source, reference in zip(lines, sources, references, strict=True):
        values = f"{line.score:.4f}", f"{line.log_p:.4f}", line.n_tokens
        table.writerow([*values, line.text, source, reference])
    write(f"translations_{split}.tsv", file.getvalue())
    if not any(text.strip() for text in texts):
        print(
            f"note: all {counted(len(texts), 'translation')} of {split} are empty: the model ends "
            "each at once, train it longer",
            file=sys.stderr,
        )
    return score(texts, references) | {"n_sentences": len(lines)}
