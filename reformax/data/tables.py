"""Rows of tables: .jsonl, .json and .csv files, and .parquet and .arrow files by pyarrow.

A row is a document: the text of one of its fields. Rows without text are left out. A file of a few
bytes may hold the same long text many times, or pages that unpack to much, so every reader counts
what it has read and stops at its limit.
"""

from __future__ import annotations

import codecs
import csv
import functools
import io
import json
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from reformax.data import files
from reformax.declared import SettingError

FIELD = "text"  # of a row that is its text, where nothing else is said
# The longest line of a .jsonl: parsed, a row of many small values takes 20 times its bytes.
MAX_LINE = 2**25
_SPACE = re.compile(r"[ \t\n\r]*")  # of JSON
_ROWS = 1024  # rows of a table that are read together
# The encodings of Parquet that pyarrow reads as a dictionary.
_AS_DICTIONARY = {"PLAIN", "RLE", "BIT_PACKED", "PLAIN_DICTIONARY", "RLE_DICTIONARY"}
# What stands in place of a file that Git LFS has not fetched.
LFS_POINTER = b"version https://git-lfs"
# Words of pyarrow's errors on files that are whole.
_UNSUPPORTED = ("not yet implemented", "not supported", "unsupported", "not built with", "codec")


def reader(path: Path, field: str = FIELD) -> Callable[[Path, str, int], Iterator[bytes]] | None:
    """The function that reads the rows of such a file; None if it is no table.

    The name says what a file is, and where it ends in .json, .csv or .tsv also the beginning: an
    array or lines of objects, and a first row that names the field.
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


def _json_reader(head: bytes, field: str):
    """`json_array`, `json_lines`, or None for another value or the begin of one."""
    if head[:1] == b"[":
        return json_array if head[1:].lstrip()[:1] in (b"{", b'"') else None
    try:
        first = json.loads(head.partition(b"\n")[0])
    except (ValueError, RecursionError):
        return None
    return json_lines if isinstance(first, dict) and field in first else None


def _header(head: bytes, delimiter: str) -> list[str]:
    """The first row of a table with delimiters; what is none has one field of any length."""
    text = head.decode("utf-8-sig", "replace")
    try:
        return next(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter), [])
    except csv.Error:
        return []


def json_lines(path: Path, field: str, max_bytes: int) -> Iterator[bytes]:
    """The texts of a file with an object of JSON in each line, plain or packed.

    Args:
      path: the file.
      field: the name of the text in an object.
      max_bytes: unused: unpacked by the limits of `files.read_file`, texts are shorter than lines.

    Raises:
      ValueError: a line is no object of JSON, is too long, or has no such text.
      OSError: the file cannot be read.
    """
    file = io.BytesIO(files.read_file(path))
    for number, line in enumerate(iter(lambda: file.readline(MAX_LINE + 1), b""), start=1):
        where = f"{path} line {number:,}"
        if len(line) > MAX_LINE:
            raise ValueError(f"{where} has more than {MAX_LINE:,} bytes: split it into several")
        if line.isspace():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(f"{where} is no JSON ({reason}): expected an object a line") from None
        if not isinstance(row, dict):
            raise ValueError(f'{where} is no object: expected lines such as {{"text": "..."}}')
        if text := _text_of(row, where, field):
            yield text


def json_array(path: Path, field: str, max_bytes: int) -> Iterator[bytes]:
    """The texts of a file that is one array, of objects of JSON or of texts.

    Takes and raises what `json_lines` does.
    """
    text, where = _decoded(path), f"{path}"
    place, number, decoder = text.index("[") + 1, 0, json.JSONDecoder()
    try:
        while not text.startswith("]", place := _SPACE.match(text, place).end()):
            number, where = number + 1, f"{path} element {number + 1:,}"
            row, place = decoder.raw_decode(text, place)
            if not isinstance(row, dict | str):
                raise SettingError(
                    f'{where} is no object: expected an array of such as {{"text": "..."}}'
                )
            if found := _text_of(row if isinstance(row, dict) else {field: row}, where, field):
                yield found
            place = _SPACE.match(text, place).end()
            if text.startswith(",", place):
                place += 1
            elif not text.startswith("]", place):
                raise json.JSONDecodeError("expected ',' or ']'", text, place)
        if text[place + 1 :].strip():
            raise json.JSONDecodeError("more behind the array", text, place + 1)
    except (json.JSONDecodeError, RecursionError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{where} is no JSON ({reason}): write it anew, or as .jsonl") from None


def _text_of(row: dict[str, Any], where: str, field: str) -> bytes | None:
    text = row.get(field, ...)
    if text is not None and not isinstance(text, str):
        raise _no_field(where, field, [n for n, x in row.items() if isinstance(x, str)])
    return text.encode("utf-8", "replace") if text else None


def _delimited(delimiter: str, path: Path, field: str, max_bytes: int) -> Iterator[bytes]:
    """The texts of a column of a .csv or .tsv, whose first row names the columns.

    A text with the delimiter or with newlines stands in quotation marks.

    Raises:
      ValueError: there is no such column, a row has more fields than the first, or no UTF-8.
    """
    for number, row in enumerate(delimited_rows(path, delimiter), start=1):
        if number == 1:
            if field not in row:
                raise _no_field(str(path), field, row)
            names, column = row, row.index(field)
        elif len(row) > len(names):
            raise SettingError(
                f"{path} row {number:,} has {len(row)} fields and the first {len(names)}: put "
                f"texts with {delimiter!r} into quotation marks"
            )
        elif len(row) > column and row[column]:
            yield row[column].encode("utf-8", "replace")


def delimited_rows(path: Path, delimiter: str) -> Iterator[list[str]]:
    """The rows of a .csv or .tsv, plain or packed, without empty lines."""
    csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE))
    table = csv.reader(io.StringIO(_decoded(path), newline=""), delimiter=delimiter)
    try:
        yield from filter(None, table)
    except csv.Error as error:
        raise SettingError(f"{path} line {table.line_num:,} is no row ({error})") from None


def _decoded(path: Path) -> str:
    try:
        return files.read_file(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 ({error.reason}): convert it, as with iconv"
        ) from None


def parquet(path: Path, field: str, max_bytes: int) -> Iterator[bytes]:
    """The texts of a column of a Parquet file.

    Args:
      path: the file.
      field: the column.
      max_bytes: the most that the column may unpack to, and the most that its texts may have.

    Raises:
      ValueError: the file is damaged, has no such column of text, or too much in it.
      OSError: the file cannot be read.
      ImportError: pyarrow is not there.
    """
    pa = _pyarrow(path)
    size = files.check_ordinary(path)
    try:
        _check_column(pa, path, pa.parquet.read_schema(path), field)
        with pa.parquet.ParquetFile(path) as file:
            metadata = file.metadata
        if (stated := _stated(metadata, field)) > max_bytes:
            raise _bomb(path, size, max_bytes)
        # Read as a dictionary, a text that stands many times is in memory once. Where pyarrow
        # cannot, a row has at most the bytes that the column states, so few rows are read together.
        as_dictionary = _encodings(metadata, field) <= _AS_DICTIONARY
        n_rows = _ROWS if as_dictionary else min(_ROWS, max(1, max_bytes // max(1, stated)))
        with pa.parquet.ParquetFile(path, read_dictionary=[field] * as_dictionary) as file:
            batches = file.iter_batches(batch_size=n_rows, columns=[field], use_threads=False)
            yield from _texts(pa, path, field, (batch.column(0) for batch in batches), max_bytes)
    except (pa.ArrowException, OSError) as error:
        raise _unread(pa, path, error) from error


def arrow(path: Path, field: str, max_bytes: int) -> Iterator[bytes]:
    """The texts of a column of an Arrow file or stream, as `datasets` writes them.

    Takes and raises what `parquet` does; packed buffers are refused.
    """
    pa = _pyarrow(path)
    size = files.check_ordinary(path)
    try:
        with pa.memory_map(str(path)) as source:
            begin = 8 if source.read(6) == b"ARROW1" else 0  # a file is a stream in a frame
            source.seek(begin)
            if any(map(_is_packed, pa.ipc.MessageReader.open_stream(source))):
                raise ValueError(
                    f"{path} has packed buffers, which `datasets` does not write: save it as "
                    ".parquet, or without compression"
                )
            source.seek(begin)
            schema = pa.ipc.open_stream(source).schema
            _check_column(pa, path, schema, field)
            source.seek(begin)
            options = pa.ipc.IpcReadOptions(included_fields=[schema.get_field_index(field)])
            batches = pa.ipc.open_stream(source, options=options)
            columns = (batch.column(0) for batch in batches)
            yield from _texts(pa, path, field, columns, max(max_bytes, size))
    except (pa.ArrowException, OSError) as error:
        raise _unread(pa, path, error) from error


def _texts(pa, path: Path, field: str, columns: Iterator[Any], max_bytes: int) -> Iterator[bytes]:
    """The values of columns, as long as they have no more bytes than that together."""
    total, size = 0, path.stat().st_size
    for column in columns:
        column.validate(full=True)
        while isinstance(column, pa.ExtensionArray):
            column = column.storage
        indices, values = None, column
        if pa.types.is_dictionary(column.type):
            indices, values = column.indices, column.dictionary
        lengths = _lengths(pa, values)
        lengths = lengths if indices is None else lengths.take(indices)
        total += len(column) + (pa.compute.sum(lengths).as_py() or 0)
        if total > max_bytes:
            raise _bomb(path, size, max_bytes)
        found = _as_bytes(pa, path, field, values)
        numbers = range(len(found)) if indices is None else indices.to_pylist()
        yield from (found[i] for i in numbers if i is not None and found[i])


def _lengths(pa, values: Any) -> Any:
    """The bytes of each value, before any of them is copied."""
    if not _is_view(pa, values.type):
        return pa.compute.binary_length(values)
    # A view is 16 bytes, of which the first four are the length; many may show one text.
    views = np.frombuffer(values.buffers()[1], np.int32)[4 * values.offset :: 4][: len(values)]
    return pa.array(np.where(np.asarray(values.is_valid()), views, 0), pa.int64())


def _as_bytes(pa, path: Path, field: str, values: Any) -> list[bytes | None]:
    """The values as they are; bytes that no type says are text must be UTF-8."""
    found = values.cast(pa.large_binary()).to_pylist()
    if not _is_string(pa, values.type):
        for value in found:
            try:
                (value or b"").decode("utf-8")
            except UnicodeDecodeError:
                raise SettingError(
                    f"{path}: column {field!r} is {values.type} and no UTF-8: convert it to text"
                ) from None
    return found


def _check_column(pa, path: Path, schema: Any, field: str) -> None:
    """Raises `SettingError` if a table has no such column, or it is not text."""

    def plain(kind: Any) -> Any:
        while isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        return kind.value_type if pa.types.is_dictionary(kind) else kind

    kinds = [plain(column.type) for column in schema]
    texts = [c.name for c, kind in zip(schema, kinds, strict=True) if _is_string(pa, kind)]
    found = [kind for c, kind in zip(schema, kinds, strict=True) if c.name == field]
    if not found:
        raise _no_field(str(path), field, texts)
    if len(found) > 1:
        raise SettingError(f"{path} has {len(found)} columns {field!r}: give each its own name")
    if not (_is_string(pa, found[0]) or _is_binary(pa, found[0])):
        other = next((name for name in texts if name != field), None)
        fix = f"set --config='text.text.field=\"{other}\"'" if other else "save it as strings"
        raise SettingError(f"{path}: column {field!r} is {found[0]}, which is no text: {fix}")


def _is_string(pa, kind: Any) -> bool:
    types = pa.types
    return any(f(kind) for f in (types.is_string, types.is_large_string, types.is_string_view))


def _is_binary(pa, kind: Any) -> bool:
    types = pa.types
    tests = types.is_binary, types.is_large_binary, types.is_binary_view
    return any(test(kind) for test in (*tests, types.is_fixed_size_binary))


def _is_view(pa, kind: Any) -> bool:
    return pa.types.is_string_view(kind) or pa.types.is_binary_view(kind)


def _stated(metadata: Any, field: str) -> int:
    """The bytes that a column unpacks to as the file says, and one for each row."""
    total = metadata.num_rows
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        columns = map(group.column, range(group.num_columns))
        total += sum(c.total_uncompressed_size for c in columns if c.path_in_schema == field)
    return total


def _encodings(metadata: Any, field: str) -> set[str]:
    """How a column's pages are encoded."""
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    columns = (group.column(i) for group in groups for i in range(group.num_columns))
    return {name for c in columns if c.path_in_schema == field for name in c.encodings}


def _is_packed(message: Any) -> bool:
    """Whether the buffers of a message are packed, by its metadata.

    pyarrow does not tell, and would take as much memory as a packed buffer asks for. The metadata
    is a flatbuffer: https://arrow.apache.org/docs/format/Columnar.html#serialization-and-ipc.
    """
    data = message.metadata.to_pybytes()

    def follow(place: int) -> int:
        return place + struct.unpack_from("<I", data, place)[0]

    def field(table: int, number: int) -> int:  # its place; 0 if it is not there
        offsets = table - struct.unpack_from("<i", data, table)[0]
        if 4 + 2 * number >= struct.unpack_from("<H", data, offsets)[0]:
            return 0
        offset = struct.unpack_from("<H", data, offsets + 4 + 2 * number)[0]
        return offset and table + offset

    if message.type not in ("record batch", "dictionary"):
        return False
    batch = follow(field(follow(0), 2))  # Message.header
    if message.type == "dictionary":
        batch = follow(field(batch, 1))  # DictionaryBatch.data
    return field(batch, 3) != 0  # RecordBatch.compression


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow.compute
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise ImportError(
            f"{path} is read by pyarrow, which is not there: pip install 'reformax[parquet]'"
        ) from None
    return pyarrow


def _no_field(where: str, field: str, others: Sequence[str]) -> SettingError:
    there = f"it has {', '.join(others[:9])}" if others else "it has none"
    fix = f", set --config='text.text.field=\"{others[0]}\"'" if others else ""
    return SettingError(f"{where} has no text {field!r}: {there}{fix}")


def _bomb(path: Path, size: int, max_bytes: int) -> ValueError:
    return ValueError(
        f"{path} unpacks to more than {max_bytes:,} bytes of text from {size:,}: refused as a "
        "decompression bomb; if it is none, write it as .jsonl"
    )


def _unread(pa, path: Path, error: Exception) -> Exception:
    """The error of a file that pyarrow does not read: it is damaged, or of an unknown kind."""
    if isinstance(error, OSError) and error.errno is not None:  # of the system
        return error
    reason = " ".join(str(error).split())[:200]
    if isinstance(error, pa.ArrowMemoryError):
        return MemoryError(f"{path} does not fit into memory ({reason})")
    with open(path, "rb") as file:
        head = file.read(len(LFS_POINTER))
    if head == LFS_POINTER:
        return SettingError(f"{path} is a pointer of Git LFS, not the file: run git lfs pull")
    if head[:4] == b"PARE" or "no decryption" in reason:
        return SettingError(f"{path} is encrypted ({reason}): decrypt it first")
    unknown = pa.ArrowNotImplementedError, pa.ArrowCapacityError
    if isinstance(error, unknown) or any(word in reason.lower() for word in _UNSUPPORTED):
        return SettingError(
            f"{path} is of a kind that pyarrow does not read ({reason}): write it anew, or as "
            ".jsonl"
        )
    magic = {".parquet": (b"PAR1",), ".arrow": (b"ARROW1", b"\xff\xff\xff\xff")}
    known = magic[path.suffix.lower()]
    if not head.startswith(known):
        kind = "Parquet" if path.suffix.lower() == ".parquet" else "Arrow"
        return ValueError(
            f"{path} is no {kind} file by its first bytes: name it as what it is, or download it "
            "again"
        )
    return ValueError(f"{path} is damaged ({reason}): copy or download it again")
