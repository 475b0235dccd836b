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


def read_plain(path: Path) -> bytes:
    """The content of a file as it is; raises what `read_file` does."""
    size = check_ordinary(path)
    if size > MAX_BYTES:
        raise _too_much(path, size)
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


def read_folder(folder: Path, pattern: str, read: Callable[[Path], bytes]) -> Joined:
    """The files of a folder whose names match, joined in the order of `list_files`.

    Args:
      folder: searched to any depth.
      pattern: see `list_files`.
      read: reads a file that is not empty.

    Raises:
      ValueError: the folder is a run's, no file matches, one of them cannot be unpacked or is no
        ordinary file, or all together are too much.
      OSError: one of them, or a folder below, cannot be read.
    """
    if is_run(folder):
        raise SettingError(
            f"{folder} is the folder of a run: give a folder of text, and move the text there if "
            "this one has it"
        )
    paths = list_files(folder, pattern)
    if not paths:
        raise SettingError(f"{folder} has no file that matches {pattern!r}: put text files there")
    sizes = {path: check_ordinary(path) for path in paths}
    total, texts = sum(sizes.values()), []
    for path, size in sizes.items():
        if total > MAX_BYTES:
            raise _too_much(folder, total)
        if size:
            texts.append(read(path))
            total += len(texts[-1]) - size
    if total > MAX_BYTES:
        raise _too_much(folder, total)
    return join(texts)


def list_files(folder: Path, pattern: str = "*", skip: Container[str] = ()) -> list[Path]:
    """The files below a folder, sorted by their relative paths written with '/'.

    Args:
      folder: searched to any depth. Links to folders are not followed.
      pattern: matches file names, with the wildcards of a shell.
      skip: names of folders to leave out. Hidden files and folders are always left out, and so are
        runs and links to nothing.

    Raises:
      OSError: a folder cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise error

    found = []
    for here, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [f for f in folders if f not in skip and not f.startswith(".")]
        folders[:] = [f for f in folders if not is_run(Path(here, f))]
        names = [n for n in fnmatch.filter(names, pattern) if not n.startswith(".")]
        found += [path for n in names if (path := Path(here, n)).exists()]
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


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


def _too_much(path: Path, size: int) -> ValueError:
    return ValueError(
        f"{path} has {size:,} bytes of text and half of this machine's memory is {MAX_BYTES:,}: "
        "give a part of it"
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
        raise ValueError(f"{path} is damaged ({error}): copy or download it again") from error
    return _not_empty(path, b"".join(parts))


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
