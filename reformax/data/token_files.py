"""Texts of any size in files: made once, read by windows, the same batches as in memory.

1. The bytes of a text lie in shards, `text-KEY/00000` and so on, and where its documents begin
   next to them. `reformax_text.json` says which shards are which split, with lengths and CRC-32.
2. A shard is a span of a large plain file or .parquet, or some small files. Processes make shards
   side by side, each in memory that no size of the text changes, and no more of them than memory
   has room for. One that was made is not made again.
3. The ids of pieces lie in `pieces/<text and vocabulary>`, made of the text in the same way. Blocks
   are those of `pieces.PieceVocabulary`, so ids do not depend on how the text is divided.
4. A text's key has the sizes, times and samples of its sources, and the settings. It is the name
   of a cache folder. What has changed has another key, and is prepared anew.
5. Held-out text is cut when a text is read, so that its size is no reason to prepare it again.
6. Parts know their CRC-32, which combine: fingerprints are those of a text in memory, at once.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from reformax import durable
from reformax.data import (
    arrow_tables,
    cache,
    documents,
    files,
    joined,
    shard_folders,
    tables,
    text_files,
)
from reformax.data.stored import FilePart, StoredArray
from reformax.declared import Bounds, SettingError, fits
from reformax.shell import user_path

SHARD = 2**27  # bytes of a source of which one shard is made, at most
# Small texts have as many shards as large machines have cores, none of less than this.
_SHARDS, _LEAST_SHARD = 64, 2**22
_MEMORY = 2**28  # what a process takes that makes a shard, such as one that unpacks an .xz
_SAMPLES, _SAMPLED = 2**12, 64  # bytes of a sample of a source, and files that are sampled at most
_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
# The fields of a text's manifest, and the numbers of each of its shards.
_Count = Annotated[int, Bounds(0, 2**60)]
_FIELDS = {
    "settings": dict,
    "files": Mapping[str, str],
    "notes": Sequence[str],
    "of": Sequence[str],
    "splits": Mapping[str, Sequence[dict]],
}
_COUNTS = {"n", "begins", "crc"}
_INFLATION = 4  # what a packed file is taken to unpack to, to know how much there is to do


class TextShard(NamedTuple):
    """The part of a text that a worker makes a shard of."""

    number: int
    split: str
    found: text_files.Found
    spans: list[documents.FileSpan]
    field: str

    def size(self) -> int:
        """The bytes of its sources."""
        return sum(_size(span) for span in self.spans)


def load(folder: Path) -> documents.Source:
    """The text that `prepare` wrote.

    Raises:
      ValueError: the manifest is damaged, or of a later version, or a shard is not as it says.
    """
    found = _text_manifest(folder)
    texts = {s: documents.Text(*_arrays(folder, x)) for s, x in found["splits"].items()}
    notes = ["".join(c if c.isprintable() else "?" for c in line) for line in found["notes"]]
    for array in (array for text in texts.values() for array in text if array is not None):
        for part in array.parts:
            file, expected = Path(part.path), part.n * array.dtype.itemsize
            size = file.stat().st_size if file.is_file() else None
            if size != expected:
                has = "is missing" if size is None else f"has {size:,} bytes"
                raise ValueError(
                    f"{file} {has}, expected {expected:,}: delete {folder} and prepare it anew"
                )
    return documents.Source(texts, found["files"], notes)


def settings_of(folder: Path) -> dict[str, Any]:
    """The settings that a folder was prepared with; raises ValueError for a damaged manifest."""
    return _text_manifest(folder)["settings"]


def sources_of(folder: Path) -> Sequence[str]:
    """The paths that a folder was prepared from; raises ValueError for a damaged manifest."""
    return _text_manifest(folder)["of"]


def _text_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a text, whose fields are what they should be."""
    found = shard_folders.manifest(folder)
    if not all(fits(found.get(name), hint) for name, hint in _FIELDS.items()):
        raise shard_folders.damaged(folder)
    shards = [shard for shards in found["splits"].values() for shard in shards]
    names = _COUNTS | {"joined"} if any("joined" in shard for shard in shards) else _COUNTS
    whole = all(fits(shard.get(name), _Count) for shard in shards for name in names)
    if (
        not (whole and found["splits"].get("train"))
        or found["files"].keys() != found["splits"].keys()
    ):
        raise shard_folders.damaged(folder)
    return found


def _arrays(
    folder: Path, shards: Sequence[Mapping[str, Any]]
) -> tuple[StoredArray, StoredArray, StoredArray | None]:
    data, begins, of_joined, before = [], [], [], 0
    for shard in shards:
        path = shard_folders.shard_path(folder, shard.get("file"))
        data.append(FilePart(f"{path}.bytes", 0, shard["n"], 0, shard["crc"]))
        begins.append(FilePart(f"{path}.begins", 0, shard["begins"], before))
        if "joined" in shard:
            of_joined.append(FilePart(f"{path}.joined", 0, shard["joined"], before))
        before += shard["n"]
    joins = StoredArray(of_joined, "int64") if of_joined else None
    return StoredArray(data, "uint8"), StoredArray(begins, "int64"), joins


def cache_folder(cache_dir: str | os.PathLike | None) -> Path:
    """The folder of texts that training prepares by itself.

    `cache_dir`, or $XDG_CACHE_HOME/reformax/texts, or ~/.cache/reformax/texts.
    """
    if cache_dir is not None:
        return user_path("text.text.cache_dir", cache_dir)
    if not os.path.isabs(os.environ.get("XDG_CACHE_HOME", "")) and not os.environ.get("HOME"):
        raise SettingError("there is no home to keep token files in: set text.text.cache_dir")
    return durable.cache_folder("texts")


def words_of(folder: Path) -> str:
    """The source of a text in the cache, in words."""
    try:
        return "of " + "; ".join(sources_of(folder))
    except (ValueError, OSError):
        return "not whole"


def cached(
    found: text_files.Found, settings: Mapping[str, Any], cache_dir: str | os.PathLike | None
) -> tuple[documents.Source, Path]:
    """A text that is prepared in the cache, at its first use, and its folder there."""
    key = key_of(found, settings)
    folder = cache_folder(cache_dir) / key[:32]
    cache.hold(folder)
    with _advice("give another folder by text.text.cache_dir", folder):
        prepare(found, settings, folder, key=key)
    return load(folder), folder


@contextlib.contextmanager
def _advice(fix: str, folder: Path) -> Iterator[None]:
    """Errors of a folder that has no room or may not be written say what to set."""
    try:
        yield
    except OSError as error:
        if error.errno not in _UNWRITABLE or str(folder.parent) not in str(error):
            raise
        raise SettingError(f"{error}; or {fix}") from None


def key_of(found: text_files.Found, settings: Mapping[str, Any]) -> str:
    """The key of a text: its sources by path, size, time and samples, and the settings."""
    total = hashlib.sha256(
        json.dumps([shard_folders.FORMAT, found.kind, sorted(settings.items())]).encode()
    )
    everything = [(split, path) for split, paths in found.paths.items() for path in paths]
    every = max(1, -(-len(everything) // _SAMPLED))
    for number, (split, path) in enumerate(everything):
        state = path.stat()
        facts = split, str(path.absolute()), state.st_size, state.st_mtime_ns
        total.update(repr(facts).encode())
        if number % every == 0:
            with open(path, "rb") as file:
                for offset in (0, state.st_size // 2, max(0, state.st_size - _SAMPLES)):
                    total.update(os.pread(file.fileno(), _SAMPLES, offset))
    return total.hexdigest()


def prepare(
    found: text_files.Found,
    settings: Mapping[str, Any],
    folder: Path,
    processes: int | None = None,
    quiet: bool = False,
    key: str | None = None,
) -> bool:
    """Writes a text's token files to a folder, unless they are there.

    Args:
      found: the sources.
      settings: what they were found by, 'field' among them; kept in the manifest.
      folder: gets the files. One that has another text's is replaced.
      processes: that make shards; None: one for each core, as memory has room for.
      quiet: shows no bar.
      key: what `key_of` finds, which reads a sample of the sources, if it did so before.

    Returns:
      Whether anything was made.

    Raises:
      ValueError: a source is damaged or no text, or the folder holds other files.
      OSError: a source cannot be read, or the folder not be written, or there is no room.
    """
    key = key or key_of(found, settings)
    if shard_folders.is_of(folder, key):  # sources of any number are not looked at again
        return False
    there = folder.resolve()
    for path in (path for paths in found.paths.values() for path in paths):
        if there in path.resolve().parents:
            raise SettingError(f"{folder} holds the source {path}: give another folder")

    def make(partial: Path) -> dict[str, Any]:
        _check_room(found.size(), partial)
        shards = list(shards_of(found, settings["field"]))
        # A version that divides a text in another way goes on with no shard of this one.
        division = [[(span.first, span.last) for span in shard.spans] for shard in shards]
        parts = partial / f"text-{hashlib.sha256(repr((key, division)).encode()).hexdigest()[:16]}"
        for other in set(partial.glob("text-*")) - {parts}:
            durable.remove(other)
        how = _MEMORY, processes, quiet
        made = shard_folders.all_made(make_shard, shards, "text", parts, *how)
        if key_of(found, settings) != key:
            raise SettingError("a source changed while it was read: start again")
        splits = {split: [] for split in found.paths}
        for shard, facts in zip(shards, made, strict=True):
            splits[shard.split].append(facts)
        if found.join_by is not None:
            for split, of_split in splits.items():
                splits[split] = joined.join_shards(partial, of_split, SHARD)
            texts = {split: documents.Text(*_arrays(partial, x)) for split, x in splits.items()}
            documents.check_joined(found.root, found, texts)
        source = {
            "files": dict(found.files),
            "notes": list(found.notes),
            "of": [str(found.root.absolute())],
        }
        return {"settings": dict(settings), **source, "splits": splits}

    return shard_folders.made_whole(folder, key, make)


def _check_room(size: int, folder: Path) -> None:
    """Raises OSError for more text than the disk has room for, besides what is made already."""
    there = sum(path.stat().st_size for path in folder.glob("text-*/*.bytes"))
    if size > (room := shutil.disk_usage(folder).free) + there:
        error = OSError(f"{folder} needs {size:,} bytes and its disk has room for {room:,}")
        error.errno = errno.ENOSPC
        raise error


def shards_of(found: text_files.Found, field: str) -> Iterator[TextShard]:
    """The parts that become shards, in order: spans of large plain files, groups of small ones."""
    number = 0
    most = (found.size() * (_INFLATION if found.checked else 1)) // _SHARDS
    most = min(SHARD, max(_LEAST_SHARD, most))
    for split, paths in found.paths.items():
        waiting, size = [], 0
        for span in (span for path in paths for span in _spans(found, path, field, most)):
            if waiting and size + _size(span) > most:
                yield TextShard(number, split, found, waiting, field)
                number, waiting, size = number + 1, [], 0
            waiting.append(span)
            size += _size(span)
        if waiting:
            yield TextShard(number, split, found, waiting, field)
            number += 1


def _spans(
    found: text_files.Found, path: Path, field: str, most: int
) -> Iterator[documents.FileSpan]:
    """The parts of a file, of about so many bytes each where it can be divided."""
    size = path.stat().st_size
    plain = not found.checked or files.packing(path) is None
    rows = tables.reader(path, field) if found.checked and found.kind != "datasets" else None
    if size <= most or not plain or found.kind == "datasets":
        yield documents.FileSpan(path)
    elif rows is tables.parquet and (groups := arrow_tables.row_groups(path)):
        first = so_far = 0
        for number, n_bytes in enumerate(groups, start=1):
            so_far += n_bytes
            if number == len(groups) or so_far + groups[number] > most:
                yield documents.FileSpan(path, first, number, so_far)
                first, so_far = number, 0
    elif rows in (None, tables.json_lines):
        for first in range(0, size, most):
            last = min(size, first + most)
            yield documents.FileSpan(path, first, last, last - first)
    else:
        yield documents.FileSpan(path)


def _size(span: documents.FileSpan) -> int:
    if span.size is not None:
        return span.size
    packed = files.packing(span.path) is not None
    return span.path.stat().st_size * (_INFLATION if packed else 1)


def make_shard(shard: TextShard, folder: Path) -> dict[str, Any]:
    """Writes the bytes of a shard and where documents begin; returns what the manifest says."""
    name = f"{folder.name}/{shard.number:05}"
    path, begin = folder / f"{shard.number:05}", shard.spans[0]
    rows = shard.found.checked and tables.reader(begin.path, shard.field) is not None
    goes_on = begin.first > 0 and not rows
    if goes_on and shard.found.checked:  # byte 0 in a text ends a document
        with open(begin.path, "rb") as file:
            goes_on = os.pread(file.fileno(), 1, begin.first - 1) != documents.BORDER
    begins = documents.Begins(shard.found.checked, continues=goes_on)
    n = crc = n_begins = 0
    keys, of_documents = shard.found.keys(), [b""]
    new = durable.new_file
    with new(Path(f"{path}.bytes")) as data, new(Path(f"{path}.begins")) as positions:
        for part, first in documents.pieces_of(shard.found, shard.spans, shard.field, keys):
            found = begins.of(part, first)
            if keys is not None:
                of_documents.append(keys.take(len(found)).tobytes())
            with durable.explaining("written", path):
                data.write(part)
                positions.write(found)
            n, n_begins, crc = n + len(part), n_begins + len(found), zlib.crc32(part, crc)
    if keys is not None:
        durable.write(Path(f"{path}.keys"), b"".join(of_documents))
    return {"file": name, "n": n, "begins": n_begins, "crc": crc}
