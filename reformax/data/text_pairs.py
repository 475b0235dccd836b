"""Your own sentence pairs: two text files of the same number of lines for each split."""

from __future__ import annotations

import codecs
import contextlib
import functools
from pathlib import Path

from reformax.data import files, splits
from reformax.data.base import SPLITS
from reformax.data.sentence_pairs import sentence_pairs
from reformax.data.vocabulary import Coverage, ModelType, Pieces, SentencePieces
from reformax.declared import Name, PathName, SettingError, checked
from reformax.task import Task

_ENDINGS = ("", *files.PACKED)
_NAMES = {"train": "train.{language}", "valid": "val*.{language}", "test": "test*.{language}"}


@checked
def text_pairs(
    data_dir: PathName,
    source: Name = "en",
    target: Name = "de",
    train: Name = _NAMES["train"],
    valid: Name = _NAMES["valid"],
    test: Name = _NAMES["test"],
    vocab_size: Pieces = 8000,
    model_type: ModelType = "unigram",
    character_coverage: Coverage = 1.0,
) -> Task:
    """Translation from one language of a folder into another, line by line.

    Files are UTF-8 with one sentence a line, plain or packed as .gz, .xz, .zip or .zst. The
    vocabulary is learnt from the lines of both training files. A split is read when it is needed,
    so scoring a test set needs no other file.

    Args:
      data_dir: the folder.
      source: replaces {language} in the names of the files to translate.
      target: replaces {language} in the names of the translations.
      train: the name of the training files without .gz, .xz or .zip, with the wildcards of a shell.
        It matches one file of each language.
      valid: the name of the files to choose by.
      test: the name of the files to report. Where no file has the name that is the default, it is
        the one of its language whose name or folder says the split, as dev.en and train/news.en do:
        see `reformax.data.splits`.
      vocab_size: pieces of the vocabulary.
      model_type: 'unigram', 'bpe', 'char' or 'word'.
      character_coverage: the share of the text's characters that is not unknown.

    Raises:
      FileNotFoundError: the folder does not exist; when a split is read, a file does not.
      ValueError: a name has no {language}; when a split is read, several files match, or files have
        different lengths, are empty or damaged, or are no UTF-8.
    """
    folder = files.existing(data_dir)
    if not folder.is_dir():
        raise SettingError(
            f"data_dir={data_dir} must be a folder with the files of both languages; for one text "
            "take --config_file=reformer_text.gin"
        )
    patterns = dict(zip(SPLITS, (train, valid, test), strict=True))
    for split, pattern in patterns.items():
        if "{language}" not in pattern:
            raise SettingError(
                f"{split}={pattern!r} must have {{language}} in it: train.{{language}}"
            )

    def paths_of(split: str) -> list[Path]:
        return [_find(folder, split, patterns[split], language) for language in (source, target)]

    @functools.cache
    def sentences(split: str) -> tuple[list[str], list[str]]:
        return read_pairs(*paths_of(split))

    def summary() -> list[str]:
        counts = []
        for split in SPLITS:
            with contextlib.suppress(ValueError, OSError):  # a run may do without 'test'
                names = ", ".join(x.relative_to(folder).as_posix() for x in paths_of(split))
                counts.append(f"{split} {len(sentences(split)[0]):,} pairs ({names})")
        return [f"{folder}: {'; '.join(counts)}"]

    def training_text() -> list[str]:
        return [line for side in sentences("train") for line in side]

    vocabulary = SentencePieces(vocab_size, training_text, model_type, character_coverage)
    task = sentence_pairs(f"text_pairs {source}-{target}", sentences, vocabulary)
    return task.replace(summary=summary)


def read_pairs(source: Path, target: Path) -> tuple[list[str], list[str]]:
    """The lines of two aligned files.

    Raises:
      ValueError: the files have different numbers of lines; see also `read_lines`.
    """
    sides = read_lines(source), read_lines(target)
    if len(sides[0]) != len(sides[1]):
        raise ValueError(
            f"{source} has {len(sides[0]):,} lines and {target} {len(sides[1]):,}: line n of one "
            "must translate line n of the other"
        )
    return sides


def read_lines(path: Path) -> list[str]:
    """The lines of a text file, plain or packed, without newlines.

    Raises:
      ValueError: the file is empty, damaged or no UTF-8.
      OSError: the file cannot be read.
    """
    data = files.read_file(path).removeprefix(codecs.BOM_UTF8).removesuffix(b"\n")
    try:
        # Only a newline ends a line: str.splitlines knows ten other ends, and texts hold some.
        return [line.removesuffix("\r") for line in data.decode("utf-8").split("\n")]
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path} is not UTF-8: byte {data[error.start]:#04x} in line {line:,}: convert it, as "
            "with iconv"
        ) from None


def _find(folder: Path, split: str, names: str, language: str) -> Path:
    pattern = names.replace("{language}", language)
    found = {path for ending in _ENDINGS for path in folder.glob(pattern + ending)}
    found = {path for path in found if not path.name.startswith(".")}
    if not found and names == _NAMES[split]:
        endings = tuple(f".{language}{ending}" for ending in _ENDINGS)
        paths = [path for path in files.list_files(folder) if path.name.endswith(endings)]
        found = {path for path in paths if splits.named_in(folder, path) == split}
    if not found:
        raise files.Missing(
            f"{folder} has no file {pattern}, .gz, .xz or .zip: put one there, or set "
            f"text_pairs.text_pairs.{split} to the names of yours, with {{language}} in them; for "
            "one text take --config_file=reformer_text.gin"
        )
    if len(found) > 1:
        names = ", ".join(sorted(path.relative_to(folder).as_posix() for path in found))
        raise ValueError(
            f"{folder} holds {names}: set text_pairs.text_pairs.{split} to one, with {{language}} "
            "in its name"
        )
    return found.pop()
