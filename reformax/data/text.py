"""Any text: a file, the files of a folder, or a table of documents."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from jaxtyping import Int64, UInt8

from reformax.data import (
    documents,
    files,
    piece_files,
    shard_folders,
    tables,
    text_files,
    token_files,
)
from reformax.data.base import (
    MAX_HELD_OUT,
    SPLITS,
    Windows,
    WindowSettings,
    byte_language_model,
    held_out_size,
    split_borders,
)
from reformax.data.checks import of_split
from reformax.data.joined import FOLDER
from reformax.data.lengths import checked_lengths
from reformax.data.piece_language_model import piece_language_model
from reformax.data.pieces import BYTES, PieceVocabulary
from reformax.data.splits import By
from reformax.data.stored import StoredArray
from reformax.data.vocabulary import FILE, ModelType
from reformax.declared import (
    Bounds,
    Name,
    NonNegative,
    PathName,
    SettingError,
    Size,
    VocabSize,
    checked,
)
from reformax.task import Task

# Sources of so many bytes are read into memory at each start. Larger ones are prepared once.
SMALL, SMALL_PIECES = 2**24, 2**20
Offset = Annotated[int, Bounds(0, 2**16 - 1)]


@checked
def text(
    data_dir: PathName,
    pattern: Name = "*",
    field: Name = "text",
    raw: bool = False,
    max_held_out: Size = MAX_HELD_OUT,
    vocab_size: VocabSize = BYTES,
    vocabulary: PathName | None = None,
    model_type: ModelType | None = None,
    offset: Offset = 0,
    windows: Windows = "anywhere",
    document_mask: bool = False,
    splits: By = "by_name",
    cache_dir: PathName | None = None,
    join_by: Name | None = None,
    hide_joined: bool = False,
    length_borders: Sequence[Size] = (),
    length_weights: Sequence[NonNegative] = (),
) -> Task:
    """A language model of your own text, of its bytes or of pieces of words.

    A folder's own splits are kept, where the names of its files or subfolders say them, such as
    train.jsonl and test.jsonl: see `reformax.data.splits`. Without, the last 5% of the bytes are
    the test split and the 5% before them the valid split, at most `max_held_out` each. One that is
    not there is so cut from the end of train. A character belongs to one split.

    Documents are the rows of tables, and the files of a folder. A row ends in byte 0, and in a
    vocabulary's EOS. Files are joined in the order of their relative paths, with a newline after a
    file that ends without one. Hidden files and folders are left out, and so are folders of runs:
    those with a `.lock`, or with a config.gin and checkpoints; and, next to tables, pages that tell
    of them, such as README.md. A run's first lines say what is read and what is not.

    Args:
      data_dir: a file or a folder, which `reformax prepare` may have made; larger sources are
        prepared at the first start. Text, plain or .gz, .xz, .zip or .zst; .jsonl, .json with an
        array or lines of objects, .csv and .tsv whose first row names the field, plain or packed;
        .parquet; .arrow; or a folder that `datasets` saved, whose own splits are kept.
      pattern: the names of files to take, such as '*.txt' or '*.md'; '**' takes pages next to
        tables too.
      field: the field of a table's rows that is their text.
      raw: train on the bytes of files as they are, whatever they hold.
      max_held_out: the most bytes of valid and of test.
      vocab_size: 256 for bytes. Otherwise the pieces of a sentencepiece model that is learnt from
        the training text, 256 of which are bytes, so that no text is unknown.
      vocabulary: a file with a vocabulary to take instead: tokenizer.json of Hugging Face's
        `tokenizers`, or a sentencepiece model. It has as many pieces as a `vocab_size` other than
        256 says, and the `model_type`, if that is given.
      model_type: of pieces: 'bpe', 'unigram', 'char' or 'word'; None: 'bpe' where they are learnt.
      offset: a byte's id is the byte plus this, for models that reserve the first ids.
      windows: where training windows begin: 'anywhere', uniformly; by 'documents', from their
        begins where they fit, as `reformax.data.windows.document_starts` says; or 'each_once', one
        after the other in an order of each epoch, in which each token is a target once.
      document_mask: whether a token is predicted from its own document alone, in training and in
        evaluation: the documents of a window are hidden from each other, and positions start again
        with each. Llama 3's mask (Dubey et al. 2024, "The Llama 3 Herd of Models", section 3.2).
      splits: 'by_name', a folder's own; or 'cut', all that it holds as one text.
      cache_dir: a folder for the token files of large texts; None: $XDG_CACHE_HOME/reformax/texts,
        or ~/.cache/reformax/texts.
      join_by: what short documents are joined by into one: 'folder', the files below one folder of
        data_dir; or a field of a table's rows, those with one value. Joined documents
        follow each other, and are one document to `windows`, `document_mask` and `length_borders`.
      hide_joined: whether `document_mask` hides the parts of a joined document from each other too.
      length_borders: lengths in tokens, which divide documents into ranges: those below the first,
        those from it to below the second, and so on. A training window is of documents of one
        range, one after the other; `windows` says where it begins in these.
      length_weights: how often a training window is of each range, in proportion; one more than
        borders.

    Raises:
      FileNotFoundError: data_dir does not exist.
      OSError: a file or a folder below cannot be read.
      ValueError: the text is empty, damaged, too short or too long, or no file matches, or one is
        no text, a FIFO, a device or a socket, or data_dir is a run's folder; or a setting goes by
        documents and there is one. Text is too long where the cache's disk has no room for it, and
        packed text and tables above 1 GiB and 20 times their size.
      ImportError: pyarrow or tokenizers is needed and not there.
    """
    of_bytes = vocabulary is None and vocab_size in (BYTES, BYTES + offset)
    path = files.existing(data_dir)
    lengths = checked_lengths(length_borders, length_weights, windows)
    settings = dict(pattern=pattern, field=field, raw=raw, splits=splits, join_by=join_by)
    by_documents = document_mask or windows == "documents" or lengths is not None
    if join_by == FOLDER and not by_documents:  # files of a folder are together in every text
        raise SettingError(
            f"join_by is {join_by!r}, and nothing goes by documents: set windows='documents', "
            "document_mask=True or length_weights as well, or leave it out"
        )
    source, folder = _source(path, settings, SMALL if of_bytes else SMALL_PIECES, cache_dir)
    texts = {split: x.data for split, x in source.texts.items()}
    parts = split_text(texts, str(path), max_held_out)
    borders = split_borders({split: x.begins for split, x in source.texts.items()}, parts)
    joined = joined_borders(source, parts)
    if hide_joined and not (joined and document_mask):
        raise SettingError(
            "hide_joined is True, which needs joined documents and a mask: set join_by and "
            "document_mask=True as well, or leave it out"
        )
    # What windows and lengths go by, and what the mask hides where that is another thing.
    outer, inner = (borders if joined is None else joined), borders if hide_joined else None
    divided = WindowSettings(windows, document_mask, lengths)
    of_lengths = [] if lengths is None else lengths.summary()
    unread = _unread_ids(folder) if of_bytes else []
    summary = functools.cache(lambda: [*described(path, source, parts), *unread, *of_lengths])
    if of_bytes:
        if model_type is not None:
            raise SettingError(
                f"model_type is {model_type!r}: bytes are no pieces, leave it out, or set "
                "vocab_size to 260 or more"
            )
        task = byte_language_model("text", parts, offset, outer, divided, inner)
        return _with_words(task, summary, joined is not None, hide_joined)
    if offset:
        raise SettingError(f"offset is {offset}: pieces have no reserved ids, leave it out")
    if vocabulary is None and folder is not None and (folder / FILE).is_file():
        vocabulary = folder / FILE
    pieces = PieceVocabulary(vocab_size, parts["train"], vocabulary, model_type, kept_in=folder)

    def encode(split: str) -> tuple[StoredArray, StoredArray, StoredArray]:
        ids, begins, of_joined = encoded_split(parts, borders, joined, pieces, folder, split)
        return ids, begins if of_joined is None else of_joined, begins

    in_files = encode if folder else None
    task = piece_language_model("text", parts, pieces, outer, divided, inner, in_files)
    return _with_words(task, summary, joined is not None, hide_joined)


# The settings that a text is prepared by, and their defaults.
DEFAULTS = {
    name: inspect.signature(text).parameters[name].default
    for name in ("pattern", "field", "raw", "splits", "join_by")
}


def _unread_ids(folder: Path | None) -> list[str]:
    """A line on ids that `reformax prepare` wrote and a run of bytes does not read."""
    if folder is None or not (folder / FILE).is_file():
        return []
    size = PieceVocabulary(BYTES, path=folder / FILE).size
    return [
        f"note: {folder} has ids of {size:,} pieces, and this run reads bytes: set "
        f"vocab_size={size} to read them"
    ]


def _with_words(
    task: Task, summary: Callable[[], list[str]], is_joined: bool, hide_joined: bool
) -> Task:
    """A task with its first lines, and a fingerprint that says whether documents are joined."""
    words = ", joined" * is_joined + ", hide_joined=True" * hide_joined
    of_text = task.fingerprint
    return task.replace(summary=summary, fingerprint=lambda split: of_text(split) + words)


def joined_borders(
    source: documents.Source, parts: Mapping[str, Any]
) -> dict[str, Int64[np.ndarray, " j"]] | None:
    """Where joined documents begin in each split; None where none is joined."""
    joined = {split: x.joined for split, x in source.texts.items()}
    if any(x is None for x in joined.values()):
        return None
    found = split_borders(joined, parts)
    return found or {split: np.zeros(1, np.int64) for split in parts}


def _source(
    path: Path, settings: Mapping[str, Any], small: int, cache_dir: PathName | None
) -> tuple[documents.Source, Path | None]:
    """The text, and the folder of its files; None for what is in memory."""
    if shard_folders.is_prepared(path):
        made_with = DEFAULTS | token_files.settings_of(path)
        for name, value in settings.items():
            if value not in (DEFAULTS[name], made_with[name]):
                raise SettingError(
                    f"text.text.{name} is {value!r}, and {path} was prepared with "
                    f"{made_with[name]!r}: leave it out, or prepare the text anew"
                )
        return token_files.load(path), path
    found = find(path, settings)
    if found.size() <= small:
        return documents.read(path, found, settings["field"]), None
    return token_files.cached(found, settings, cache_dir)


def find(path: Path, settings: Mapping[str, Any]) -> text_files.Found:
    """The files of a text, by the settings of `DEFAULTS`."""
    by = {"by": settings["splits"], "option": "text.text.splits"}
    found = text_files.find(path, settings["pattern"], settings["field"], settings["raw"], **by)
    _check_field(path, found, settings)
    join_by = settings.get("join_by")
    if settings["raw"] and join_by not in (None, FOLDER):
        raise SettingError(
            f"join_by is {join_by!r} and raw is True: bytes of files as they are have "
            "no rows, give 'folder' or leave raw out"
        )
    return found._replace(join_by=join_by, root=path)


def _check_field(path: Path, found: text_files.Found, settings: Mapping[str, Any]) -> None:
    """Raises `SettingError` for the field of a table where none is read."""
    field = settings["field"]
    if field == DEFAULTS["field"] or found.kind == "datasets":
        return
    everything = (x for paths in found.paths.values() for x in paths)
    if settings["raw"] or not any(tables.reader(x, field) for x in everything):
        raise SettingError(
            f"text.text.field is {field!r}, and nothing of {path} is read as a table that has it: "
            "leave it out"
        )


def encoded_split(
    parts: Mapping[str, Any],
    borders: Mapping[str, Any] | None,
    joined: Mapping[str, Any] | None,
    pieces: PieceVocabulary,
    folder: Path,
    split: str,
    **options: Any,
) -> documents.Text:
    """The ids of a split and of its borders, in files; `options` are of `piece_files.encoded`."""
    begins = np.zeros(1, np.int64) if borders is None else borders[split]
    of_joined = None if joined is None else joined[split]
    text = documents.Text(of_split("text", parts, split), begins, of_joined)
    return piece_files.encoded(text, pieces, folder, **options)


def described(
    path: Path, source: documents.Source, parts: Mapping[str, UInt8[np.ndarray, " n"]]
) -> list[str]:
    """Lines on the text: the bytes and documents of each split, of which files, and the others."""
    found = []
    for split in SPLITS:
        size = f"{split} {len(parts[split]):,} bytes"
        if split in source.files:
            found.append(f"{size} ({_counted(source.texts[split])}, {source.files[split]})")
        else:
            found.append(f"{size} cut from the end of train")
    if "valid" not in source.files and "test" not in source.files:
        text = source.texts["train"]
        sizes = ", ".join(f"{split} {len(parts[split]):,}" for split in SPLITS)
        found = [
            f"{len(text.data):,} bytes ({_counted(text)}, {source.files['train']}), cut into "
            f"{sizes}"
        ]
    return [f"{path}: {'; '.join(found)}", *source.notes]


def _counted(text: documents.Text) -> str:
    """How many documents a text has, and how many they are joined into."""
    words = f"{len(text.begins):,} {'document' if len(text.begins) == 1 else 'documents'}"
    return words if text.joined is None else f"{words} joined into {len(text.joined):,}"


def split_text(
    found: Mapping[str, UInt8[np.ndarray, " n"]], source: str, max_held_out: int = MAX_HELD_OUT
) -> dict[str, UInt8[np.ndarray, " n"]]:
    """The splits that there are, and the others from the end of train; `text` says how.

    Raises:
      ValueError: there are too few bytes to split.
    """
    parts, train = dict(found), found["train"]
    if empty := [split for split in found if split != "train" and not len(found[split])]:
        raise SettingError(
            f"{source}: its own split {empty[0]} is empty: put text there or remove it"
        )
    held_out = held_out_size(len(train), max_held_out)
    if not held_out and len(found) < 3:
        raise SettingError(
            f"{source}: {len(train)} bytes are too few to split 90/5/5, give a text of 20 or more"
        )
    for split in ("test", "valid"):
        if split not in parts:
            border = _begin_of_character(train, len(train) - held_out)
            train, parts[split] = train[:border], train[border:]
    return parts | {"train": train}


def _begin_of_character(data: UInt8[np.ndarray, " n"], position: int) -> int:
    """The position, or up to 3 bytes before it, where a character of UTF-8 begins."""
    before = np.flatnonzero(np.asarray(data[max(0, position - 3) : position + 1])[::-1] >> 6 != 2)
    return position - int(before[0]) if len(before) else position
