"""The splits that a folder has of its own, by the names of its files and subfolders.

Names such as train.jsonl, validation-00000-of-00002.parquet, wiki.test.tokens, or folders train/,
dev/ and test/. One name is no layout: a folder of books may hold a test.txt, and one of sources a
test.py. A layout has, at one level, files or folders of 'train' and of another split, of the same
kind, whose names begin alike; and what belongs to its splits is the greater part of the folder.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from reformax.data import files
from reformax.data.base import SPLITS
from reformax.declared import SettingError, some_of
from reformax.shell import config_flag

# Whether a folder's own splits are kept, or all that it holds is one text that is cut.
By = Literal["by_name", "cut"]
_WORDS = {"train": "train", "training": "train", "test": "test", "testing": "test"} | dict.fromkeys(
    ("valid", "val", "validation", "dev", "eval", "evaluation"), "valid"
)
_WORD = re.compile(
    rf"(?<![^\W_])({'|'.join(sorted(_WORDS, key=len, reverse=True))})(?![^\W\d_])", re.IGNORECASE
)
TABLES = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow", ".csv", ".tsv")
IMAGES = (".png", ".jpg", ".jpeg")
_TEXTS = ("", ".txt", ".text", ".tokens", ".tok", ".bpe", ".raw", ".data")
# The languages of published sentence pairs, whose files end so: train.en.
_LANGUAGES = (
    "ar cs de en es et fi fr gu ha hi hu is it ja kk km ko lt lv nl pl ps pt ro ru sv ta tr"
)
_LANGUAGES = {f".{language}" for language in (*_LANGUAGES.split(), "uk", "vi", "zh")}


# Of ten rows of train, the one that is of a split which the data does not have.
_CUT = {"valid": 0, "test": 5}
T = TypeVar("T")


class Named(NamedTuple):
    """The split that a name says, and what precedes that word."""

    split: str
    before: str


class Divided(NamedTuple):
    """The files of a folder by their splits.

    Attributes:
      paths: split -> its files; those of 'train' alone where the folder has no splits of its own.
      outside: files that are in none of its splits, and so are left out.
      notes: lines for the user.
    """

    paths: dict[str, list[Path]]
    outside: Sequence[Path] = ()
    notes: Sequence[str] = ()


@functools.lru_cache(maxsize=2**16)
def named(name: str) -> Named | None:
    """The split that the name of a file or folder says; None for none, or for several."""
    found = list(_WORD.finditer(name))
    if len({_WORDS[match[1].lower()] for match in found}) != 1:
        return None
    return Named(_WORDS[found[0][1].lower()], name[: found[0].start()].lower())


def kind(path: Path) -> str:
    """'table', 'image', 'text', or the ending of a file of another kind."""
    name = path.name.lower()
    for ending in files.PACKED:
        name = name.removesuffix(ending)
    suffix = Path(name).suffix
    if suffix in TABLES:
        return "table"
    if suffix in IMAGES:
        return "image"
    is_split = suffix.removeprefix(".") in _WORDS
    return "text" if suffix in _TEXTS or is_split else suffix


def named_in(folder: Path, path: Path) -> str | None:
    """The split that the outermost name says, of the folders that a file is in or its own."""
    return next((x.split for _, name in _steps(folder, path) if (x := named(name))), None)


def held_out_next_to(path: Path) -> list[Path]:
    """The files of other splits in the folder of a file of 'train', of its kind."""
    train = named(path.name)
    if train is None or train.split != "train":
        return []
    return [
        other
        for other in files.list_files(path.parent, deep=False)
        if (found := named(other.name))
        and found.split != "train"
        and (found.before, kind(other)) == (train.before, kind(path))
    ]


def divided(folder: Path, paths: Sequence[Path], option: str) -> Divided:
    """The files of a folder by the splits that it has of its own.

    Args:
      folder: the folder.
      paths: the files in it and below, in order.
      option: the setting of the task that takes a `By`, for errors.

    Raises:
      SettingError: it has splits that cannot be used.
    """
    layouts = _layouts(folder, paths)
    split_of = {path: split for path in paths if (split := _split_in(layouts, folder, path))}
    fix = f"choose files by pattern, or take all as one by {config_flag(option, 'cut')}"
    if not split_of:
        return Divided({"train": list(paths)}, (), _held_out_alone(folder, paths, fix))
    outside = [path for path in paths if path not in split_of]
    if sum(map(_size, outside)) > sum(map(_size, split_of)):
        names = shown(folder, list(split_of))
        at_root = any(path.parent == folder for path in split_of)
        if at_root:
            raise SettingError(
                f"{folder} has splits by name ({names}), and {shown(folder, outside)}, in none of "
                f"them, are the greater part: move these or rename those, {fix}"
            )
        note = f"{names} are read as all else: they are the smaller part of the folder"
        return Divided({"train": list(paths)}, (), [note])
    found = {split: [p for p in paths if split_of.get(p) == split] for split in SPLITS}
    return Divided({split: found[split] for split in SPLITS if found[split]}, outside)


def choose(
    folder: Path,
    paths: Sequence[Path],
    by: By,
    option: str,
    left_out: Mapping[str, Sequence[Path]],
) -> Divided:
    """The files of a folder by its splits, and a line for each reason that others are left out for.

    Args:
      folder, paths, option: as in `divided`.
      by: whether the folder's own splits are kept.
      left_out: files by the reason that they are none of `paths`.
    """
    found = divided(folder, paths, option) if by == "by_name" else Divided({"train": list(paths)})
    lines = left_out_lines(folder, {"in no split": found.outside, **left_out})
    return found._replace(notes=[*found.notes, *lines])


def with_cut(rows: Mapping[str, Sequence[T]]) -> dict[str, list[T]]:
    """The rows of each split, of which those that are not there are every tenth row of train."""
    cut = {remainder: split for split, remainder in _CUT.items() if split not in rows}
    parts = {split: list(part) for split, part in rows.items()} | {"train": []}
    parts |= {split: [] for split in cut.values()}
    for number, row in enumerate(rows["train"]):
        parts[cut.get(number % 10, "train")].append(row)
    return parts


def shown(folder: Path, paths: Sequence[Path], most: int = 3) -> str:
    """Some names of files of a folder, and how many more there are."""
    if list(paths) == [folder]:
        return folder.name
    return some_of([p.relative_to(folder).as_posix() + "/" * p.is_dir() for p in paths], most)


def left_out_lines(folder: Path, left_out: Mapping[str, Sequence[Path]]) -> list[str]:
    """A line for each reason that files of a folder are left out for."""
    return [
        f"left out: {shown(folder, paths)} ({reason})"
        for reason, paths in sorted(left_out.items())
        if paths
    ]


def _layouts(folder: Path, paths: Iterable[Path]) -> dict[tuple[Path, str], set[str]]:
    """(level, what precedes the split's name) -> the splits that are there."""
    kinds: dict[tuple[Path, str], dict[str, set[str]]] = {}
    of_kind: dict[str, list[Path]] = {}
    for path in paths:
        of_kind.setdefault(kind(path), []).append(path)
        for level, name in _steps(folder, path):
            # Of files a kind is that of data: train.py next to test.py are no splits.
            if (level / name != path or _is_data(path)) and (found := named(name)):
                splits = kinds.setdefault((level, found.before), {})
                splits.setdefault(found.split, set()).add(kind(path))
    layouts: dict[tuple[Path, str], set[str]] = {}
    of_others = {}
    for key, splits in kinds.items():
        train = splits.pop("train", set())
        alike = {split for split, those in splits.items() if train & those}
        if alike:
            layouts[key] = alike | {"train"}
            of_others[key] = {x for split in alike for x in train & splits[split]}
    # Folders of another kind, such as sources, are splits where all of that kind is in them.
    for key, those in of_others.items():
        if not any(map(_is_known, those)) and not all(
            _split_in(layouts, folder, path) for x in those for path in of_kind[x]
        ):
            del layouts[key]
    return layouts


def _split_in(layouts, folder: Path, path: Path) -> str | None:
    """The split of a file by the outermost of its folders that is one's, or by its own name."""
    for level, name in _steps(folder, path):
        found = named(name)
        if found and found.split in layouts.get((level, found.before), ()):
            return found.split
    return None


def _steps(folder: Path, path: Path) -> Iterable[tuple[Path, str]]:
    level = folder
    for name in path.relative_to(folder).parts:
        yield level, name
        level = level / name


def _held_out_alone(folder: Path, paths: Sequence[Path], fix: str) -> list[str]:
    """Notes on files named as held out without any to train on; raises where these are the data."""
    held_out = [p for p in paths if _is_data(p) and (x := named(p.name)) and x.split != "train"]
    inside = [
        path
        for path in paths
        if _is_data(path)
        and any((x := named(name)) and x.split != "train" for _, name in _steps(folder, path))
    ]
    tables = [path for path in held_out if kind(path) == "table"]
    all_tables = sum(_size(path) for path in paths if kind(path) == "table")
    are_tables = tables and 2 * all_tables > sum(map(_size, paths))
    if are_tables or (inside and len(inside) == len(paths)):
        raise SettingError(
            f"{folder} has {shown(folder, tables if are_tables else inside)} and no train next to "
            f"it: put the data to train on there, {fix}"
        )
    if not held_out:
        return []
    return [f"{shown(folder, held_out)}: trained on, for there is no train next to it"]


def _is_data(path: Path) -> bool:
    return _is_known(kind(path))


def _is_known(name: str) -> bool:
    return name in ("table", "image", "text") or name in _LANGUAGES


def _size(path: Path) -> int:
    return path.stat().st_size
