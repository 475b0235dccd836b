"""Rows of tables: .jsonl, .json, .csv and .tsv files, and those of `arrow_tables`."""

from __future__ import annotations

import codecs
import csv
import functools
import io
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from reformax.data import files
from reformax.data.arrow_tables import Column, arrow, no_field, parquet
from reformax.declared import SettingError

FIELD = "text"  # of a row that is its text, where nothing else is said
# The longest line of a .jsonl: parsed, a row of many small values takes 20 times its bytes.
MAX_LINE = 2**25
_SPACE = re.compile(r"[ \t\n\r]*")  # of JSON
# (file, its fields, the most bytes that their texts may have) -> rows: a value of each field, of
# text its bytes, or None
Reader = Callable[[Path, Sequence[Column], int], Iterator[tuple]]


def reader(path: Path, field: str | None = FIELD) -> Reader | None:
    """The function that reads the rows of such a file; None if it is no table.

    The name says what a file is, and where it ends in .json, .csv or .tsv also the beginning: an
    array or lines of objects, and a first row that names the field, or any if that is None.
    """
    name = path.name.lower()
    for ending in files.PACKED:
        name = name.removesuffix(ending)
    if name.endswith((".jsonl", ".ndjson")):
        return json_lines
    if name.endswith(".json"):
        return _json_reader(files.head(path).removeprefix(codecs.BOM_UTF8).strip(), field)
    if name.endswith((".csv", ".tsv")):
        delimiter = "\t" if name.endswith(".tsv") else ","
        named = field in _header(files.head(path), delimiter)
        return functools.partial(_delimited, delimiter) if named or field != FIELD else None
    return {".parquet": parquet, ".arrow": arrow}.get(path.suffix.lower())


def _json_reader(head: bytes, field: str | None) -> Reader | None:
    """`json_array`, `json_lines`, or None for another value or the begin of one."""
    if head[:1] == b"[":
        return json_array if head[1:].lstrip()[:1] in (b"{", b'"') else None
    try:
        first = json.loads(head.partition(b"\n")[0])
    except (ValueError, RecursionError):
        return None
    named = isinstance(first, dict) and (field is None or field in first)
    return json_lines if named else None


def _header(head: bytes, delimiter: str) -> list[str]:
    """The first row of a table with delimiters; what is none has one field of any length."""
    text = head.decode("utf-8-sig", "replace")
    try:
        return next(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter), [])
    except csv.Error:
        return []


def texts(path: Path, rows: Reader, field: str, max_bytes: int) -> Iterator[bytes]:
    """The texts of a table's field; rows without text are left out."""
    return (text for (text,) in rows(path, [Column(field)], max_bytes) if text)


def json_lines(
    path: Path, fields: Sequence[Column], max_bytes: int, first: int = 0, last: int | None = None
) -> Iterator[tuple]:
    """The rows of a file with an object of JSON in each line, plain or packed.

    Args:
      path: the file.
      fields: the names in an object.
      max_bytes: unused: unpacked by the limits of `files.blocks`, texts are shorter than lines.
      first, last: of a plain file, the bytes that the lines begin in, from `first` to before
        `last`; None: all.

    Yields:
      A value of each field: of text its bytes, or None.

    Raises:
      ValueError: a line is no object of JSON, is too long, or has no such field.
      OSError: the file cannot be read.
    """
    file = files.opened(files.blocks(path, max(0, first - 1)))
    offset, number = first, 0
    if first:  # a line that begins before is of the part before
        offset += len(file.readline()) - 1
    begin = offset

    def where() -> str:
        parts = files.blocks(path, 0, begin) if begin else ()
        before = sum(part.count(b"\n") for part in parts)
        return f"{path} line {before + number:,}"

    while (last is None or offset < last) and (line := file.readline(MAX_LINE + 1)):
        number += 1
        if len(line) > MAX_LINE:
            raise ValueError(f"{where()} has more than {MAX_LINE:,} bytes: split it into several")
        offset += len(line)
        if line.isspace():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f"{where()} is no JSON ({reason}): expected an object a line"
            ) from None
        if not isinstance(row, dict):
            raise ValueError(f'{where()} is no object: expected lines such as {{"text": "..."}}')
        yield _values(row, where, fields)


def json_array(path: Path, fields: Sequence[Column], max_bytes: int) -> Iterator[tuple]:
    """The rows of a file that is one array, of objects of JSON or of texts.

    Takes, yields and raises what `json_lines` does.
    """
    text, where = _decoded(path), lambda: str(path)
    offset, number, decoder = text.index("[") + 1, 0, json.JSONDecoder()
    try:
        while not text.startswith("]", offset := _SPACE.match(text, offset).end()):
            number += 1

            def where(number=number) -> str:
                return f"{path} element {number:,}"

            row, offset = decoder.raw_decode(text, offset)
            if not isinstance(row, dict | str):
                raise SettingError(
                    f'{where()} is no object: expected an array of such as {{"text": "..."}}'
                )
            yield _values(row if isinstance(row, dict) else {fields[0].name: row}, where, fields)
            offset = _SPACE.match(text, offset).end()
            if text.startswith(",", offset):
                offset += 1
            elif not text.startswith("]", offset):
                raise json.JSONDecodeError("expected ',' or ']'", text, offset)
        if text[offset + 1 :].strip():
            raise json.JSONDecodeError("more after the array", text, offset + 1)
    except (json.JSONDecodeError, RecursionError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{where()} is no JSON ({reason}): write it anew, or as .jsonl") from None


def _values(row: dict[str, Any], where: Callable[[], str], fields: Sequence[Column]) -> tuple:
    found = []
    for field in fields:
        value, kinds = row.get(field.name, None if field.optional else ...), field.kinds
        if value is not None and not isinstance(value, kinds):
            others = [name for name, x in row.items() if isinstance(x, kinds)]
            rest = {name: _kind(x) for name, x in row.items() if name not in others}
            raise no_field(where(), field, fields, others, rest)
        found.append(value.encode("utf-8", "replace") if isinstance(value, str) else value)
    return tuple(found)


def _kind(value: Any) -> str:
    """A value of JSON in a word."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return "null" if value is None else json.dumps(value)[:20]


def _delimited(
    delimiter: str, path: Path, fields: Sequence[Column], max_bytes: int
) -> Iterator[tuple]:
    """The rows of a .csv or .tsv, whose first row names the columns.

    A text with the delimiter or with newlines is in quotation marks.

    Raises:
      ValueError: there is no such column, a row has more fields than the first, or no UTF-8.
    """
    columns: list[int] = []
    for number, row in enumerate(delimited_rows(path, delimiter), start=1):
        if number == 1:
            for field in fields:
                if field.name not in row and not field.optional:
                    raise no_field(str(path), field, fields, row)
            names, columns = row, [_index(row, field.name) for field in fields]
        elif len(row) > len(names):
            raise SettingError(
                f"{path} row {number:,} has {len(row)} fields and the first {len(names)}: put "
                f"texts with {delimiter!r} into quotation marks"
            )
        else:
            values = (row[column] if column < len(row) else "" for column in columns)
            yield tuple(value.encode("utf-8", "replace") for value in values)


def _index(names: Sequence[str], name: str) -> int:
    """A column's index; that of a column that no row has where it is not there."""
    return names.index(name) if name in names else len(names)


def place_of(path: Path, rows: Reader, number: int) -> str:
    """Where a file has its row of this number, from 1 on, in words for errors."""
    if rows is not json_lines:
        return f"{path} {'element' if rows is json_array else 'row'} {number:,}"
    lines = (i for i, line in enumerate(files.opened(files.blocks(path)), 1) if not line.isspace())
    return f"{path} line {next(itertools.islice(lines, number - 1, None)):,}"


def delimited_rows(
    path: Path, delimiter: str, quoting: int = csv.QUOTE_MINIMAL
) -> Iterator[list[str]]:
    """The rows of a .csv or .tsv, plain or packed, without empty lines; `quoting` is of `csv`."""
    csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE))
    text = io.TextIOWrapper(files.opened(files.blocks(path)), "utf-8-sig", newline="")
    table = csv.reader(text, delimiter=delimiter, quoting=quoting)
    try:
        yield from filter(None, table)
    except csv.Error as error:
        raise SettingError(f"{path} line {table.line_num:,} is no row ({error})") from None
    except UnicodeDecodeError as error:
        raise _no_utf8(path, error) from None


def _decoded(path: Path) -> str:
    try:
        return files.read_file(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _no_utf8(path, error) from None


def _no_utf8(path: Path, error: UnicodeDecodeError) -> ValueError:
    return ValueError(f"{path} is not UTF-8 ({error.reason}): convert it, as with iconv")
