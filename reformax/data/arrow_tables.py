"""Rows of .parquet and .arrow files, by pyarrow.

A file of a few bytes may unpack to much, so every reader counts what it has read and stops at its
limit.
"""

from __future__ import annotations

import difflib
import errno
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from reformax.data import files
from reformax.declared import SettingError
from reformax.shell import config_flag

_ROWS = 1024  # rows of a table that are read together
_TOGETHER, _BUFFER = 2**24, 2**20  # bytes of texts that are read together, and bytes of a read
_NESTED = 64  # bytes that a value in a list or an object takes in Python besides its text
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
    """The batches of a row group, each of about `_TOGETHER` bytes of text."""
    group = metadata.row_group(number)
    n_rows = _TOGETHER * group.num_rows // max(1, _stated(group, names))
    with pa.parquet.ParquetFile(
        path, metadata=metadata, pre_buffer=False, buffer_size=_BUFFER
    ) as file:
        yield from file.iter_batches(
            batch_size=min(_ROWS, max(1, n_rows)),
            row_groups=[number],
            columns=list(names),
            use_threads=False,
        )


def arrow(path: Path, fields: Sequence[Column], max_bytes: int) -> Iterator[tuple]:
    """The rows of columns of an Arrow file or stream, as `datasets` writes them.

    Takes, yields and raises what `parquet` does.
    """
    pa = _pyarrow(path)
    size = files.check_ordinary(path)
    try:
        with _source(pa, path) as source:
            begin = 8 if source.read(6) == b"ARROW1" else 0  # a file is a stream in a frame
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
    parts = (batch.slice(n, _ROWS) for batch in batches for n in range(0, batch.num_rows, _ROWS))
    for part in parts:  # a batch of an .arrow file may be the whole table
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
            column = _decoded(pa, column)
            is_text = _is_text(column.type)
            found = _as_bytes(pa, path, field.name, column) if is_text else column.to_pylist()
            columns.append(found)
        yield from zip(*columns, strict=True)


def _source(pa, path: Path) -> Any:
    """A file mapped into memory, or read where a limit of addresses does not let it."""
    try:
        return pa.memory_map(str(path))
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        return pa.OSFile(str(path))


def _decoded(pa, values: Any) -> Any:
    """The values of a dictionary or of views as plain ones, which all of pyarrow takes."""
    if pa.types.is_dictionary(values.type):
        kept = values.dictionary
        return (_large(pa, kept) if _is_text(kept.type) else kept).take(values.indices)
    return _large(pa, values) if str(values.type).endswith("_view") else values


def _large(pa, values: Any) -> Any:
    """Texts whose bytes together may be more than 2^31."""
    return values.cast(pa.large_string() if _is_string(values.type) else pa.large_binary())


def _size(pa, values: Any, each: int) -> int:
    """The bytes of texts, those in lists and objects too, and `each` for every value."""
    size = each * len(values)
    if pa.types.is_nested(values.type):
        parts = values.flatten()
        parts = parts if isinstance(parts, list) else [parts]
        return size + sum(_size(pa, part, each) for part in parts)
    by_index = pa.types.is_dictionary(values.type)
    texts = values.dictionary if by_index else values
    if pa.types.is_nested(texts.type):
        return _size(pa, _decoded(pa, values), each)
    if not _is_text(texts.type):
        return size
    lengths = pa.compute.binary_length(_large(pa, texts))
    lengths = lengths.take(values.indices) if by_index else lengths
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
        is_text = _is_text(found[0])
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


def _is_text(kind: Any) -> bool:
    return _is_string(kind) or _is_bytes(kind)


def _is_string(kind: Any) -> bool:
    return str(kind) in ("string", "large_string", "string_view")


def _is_bytes(kind: Any) -> bool:
    name = str(kind)
    return name in ("binary", "large_binary", "binary_view") or name.startswith("fixed_size_binary")


def _stated(group: Any, names: Sequence[str]) -> int:
    """The bytes that some columns of a row group unpack to, as the file says."""
    paths = tuple(f"{name}." for name in names)  # of a column, and of those in lists and objects
    chunks = map(group.column, range(group.num_columns))
    found = (x for x in chunks if f"{x.path_in_schema}.".startswith(paths))
    return sum(chunk.total_uncompressed_size for chunk in found)


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
