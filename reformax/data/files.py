"""Reads bytes: a file, plain or compressed, or the files of a folder, joined.

Every error is an OSError or a ValueError of one line that names the path and says what to do. What
is no ordinary file is refused before it is opened. A packed file is unpacked block by block, so one
that unpacks to too much is refused with `most_unpacked` bytes in memory and no more.
"""

from __future__ import annotations

import fnmatch
import gzip
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

from reformax.declared import SettingError, user_path

# A packed file may unpack to so many bytes, or to so many times its own size, whichever is more.
MAX_UNPACKED = 2**30
MAX_INFLATION = 20
# Text lies in memory as it is. So that there is room for it and a model, it may have at most half.
MAX_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2

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
_MAGIC = {"gzip": b"\x1f\x8b", "xz": b"\xfd7zXZ\0", "zip": b"PK"}
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


class Joined(NamedTuple):
    """Texts behind each other, and where each begins."""

    data: bytes
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
        raise Missing(f"{path} does not exist: set data_dir to a file or folder of text")
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
    """The content of a file, unpacked if its name ends in .gz, .xz or .zip.

    Raises:
      ValueError: the file is empty or damaged, has or unpacks to too many bytes, is a .zip that
        does not hold exactly one file, or is no ordinary file.
      OSError: the file cannot be read.
    """
    blocks = PACKED.get(path.suffix.lower())
    return read_plain(path) if blocks is None else _unpacked(path, blocks)


def head(path: Path) -> bytes:
    """The first bytes of a file, 64 KiB or 1 MiB, unpacked as `read_file` does; raises the same."""
    check_ordinary(path)
    blocks = PACKED.get(path.suffix.lower(), _plain_blocks)
    try:
        return next(blocks(path), b"")
    except DAMAGED as error:
        raise _not_unpacked(path, error, blocks) from error


def read_plain(path: Path) -> bytes:
    """The content of a file as it is; raises what `read_file` does."""
    size = check_ordinary(path)
    check_room(path, size)
    return _not_empty(path, path.read_bytes())


def most_unpacked(size: int) -> int:
    """The most bytes that a packed file of `size` bytes may unpack to."""
    return min(max(MAX_UNPACKED, MAX_INFLATION * size), MAX_BYTES)


def read_gz(path: Path) -> bytes:
    """The content of a gzip file of any name, at most `most_unpacked` bytes.

    Raises:
      ValueError: the file is empty, damaged, no gzip file or no ordinary file, or unpacks to more.
      OSError: the file cannot be read.
    """
    return _unpacked(path, _gz_blocks)


def read_all(paths: Iterable[Path], read: Callable[[Path], bytes], source: Path) -> Joined:
    """Files, joined in this order.

    Args:
      paths: the files; empty ones are passed over.
      read: reads a file that is not empty.
      source: the folder that they are of, for errors.

    Raises:
      ValueError: one of them cannot be unpacked or is no ordinary file, or all together are too
        much.
      OSError: one of them cannot be read.
    """
    sizes = {path: check_ordinary(path) for path in paths}
    total, texts = sum(sizes.values()), []
    for path, size in sizes.items():
        check_room(source, total)
        if size:
            texts.append(read(path))
            total += len(texts[-1]) - size
    check_room(source, total)
    return join(texts)


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
        runs and links to nothing.
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
        kept = []
        for name in folders:
            path = Path(here, name)
            if name in skip:
                continue
            reason = "hidden" if name.startswith(".") else "a run" if is_run(path) else None
            reason = reason or ("a link to a folder" if path.is_symlink() else None)
            kept += [name] * (reason is None)
            if reason:
                left_out.setdefault(reason, []).append(path)
        folders[:] = kept if deep else []
        for name in names:
            path = Path(here, name)
            reason = "hidden" if name.startswith(".") else None
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
    """Joins texts. A text that ends in no newline, and in no border of a document, gets one."""
    texts = [t if t.endswith((b"\n", b"\0")) else t + b"\n" for t in texts if t]
    return Joined(b"".join(texts), np.cumsum([0, *map(len, texts)], dtype=np.int64)[:-1])


def as_array(data: bytes) -> UInt8[np.ndarray, " n"]:
    """The bytes as a read-only array, not copied."""
    return np.frombuffer(data, np.uint8)


def _not_empty(path: Path, data: bytes) -> bytes:
    if not data:
        raise SettingError(f"{path} is empty: give a file with text")
    return data


def check_room(path: Path, size: int) -> None:
    """Raises ValueError for text of so many bytes that there is no room for it and a model."""
    if size > MAX_BYTES:
        raise ValueError(
            f"{path} has {size:,} bytes of text and half of this machine's memory is "
            f"{MAX_BYTES:,}: give a part of it"
        )


def _unpacked(path: Path, blocks: Callable[[Path], Iterator[bytes]]) -> bytes:
    """Joins the blocks of a packed file, as long as they are within the limit."""
    size = check_ordinary(path)
    most, parts, total = most_unpacked(size), [], 0
    try:
        for block in blocks(path):
            parts.append(block)
            total += len(block)
            if total > most:
                parts.clear()
                raise ValueError(
                    f"{path} unpacks to more than {most:,} bytes from {size:,}: refused as a "
                    "decompression bomb; if it is none, unpack it yourself"
                )
    except DAMAGED as error:
        raise _not_unpacked(path, error, blocks) from error
    return _not_empty(path, b"".join(parts))


def _not_unpacked(
    path: Path, error: Exception, blocks: Callable[[Path], Iterator[bytes]]
) -> ValueError:
    """The error of a file that is damaged, or not packed as its name says, or in a newer way."""
    kind = {_xz_blocks: "xz", _zip_blocks: "zip"}.get(blocks, "gzip")
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


def _plain_blocks(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        yield from iter(lambda: file.read(_PACKED), b"")


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


# How a file is unpacked, by the end of its name.
PACKED: dict[str, Callable[[Path], Iterator[bytes]]] = {
    ".gz": _gz_blocks,
    ".xz": _xz_blocks,
    ".zip": _zip_blocks,
}
