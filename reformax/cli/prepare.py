"""Prepares a text for training: `reformax prepare`, once, for a text of any size.

    reformax prepare --data_dir=FILE_OR_FOLDER --to=FOLDER [--vocabulary=tokenizer.json]
    reformax train --config_file=reformer_text.gin --data_dir=FOLDER

FOLDER gets the text's bytes and where documents begin, and with --vocabulary or --vocab_size the
ids of pieces. It is whole or absent. The same command, run again after an interruption, goes on; of
a text that has not changed it does nothing, and one that has is prepared anew.

Training prepares a large text by itself, in a cache folder. This command says where to and with how
many processes, and FOLDER can be copied to other machines.

    reformax prepare --list
    reformax prepare --prune=DAYS

say what is in the cache folder, and delete what no run has begun to read for so many days; what a
run of this machine reads stays.
"""

from __future__ import annotations

import argparse
import functools
import time
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from reformax import durable
from reformax.cli import errors, flags
from reformax.data import cache, files, shard_folders, token_files, token_ids
from reformax.data import text as texts
from reformax.data.base import MAX_HELD_OUT, SPLITS, split_borders
from reformax.data.documents import Source
from reformax.data.pieces import BYTES, PieceVocabulary
from reformax.data.splits import By
from reformax.data.vocabulary import FILE
from reformax.declared import Name, NonNegative, PathName, SettingError, Size, VocabSize
from reformax.shell import user_path

# Settings of training that are flags here.
_FLAGS = (*texts.DEFAULTS, "vocabulary", "vocab_size", "max_held_out")


def main(argv: Sequence[str] | None = None) -> int:
    """Prepares a text and says what it is."""
    args = parser().parse_args(argv)
    try:
        if args.list or args.prune is not None:
            return _clean(args, argv)
        with errors.reading_input():
            return _prepare(args)
    except (ValueError, OSError) as error:
        if len(error.args) == 1:
            error.args = (flags.in_place_of_settings(str(error), "text.text", _FLAGS),)
        raise


def _prepare(args: argparse.Namespace) -> int:
    if args.data_dir is None or args.to is None:
        raise SettingError("--data_dir and --to are missing: give a text and the folder to make")
    if args.cache_dir is not None:
        raise SettingError(f"cache_dir={args.cache_dir} is for --list and --prune: leave it out")
    settings = {name: getattr(args, name) for name in texts.DEFAULTS}
    path, folder = files.existing(args.data_dir), user_path("to", args.to)
    if shard_folders.is_prepared(path):
        raise SettingError(f"data_dir={path} is prepared already: give the text itself")
    if path.is_dir() and path.resolve() in (folder.resolve(), *folder.resolve().parents):
        raise SettingError(f"to={folder} lies in data_dir={path}: give a folder outside of it")
    _check_folder(folder, path)
    of_bytes = args.vocabulary is None and args.vocab_size == BYTES
    _check_bytes(args) if of_bytes else _check_pieces(args)
    found = texts.find(path, settings)
    work = {"processes": args.processes, "quiet": args.quiet}
    made = token_files.prepare(found, settings, folder, **work)
    source = token_files.load(folder)
    of_split = {split: x.data for split, x in source.texts.items()}
    parts = texts.split_text(of_split, str(path), args.max_held_out)
    if not of_bytes:
        _prepare_ids(args, folder, source, parts, work)
    for line in texts.described(folder, source, parts):
        print(flags.in_place_of_settings(line, "text.text", _FLAGS))
    if not made:
        print(f"{folder}: the text is as it was, and nothing of it was made anew")
    return 0


def _check_folder(folder: Path, source: Path) -> None:
    """Raises `SettingError` for a file, and for a folder that has the text of another source."""
    if folder.exists() and not folder.is_dir():
        raise SettingError(f"to={folder} is a file: give a folder to make")
    if folder.resolve() in source.resolve().parents:
        raise SettingError(f"to={folder} holds the source {source}: give another folder")
    if not shard_folders.is_prepared(folder):
        return
    others = [of for of in token_files.sources_of(folder) if Path(of).resolve() != source.resolve()]
    if others:
        raise SettingError(f"to={folder} has the text of {', '.join(others)}: give another folder")


def _check_bytes(args: argparse.Namespace) -> None:
    """Refuses flags of pieces for a text whose bytes alone are prepared."""
    for name in ("write", "model_type"):
        if (value := getattr(args, name)) is not None:
            raise SettingError(
                f"{name}={value}: bytes are no ids, give --vocabulary or --vocab_size"
            )


def _check_pieces(args: argparse.Namespace) -> None:
    """Refuses a vocabulary that cannot be learnt, read or written, before hours go by."""
    vocabulary = _vocabulary(args, np.zeros(0, np.uint8))
    if args.vocabulary is not None:
        vocabulary.check_file()
    if args.write is not None:
        token_ids.check_form(args.to, vocabulary.dtype, args.write)


def _vocabulary(
    args: argparse.Namespace, text: UInt8[np.ndarray, " n"], folder: Path | None = None
) -> PieceVocabulary:
    """The vocabulary of the flags, learnt of a text, and kept in a folder, where it is no file."""
    model = user_path("vocabulary", args.vocabulary) if args.vocabulary else None
    return PieceVocabulary(args.vocab_size, text, model, args.model_type, kept_in=folder)


def _prepare_ids(
    args: argparse.Namespace,
    folder: Path,
    source: Source,
    parts: dict[str, Any],
    work: dict[str, Any],
) -> None:
    """Writes the ids of pieces of a prepared text, and says how many there are."""
    borders = split_borders({split: x.begins for split, x in source.texts.items()}, parts)
    pieces = _vocabulary(args, parts["train"], folder)
    durable.write(folder / FILE, pieces.serialised())
    joined = texts.joined_borders(source, parts)
    encode = functools.partial(texts.encoded_split, parts, borders, joined, pieces, folder)
    ids = {split: encode(split, **work) for split in SPLITS}
    if args.write is not None:
        there = folder / args.write
        durable.make_folder(there)
        names = {"train": "train", "valid": "val", "test": "test"}
        for split, x in ids.items():
            token_ids.write(there / f"{names[split]}.bin", x.data, x.begins, args.write)
    counts = ", ".join(f"{split} {len(x.data):,}" for split, x in ids.items())
    print(f"{folder}: ids of {pieces.size:,} pieces, {counts}")


def _clean(args: argparse.Namespace, argv: Sequence[str] | None) -> int:
    """Lists the cache's texts, or deletes those that were not used for some days."""
    names = set(vars(args))
    given = parser().parse_args(argv, argparse.Namespace(**dict.fromkeys(names)))  # no defaults
    others = sorted(names - {"list", "prune", "cache_dir", "quiet", "traceback"})
    flags.refuse(given, others, "--list and --prune go by the cache")
    folder = token_files.cache_folder(args.cache_dir)
    if args.prune is not None:
        deleted, kept = cache.prune(folder, args.prune)
        for entry in kept:
            print(f"{entry.folder}: a process reads it, and it stays")
        total = sum(entry.size for entry in deleted)
        print(f"{folder}: {len(deleted):,} texts of {total:,} bytes deleted")
    for entry in cache.entries(folder) if args.list else ():
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        words = token_files.words_of(entry.folder)
        now = ", in use" * entry.in_use
        print(f"{entry.folder}: {entry.size:,} bytes, last used {used}{now}, {words}")
    return 0


def parser():
    """The flags."""
    parser = flags.parser(__doc__)
    path = flags.of(PathName)
    parser.add_argument("--data_dir", type=path, help="a file or a folder of text")
    parser.add_argument("--to", type=path, help="the folder that is made")
    parser.add_argument("--vocabulary", type=path, help="a tokenizer.json or sentencepiece model")
    parser.add_argument(
        "--vocab_size",
        type=flags.of(VocabSize),
        default=BYTES,
        help="pieces of a vocabulary that is learnt, or that the model has (default: bytes alone)",
    )
    parser.add_argument(
        "--model_type", choices=("bpe", "unigram", "char", "word"), help="of pieces (default: bpe)"
    )
    parser.add_argument(
        "--write",
        choices=typing.get_args(token_ids.Format),
        help="the ids as another program reads them too, in a folder of this name in FOLDER",
    )
    parser.add_argument("--pattern", type=flags.of(Name), help="names of files to take")
    parser.add_argument("--field", type=flags.of(Name), help="a table's field that is text")
    parser.add_argument(
        "--join_by", type=flags.of(Name), help="'folder' or a field, see text.text.join_by"
    )
    parser.add_argument("--raw", action="store_true", help="take the bytes of files as they are")
    parser.add_argument("--splits", choices=typing.get_args(By), help="see text.text.splits")
    parser.add_argument(
        "--max_held_out",
        type=flags.of(Size),
        default=MAX_HELD_OUT,
        help="the most bytes of valid and of test that training will have; ids go by it "
        f"(default: {MAX_HELD_OUT:,})",
    )
    parser.add_argument(
        "--processes", type=flags.of(Size), help="that work side by side (default: one a core)"
    )
    parser.add_argument("--list", action="store_true", help="say what is in the cache folder")
    parser.add_argument(
        "--prune", type=flags.of(NonNegative), help="days without use, to delete from the cache"
    )
    parser.add_argument("--cache_dir", type=path, help="of --list and --prune, another folder")
    flags.add_quiet(parser)
    flags.add_traceback(parser)
    parser.set_defaults(**texts.DEFAULTS)
    return parser
