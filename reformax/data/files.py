"""Reads bytes: a file, plain or compressed, or the files of a folder, joined.

Every error is an OSError or a ValueError of one line that names the path and says what to do. What
is no ordinary file is refused before it is opened. A packed file is unpacked block by block, so one
that unpacks to too much is refused with `most_unpacked` bytes in memory and no more.
"""

from __future__ import annotations

import fnmatch
import gzip
import io
import lzma
import os
import stat
import zipfile
import zlib
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64, UInt8

from reformax import memory
from reformax.declared import SettingError
from reformax.shell import user_path

# A packed file may unpack to so many bytes, or to so many times its own size, whichever is more.
MAX_UNPACKED = 2**30
MAX_INFLATION = 20
# What is read whole lies in memory, half of it at most, so that there is room for a model too.
MAX_BYTES = memory.host() // 2

# The memory of an .xz file's dictionary; `xz -9` asks for 64 MiB.
_XZ_MEMORY = 2**28
_PACKED, _BLOCK = 2**16, 2**20  # bytes read, and bytes unpacked, at a time
DAMAGED = (
    EOFError,
    NotImplementedError,  # a .zip of a later version
    gzip.BadGzipFile,
    lzma.LZMAError,
    zipfile.BadZipFile,
    zlib.error,
)
# What `reformax runs` draws where all its runs are below, and what `reformax sweep` writes next to
# its runs: the fingerprints of the configs of those that have finished, by name.
PLOT, FINISHED = "runs.png", "finished.json"
_MAGIC = {"gzip": b"\x1f\x8b", "xz": b"\xfd7zXZ\0", "zip": b"PK", "zstd": b"\x28\xb5\x2f\xfd"}
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


class Joined(NamedTuple):
    """Texts one after another, and where each begins."""

    data: UInt8[np.ndarray, " n"]
    begins: Int64[np.ndarray, " d"]


class Missing(SettingError, FileNotFoundError):
    """What data_dir names is not there."""


class Archive(SettingError):
    """A .zip holds several files, or none."""


def existing(data_dir: str | os.PathLike) -> Path:
    """The path with '~' expanded; raises `Missing` if it does not exist."""
    path = user_path("data_dir", data_dir)
    try:
        found = path.exists()
    except OSError as error:  # such as a name that is too long
        raise Missing(f"{path}: {error.strerror}: set data_dir to a file or folder") from None
    if not found:
        where = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise Missing(f"{path} does not exist{where}: set data_dir to a file or folder of text")
    return path


def check_ordinary(path: Path) -> int:
    """The size of a file in bytes.

    Raises:
      ValueError: it is a FIFO, a device, a socket or a folder.
      OSError: it does not exist, or may not be looked at.
    """
    found = path.stat()
    kind = stat.S_IFMT(found.st_mode)
    if kind != stat.S_IFREG:
        raise SettingError(
            f"{path} is {_KINDS.get(kind, 'of another kind')}: give an ordinary file, such as one "
            "that you copied it into"
        )
    return found.st_size


def read_file(path: Path) -> bytes:
    """The content of a file, as `blocks` gives it.

    Raises:
      ValueError: as `blocks`, or it has more bytes than half of the memory.
      OSError: the file cannot be read.
      ImportError: it is a .zst, and pyarrow is not there.
    """
    return read_plain(path) if packing(path) is None else _whole(path, packing(path))


def blocks(path: Path, first: int = 0, last: int | None = None) -> Iterator[bytes]:
    """The content of a file, piece by piece, unpacked if its name ends as `PACKED` says.

    Args:
      path: the file.
      first, last: the bytes of a plain file to read, from `first` to before `last`.

    Raises:
      ValueError: the file is empty or damaged, unpacks to more than `most_unpacked` bytes, is a
        .zip that does not hold exactly one file, or is no ordinary file.
      OSError: the file cannot be read.
      ImportError: it is a .zst, and pyarrow is not there.
    """
    if unpack := packing(path):
        return _unpacked(path, unpack, most_unpacked(check_ordinary(path)))
    if not check_ordinary(path):
        raise _empty(path)
    return plain_blocks(path, first, last)


class _Stream(io.RawIOBase):
    """Blocks as a file."""

    def __init__(self, parts: Iterator[bytes]):
        self._parts, self._left = parts, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not len(self._left):
            if (part := next(self._parts, None)) is None:
                return 0
            self._left = memoryview(part)
        n = min(len(buffer), len(self._left))
        buffer[:n], self._left = self._left[:n], self._left[n:]
        return n


def opened(parts: Iterator[bytes]) -> io.BufferedReader:
    """Blocks as a file that has lines."""
    return io.BufferedReader(_Stream(parts), _BLOCK)


def packing(path: Path) -> Callable[[Path], Iterator[bytes]] | None:
    """The function that unpacks a file of such a name; None for a plain one."""
    return PACKED.get(path.suffix.lower())


def head(path: Path) -> bytes:
    """The first bytes of a file, 1 MiB at most, unpacked as `read_file` does; raises the same."""
    check_ordinary(path)
    unpack = packing(path) or plain_blocks
    try:
        return next(unpack(path), b"")
    except DAMAGED as error:
        raise _not_unpacked(path, error, unpack) from error


def read_plain(path: Path) -> bytes:
    """The content of a file as it is; raises what `read_file` does."""
    size = check_ordinary(path)
    check_room(path, size)
    if not (data := path.read_bytes()):
        raise _empty(path)
    return data


def most_unpacked(size: int) -> int:
    """The most bytes that a packed file of `size` bytes may unpack to."""
    return max(MAX_UNPACKED, MAX_INFLATION * size)


def read_gz(path: Path) -> bytes:
    """The content of a gzip file of any name, at most `most_unpacked` bytes.

    Raises:
      ValueError: the file is empty, damaged, no gzip file or no ordinary file, or unpacks to more.
      OSError: the file cannot be read.
    """
    return _whole(path, _gz_blocks)


class Listed(NamedTuple):
    """The files below a folder: those that are taken, in order, and the others."""

    paths: list[Path]
    left_out: dict[str, list[Path]]  # by the reason, in words; folders stand for what is in them


def list_files(
    folder: Path, pattern: str = "*", skip: Container[str] = (), deep: bool = True
) -> list[Path]:
    """The paths of `listed`."""
    return listed(folder, pattern, skip, deep).paths


def listed(
    folder: Path, pattern: str = "*", skip: Container[str] = (), deep: bool = True
) -> Listed:
    """The files below a folder, sorted by their relative paths written with '/'.

    Args:
      folder: searched to any depth. Links to folders are not followed.
      pattern: matches file names, with the wildcards of a shell.
      skip: names of folders to leave out. Hidden files and folders are always left out, and so are
        runs, what commands write next to them, and links to nothing.
      deep: whether the folders in it are searched.

    Raises:
      OSError: a folder cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise error

    def order(path: Path) -> str:
        return path.relative_to(folder).as_posix()

    found, left_out = [], {}
    for here, folders, names in os.walk(folder, onerror=refuse):
        kept, runs = [], []
        for name in folders:
            path = Path(here, name)
            if name in skip:
                continue
            reason = "hidden" if name.startswith(".") else "a run" if is_run(path) else None
            reason = reason or ("a link to a folder" if path.is_symlink() else None)
            kept += [name] * (reason is None)
            runs += [name] * (reason == "a run")
            if reason:
                left_out.setdefault(reason, []).append(path)
        folders[:] = kept if deep else []
        for name in names:
            path = Path(here, name)
            reason = "hidden" if name.startswith(".") else None
            if name == PLOT or runs and name == FINISHED:
                reason = "of runs"
            if reason is None and not fnmatch.fnmatch(name, pattern):
                reason = f"not {pattern}"
            if reason is None and not path.exists():
                reason = "a link to nothing"
            if reason is None:
                found.append(path)
            else:
                left_out.setdefault(reason, []).append(path)
    return Listed(sorted(found, key=order), {r: sorted(left_out[r], key=order) for r in left_out})


def is_run(folder: Path) -> bool:
    """Whether a folder is a run's, which training or conversion made."""
    # The lock is the first file that training writes: a run reads the same text whenever it begins.
    if (folder / ".lock").is_file():
        return True
    return (folder / "config.gin").is_file() and (folder / "checkpoints").is_dir()


def join(texts: Iterable[bytes]) -> Joined:
    """Joins texts, one in memory at a time; one that does not end in a newline gets one."""
    data, begins = bytearray(), []
    for text in filter(None, texts):
        begins.append(len(data))
        data += text
        data += b"" if text.endswith((b"\n", b"\0")) else b"\n"
    return Joined(as_array(data), np.array(begins, np.int64))


def as_array(data: bytes | bytearray) -> UInt8[np.ndarray, " n"]:
    """The bytes as an array, not copied."""
    return np.frombuffer(data, np.uint8)


def _empty(path: Path) -> SettingError:
    return SettingError(f"{path} is empty: give a file with text")


def check_room(path: Path, size: int, what: str = "text") -> None:
    """Raises ValueError for text of so many bytes that there is no room for it and a model."""
    if size > MAX_BYTES:
        raise ValueError(
            f"{path} has {size:,} bytes of {what} and half of this machine's memory is "
            f"{MAX_BYTES:,}: give a part of it"
        )


def _whole(path: Path, unpack: Callable[[Path], Iterator[bytes]]) -> bytes:
    """What a packed file has, in memory."""
    return b"".join(_unpacked(path, unpack, min(MAX_BYTES, most_unpacked(check_ordinary(path)))))


def _unpacked(path: Path, unpack: Callable[[Path], Iterator[bytes]], most: int) -> Iterator[bytes]:
    """The blocks of a packed file, as long as they have `most` bytes together."""
    total = 0
    try:
        for block in unpack(path):
            total += len(block)
            if total > most:
                raise ValueError(
                    f"{path} unpacks to more than {most:,} bytes from {path.stat().st_size:,}: "
                    "refused as a decompression bomb; if it is none, unpack it yourself"
                )
            yield block
    except DAMAGED as error:
        raise _not_unpacked(path, error, unpack) from error
    if not total:
        raise _empty(path)


def _not_unpacked(
    path: Path, error: Exception, unpack: Callable[[Path], Iterator[bytes]]
) -> ValueError:
    """The error of a file that is damaged, or not packed as its name says, or in a newer way."""
    kind = {_xz_blocks: "xz", _zip_blocks: "zip", _zst_blocks: "zstd"}.get(unpack, "gzip")
    with open(path, "rb") as file:
        begin = file.read(6)
    if isinstance(error, NotImplementedError):
        return ValueError(
            f"{path} is packed in a way that is not read ({error}): unpack it yourself"
        )
    if "memory usage limit" in str(error).lower():
        return ValueError(
            f"{path} asks for more than {_XZ_MEMORY:,} bytes to be unpacked: unpack it yourself"
        )
    if begin and not begin.startswith(_MAGIC[kind][: len(begin)]):
        return ValueError(
            f"{path} is not packed by {kind}, by its first bytes: name it as what it is, or "
            "download it again"
        )
    return ValueError(f"{path} is damaged ({error}): copy or download it again")


def plain_blocks(path: Path, first: int = 0, last: int | None = None) -> Iterator[bytes]:
    """A file's bytes as they are; arguments are those of `blocks`."""
    with path.open("rb") as file:
        file.seek(first)
        while block := file.read(_BLOCK if last is None else min(_BLOCK, last - file.tell())):
            yield block


def _gz_blocks(path: Path) -> Iterator[bytes]:
    with gzip.open(path) as file:
        yield from iter(lambda: file.read(_BLOCK), b"")


def _xz_blocks(path: Path) -> Iterator[bytes]:
    # lzma.open would take as much memory as the file asks for.
    with open(path, "rb") as file:
        packed = file.read(_PACKED)
        while packed:  # a file may have several streams, with zeros between them
            stream = lzma.LZMADecompressor(memlimit=_XZ_MEMORY)
            while not stream.eof:
                if stream.needs_input and not packed and not (packed := file.read(_PACKED)):
                    raise EOFError("it is cut short")
                yield stream.decompress(packed, _BLOCK)
                packed = b""
            packed = stream.unused_data.lstrip(b"\0")
            while not packed and (more := file.read(_PACKED)):
                packed = more.lstrip(b"\0")


def _zip_blocks(path: Path) -> Iterator[bytes]:
    with zipfile.ZipFile(path) as archive:
        members = [m for m in archive.infolist() if not m.filename.endswith("/")]
        if len(members) != 1:
            raise Archive(
                f"{path} holds {len(members)} files and must hold one: "
                "unpack it and give the folder or one of its files"
            )
        if members[0].compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            # zipfile unpacks bzip2 and LZMA in blocks of any size.
            raise ValueError(f"{path} is packed by another method than deflate: unpack it yourself")
        try:
            with archive.open(members[0]) as file:
                yield from iter(lambda: file.read(_BLOCK), b"")
        except RuntimeError as error:  # a password
            raise ValueError(f"{path} cannot be read ({error}): unpack it yourself") from error


def _zst_blocks(path: Path) -> Iterator[bytes]:
    try:
        import pyarrow
    except ImportError:
        raise ImportError(
            f"{path} is unpacked by pyarrow, which is not there: pip install 'reformax[parquet]', "
            "or unpack it yourself"
        ) from None
    try:
        with pyarrow.input_stream(str(path), compression="zstd", buffer_size=_PACKED) as file:
            yield from iter(lambda: file.read(_BLOCK), b"")
    except OSError as error:
        if error.errno is not None:  # of the system
            raise
        raise zlib.error(" ".join(str(error).split())) from None


# How a file is unpacked, by the end of its name.
PACKED: dict[str, Callable[[Path], Iterator[bytes]]] = {
    ".gz": _gz_blocks,
    ".xz": _xz_blocks,
    ".zip": _zip_blocks,
    ".zst": _zst_blocks,
}
