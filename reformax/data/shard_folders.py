"""A folder of shards that is whole or absent, made by processes side by side.

1. A folder has a manifest, `reformax_text.json`, which says what shards are in it.
2. `<folder>.partial` gets the folder's name when all in it is on the disk. A process that is
   stopped leaves it behind, and the next one goes on with its shards.
3. What a folder was made of is its key. One of another key is replaced.
"""

from __future__ import annotations

import functools
import json
import re
import sys
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from reformax import durable
from reformax.data import token_ids, workers
from reformax.data.vocabulary import FILE
from reformax.declared import SettingError
from reformax.progress import Progress

MANIFEST, _PARTIAL, _OLD, FORMAT = "reformax_text.json", ".partial", ".old", 1
# What a folder that is replaced may hold: shards, ids, a vocabulary, files for other programs.
_OURS = re.compile(
    r"text-\w+|pieces|key|learnt-\w+\.model|\d{5,}\.(bytes|begins|joined|ids|json)|"
    + "|".join(map(re.escape, (MANIFEST, FILE, *typing.get_args(token_ids.Format))))
)
_SHARD = re.compile(r"(text-\w+/)?\d{5,}")


def is_prepared(path: Path) -> bool:
    """Whether a folder has token files."""
    return path.is_dir() and (path / MANIFEST).is_file()


def manifest(folder: Path) -> dict[str, Any]:
    """The contents of a folder's manifest.

    Raises:
      ValueError: it is damaged, or of another version.
    """
    path = folder / MANIFEST
    try:
        found = json.loads(durable.read(path, 2**28))
        if found["format"] != FORMAT:
            raise SettingError(f"{path} is of format {found['format']}: prepare the text anew")
    except (KeyError, TypeError, RecursionError, json.JSONDecodeError, UnicodeDecodeError):
        raise damaged(folder) from None
    return found


def damaged(folder: Path) -> ValueError:
    """The error of a folder whose manifest is not what this program writes."""
    path = folder / MANIFEST
    return ValueError(f"{path} is damaged: delete {folder} and prepare the text anew")


def shard_path(folder: Path, name: str) -> str:
    """The path of a shard's files, without their ending.

    Raises:
      ValueError: a manifest names another file.
    """
    if not isinstance(name, str) or not _SHARD.fullmatch(name):
        raise ValueError(f"{folder / MANIFEST} names {name!r}, which is no shard of the folder")
    return str(folder / name)


def made_whole(folder: Path, key: str, make: Callable[[Path], dict[str, Any]]) -> bool:
    """Makes a folder with a manifest, unless the one of this key is there.

    Args:
      folder: is whole or absent. One of another key is replaced.
      key: of all that it is made of.
      make: writes to a folder, which has what a process made of this key that was stopped; returns
        the manifest.

    Returns:
      Whether it was made.
    """
    if is_of(folder, key):  # it may be another user's, or on a disk that is only read
        return False
    with durable.explaining("written", folder.parent):
        durable.make_folder(folder.parent)
    with durable.locked(folder.with_name(f".{folder.name}.lock")):  # others find what it makes
        if is_of(folder, key):
            return False
        _check_ours(folder)
        partial, old = (folder.with_name(folder.name + end) for end in (_PARTIAL, _OLD))
        if not is_of(partial, key):
            if not (partial / "key").is_file() or (partial / "key").read_text() != key:
                durable.remove(partial)
                durable.make_folder(partial)
                durable.write(partial / "key", key.encode())
            facts = {"format": FORMAT, "key": key} | make(partial)
            durable.write(partial / MANIFEST, json.dumps(facts, indent=1).encode())
        if folder.exists():
            durable.remove(old)
            durable.rename(folder, old)
        durable.rename(partial, folder)
        durable.remove(old)
    return True


def is_of(folder: Path, key: str) -> bool:
    """Whether a folder has the files of a key, all of them."""
    return is_prepared(folder) and manifest(folder).get("key") == key


def _check_ours(folder: Path) -> None:
    """Raises `SettingError` for a folder with files that `prepare` did not write."""
    if not folder.exists():
        return
    prepared = is_prepared(folder)
    for name in sorted(entry.name for entry in folder.iterdir()):
        if not (prepared and _OURS.fullmatch(name)):
            raise SettingError(f"{folder} holds other files, such as {name}: give a new folder")


def all_made(
    make: Callable[[Any, Path], dict[str, Any]],
    tasks: Sequence[Any],
    what: str,
    folder: Path,
    memory_each: int,
    processes: int | None = None,
    quiet: bool = False,
) -> list[dict[str, Any]]:
    """Makes the shards that are missing; returns the manifest's entry of each, in order.

    Args:
      make: writes a shard's files, flushed to the disk; returns what the manifest says of it.
      tasks: what shards are made of, each with its `number` and `size()`.
      what: they are, for the line that says how many there are; one alone needs no line.
      folder: gets the files, and `NUMBER.json` after those of a shard.
      memory_each: the bytes of memory that a process takes.
      processes, quiet: as in `prepare`.
    """
    durable.make_folder(folder)
    found: dict[int, dict[str, Any]] = {}
    total = max(1, sum(task.size() for task in tasks))
    with Progress("prepare", total, sys.stderr, shown=not quiet) as bar:
        for task in tasks:
            path = folder / f"{task.number:05}.json"
            if path.is_file():
                found[task.number] = json.loads(path.read_bytes())
                bar.advance(task.size())
        missing = [task for task in tasks if task.number not in found]
        chosen = workers.workers_for(len(missing), memory_each, processes)
        if len(missing) > 1 and not quiet:
            bar.say(f"prepare {what}: {chosen.words}", sys.stderr)
        function = functools.partial(make, folder=folder)
        for task, facts in workers.in_processes(function, missing, chosen.n):
            durable.write(folder / f"{task.number:05}.json", json.dumps(facts).encode())
            found[task.number] = facts
            bar.advance(task.size())
    return [found[task.number] for task in tasks]
