"""Short documents joined into long ones: the files of a folder, or the rows with one value.

Joined documents follow each other, in the order of the source, and are one document to all
that goes by documents. Sets of them are in the order of their first documents. Where a source has
them in this order already, as the files of a folder are, its text stays as it is.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from reformax import durable
from reformax.data.stored import FilePart, StoredArray

FOLDER = "folder"


class Keys:
    """The keys of documents, while their files are read: those with one key are joined.

    `begin` takes each file, and `rows` passes the rows of a table on. `take` then has the keys of
    the documents that were read.
    """

    def __init__(self, join_by: str):
        """Takes `FOLDER`, or a field of rows."""
        self.field = None if join_by == FOLDER else join_by
        self._of_file, self._waiting = 0, []

    def begin(self, path: Path, root: Path, is_split: Callable[[str], bool]) -> None:
        """What comes next is of another file; the arguments are those of `key_of_file`."""
        key = "" if self.field is not None else key_of_file(path, root, is_split)
        self._of_file = _hash(key)

    def rows(self, rows: Iterator[tuple]) -> Iterator[bytes]:
        """The texts of rows of a text and a value; rows without text are left out."""
        for text, value in rows:
            if text:
                # Rows without a value are alone, as two of them say nothing of each other.
                self._waiting.append(_hash(f"={value!r}") if _is_value(value) else None)
                yield text

    def take(self, n: int) -> Int64[np.ndarray, " n"]:
        """The keys of the next n documents; 0 for one that is alone."""
        if self._waiting:
            found, self._waiting = self._waiting[:n], self._waiting[n:]
        else:
            found = repeat(self._of_file, n)
        return np.array([x or 0 for x in found], np.int64)


def _is_value(value: bytes | float | None) -> bool:
    """Whether a row has a value: an empty cell is none, and neither is what is no number."""
    return value not in (None, b"") and value == value


def _hash(key: str) -> int:
    """The number of a key; 0 for none."""
    if not key:
        return 0
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> 1 or 1


def key_of_file(path: Path, root: Path, is_split: Callable[[str], bool]) -> str:
    """The folder in `root` that a file lies in, without one that names a split; '' for none."""
    if path == root:
        return ""
    folders = path.relative_to(root).parts[:-1]
    if folders and is_split(folders[0]):
        folders = folders[1:]
    return folders[0] if folders else ""


def order_of(keys: Int64[np.ndarray, " d"]) -> Int64[np.ndarray, " d"] | None:
    """The documents by number, those with one key together; None for the order that they have."""
    alone = keys == 0
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    rank = np.where(alone, np.arange(len(keys)), first[inverse])
    if (np.diff(rank) >= 0).all():
        return None
    return np.argsort(rank, kind="stable")


def firsts(keys: Int64[np.ndarray, " d"], before: int = 0) -> Int64[np.ndarray, " f"]:
    """The documents, by number, that begin a joined one; `before` is the key before the first."""
    previous = np.concatenate([[before], keys[:-1]])
    return np.flatnonzero((keys != previous) | (keys == 0))


def join_shards(
    folder: Path, shards: Sequence[dict[str, Any]], shard_bytes: int
) -> list[dict[str, Any]]:
    """Joins the documents of a split in its files; returns what the manifest says of these.

    What is known of all documents is in memory meanwhile, at most 100 bytes a document. A text that
    is in another order is written anew, document by document.

    Args:
      folder: has the files of the shards, with those of the documents' keys.
      shards: what the manifest says of them, in order.
      shard_bytes: the most bytes of a new shard, unless one document has more.
    """
    paths = [folder / shard["file"] for shard in shards]
    of_shards = [np.fromfile(f"{path}.keys", np.int64) for path in paths]
    keys = np.concatenate([np.zeros(0, np.int64), *of_shards])
    order = order_of(keys)
    if order is not None:
        return _written_anew(folder, shards, keys, order, shard_bytes)
    found, before = [], 0
    for shard, path, shard_keys in zip(shards, paths, of_shards, strict=True):
        begins = np.fromfile(f"{path}.begins", np.int64)[firsts(shard_keys, before)]
        durable.write(Path(f"{path}.joined"), begins.tobytes())
        found.append(shard | {"joined": len(begins)})
        before = shard_keys[-1] if len(shard_keys) else before
    return found


def _written_anew(folder: Path, shards, keys, order, shard_bytes: int) -> list[dict[str, Any]]:
    old = [str(folder / shard["file"]) for shard in shards]
    sizes, counts = ([shard[name] for shard in shards] for name in ("n", "begins"))
    data = StoredArray(
        [FilePart(f"{p}.bytes", 0, n) for p, n in zip(old, sizes, strict=True)], "uint8"
    )
    before = np.cumsum([0, *sizes[:-1]])
    begins = np.concatenate(
        [np.fromfile(f"{p}.begins", np.int64) + b for p, b in zip(old, before, strict=True)]
    )
    lengths = np.diff(begins, append=len(data))[order]
    ends, begins, keys = np.cumsum(lengths), begins[order], keys[order]
    first_name = Path(shards[0]["file"])
    new = folder / f"{first_name.parent}j{first_name.name}"  # of this split alone
    durable.make_folder(new)
    found, first = [], 0
    while first < len(order):
        limit = ends[first] - lengths[first] + shard_bytes
        last = max(first + 1, int(ends.searchsorted(limit, "right")))
        span = slice(first, last)
        path, crc = new / f"{len(found):05}", 0
        with durable.new_file(Path(f"{path}.bytes")) as file, durable.explaining("written", path):
            for begin, length in zip(begins[span], lengths[span], strict=True):
                for block in data[begin : begin + length].blocks():
                    file.write(block)
                    crc = zlib.crc32(block, crc)
        begins_in_file = np.cumsum([0, *lengths[first : last - 1]], dtype=np.int64)
        joined = begins_in_file[firsts(keys[span], keys[first - 1] if first else 0)]
        durable.write(Path(f"{path}.begins"), begins_in_file.tobytes())
        durable.write(Path(f"{path}.joined"), joined.tobytes())
        facts = {"n": int(lengths[span].sum()), "begins": len(begins_in_file), "crc": crc}
        found.append({"file": f"{new.name}/{path.name}", **facts, "joined": len(joined)})
        first = last
    for path in old:  # without the first one a shard counts as one to be made
        for ending in ("json", "bytes", "begins", "keys"):
            durable.remove(Path(f"{path}.{ending}"))
    return found
