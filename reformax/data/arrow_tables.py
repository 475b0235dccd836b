"""Rows of .parquet and .arrow files, by pyarrow.

A file of a few bytes may hold the same long text many times, or pages that unpack to much, so every
reader counts what it has read and stops at its limit.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reformax.data import files
from reformax.declared import SettingError
from reformax.shell import config_flag

_ROWS = 1024  # rows of a table that are read together
_TOGETHER, _BUFFER = 2**24, 2**20  # bytes of texts that are read together, and bytes of a read
_NESTED = 64  # bytes that a value in a list or an object takes in Python besides its text
# Encodings of Parquet whose texts take no more memory than the file states, and dictionaries.
_PLAIN = {"PLAIN", "RLE", "BIT_PACKED"}
_DICTIONARY = {"PLAIN_DICTIONARY", "RLE_DICTIONARY"}
_SMALL_GROUP = 2**26  # stated bytes of a row group that is read as a dictionary
# Fields of a conversation, and of a prompt and its answer (`conversations`).
MESSAGES = ("messages", "conversations", "conversation")
PROMPTS = ("prompt", "instruction", "question")
ANSWERS = ("completion", "answer", "response", "output")
# What is in place of a file that Git LFS has not fetched.
LFS_POINTER = b"version https://git-lfs"
# Words of pyarrow's errors on files that are whole.
_UNSUPPORTED = ("not yet implemented", "not supported", "unsupported", "not built with", "codec")


class Column(NamedTuple):
    """A field of rows that is read.

    Attributes:
      name: the field's.
      setting: the setting that names it, for errors.
      is_text: whether its values are text; otherwise they are numbers, booleans or text.
      nested: whether they may be lists and objects as well.
      optional: whether rows may be without it, which then have None.
    """

    name: str
    setting: str = "text.text.field"
    is_text: bool = True
    nested: bool = False
    optional: bool = False

    @property
    def kinds(self) -> tuple[type, ...]:
        """The types of its values in JSON."""
        kinds = (str,) if self.is_text else (str, int, float)
        return (*kinds, list, dict) if self.nested else kinds


class NoField(SettingError):
    """A table has no such field; `others` are those of its kind."""

    def __init__(self, text: str, others: Sequence[str] = ()):
        super().__init__(text)
        self.others = others


def parquet(
    path: Path, fields: Sequence[Column], max_bytes: int, first: int = 0, last: int | None = None
) -> Iterator[tuple]:
    """The rows of columns of a Parquet file.

    Args:
      path: the file.
      fields: the columns.
      max_bytes: the most that the columns may unpack to, and the most that their texts may have.
      first, last: the row groups that are read, from `first` to before `last`; None: all.

    Yields:
      A value of each column: of text its bytes, or None.

    Raises:
      ValueError: the file is damaged, has no such column of text, or too much in it.
      OSError: the file cannot be read.
      ImportError: pyarrow is not there.
    """
    pa = _pyarrow(path)
    size = files.check_ordinary(path)
    try:
        schema = pa.parquet.read_schema(path)
        _check_columns(pa, path, schema, fields)
        names = [field.name for field in fields if field.name in schema.names]
        with pa.parquet.ParquetFile(path) as file:
            metadata = file.metadata
        numbers = range(metadata.num_row_groups)
        stated = sum(_stated(metadata.row_group(i), names) for i in numbers)
        if metadata.num_rows + stated > max_bytes:
            raise _bomb(path, size, max_bytes)
        batches = (b for i in numbers[first:last] for b in _batches(pa, path, metadata, i, names))
        yield from _rows(pa, path, fields, batches, max_bytes)
    except (pa.ArrowException, OSError) as error:
        raise _unread(pa, path, error) from error


def row_groups(path: Path) -> list[int]:
    """The bytes that each row group of a Parquet file has in it; raises what `parquet` does."""
    pa = _pyarrow(path)
    try:
        metadata = pa.parquet.read_metadata(path)
        groups = map(metadata.row_group, range(metadata.num_row_groups))
        return [
            sum(max(0, group.column(i).total_compressed_size) for i in range(group.num_columns))
            for group in groups
        ]
    except (pa.ArrowException, OSError) as error:
        raise _unread(pa, path, error) from error


def _batches(pa, path: Path, metadata: Any, number: int, names: Sequence[str]) -> Iterator[Any]:
    """The batches of a row group, each of about `_TOGETHER` bytes of text, or of a small group.

    Read as a dictionary, a text that occurs many times is in memory once. But pyarrow then keeps
    every text of the row group, so a large one is read so only to see how long its texts are.
    """
    group = metadata.row_group(number)
    stated = max(1, _stated(group, names))
    encodings = _encodings(group, names)
    dictionaries = [column for column, found in encodings.items() if found & _DICTIONARY]

    def batches(n_rows: int, as_dictionaries: Sequence[str] = ()) -> Iterator[Any]:
        with pa.parquet.ParquetFile(
            path,
            metadata=metadata,
            read_dictionary=list(as_dictionaries),
            pre_buffer=False,
            buffer_size=_BUFFER,
        ) as file:
            yield from file.iter_batches(
                batch_size=n_rows, row_groups=[number], columns=list(names), use_threads=False
            )

    longest = -(-stated // max(1, group.num_rows))  # the mean of texts that lie in the file
    if any(found - _PLAIN - _DICTIONARY for found in encodings.values()):
        longest = stated  # a text may be most of the one before it
    elif dictionaries and stated <= _SMALL_GROUP:
        yield from batches(max(1, group.num_rows), dictionaries)
        return
    elif dictionaries:
        with contextlib.closing(batches(1, dictionaries)) as begins:
            begin = next(begins)
        found = [values for column in begin.columns for values in _dictionaries(column)]
        for values in found:
            # One value may be the first row's, with a dictionary after it.
            lengths = _lengths(pa, values) if len(values) > 1 else pa.array([stated])
            longest = max(longest, pa.compute.max(lengths).as_py() or 0)
        if len(found) < len(dictionaries):
            longest = stated
        del begin, found
    yield from batches(min(_ROWS, max(1, _TOGETHER // longest)))


def arrow(path: Path, fields: Sequence[Column], max_bytes: int) -> Iterator[tuple]:
    """The rows of columns of an Arrow file or stream, as `datasets` writes them.

    Takes, yields and raises what `parquet` does; packed buffers are refused.
    """
    pa = _pyarrow(path)
    size = files.check_ordinary(path)
    try:
        with _source(pa, path) as source:
            begin = 8 if source.read(6) == b"ARROW1" else 0  # a file is a stream in a frame
            source.seek(begin)
            if any(map(_is_packed, pa.ipc.MessageReader.open_stream(source))):
                raise ValueError(
                    f"{path} has packed buffers, which `datasets` does not write: save it as "
                    ".parquet, or without compression"
                )
            source.seek(begin)
            schema = pa.ipc.open_stream(source).schema
            _check_columns(pa, path, schema, fields)
            source.seek(begin)
            names = [field.name for field in fields if field.name in schema.names]
            included = [schema.get_field_index(name) for name in names]
            options = pa.ipc.IpcReadOptions(included_fields=included)
            batches = pa.ipc.open_stream(source, options=options)
            yield from _rows(pa, path, fields, batches, max(max_bytes, size))
    except (pa.ArrowException, OSError) as error:
        raise _unread(pa, path, error) from error


def _rows(
    pa, path: Path, fields: Sequence[Column], batches: Iterator[Any], max_bytes: int
) -> Iterator[tuple]:
    """The rows of batches, as long as their texts have no more bytes than that together."""
    total, size = 0, path.stat().st_size
    for part in _in_parts(pa, batches):
        columns = []
        for field in fields:
            if field.name not in part.schema.names:  # an optional one
                columns.append([None] * part.num_rows)
                continue
            column = part.column(field.name)
            column.validate(full=True)
            while isinstance(column, pa.ExtensionArray):
                column = column.storage
            total += _size(pa, column, _NESTED if pa.types.is_nested(column.type) else 1)
            if total > max_bytes:  # before any text is copied
                raise _bomb(path, size, max_bytes)
            is_dictionary = pa.types.is_dictionary(column.type)
            values = column.dictionary if is_dictionary else column
            is_text = _is_string(values.type) or _is_bytes(values.type)
            found = _as_bytes(pa, path, field.name, values) if is_text else values.to_pylist()
            if is_dictionary:  # a text that occurs many times is in memory once
                found = [None if i is None else found[i] for i in column.indices.to_pylist()]
            columns.append(found)
        yield from zip(*columns, strict=True)


def _in_parts(pa, batches: Iterator[Any]) -> Iterator[Any]:
    """Batches of a few rows, for one of an .arrow file's may be the whole table.

    One with a dictionary stays whole: each of its parts would have all of the dictionary.
    """
    for batch in batches:
        whole = any(map(pa.types.is_dictionary, batch.schema.types))
        n_rows = max(1, batch.num_rows)
        for first in range(0, n_rows, n_rows if whole else _ROWS):
            yield batch.slice(first, n_rows if whole else _ROWS)


def _source(pa, path: Path) -> Any:
    """A file mapped into memory, or read where a limit of addresses does not let it."""
    try:
        return pa.memory_map(str(path))
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        return pa.OSFile(str(path))


def _lengths(pa, values: Any) -> Any:
    """The bytes of each value, before any of them is copied."""
    if not str(values.type).endswith("_view"):
        return pa.compute.binary_length(values)
    # A view is 16 bytes, of which the first four are the length; many may show one text.
    views = np.frombuffer(values.buffers()[1], np.int32)[4 * values.offset :: 4][: len(values)]
    return pa.array(np.where(np.asarray(values.is_valid()), views, 0), pa.int64())


def _size(pa, values: Any, each: int) -> int:
    """The bytes of texts, those in lists and objects too, and `each` for every value."""
    size = each * len(values)
    if pa.types.is_nested(values.type):
        parts = values.flatten()
        parts = parts if isinstance(parts, list) else [parts]
        return size + sum(_size(pa, part, each) for part in parts)
    is_dictionary = pa.types.is_dictionary(values.type)
    texts = values.dictionary if is_dictionary else values
    if not (_is_string(texts.type) or _is_bytes(texts.type)):
        return size
    lengths = _lengths(pa, texts)
    lengths = lengths.take(values.indices) if is_dictionary else lengths
    return size + (pa.compute.sum(lengths).as_py() or 0)


def _as_bytes(pa, path: Path, field: str, values: Any) -> list[bytes | None]:
    """The values as they are; bytes that no type says are text must be UTF-8."""
    found = values.cast(pa.large_binary()).to_pylist()
    if not _is_string(values.type):
        for value in found:
            try:
                (value or b"").decode("utf-8")
            except UnicodeDecodeError:
                raise SettingError(
                    f"{path}: column {field!r} is {values.type} and no UTF-8: convert it to text"
                ) from None
    return found


def _check_columns(pa, path: Path, schema: Any, fields: Sequence[Column]) -> None:
    """Raises `SettingError` if a table has no such column, or it is not what a field is."""

    def plain(kind: Any) -> Any:
        while isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        return kind.value_type if pa.types.is_dictionary(kind) else kind

    kinds = [(column.name, plain(column.type)) for column in schema]
    texts = [name for name, kind in kinds if _is_string(kind)]
    for field in fields:
        found = [kind for name, kind in kinds if name == field.name]
        if not found and field.optional:
            continue
        if not found:
            any_kind = field.nested or not field.is_text
            others = [name for name, _ in kinds] if any_kind else texts
            rest = {name: str(kind) for name, kind in kinds if name not in others}
            raise no_field(str(path), field, fields, others, rest)
        where = f"{path}: column {field.name!r}"
        if len(found) > 1:
            raise SettingError(f"{where} is there {len(found)} times: give each its own name")
        is_text = _is_string(found[0]) or _is_bytes(found[0])
        types = pa.types
        is_value = types.is_integer(found[0]) or types.is_floating(found[0])
        is_value = is_value or types.is_boolean(found[0]) or types.is_null(found[0])
        if field.nested and types.is_nested(found[0]):
            continue
        if not is_text and (field.is_text or not is_value):
            other = next((x for x in texts if x not in [f.name for f in fields]), None)
            fix = f"set {config_flag(field.setting, other)}" if other else "save it as strings"
            if field.optional:
                fix = f"save it as strings, or name it otherwise, as {field.setting} reads it too"
            what = "which is no text" if field.is_text else "which is no value"
            raise SettingError(f"{where} is {found[0]}, {what}: {fix}")


def _is_string(kind: Any) -> bool:
    return str(kind) in ("string", "large_string", "string_view")


def _is_bytes(kind: Any) -> bool:
    name = str(kind)
    return name in ("binary", "large_binary", "binary_view") or name.startswith("fixed_size_binary")


def _stated(group: Any, names: Sequence[str]) -> int:
    """The bytes that some columns of a row group unpack to, as the file says."""
    return sum(chunk.total_uncompressed_size for chunk in _chunks(group, names))


def _encodings(group: Any, names: Sequence[str]) -> dict[str, set[str]]:
    """How the pages of texts are encoded: of columns, and of those in lists and objects."""
    return {
        chunk.path_in_schema: set(chunk.encodings)
        for chunk in _chunks(group, names)
        if chunk.physical_type == "BYTE_ARRAY"
    }


def _chunks(group: Any, names: Sequence[str]) -> Iterator[Any]:
    """What a file says of each part of some columns in a row group."""
    paths = tuple(f"{name}." for name in names)  # of a column, and of those in lists and objects
    for chunk in map(group.column, range(group.num_columns)):
        if f"{chunk.path_in_schema}.".startswith(paths):
            yield chunk


def _dictionaries(values: Any) -> Iterator[Any]:
    """The dictionaries of an array, and of those in lists and objects."""
    values = getattr(values, "storage", values)
    if hasattr(values, "dictionary"):
        yield values.dictionary
    elif hasattr(values, "flatten"):
        parts = values.flatten()
        for part in parts if isinstance(parts, list) else [parts]:
            yield from _dictionaries(part)


def _is_packed(message: Any) -> bool:
    """Whether the buffers of a message are packed, by its metadata.

    pyarrow does not tell, and would take as much memory as a packed buffer asks for. The metadata
    is a flatbuffer: https://arrow.apache.org/docs/format/Columnar.html#serialization-and-ipc.
    """
    data = message.metadata.to_pybytes()

    def follow(offset: int) -> int:
        return offset + struct.unpack_from("<I", data, offset)[0]

    def field(table: int, number: int) -> int:  # its offset; 0 if it is not there
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


def no_field(
    where: str,
    field: Column,
    fields: Sequence[Column],
    others: Sequence[str],
    rest: Mapping[str, str] | None = None,
) -> NoField:
    """The error of a table without a field, which names those that it has.

    Args:
      where: the table, or its row.
      field: the one that is missing, or has values of another kind.
      fields: all that are read.
      others: names of fields that have values of its kind.
      rest: kinds of values of other fields, by their names.
    """
    rest = rest or {}
    there = others or [f"{name} ({kind})" for name, kind in rest.items()]
    free = [name for name in others if name not in [one.name for one in fields]]
    near = difflib.get_close_matches(field.name, free, n=1) or free[:1]
    fix = f", set {config_flag(field.setting, near[0])}" if near else ""
    fix = f", give all rows the same fields, or set {field.setting}" if field.nested else fix
    if field == Column(field.name) and _is_chat({*others, *rest}):
        fix += "; for chats add --config_file=chats.gin after the config of a model"
    what = "text" if field.is_text and not field.nested else "value"
    listed = ", ".join(there[:9]) or "none"
    return NoField(f"{where} has no {what} {field.name!r}: it has {listed}{fix}", others)


def _is_chat(names: Collection[str]) -> bool:
    """Whether fields of these names are a conversation, or a prompt and its answer."""
    return any(map(names.__contains__, MESSAGES)) or all(
        any(map(names.__contains__, part)) for part in (PROMPTS, ANSWERS)
    )


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
