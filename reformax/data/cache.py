"""The cache of texts that training prepares by itself: what is in it, and what may be deleted.

A process that reads a text of the cache holds a shared lock of it as long as it lives. Pruning
deletes a text under the exclusive lock alone, so never one that is read, in any process of the
machine. A text that was deleted is prepared again at the next start.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from reformax import durable

_DAY = 86_400  # seconds
_KEY = 32  # hexadecimal digits of a text's name
_OLD = ".old"
_ENDS = ("", ".partial", _OLD)  # of the names of a text's folders
_held: dict[Path, int] = {}  # the descriptors of the locks of texts that this process reads


class Entry(NamedTuple):
    """A text in the cache.

    Attributes:
      folder: its files.
      size: bytes of them.
      used: when a run last began to read it, in seconds since 1970.
      in_use: whether a process reads or makes it.
    """

    folder: Path
    size: int
    used: float
    in_use: bool


def hold(folder: Path) -> None:
    """Keeps a text of the cache from being pruned as long as this process lives."""
    path = _lock(folder)
    if path in _held:
        return
    # A cache that is only read is pruned by nobody.
    with contextlib.suppress(OSError):
        durable.make_folder(folder.parent)
        if not path.exists():
            open(path, "ab").close()
        descriptor = os.open(path, os.O_RDONLY)  # never closed: the lock ends with the process
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        _held[path] = descriptor  # also where another user owns it, so that its time stays
        os.utime(path)


def entries(cache: Path) -> list[Entry]:
    """The texts of a cache, the last used ones first."""
    found = []
    for folder in _folders(cache):
        # Another process may delete it, and the cache, meanwhile.
        with contextlib.suppress(FileNotFoundError), _alone(folder) as alone:
            size = sum(map(_size, _parts(folder)))
            if _parts(folder):
                found.append(Entry(folder, size, _lock(folder).stat().st_mtime, not alone))
    return sorted(found, key=lambda entry: -entry.used)


def prune(cache: Path, days: float) -> tuple[list[Entry], list[Entry]]:
    """Deletes the texts that no run has begun to read for some days.

    Returns:
      Those that were deleted, and those of this age that a process reads.

    Raises:
      OSError: a file cannot be deleted.
    """
    deleted, kept = [], []
    for entry in entries(cache):
        if entry.used > time.time() - days * _DAY:
            continue
        with contextlib.suppress(FileNotFoundError), _alone(entry.folder) as alone:
            parts = _parts(entry.folder)
            for part in parts if alone else ():
                _delete(entry.folder, part)
            if parts:
                (deleted if alone else kept).append(entry)
    return deleted, kept


def _delete(folder: Path, part: Path) -> None:
    """Deletes a folder of a text under the name of what is replaced, of which nothing is read."""
    old = folder.with_name(folder.name + _OLD)
    if part != old:
        durable.remove(old)
        durable.rename(part, old)
    durable.remove(old)


def _size(folder: Path) -> int:
    """The bytes of the files in a folder that are still there."""
    total = 0
    for here, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(here, name)).st_size
    return total


def _folders(cache: Path) -> list[Path]:
    names = {path.name.partition(".")[0] for path in cache.iterdir()} if cache.is_dir() else ()
    keys = (name for name in names if len(name) == _KEY and set(name) <= set("0123456789abcdef"))
    return [folder for name in sorted(keys) if _parts(folder := cache / name)]


def _parts(folder: Path) -> list[Path]:
    named = (folder.with_name(folder.name + end) for end in _ENDS)
    return [path for path in named if path.is_dir() and not path.is_symlink()]


def _lock(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.used")


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """Whether no other process reads a text, nor begins to meanwhile."""
    path = _lock(folder)
    with durable.explaining("written", path), _opened(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # held, or a disk without locks, of which nobody knows
            yield False
            return
        yield True


def _opened(path: Path) -> BinaryIO:
    """A lock for its exclusive use; one of another user's is only read, which most disks take."""
    try:
        return open(path, "ab")
    except PermissionError:
        return open(path, "rb")
