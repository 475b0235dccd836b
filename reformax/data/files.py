"""Reads text as bytes: a file, plain or compressed, or the files of a folder, joined.

Every error is an OSError or a ValueError of one line that names the path and says what to do.
"""

from __future__ import annotations

import fnmatch
import gzip
import lzma
import os
import zipfile
import zlib
from collections.abc import Container, Iterable
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from reformax.declared import user_path

_DAMAGED = (EOFError, gzip.BadGzipFile, lzma.LZMAError, zipfile.BadZipFile, zlib.error)


def existing(data_dir: str | os.PathLike) -> Path:
    """The path with '~' expanded; raises `FileNotFoundError` if it does not exist."""
    path = user_path("data_dir", data_dir)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: set data_dir to a file or folder of text")
    return path


def read_file(path: Path) -> bytes:
    """The content of a file, unpacked if its name ends in .gz, .xz or .zip.

    Raises:
      ValueError: the file is empty or damaged, or is a .zip that does not hold exactly one file.
      OSError: the file cannot be read.
    """
    readers = {".gz": _read_gz, ".xz": _read_xz, ".zip": _read_zip}
    try:
        data = readers.get(path.suffix.lower(), Path.read_bytes)(path)
    except _DAMAGED as error:
        raise ValueError(f"{path} is damaged ({error}): copy or download it again") from error
    if not data:
        raise ValueError(f"{path} is empty: give a file with text")
    return data


def read_folder(folder: Path, pattern: str = "*") -> bytes:
    """The files of a folder whose names match, joined in the order of `list_files`.

    Raises:
      ValueError: no file matches, or one of them cannot be unpacked.
      OSError: one of them cannot be read.
    """
    paths = list_files(folder, pattern)
    if not paths:
        raise ValueError(f"{folder} has no file that matches {pattern!r}: put text files there")
    return join(read_file(path) for path in paths if path.stat().st_size)


def list_files(folder: Path, pattern: str = "*", skip: Container[str] = ()) -> list[Path]:
    """The files below a folder, sorted by their relative paths written with '/'.

    Args:
      folder: searched to any depth. Links to folders are not followed.
      pattern: matches file names, with the wildcards of a shell.
      skip: names of folders to leave out. Hidden files and folders are always left out.
    """
    found = []
    for here, folders, names in os.walk(folder):
        folders[:] = [f for f in folders if f not in skip and not f.startswith(".")]
        names = [n for n in fnmatch.filter(names, pattern) if not n.startswith(".")]
        found += [path for n in names if (path := Path(here, n)).is_file()]
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def join(texts: Iterable[bytes]) -> bytes:
    """Joins texts. A text that does not end in a newline gets one."""
    return b"".join(t if t.endswith(b"\n") else t + b"\n" for t in texts if t)


def as_array(data: bytes) -> UInt8[np.ndarray, " n"]:
    """The bytes as a read-only array, not copied."""
    return np.frombuffer(data, np.uint8)


def _read_gz(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes())


def _read_xz(path: Path) -> bytes:
    return lzma.decompress(path.read_bytes())


def _read_zip(path: Path) -> bytes:
    with zipfile.ZipFile(path) as archive:
        members = [m for m in archive.infolist() if not m.is_dir()]
        if len(members) != 1:
            raise ValueError(
                f"{path} holds {len(members)} files and must hold one: "
                "unpack it and give the folder or one of its files"
            )
        try:
            return archive.read(members[0])
        except RuntimeError as error:  # a password or an unknown compression
            raise ValueError(f"{path} cannot be read ({error}): unpack it yourself") from error
