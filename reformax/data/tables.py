"""Rows of text: .jsonl files, and .parquet and .arrow files by pyarrow.

A row is a document: the text of one of its fields. Rows without text are left out. A file of a few
bytes may hold the same long text many times, or pages that unpack to much, so every reader counts
what it has read and stops at its limit.
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from reformax.data import files
from reformax.declared import SettingError

# The longest line of a .jsonl: parsed, a row of many small values takes 20 times its bytes.
MAX_LINE = 2**25
_ROWS = 1024  # rows of a table that are read together


def reader(path: Path) -> Callable[[Path, str, int], Iterator[bytes]] | None:
    """The function that reads the rows of such a file; None if it is no table by its name."""
    name = path.name.lower()
    for ending in files.PACKED:
        name = name.removesuffix(ending)
    if name.endswith((".jsonl", ".ndjson")):
        return json_lines
    return {".parquet": parquet, ".arrow": arrow}.get(path.suffix.lower())


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
        if field not in row:
            raise _no_field(where, field, [n for n, x in row.items() if isinstance(x, str)])
        text = row[field]
        if text is not None and not isinstance(text, str):
            raise _no_field(where, field, [n for n, x in row.items() if isinstance(x, str)])
        if text:
            yield text.encode("utf-8", "replace")


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
        # Read as a dictionary, a text that stands many times is in memory once.
        with pa.parquet.ParquetFile(path, read_dictionary=[field]) as file:
            if _stated(file.metadata, field) > max_bytes:
                raise _bomb(path, size, max_bytes)
            batches = file.iter_batches(batch_size=_ROWS, columns=[field], use_threads=False)
            yield from _texts(pa, path, (batch.column(0) for batch in batches), max_bytes)
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, error) from error


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
            yield from _texts(pa, path, columns, max(max_bytes, size))
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, error) from error


def _texts(pa, path: Path, columns: Iterator[Any], max_bytes: int) -> Iterator[bytes]:
    """The values of columns, as long as they have no more bytes than that together."""
    total, size = 0, path.stat().st_size
    for column in columns:
        column.validate(full=True)
        if not pa.types.is_dictionary(column.type):
            column = column.dictionary_encode()
        lengths = pa.compute.binary_length(column.dictionary).take(column.indices)
        total += len(column) + (pa.compute.sum(lengths).as_py() or 0)
        if total > max_bytes:
            raise _bomb(path, size, max_bytes)
        values = column.dictionary.cast(pa.large_binary()).to_pylist()
        yield from (values[i] for i in column.indices.to_pylist() if i is not None and values[i])


def _check_column(pa, path: Path, schema: Any, field: str) -> None:
    """Raises `SettingError` if a table has no such column, or it is not text."""

    def is_text(kind: Any) -> bool:
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        return pa.types.is_string(kind) or pa.types.is_large_string(kind)

    texts = [column.name for column in schema if is_text(column.type)]
    if texts.count(field) != 1:
        raise _no_field(str(path), field, texts)


def _stated(metadata: Any, field: str) -> int:
    """The bytes that a column unpacks to as the file says, and one for each row."""
    total = metadata.num_rows
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        columns = map(group.column, range(group.num_columns))
        total += sum(c.total_uncompressed_size for c in columns if c.path_in_schema == field)
    return total


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


def _damaged(path: Path, error: Exception) -> Exception:
    if isinstance(error, OSError) and error.errno is not None:  # of the system
        return error
    reason = " ".join(str(error).split())[:200]
    return ValueError(f"{path} is damaged ({reason}): copy or download it again")
