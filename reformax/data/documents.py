"""A text from its files: their documents, one after another, with where each begins.

What is no text is refused in one line that names the option to train on its bytes as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64, UInt8

from reformax.data import arrow_tables, files, joined, tables
from reformax.data.text_files import Found
from reformax.data.text_samples import RAW, Samples
from reformax.declared import SettingError

# Stands after each row of a table. Text does not hold it.
BORDER = b"\0"
_TOGETHER = 2**20  # bytes of rows that are joined


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
      files, notes: as in `Found`; split -> files as `texts`.
    """

    texts: Mapping[str, Text]
    files: Mapping[str, str]
    notes: Sequence[str] = ()


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
