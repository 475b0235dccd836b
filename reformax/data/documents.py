"""A text from what --data_dir names: files of text, tables of documents, folders of `datasets`.

Every file is looked at before it is trained on. What is no text is refused in one line that names
the option to train on its bytes as they are.
"""

from __future__ import annotations

import codecs
import collections
import fnmatch
import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64, UInt8

from reformax.data import arrow_tables, files, joined, splits, tables
from reformax.declared import SettingError

# Stands after each row of a table. Text does not hold it.
BORDER = b"\0"
RAW = "--config='text.text.raw=True'"
# Of the bytes of a sample; text in Latin-1 has a few percent, a picture half.
MOST_NO_TEXT = 1 / 3
_PIECE, _PIECES = 2**12, 16  # the sample
_TOGETHER = 2**20  # bytes of rows that are joined
# Files that tell of the tables next to them.
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
    b"\x28\xb5\x2f\xfd": ("packed by zstd", "name it .zst"),
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


class Text(NamedTuple):
    """The bytes of a text, and where its documents begin, in memory or in files.

    `joined` are those of `begins` that begin a joined document; None: none is joined.
    """

    data: UInt8[np.ndarray, " n"]
    begins: Int64[np.ndarray, " d"]
    joined: Int64[np.ndarray, " j"] | None = None


class Source(NamedTuple):
    """A text, and what was read of which files.

    Attributes:
      texts: 'train' alone, or the splits that the text is divided in.
      files: split -> the files, by name; as `texts`.
      notes: lines on what else was found: files that are left out, and why.
    """

    texts: Mapping[str, Text]
    files: Mapping[str, str]
    notes: Sequence[str] = ()


class Found(NamedTuple):
    """The files of a text, not read yet.

    Attributes:
      paths: split -> its files, in order.
      files, notes: as in `Source`.
      kind: how they are read: 'datasets', what `datasets` saved; 'joined', files each with a
        newline at its end; or 'file', the one that there is.
      checked: whether what is no text is refused, and byte 0 ends a document.
      join_by: what documents are joined by, `joined.FOLDER` or a field of rows; None: by nothing.
      root: what a user named.
    """

    paths: Mapping[str, list[Path]]
    files: Mapping[str, str]
    notes: Sequence[str]
    kind: str
    checked: bool = True
    join_by: str | None = None
    root: Path = Path()

    def keys(self) -> joined.Keys | None:
        """What finds the keys of documents, by which they are joined; None: by nothing."""
        return None if self.join_by is None else joined.Keys(self.join_by)

    def is_split(self, name: str) -> bool:
        """Whether a folder's name says a split of this text."""
        return len(self.paths) > 1 and splits.named(name) is not None

    def size(self) -> int:
        """The bytes of all files; raises for what is no ordinary one."""
        return sum(files.check_ordinary(p) for paths in self.paths.values() for p in paths)


def read(path: Path, found: Found, field: str) -> Source:
    """The text of what `find` found, in memory; `pieces_of` says what else raises.

    Raises:
      ValueError: there is more than fits into half of the memory.
    """
    files.check_room(path, found.size())
    texts, total = {}, 0
    for split, paths in found.paths.items():
        parts, positions, of_documents = [], [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        begins, keys = Begins(found.checked), found.keys()
        for part, first in pieces_of(found, [FileSpan(p) for p in paths], field, keys):
            total += len(part)
            files.check_room(path, total)
            parts.append((part, first))
            if keys is not None:
                positions.append(begins.of(part, first))
                of_documents.append(keys.take(len(positions[-1])))
        if keys is None:  # after all is read: borders of what is no text may be many
            positions += [begins.of(*part) for part in parts]
        data = b"".join(part for part, _ in parts)
        text = Text(files.as_array(data), np.concatenate(positions))
        texts[split] = text if keys is None else _joined(text, np.concatenate(of_documents))
    check_joined(path, found, texts)
    return Source(texts, found.files, found.notes)


def _joined(text: Text, keys: Int64[np.ndarray, " d"]) -> Text:
    """A text with its documents joined by their keys."""
    order = joined.order_of(keys)
    if order is not None:
        lengths = np.diff(text.begins, append=len(text.data))[order]
        first = text.begins[order]
        parts = [text.data[a : a + n] for a, n in zip(first, lengths, strict=True)]
        begins = np.cumsum([0, *lengths[:-1]], dtype=np.int64)
        text, keys = Text(np.concatenate(parts), begins), keys[order]
    return text._replace(joined=text.begins[joined.firsts(keys)])


def check_joined(path: Path, found: Found, texts: Mapping[str, Text]) -> None:
    """Raises `SettingError` if documents are to be joined, and none is."""
    if found.join_by is not None and all(len(x.joined) == len(x.begins) for x in texts.values()):
        what = "no folder in it" if found.join_by == joined.FOLDER else "no value of this field"
        raise SettingError(
            f"text.text.join_by is {found.join_by!r}, and {path} has {what} with two documents: "
            "name 'folder' or a field by which some belong together, or leave it out"
        )


def find(
    path: Path, pattern: str, field: str | None, raw: bool, by: splits.By, option: str
) -> Found:
    """The files of a text, by splits.

    Args:
      path: a file; a folder, whose files are joined; or a folder that `datasets` saved.
      pattern: the names of files to take. What is read whole matches, or this is '*', which leaves
        pages next to tables out.
      field: the field of a table's rows that is text. Each text ends in `BORDER`. None: tables of
        any fields.
      raw: take files as they are: no table, nothing unpacked, nothing refused, and documents are
        files alone.
      by: whether a folder's own splits are kept.
      option: the setting that `by` is of, for errors.

    Raises:
      ValueError: no file matches, or the folder is a run's or has splits that cannot be used.
      OSError: a folder cannot be read.
    """
    _check_pattern(path, pattern, raw)
    if not path.is_dir():
        notes: Sequence[str] = ()
        if by == "by_name" and (others := splits.held_out_next_to(path)):
            names_of = splits.shown(path.parent, others)
            notes = [f"not read: {names_of}, next to it: give the folder to use these splits"]
        notes = [*notes, *([] if raw else _with_marks([path], field))]
        return Found({"train": [path]}, {"train": path.name}, notes, "file", not raw)
    if not raw and any((path / name).is_file() for name in (_DATASETS, _DATASET)):
        whole = (path / _DATASETS).is_file()
        parts, notes = _datasets(path) if whole else ({"train": _dataset(path)}, ())
        if by == "cut":
            parts = {"train": [file for paths in parts.values() for file in paths]}
        return Found(parts, dict.fromkeys(parts, "what `datasets` saved"), notes, "datasets")
    if not raw and pattern == "*":
        _check_no_pairs(path)
    chosen = choose(path, pattern, field, raw, by, option)
    names = {split: _named(path, paths) for split, paths in chosen.paths.items()}
    marked = [] if raw else _with_marks([p for x in chosen.paths.values() for p in x], field)
    return Found(chosen.paths, names, [*chosen.notes, *marked], "joined", not raw)


class FileSpan(NamedTuple):
    """A file, or a part of it.

    Attributes:
      path: the file.
      first, last: of a plain file the bytes, of a .parquet the row groups, from `first` to before
        `last`.
      size: the bytes of the part in the file; None: the whole file's.
    """

    path: Path
    first: int = 0
    last: int | None = None
    size: int | None = None


def pieces_of(
    found: Found, spans: Iterable[FileSpan], field: str, keys: joined.Keys | None = None
) -> Iterator[tuple[bytes, bool]]:
    """The text of some files, a part at a time, each with whether a file begins with it.

    `keys` then has those of the documents of a part, which `Begins` counts.

    Raises:
      ValueError: a file is empty, damaged or no text, or too much.
      OSError: a file cannot be read.
      ImportError: a package that reads such tables is not there.
    """
    n_rows = 0
    for span in spans:
        size, end = files.check_ordinary(span.path), b""
        if found.kind == "joined" and not size:
            continue
        first = span.first == 0
        if keys is not None:
            keys.begin(span.path, found.root, found.is_split)
        for part in _parts(found, span, field, size, keys):
            if part:
                yield part, first
                first, end, n_rows = False, part[-1:], n_rows + 1
        ends_here = span.last is None or span.last == size
        if found.kind == "joined" and end not in (b"\n", BORDER, b"") and ends_here:
            yield b"\n", False
    if found.kind == "datasets" and not n_rows:
        raise _no_row(span.path.parent, field)


def _parts(
    found: Found, span: FileSpan, field: str, size: int, keys: joined.Keys | None
) -> Iterator[bytes]:
    """The text of a file in parts; see `pieces_of`."""
    path, bounds = span.path, (span.first, span.last)
    if not found.checked:
        if not size:
            raise SettingError(f"{path} is empty: give a file with text")
        return files.plain_blocks(path, *bounds)
    rows = arrow_tables.arrow if found.kind == "datasets" else tables.reader(path, field)
    if rows is None:
        return _checked_text(path, bounds)
    if rows in (tables.json_lines, tables.parquet) and bounds != (0, None):
        rows = functools.partial(rows, first=span.first, last=span.last)
    most = files.most_unpacked(size)
    if keys is not None and keys.field is not None:
        other = arrow_tables.Column(keys.field, "text.text.join_by", is_text=False)
        texts = keys.rows(rows(path, [arrow_tables.Column(field), other], most))
    else:
        texts = tables.texts(path, rows, field, most)
    return _with_borders(
        texts, path, field, needs_row=span == FileSpan(path) and found.kind != "datasets"
    )


def _checked_text(path: Path, bounds: tuple[int, int | None]) -> Iterator[bytes]:
    """The blocks of a file that is no table; raises `SettingError` if they are no text."""
    samples = Samples(path)
    try:
        for block in files.blocks(path, *bounds):
            samples.add(block)
            yield block
    except files.Archive as error:
        raise SettingError(f"{error}; or train on its bytes with {RAW}") from None
    samples.check()


def _with_borders(
    rows: Iterator[bytes], path: Path, field: str, needs_row: bool
) -> Iterator[bytes]:
    """Documents with a border after each, many at a time. What is none in one becomes U+FFFD."""
    some, size, any_row = [], 0, False
    for row in rows:
        some.append(row.replace(BORDER, "\ufffd".encode()))
        size += len(row)
        if size >= _TOGETHER:
            yield BORDER.join([*some, b""])
            some, size, any_row = [], 0, True
    if some:
        yield BORDER.join([*some, b""])
    elif needs_row and not any_row:
        raise _no_row(path, field)


def _no_row(path: Path, field: str) -> ValueError:
    return ValueError(f"{path} has no row with text in {field!r}: give one that has")


class Begins:
    """Finds where documents begin in a text that comes in parts: with files, and after a `BORDER`.

    Args:
      by_border: whether a border ends a document.
      continues: whether the text begins within a document.
    """

    def __init__(self, by_border: bool, continues: bool = False):
        self._by_border, self._size = by_border, 0
        self._ends = not continues  # whether what comes next begins a document

    def of(self, part: bytes, begins_file: bool) -> Int64[np.ndarray, " d"]:
        """The positions in the text of the documents that begin in its next part, sorted."""
        found = np.zeros(int(begins_file or self._ends), np.int64)
        self._ends = self._by_border and part.endswith(BORDER)
        if self._by_border:
            inside = np.flatnonzero(files.as_array(part)[:-1] == BORDER[0])
            found = np.concatenate([found, inside + 1])
        found += self._size
        self._size += len(part)
        return found


def choose(
    folder: Path, pattern: str, field: str | None, raw: bool, by: splits.By, option: str
) -> splits.Divided:
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
    left_out = {**listed.left_out, f"next to tables; {_ALL} takes them": pages}
    return splits.choose(folder, paths, by, option, left_out)


def is_page(path: Path) -> bool:
    """Whether a file tells of data, as it lies next to tables, and is none."""
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


def _with_marks(paths: Sequence[Path], field: str | None) -> list[str]:
    """What to say of files of which all is read, the marks between values too."""
    named = [p for p in paths if p.name.lower().partition(".")[2].startswith(_WRITTEN)]
    names = [path.name for path in named if tables.reader(path, field) is None]
    if not names:
        return []
    more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return [
        f"{', '.join(names[:3])}{more}: read as text, with the marks between values; where a "
        f"column or key other than {field!r} has the text, name it by text.text.field"
    ]


def _check_pattern(path: Path, pattern: str, raw: bool) -> None:
    """Raises `SettingError` for a pattern that would choose nothing of what is read whole."""
    by_datasets = not raw and any((path / name).is_file() for name in (_DATASETS, _DATASET))
    if by_datasets and pattern != "*" or not (path.is_dir() or fnmatch.fnmatch(path.name, pattern)):
        what = "a folder that `datasets` saved" if by_datasets else "a file that does not match it"
        raise SettingError(
            f"pattern is {pattern!r}, and {path} is {what}: set text.text.pattern='*', or give a "
            "folder of files"
        )


class Samples:
    """Samples of a file's bytes, which say whether it is text in UTF-8."""

    def __init__(self, path: Path, instead: str = f"or train on its bytes as they are with {RAW}"):
        """Takes the file, and what to do with what is no text, for errors."""
        self._path, self._instead = path, instead
        self._no_text = self._total = 0

    def add(self, data: bytes) -> None:
        """Takes samples of the next block; raises `SettingError` if the first one says a kind."""
        kinds = [kind for begin, kind in _KINDS.items() if data.startswith(begin)]
        if data[257:262] == b"ustar":
            kinds = [("a tar archive", _UNPACK)]
        if kinds and not self._total:
            what, fix = kinds[0]
            raise SettingError(f"{self._path} is {what}: {fix}; {self._instead}")
        every = max(_PIECE, len(data) // _PIECES)
        sample = [data[begin : begin + _PIECE] for begin in range(0, len(data), every)]
        self._no_text += sum(map(_no_text, sample))
        self._total += sum(map(len, sample))

    def check(self) -> None:
        """Raises `SettingError` if they are mostly no text."""
        if self._no_text > MOST_NO_TEXT * self._total:
            raise SettingError(
                f"{self._path} is no text: {self._no_text / self._total:.0%} of a sample is not "
                f"UTF-8; convert it, choose other files by pattern, {self._instead}"
            )


def check_text(path: Path, data: bytes, instead: str) -> None:
    """Raises `SettingError` if a sample of a file's bytes is mostly no text; see `Samples`."""
    samples = Samples(path, instead)
    samples.add(data)
    samples.check()


def _no_text(piece: bytes) -> int:
    """The bytes of a piece that are no UTF-8, or that control a device."""
    kept = piece.translate(None, _CONTROLS)
    return len(piece) - len(kept.decode("utf-8", "ignore").encode())


def _datasets(folder: Path) -> tuple[dict[str, list[Path]], list[str]]:
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
    notes = [f"left out: {', '.join(others)} (in no split)"] * bool(others)
    return {split: _dataset(folder / name) for name, split in known.items()}, notes


def _dataset(folder: Path) -> list[Path]:
    """The files of a folder that `Dataset.save_to_disk` wrote."""
    state = _read_json(folder / _DATASET)
    try:
        names = [file["filename"] for file in state["_data_files"]]
    except (KeyError, TypeError):
        names = []
    if not names or not all(isinstance(n, str) and Path(n).name == n for n in names):
        raise ValueError(
            f"{folder / _DATASET} names no files of its folder: save the dataset again"
        )
    return [folder / name for name in names]


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


def _check_no_pairs(folder: Path) -> None:
    """Raises `SettingError` for sentence pairs: files of several splits in two languages."""
    languages = []
    for path in sorted(folder.glob("train.??")):
        found = map(splits.named, (other.name for other in folder.glob(f"*{path.suffix}")))
        if {x.split for x in found if x} - {"train"}:
            languages.append(path.suffix.removeprefix("."))
    if len(languages) > 1:
        raise SettingError(
            f"{folder} holds sentence pairs ({', '.join(languages)}): translate them with "
            "--config_file=transformer_multi30k.gin, or choose files by text.text.pattern"
        )
