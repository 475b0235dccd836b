"""A text from what --data_dir names: files of text, tables of documents, folders of `datasets`.

Every file is looked at before it is trained on. What is no text is refused in one line that names
the option to train on its bytes as they are.
"""

from __future__ import annotations

import codecs
import collections
import fnmatch
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from reformax.data import arrow_tables, files, splits, tables
from reformax.declared import SettingError

# Stands after each row of a table. Text does not hold it.
BORDER = b"\0"
RAW = "--config='text.text.raw=True'"
# Of the bytes of a sample; text in Latin-1 has a few percent, a picture half.
MOST_NO_TEXT = 1 / 3
_PIECE, _PIECES = 2**12, 16  # the sample
_BLOCK = 2**24  # bytes in which borders are looked for together
_FIRST = np.zeros(1, np.int64)  # the one begin of a text of one file
# Files that tell of the tables beside them.
_PAGES = (".md", ".rst", ".json", ".yaml", ".yml", ".toml", ".cff", ".py", ".sh", ".lock")
_PAGE_NAMES = {"readme", "license", "licence", "notice", "citation", "changelog", "authors"}
_PAGE_NAMES |= {"sha256sums", "md5sums", "checksums"}
_ALL = "text.text.pattern='**'"
_WRITTEN = ("json", "csv", "tsv")  # endings of files whose values have marks between them
_CONTROLS = bytes(set(range(32)) - set(b"\t\n\v\f\r\b\x1b")) + b"\x7f"
# The beginnings of files that hold others, or are no text: what they are, what to do instead.
_UNPACK = "unpack it and give the folder"
_KINDS = {
    b"PK\x03\x04": ("a zip archive", _UNPACK),
    b"7z\xbc\xaf\x27\x1c": ("a 7z archive", _UNPACK),
    b"Rar!\x1a\x07": ("a rar archive", _UNPACK),
    b"\x1f\x8b": ("packed by gzip", "name it .gz"),
    b"\xfd7zXZ\0": ("packed by xz", "name it .xz"),
    b"BZh": ("packed by bzip2", "unpack it"),
    b"\x28\xb5\x2f\xfd": ("packed by zstd", "unpack it"),
    b"%PDF-": ("a PDF", "convert it, as with pdftotext"),
    b"PAR1": ("a Parquet file", "name it .parquet"),
    b"ARROW1": ("an Arrow file", "name it .arrow"),
    arrow_tables.LFS_POINTER: ("a pointer of Git LFS, not the file", "run git lfs pull"),
    b"SQLite format 3\0": ("a database of SQLite", "export its text"),
    codecs.BOM_UTF16_LE: ("UTF-16", "convert it, as with iconv -f UTF-16 -t UTF-8"),
    codecs.BOM_UTF16_BE: ("UTF-16", "convert it, as with iconv -f UTF-16 -t UTF-8"),
}
# What `Dataset.save_to_disk` and `DatasetDict.save_to_disk` write.
_DATASET, _DATASETS = "state.json", "dataset_dict.json"


class Source(NamedTuple):
    """A text, and what was read of which files.

    Attributes:
      texts: 'train' alone, or the splits that the text is divided in, with the begins of documents.
      files: split -> the files, by name; as `texts`.
      said: lines on what else was found: files that are left out, and why.
    """

    texts: Mapping[str, files.Joined]
    files: Mapping[str, str]
    said: Sequence[str] = ()


def read(path: Path, pattern: str, field: str, raw: bool, by: splits.By, option: str) -> Source:
    """The text of a file or folder, with where its documents begin: files, and behind a `BORDER`.

    Args:
      path: a file; a folder, whose files are joined by `files.read_all`; or a folder that
        `datasets` saved.
      pattern: the names of files to take. What is read whole matches, or this is '*', which leaves
        pages beside tables out.
      field: the field of a table's rows that is text. Each text ends in `BORDER`.
      raw: take files as they are: no table, nothing unpacked, nothing refused, and documents are
        files alone.
      by: whether a folder's own splits are kept.
      option: the setting that `by` is of, for errors.

    Raises:
      ValueError: a file is empty, damaged or no text, or too much; or none matches.
      OSError: a file or a folder cannot be read.
      ImportError: a package that reads such tables is not there.
    """
    marked: list[str] = []

    def content(file: Path) -> bytes:
        if raw:
            return files.read_plain(file)
        rows = tables.reader(file, field)
        if rows is None:
            try:
                data = files.read_file(file)
            except files.Archive as error:
                raise SettingError(f"{error}; or train on its bytes with {RAW}") from None
            check_text(file, data)
            if file.name.lower().partition(".")[2].startswith(_WRITTEN):
                marked.append(file.name)
            return data
        limit = files.most_unpacked(files.check_ordinary(file))
        return _joined(tables.texts(file, rows, field, limit), file, field)

    _check_pattern(path, pattern, raw)
    said: Sequence[str] = ()
    if not path.is_dir():
        names = {"train": path.name}
        found = {"train": files.Joined(content(path), _FIRST)}
        if by == "by_name" and (others := splits.beside(path)):
            names_of = splits.shown(path.parent, others)
            said = [f"not read: {names_of}, beside it: give the folder to use these splits"]
    elif not raw and (path / _DATASETS).is_file():
        parts, said = _datasets(path, field)
        if by == "cut":
            parts = {"train": b"".join(parts.values())}
        found = {s: files.Joined(x, _FIRST) for s, x in parts.items()}
        names = dict.fromkeys(found, "what `datasets` saved")
    elif not raw and (path / _DATASET).is_file():
        found = {"train": files.Joined(_dataset(path, field), _FIRST)}
        names = {"train": "what `datasets` saved"}
    else:
        if not raw and pattern == "*":
            _check_no_pairs(path)
        chosen = choose(path, pattern, field, raw, by, option)
        found = {s: files.read_all(p, content, path) for s, p in chosen.paths.items()}
        names = {s: _named(path, p) for s, p in chosen.paths.items()}
        said = chosen.said
    said = [*said, *[_with_marks(marked, field)] * bool(marked)]
    texts = found if raw else {s: files.Joined(x.data, _begins(x)) for s, x in found.items()}
    return Source(texts, names, said)


class Chosen(NamedTuple):
    """The files of a folder by their splits, and lines on the others."""

    paths: Mapping[str, list[Path]]
    said: Sequence[str]


def choose(folder: Path, pattern: str, field: str, raw: bool, by: splits.By, option: str) -> Chosen:
    """The files of a folder that are read; arguments and errors are those of `read`."""
    if files.is_run(folder):
        raise SettingError(
            f"{folder} is the folder of a run: give a folder of text, and move the text there if "
            "this one has it"
        )
    listed = files.listed(folder, pattern)
    if not listed.paths:
        raise SettingError(f"{folder} has no file that matches {pattern!r}: put text files there")
    paths, pages = listed.paths, []
    if pattern == "*" and not raw:
        is_table = {path: tables.reader(path, field) is not None for path in paths}
        if any(is_table.values()):
            pages = [path for path in paths if is_page(path) and not is_table[path]]
            paths = [path for path in paths if is_table[path] or not is_page(path)]
    divided = splits.Divided({"train": paths})
    if by == "by_name":
        divided = splits.divided(folder, paths, option)
    left_out = {"in no split": list(divided.outside), **listed.left_out}
    left_out[f"beside tables; {_ALL} takes them"] = pages
    said = splits.left_out_lines(folder, left_out)
    return Chosen(divided.paths, [*divided.notes, *said])


def is_page(path: Path) -> bool:
    """Whether a file tells of data, as it lies beside tables, and is none."""
    name = path.name.lower()
    return name.endswith(_PAGES) or name.partition(".")[0] in _PAGE_NAMES


def _named(folder: Path, paths: Sequence[Path]) -> str:
    """A few names, or how many files there are of each ending."""
    if len(paths) <= 3:
        return splits.shown(folder, paths)
    endings = collections.Counter(path.suffix or "without an ending" for path in paths)
    kinds = [f"{n:,} {ending}" for ending, n in endings.most_common(3)]
    more = len(paths) - sum(n for _, n in endings.most_common(3))
    return f"{len(paths):,} files: " + ", ".join([*kinds, *[f"{more:,} other"] * bool(more)])


def _with_marks(names: Sequence[str], field: str) -> str:
    """What to say of files of which all is read, the marks between values too."""
    more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return (
        f"{', '.join(names[:3])}{more}: read as text, with the marks between values; where a "
        f"column or key other than {field!r} has the text, name it by text.text.field"
    )


def _check_pattern(path: Path, pattern: str, raw: bool) -> None:
    """Raises `SettingError` for a pattern that would choose nothing of what is read whole."""
    by_datasets = not raw and any((path / name).is_file() for name in (_DATASETS, _DATASET))
    if by_datasets and pattern != "*" or not (path.is_dir() or fnmatch.fnmatch(path.name, pattern)):
        what = "a folder that `datasets` saved" if by_datasets else "a file that does not match it"
        raise SettingError(
            f"pattern is {pattern!r}, and {path} is {what}: set text.text.pattern='*', or give a "
            "folder of files"
        )


def _begins(text: files.Joined) -> Int64[np.ndarray, " d"]:
    """Where files begin, and documents behind a `BORDER`."""
    data = files.as_array(text.data)
    after = [
        1 + first + np.flatnonzero(data[first : first + _BLOCK] == BORDER[0])
        for first in range(0, len(data), _BLOCK)
    ]
    found = np.unique(np.concatenate([text.begins, *after]))
    return found[: np.searchsorted(found, len(data))]


def check_text(
    path: Path, data: bytes, instead: str = f"or train on its bytes as they are with {RAW}"
) -> None:
    """Raises `SettingError` if a sample of a file's bytes is mostly no text in UTF-8.

    Args:
      path: the file, for the error.
      data: its bytes.
      instead: what to do with what is no text.
    """
    kinds = [kind for begin, kind in _KINDS.items() if data.startswith(begin)]
    if data[257:262] == b"ustar":
        kinds = [("a tar archive", _UNPACK)]
    if kinds:
        what, fix = kinds[0]
        raise SettingError(f"{path} is {what}: {fix}; {instead}")
    every = max(_PIECE, len(data) // _PIECES)
    sample = [data[begin : begin + _PIECE] for begin in range(0, len(data), every)]
    no_text, total = sum(map(_no_text, sample)), sum(map(len, sample))
    if no_text > MOST_NO_TEXT * total:
        raise SettingError(
            f"{path} is no text: {no_text / total:.0%} of a sample is not UTF-8; convert it, "
            f"choose other files by pattern, {instead}"
        )


def _no_text(piece: bytes) -> int:
    """The bytes of a piece that are no UTF-8, or that control a device."""
    kept = piece.translate(None, _CONTROLS)
    return len(piece) - len(kept.decode("utf-8", "ignore").encode())


def _joined(rows: Iterator[bytes], path: Path, field: str) -> bytes:
    """Documents with a border after each. What is none within one becomes U+FFFD."""
    documents = [row.replace(BORDER, "\ufffd".encode()) for row in rows]
    if not documents:
        raise ValueError(f"{path} has no row with text in {field!r}: give one that has")
    documents.append(b"")
    return BORDER.join(documents)


def _datasets(folder: Path, field: str) -> tuple[dict[str, bytes], list[str]]:
    """The splits of a folder that `DatasetDict.save_to_disk` wrote, and what else it has."""
    names = _read_json(folder / _DATASETS).get("splits")
    names = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    known = {x: found.split for x in names if (found := splits.named(x)) and not found.before}
    if "train" not in known.values() or len(set(known.values())) < len(known):
        raise SettingError(
            f"{folder} holds the splits {names}: expected 'train', and 'validation' and 'test' if "
            "there are any; give the folder of one of them"
        )
    others = [name for name in names if name not in known]
    said = [f"left out: {', '.join(others)} (in no split)"] * bool(others)
    return {split: _dataset(folder / name, field) for name, split in known.items()}, said


def _dataset(folder: Path, field: str) -> bytes:
    """The documents of a folder that `Dataset.save_to_disk` wrote."""
    state = _read_json(folder / _DATASET)
    try:
        names = [file["filename"] for file in state["_data_files"]]
    except (KeyError, TypeError):
        names = []
    if not names or not all(isinstance(n, str) and Path(n).name == n for n in names):
        raise ValueError(
            f"{folder / _DATASET} names no files of its folder: save the dataset again"
        )
    paths = [folder / name for name in names]
    limit = files.most_unpacked(sum(map(files.check_ordinary, paths)))

    def rows() -> Iterator[bytes]:
        left = limit
        for path in paths:
            for document in tables.texts(path, arrow_tables.arrow, field, left):
                left -= len(document)
                yield document

    return _joined(rows(), folder, field)


def _read_json(path: Path) -> dict:
    if files.check_ordinary(path) > 2**24:
        raise ValueError(f"{path} has more than {2**24:,} bytes: save the dataset again")
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is no object of JSON: save the dataset again")
    return found


def _named_of(paths: Iterable[Path]) -> Iterator[splits.Named]:
    return filter(None, (splits.named(path.name) for path in paths))


def _check_no_pairs(folder: Path) -> None:
    """Raises `SettingError` for sentence pairs: files of each split in two languages."""
    languages = [
        path.name.removeprefix("train.")
        for path in sorted(folder.glob("train.??"))
        if any(x.split != "train" for x in _named_of(folder.glob(f"*{path.suffix}")))
    ]
    if len(languages) > 1:
        raise SettingError(
            f"{folder} holds sentence pairs ({', '.join(languages)}): translate them with "
            "--config_file=transformer_multi30k.gin, or choose files by text.text.pattern"
        )
