"""Ids of tokens that other programs wrote, read where they lie, and written for them.

* Megatron-LM's `.bin` with `.idx` next to it: ids, and where sequences and documents begin.
* nanoGPT's `train.bin` and `val.bin`: ids of uint16, nothing else.
* llm.c's and modded-nanogpt's shards: a header of 256 numbers of int32, and ids.
"""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int64

from reformax import durable
from reformax.data import files, splits
from reformax.data.base import (
    MAX_HELD_OUT,
    SPLITS,
    Windows,
    WindowSettings,
    check_documents,
    held_out_size,
    language_model,
    split_borders,
)
from reformax.data.checks import of_split
from reformax.data.lengths import checked_lengths
from reformax.data.pieces import PieceVocabulary
from reformax.data.stored import FilePart, StoredArray
from reformax.declared import NonNegative, PathName, SettingError, Size, VocabSize, checked
from reformax.task import Task

Dtype = Literal["uint8", "uint16", "int32", "uint32", "int64"]
Format = Literal["megatron", "nanogpt"]
_MEGATRON = b"MMIDIDX\x00\x00"
# The codes of Megatron-LM's .idx.
_CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
# What headers begin with, and the ids after it.
_HEADERS, _HEADER = {20240520: "uint16", 20240801: "uint32"}, 1024
_BLOCK = 2**20


class Ids(NamedTuple):
    """The ids of a file, and those that documents begin with."""

    part: FilePart
    dtype: str
    begins: Int64[np.ndarray, " d"]


@checked
def token_ids(
    data_dir: PathName,
    vocab_size: VocabSize,
    dtype: Dtype | None = None,
    vocabulary: PathName | None = None,
    max_held_out: Size = MAX_HELD_OUT,
    windows: Windows = "anywhere",
    document_mask: bool = False,
    length_borders: Sequence[Size] = (),
    length_weights: Sequence[NonNegative] = (),
) -> Task:
    """A language model of ids in `.bin` files, which are read by windows.

    A folder's files are of the splits that their names say, as train.bin and val.bin, and of
    'train' where they say none. Files of a split follow each other by name. A split that is not
    there is cut from the end of train: 5% of it, at most `max_held_out` ids.

    Args:
      data_dir: a file, or a folder of files. With an .idx next to it a file is Megatron-LM's; one
        with the header of llm.c is read as it says; another one is nothing but ids.
      vocab_size: ids are below it.
      dtype: of files that do not say it; None: uint16, as nanoGPT writes.
      vocabulary: a tokenizer.json or a sentencepiece model that made the ids, for
        `reformax generate`. It stays with the run.
      max_held_out: the most ids of a split that is cut.
      windows, document_mask, length_borders, length_weights: as in `reformax.data.text.text`; by
        Megatron-LM's documents.

    Raises:
      FileNotFoundError: data_dir does not exist.
      ValueError: there is no such file, one is damaged or has ids beyond vocab_size, or a setting
        goes by documents and there is one.
      OSError: a file cannot be read.
    """
    path = files.existing(data_dir)
    paths = [path]
    if path.is_dir():
        paths = files.list_files(path, "*.bin", deep=False)
    if not paths:
        raise SettingError(f"{path} has no .bin file: give a folder of token files, or one of them")
    of_splits: dict[str, list[Path]] = {}
    for one in paths:
        named = splits.named(one.name) if path.is_dir() else None
        of_splits.setdefault(named.split if named else "train", []).append(one)
    if "train" not in of_splits:
        raise SettingError(f"{path} has no token file to train on: put a train.bin there")
    found = {s: _joined(them, dtype or "uint16", vocab_size) for s, them in of_splits.items()}
    ids, begins = _cut(found, max_held_out, path)
    lengths = checked_lengths(length_borders, length_weights, windows)
    divided = WindowSettings(windows, document_mask, lengths)
    check_documents(begins, divided)
    task = language_model(
        "token ids",
        vocab_size,
        functools.partial(of_split, "token ids", ids),
        borders_of=begins and functools.partial(of_split, "token ids", begins),
        windows=divided,
    )
    pieces = None if vocabulary is None else PieceVocabulary(vocab_size, None, vocabulary)
    return task.replace(
        fingerprint=functools.cache(functools.partial(_fingerprint, ids, document_mask)),
        vocabulary=pieces,
        summary=lambda: [
            _summary(path, of_splits, ids, begins),
            *([] if lengths is None else lengths.summary()),
        ],
    )


def _fingerprint(ids: Mapping[str, StoredArray], document_mask: bool, split: str) -> str:
    found = of_split("token ids", ids, split)
    mask = ", document_mask=True" * document_mask
    return (
        f"{len(found):,} ids of {found.dtype}, samples of CRC-32 {found.sampled_crc32():08x}{mask}"
    )


def _summary(path: Path, of_splits, ids, begins) -> str:
    counts = []
    for split in SPLITS:
        names = of_splits.get(split)
        where = splits.shown(path, names) if names and path.is_dir() else path.name
        where = where if names else "cut from the end of train"
        n_documents = f"{len(begins[split]):,} documents, " if begins else ""
        counts.append(f"{split} {len(ids[split]):,} ids ({n_documents}{where})")
    return f"{path}: {'; '.join(counts)}"


def _joined(paths: Sequence[Path], dtype: str, below: int) -> tuple[StoredArray, np.ndarray]:
    parts, begins, before, dtypes = [], [], 0, {}
    for path in paths:
        found = read(path, dtype)
        parts.append(found.part)
        begins.append(found.begins + before)
        before += found.part.n
        dtypes[found.dtype] = path
    if len(dtypes) > 1:
        (a, one), (b, other), *_ = dtypes.items()
        raise SettingError(f"{one} has ids of {a} and {other} of {b}: give files of one type")
    return StoredArray(parts, next(iter(dtypes)), below), np.concatenate(begins)


def _cut(
    found: Mapping[str, tuple[StoredArray, np.ndarray]], max_held_out: int, path: Path
) -> tuple[dict[str, StoredArray], dict[str, np.ndarray] | None]:
    """The ids and the documents' begins of all splits, cut from train where they are not there."""
    ids = {split: x for split, (x, _) in found.items()}
    n = held_out_size(len(ids["train"]), max_held_out)
    if not n:
        raise SettingError(f"{path}: {len(ids['train'])} ids are too few: give 20 or more")
    for split in ("test", "valid"):
        if split not in ids:
            last = len(ids["train"]) - n
            ids[split], ids["train"] = ids["train"][last:], ids["train"][:last]
    return ids, split_borders({split: x for split, (_, x) in found.items()}, ids)


def read(path: Path, dtype: str = "uint16") -> Ids:
    """Finds the ids of a file; `dtype` is that of a file that does not say it.

    Raises:
      ValueError: the file is empty, damaged, or of another size than it says.
      OSError: it cannot be read.
    """
    size = files.check_ordinary(path)
    index = path.with_suffix(".idx")
    if index.is_file():
        return _megatron(path, size, index)
    first = 0
    with durable.open_file(path) as file:
        head = file.read(12)
    if len(head) == 12 and (header := _HEADERS.get(struct.unpack_from("<i", head)[0])):
        dtype, first, n = header, _HEADER, struct.unpack_from("<i", head, 8)[0]
        expected = _HEADER + n * np.dtype(dtype).itemsize
        if size != expected:
            raise ValueError(f"{path} has {size:,} bytes and says {expected:,}: copy it again")
    n, rest = divmod(size - first, np.dtype(dtype).itemsize)
    if rest or not n:
        raise SettingError(
            f"{path} has {size:,} bytes, which are no ids of {dtype}: set token_ids.token_ids.dtype"
        )
    return Ids(FilePart(str(path), first, n), dtype, np.zeros(1, np.int64))


def _megatron(path: Path, size: int, index: Path) -> Ids:
    """Ids by Megatron-LM's index: sizes and offsets of sequences, and the documents' first ones."""
    total = files.check_ordinary(index)
    with durable.open_file(index) as file:
        head = file.read(34)
    if len(head) < 34 or not head.startswith(_MEGATRON):
        raise ValueError(f"{index} is no index of Megatron-LM by its first bytes: copy it again")
    version, code, n, n_documents = struct.unpack_from("<QBQQ", head, len(_MEGATRON))
    dtype = _CODES.get(code)
    if version != 1 or dtype is None:
        raise SettingError(f"{index} is of version {version} and type {code}: expected whole ids")
    expected = 34 + 12 * n + 8 * n_documents
    if not n or not n_documents or total not in (expected, expected + n):  # modes may follow
        raise ValueError(f"{index} has {total:,} bytes and says {expected:,}: copy it again")
    sizes = StoredArray([FilePart(str(index), 34, n)], "int32")
    offsets = StoredArray([FilePart(str(index), 34 + 4 * n, n)], "int64")
    documents = StoredArray([FilePart(str(index), 34 + 12 * n, n_documents)], "int64")
    item = np.dtype(dtype).itemsize
    at = 0
    for size_of, offset in zip(sizes.blocks(), offsets.blocks(), strict=True):
        ends = at + item * np.cumsum(size_of, dtype=np.int64)
        if (offset != np.concatenate([[at], ends[:-1]])).any():
            raise SettingError(f"{index} has sequences out of order: merge the data set anew")
        at = int(ends[-1])
    if at != size:
        raise ValueError(f"{path} has {size:,} bytes and its index says {at:,}: copy it again")
    firsts = np.asarray(documents)
    if firsts[0] != 0 or (np.diff(firsts) < 0).any() or firsts[-1] > n:
        raise ValueError(f"{index} is damaged: its documents are not in order, copy it again")
    begins = np.asarray(offsets)[firsts[firsts < n]] // item
    return Ids(
        FilePart(str(path), 0, size // item), dtype, np.unique(begins[begins < size // item])
    )


def check_form(path: str | os.PathLike, dtype: np.dtype, form: Format) -> None:
    """Raises `SettingError` for ids that a program's files have no room for; `path` gets them."""
    if form == "nanogpt" and dtype.itemsize > 2:
        raise SettingError(f"{path}: nanoGPT's ids are below 65,536: write megatron's instead")


def write(path: Path, ids: StoredArray, begins: StoredArray | np.ndarray, form: Format) -> None:
    """Writes ids for another program: `path`, and for Megatron-LM an .idx next to it.

    Args:
      path: ends in .bin; gets its name when all is on the disk.
      ids: the ids.
      begins: those that documents begin with.
      form: 'megatron', or 'nanogpt', which is uint16.

    Raises:
      SettingError: nanoGPT's ids are below 65,536.
      OSError: a file cannot be written.
    """
    check_form(path, ids.dtype, form)
    if form == "megatron":
        begins = np.unique(np.concatenate([[0], np.asarray(begins)])).astype(np.int64)
        code = next(code for code, name in _CODES.items() if name == ids.dtype.name)
        sizes = np.diff(np.append(begins, len(ids)))
        if sizes.max() > np.iinfo(np.int32).max:
            raise SettingError(
                f"{path}: a document has {sizes.max():,} ids, above 2^31 - 1 of megatron"
            )
        sizes = sizes.astype(np.int32)
        documents = np.arange(len(begins) + 1, dtype=np.int64)
        head = _MEGATRON + struct.pack("<QBQQ", 1, code, len(begins), len(documents))
        body = sizes.tobytes(), (begins * ids.dtype.itemsize).tobytes(), documents.tobytes()
        durable.write(path.with_suffix(".idx"), b"".join([head, *body]))
    temporary = path.with_suffix(".bin.tmp")
    with durable.explaining("written", path):
        with durable.new_file(temporary) as file:
            for block in ids.blocks():
                file.write(np.ascontiguousarray(block))
        durable.rename(temporary, path)
