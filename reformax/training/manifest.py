"""A folder's manifest: size and CRC-32 of every file, so that damage is noticed."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from reformax import durable

FILE = "manifest.json"
MOST = 1 << 24  # bytes of a description, or of a manifest
_BLOCK = 1 << 22
_PLAIN = re.compile(r"[\w.][\w./-]*")


class Damaged(ValueError):
    """A file is not what was written; the text says which one and how it differs."""


def flushed(folder: Path, takes: Callable[[str], bool]) -> dict[str, dict[str, int]]:
    """Size and CRC-32 of the files whose names below `folder` it `takes`.

    When this returns, the disk has these files and all folders.
    """
    found = {x: fingerprint(folder / x, flush=True) for x in sorted(names(folder)) if takes(x)}
    for path, _, _ in os.walk(folder, topdown=False):
        durable.sync_folder(Path(path))
    return found


def write(folder: Path, files: Mapping[str, dict[str, int]] | None = None) -> None:
    """Writes the manifest of the files that are in `folder` now.

    When this returns, the disk has every file, every folder and the manifest.

    Args:
      folder: has them.
      files: those that their writers have `flushed`; all others are flushed now.
    """
    noted = dict(files or {})
    noted |= flushed(folder, lambda name: name not in noted)
    durable.write(folder / FILE, json.dumps(noted, indent=1).encode())


def damage(
    folder: Path, most: int | None = None, part: tuple[int, int] | None = (0, 1)
) -> str | None:
    """The first difference between the files and the manifest, in words; None if there is none.

    Args:
      folder: has them.
      most: the bytes that all may have; sizes are compared before anything is read.
      part: a number and a count: all sizes are compared, and this part of the contents; None: no
        contents.

    Raises:
      OSError: a file cannot be read, which says nothing about its content.
    """
    try:
        noted = _compare_sizes(folder, most)
        # The largest first: parts have like numbers of bytes.
        largest = sorted(noted, key=lambda name: noted[name]["size"], reverse=True)
        for name in largest[part[0] :: part[1]] if part else ():
            _check(name, fingerprint(folder / name), noted[name])
    except Damaged as error:
        return str(error)
    except FileNotFoundError as error:  # another process deleted it just now
        return f"{error.filename} is missing"
    return None


def _compare_sizes(folder: Path, most: int | None) -> dict[str, dict[str, int]]:
    """Compares names and sizes; returns the manifest."""
    manifest, there = _read(folder), names(folder) - {FILE}
    if missing := manifest.keys() - there:
        raise Damaged(f"{min(missing)} is missing")
    if extra := there - manifest.keys():
        raise Damaged(f"{min(extra)} is not in {FILE}")
    sizes = {name: (folder / name).lstat().st_size for name in manifest}
    if most is not None and sum(sizes.values()) > most:
        raise Damaged(f"its files have {sum(sizes.values()):,} bytes, its tensors fewer")
    return manifest


def read_file(folder: Path, name: str) -> bytes:
    """The content of a file, checked against the manifest.

    Raises:
      Damaged: the manifest or the file.
      OSError: one of them cannot be read, which says nothing about its content.
    """
    manifest = _read(folder)
    if name not in manifest:
        raise Damaged(f"{FILE} has no {name}")
    data = _content(folder, name)
    _check(name, {"size": len(data), "crc32": zlib.crc32(data)}, manifest[name])
    return data


def fingerprint(path: Path, flush: bool = False) -> dict[str, int]:
    """Size and CRC-32 of a file, which is flushed to the disk on request.

    Raises:
      Damaged: it is no regular file.
      OSError: it is not there, or cannot be read.
    """
    size = crc = 0
    try:
        with durable.open_file(path) as file, durable.explaining("read", path):
            while block := file.read(_BLOCK):
                size, crc = size + len(block), zlib.crc32(block, crc)
            if flush:
                os.fsync(file.fileno())
    except durable.NotRegular:
        raise Damaged(f"{path.name} is no regular file") from None
    return {"size": size, "crc32": crc}


def _read(folder: Path) -> dict[str, dict[str, int]]:
    return listed(_content(folder, FILE))


def listed(content: bytes) -> dict[str, dict[str, int]]:
    """The files that a manifest lists, all of them below its folder; raises `Damaged`."""
    try:
        manifest = json.loads(content)
    except (ValueError, RecursionError):
        raise Damaged(f"{FILE} is cut short or has changed") from None
    if not (isinstance(manifest, dict) and manifest and all(map(_is_noted, manifest.values()))):
        raise Damaged(f"{FILE} does not hold the size and the crc32 of files")
    if outside := [name for name in manifest if not _PLAIN.fullmatch(name) or ".." in name]:
        raise Damaged(f"{FILE} lists {outside[0]!r}, which is no file of a checkpoint")
    return manifest


def _content(folder: Path, name: str) -> bytes:
    try:
        return durable.read(folder / name, MOST)
    except durable.TooLong as error:
        raise Damaged(str(error)) from None
    except (FileNotFoundError, NotADirectoryError):
        raise Damaged(f"{name} is missing") from None
    except durable.NotRegular:
        raise Damaged(f"{name} is no regular file") from None


def _is_noted(noted: Any) -> bool:
    return (
        isinstance(noted, dict)
        and noted.keys() == {"size", "crc32"}
        and all(type(number) is int for number in noted.values())
    )


def _check(name: str, found: dict[str, int], noted: dict[str, int]) -> None:
    if found["size"] != noted["size"]:
        raise Damaged(f"{name} has {found['size']} bytes of {noted['size']}")
    if found != noted:
        raise Damaged(f"{name} has changed")


def names(folder: Path) -> set[str]:
    """The files below a folder, relative to it."""

    def fail(error: OSError):
        with durable.explaining("read", folder):
            raise error

    walk = os.walk(folder, onerror=fail)
    return {os.path.relpath(Path(path, name), folder) for path, _, names in walk for name in names}
