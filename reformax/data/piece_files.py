"""The ids of a text's pieces in files, made by processes side by side; see `token_files`."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reformax import durable
from reformax.data import shard_folders
from reformax.data.documents import Text
from reformax.data.piece_blocks import spans
from reformax.data.pieces import PieceVocabulary
from reformax.data.stored import FilePart, StoredArray, crc32_of
from reformax.data.vocabulary import fingerprint
from reformax.declared import SettingError

_SPAN = 2**25  # bytes of text that one file has the ids of
_MEMORY = 2**29  # what a process takes that encodes them
_FOLDER = "pieces"
_ENDS = {"begins": "ends", "joined": "joined_ends"}  # names of the first and last positions


class TextSpan(NamedTuple):
    """A part of a text, with the bytes of its split before it."""

    number: int
    before: int
    text: Text

    def size(self) -> int:
        """The number of its bytes."""
        return len(self.text.data)


def encoded(
    text: Text,
    vocabulary: PieceVocabulary,
    folder: Path,
    processes: int | None = None,
    quiet: bool = False,
) -> Text:
    """The ids of a split, and the ids that documents begin with; made at the first use.

    Args:
      text: the split's bytes, and where documents begin in it.
      vocabulary: learnt or read before.
      folder: of the text's files; gets those of its ids.
      processes, quiet: as in `token_files.prepare`.

    Raises:
      ValueError: the text is not UTF-8, or has ids that the model lacks.
      OSError: the folder cannot be written.
    """
    model = vocabulary.serialised()
    facts = len(text.data), crc32_of(text.data), fingerprint(model), vocabulary.size, _SPAN
    if text.joined is not None:
        facts = (*facts, "joined")
    key = hashlib.sha256(repr(facts).encode()).hexdigest()
    encoded = folder / _FOLDER / key[:32]

    def make(partial: Path) -> dict[str, Any]:
        tasks = [
            TextSpan(number, first, _part(text, first, last))
            for number, (first, last) in enumerate(spans(text.data, _SPAN))
        ]
        write = functools.partial(_write, model=model, size=vocabulary.size)
        how = _MEMORY, processes, quiet
        made = shard_folders.all_made(write, tasks, "ids", partial, *how)
        return {"dtype": str(vocabulary.dtype), "vocabulary": fingerprint(model), "spans": made}

    if (folder / _FOLDER).is_symlink():  # in a folder of somebody else it may lead anywhere
        raise SettingError(f"{folder / _FOLDER} is a symbolic link: prepare the text anew")
    shard_folders.made_whole(encoded, key, make)
    return _arrays(encoded, shard_folders.manifest(encoded)["spans"], vocabulary.dtype)


def _part(text: Text, first: int, last: int) -> Text:
    begins, joined = (
        x if x is None else x[slice(*x.searchsorted([first, last]))] - first
        for x in (text.begins, text.joined)
    )
    return Text(text.data[first:last], begins, joined)


def _write(span: TextSpan, folder: Path, model: bytes, size: int) -> dict[str, Any]:
    vocabulary = _vocabulary(model, size)
    data = bytes(span.text.data)
    found = vocabulary.encode_documents(data, span.before)
    name = f"{span.number:05}"
    with durable.new_file(folder / f"{name}.ids") as file:
        file.write(np.ascontiguousarray(found.ids))
    facts = {"file": name, "n": len(found.ids)}
    for kind, begins in {"begins": span.text.begins, "joined": span.text.joined}.items():
        if begins is not None:
            positions = vocabulary.positions(data, found, np.asarray(begins))
            durable.write(folder / f"{name}.{kind}", positions.tobytes())
            ends = [int(positions[0]), int(positions[-1])] if len(positions) else None
            facts |= {kind: len(positions), _ENDS[kind]: ends}
    return facts


@functools.lru_cache(maxsize=1)
def _vocabulary(model: bytes, size: int) -> PieceVocabulary:
    return PieceVocabulary.of(model, size)


def _arrays(folder: Path, made: Sequence[dict[str, Any]], dtype: np.dtype) -> Text:
    paths = [shard_folders.shard_path(folder, x["file"]) for x in made]
    ids = [FilePart(f"{path}.ids", 0, x["n"]) for path, x in zip(paths, made, strict=True)]
    joins = any("joined" in x for x in made)
    begins = _begins(paths, made, "begins")
    return Text(StoredArray(ids, dtype), begins, _begins(paths, made, "joined") if joins else None)


def _begins(paths: Sequence[str], made: Sequence[dict[str, Any]], kind: str) -> StoredArray:
    begins, before, ends = [], 0, _ENDS[kind]
    for path, x, after in zip(paths, made, [*made[1:], None], strict=True):
        n = x[kind]
        # A document without a piece of its own begins with the next id, which may be of the next
        # span, whose first document may do so too.
        if n and x[ends][1] == x["n"] and (after is None or (after[ends] or [1])[0] == 0):
            n -= 1
        begins.append(FilePart(f"{path}.{kind}", 0, n, before))
        before += x["n"]
    return StoredArray(begins, "int64")
