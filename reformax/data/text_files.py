"""The files of a text, not read yet: those that --data_dir names, by splits."""

from __future__ import annotations

import collections
import fnmatch
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from reformax.data import files, joined, splits, tables
from reformax.declared import SettingError, some_of

# Files that tell of the tables next to them.
_PAGES = (".md", ".rst", ".json", ".yaml", ".yml", ".toml", ".cff", ".py", ".sh", ".lock")
_PAGE_NAMES = {"readme", "license", "licence", "notice", "citation", "changelog", "authors"}
_PAGE_NAMES |= {"sha256sums", "md5sums", "checksums"}
_ALL = "text.text.pattern='**'"
_WRITTEN = ("json", "csv", "tsv")  # endings of files whose values have marks between them
# What `Dataset.save_to_disk` and `DatasetDict.save_to_disk` write.
_DATASET, _DATASETS = "state.json", "dataset_dict.json"


class Found(NamedTuple):
    """The files of a text, not read yet.

    Attributes:
      paths: split -> its files, in order.
      files: split -> the files, by name.
      notes: lines on what else was found: files that are left out, and why.
      kind: how they are read: 'datasets', what `datasets` saved; 'joined', files each with a
        newline at its end; or 'file', the one that there is.
      checked: whether what is no text is refused, and byte 0 ends a document.
      join_by: what documents are joined by, `joined.FOLDER` or a field of rows; None: by nothing.
      root: what a user named.
    """

    paths: Mapping[str, list[Path]]
    files: Mapping[str, str]
    notes: Sequence[str]
    kind: str
    checked: bool = True
    join_by: str | None = None
    root: Path = Path()

    def keys(self) -> joined.Keys | None:
        """What finds the keys of documents, by which they are joined; None: by nothing."""
        return None if self.join_by is None else joined.Keys(self.join_by)

    def is_split(self, name: str) -> bool:
        """Whether a folder's name says a split of this text."""
        return len(self.paths) > 1 and splits.named(name) is not None

    def size(self) -> int:
        """The bytes of all files; raises for what is no ordinary one."""
        return sum(files.check_ordinary(p) for paths in self.paths.values() for p in paths)


def find(
    path: Path, pattern: str, field: str | None, raw: bool, by: splits.By, option: str
) -> Found:
    """The files of a text, by splits.

    Args:
      path: a file; a folder, whose files are joined; or a folder that `datasets` saved.
      pattern: the names of files to take. What is read whole matches, or this is '*', which leaves
        pages next to tables out.
      field: the field of a table's rows that is text. Each text ends in `documents.BORDER`. None:
        tables of any fields.
      raw: take files as they are: no table, nothing unpacked, nothing refused, and documents are
        files alone.
      by: whether a folder's own splits are kept.
      option: the setting that `by` is of, for errors.

    Raises:
      ValueError: no file matches, or the folder is a run's or has splits that cannot be used.
      OSError: a folder cannot be read.
    """
    _check_pattern(path, pattern, raw)
    if not path.is_dir():
        notes: Sequence[str] = ()
        if by == "by_name" and (others := splits.held_out_next_to(path)):
            names_of = splits.shown(path.parent, others)
            notes = [f"not read: {names_of}, next to it: give the folder to use these splits"]
        notes = [*notes, *([] if raw else _with_marks([path], field))]
        return Found({"train": [path]}, {"train": path.name}, notes, "file", not raw)
    if not raw and any((path / name).is_file() for name in (_DATASETS, _DATASET)):
        whole = (path / _DATASETS).is_file()
        parts, notes = _datasets(path) if whole else ({"train": _dataset(path)}, ())
        if by == "cut":
            parts = {"train": [file for paths in parts.values() for file in paths]}
        return Found(parts, dict.fromkeys(parts, "what `datasets` saved"), notes, "datasets")
    if not raw and pattern == "*":
        _check_no_pairs(path)
    chosen = choose(path, pattern, field, raw, by, option)
    names = {split: _named(path, paths) for split, paths in chosen.paths.items()}
    marked = [] if raw else _with_marks([p for x in chosen.paths.values() for p in x], field)
    return Found(chosen.paths, names, [*chosen.notes, *marked], "joined", not raw)


def choose(
    folder: Path, pattern: str, field: str | None, raw: bool, by: splits.By, option: str
) -> splits.Divided:
    """The files of a folder that are read; arguments and errors are those of `find`."""
    if files.is_run(folder):
        raise SettingError(
            f"{folder} is the folder of a run: give a folder of text, and move the text there if "
            "this one has it"
        )
    listed = files.listed(folder, pattern)
    if not listed.paths:
        raise SettingError(f"{folder} has no file that matches {pattern!r}: put text files there")
    paths, pages = listed.paths, []
    if pattern == "*" and not raw:
        is_table = {path: tables.reader(path, field) is not None for path in paths}
        if any(is_table.values()):
            pages = [path for path in paths if is_page(path) and not is_table[path]]
            paths = [path for path in paths if is_table[path] or not is_page(path)]
    left_out = {**listed.left_out, f"next to tables; {_ALL} takes them": pages}
    return splits.choose(folder, paths, by, option, left_out)


def is_page(path: Path) -> bool:
    """Whether a file tells of data, as it lies next to tables, and is none."""
    name = path.name.lower()
    return name.endswith(_PAGES) or name.partition(".")[0] in _PAGE_NAMES


def _named(folder: Path, paths: Sequence[Path]) -> str:
    """A few names, or how many files there are of each ending."""
    if len(paths) <= 3:
        return splits.shown(folder, paths)
    endings = collections.Counter(path.suffix or "without an ending" for path in paths)
    kinds = [f"{n:,} {ending}" for ending, n in endings.most_common(3)]
    more = len(paths) - sum(n for _, n in endings.most_common(3))
    return f"{len(paths):,} files: " + ", ".join([*kinds, *[f"{more:,} other"] * bool(more)])


def _with_marks(paths: Sequence[Path], field: str | None) -> list[str]:
    """What to say of files of which all is read, the marks between values too."""
    named = [p for p in paths if p.name.lower().partition(".")[2].startswith(_WRITTEN)]
    names = [path.name for path in named if tables.reader(path, field) is None]
    if not names:
        return []
    return [
        f"{some_of(names)}: read as text, with the marks between values; where a "
        f"column or key other than {field!r} has the text, name it by text.text.field"
    ]


def _check_pattern(path: Path, pattern: str, raw: bool) -> None:
    """Raises `SettingError` for a pattern that would choose nothing of what is read whole."""
    by_datasets = not raw and any((path / name).is_file() for name in (_DATASETS, _DATASET))
    if by_datasets and pattern != "*" or not (path.is_dir() or fnmatch.fnmatch(path.name, pattern)):
        what = "a folder that `datasets` saved" if by_datasets else "a file that does not match it"
        raise SettingError(
            f"pattern is {pattern!r}, and {path} is {what}: set text.text.pattern='*', or give a "
            "folder of files"
        )


def _datasets(folder: Path) -> tuple[dict[str, list[Path]], list[str]]:
    """The splits of a folder that `DatasetDict.save_to_disk` wrote, and what else it has."""
    names = _read_json(folder / _DATASETS).get("splits")
    names = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    known = {x: found.split for x in names if (found := splits.named(x)) and not found.before}
    if "train" not in known.values() or len(set(known.values())) < len(known):
        raise SettingError(
            f"{folder} holds the splits {names}: expected 'train', and 'validation' and 'test' if "
            "there are any; give the folder of one of them"
        )
    others = [name for name in names if name not in known]
    notes = [f"left out: {', '.join(others)} (in no split)"] * bool(others)
    return {split: _dataset(folder / name) for name, split in known.items()}, notes


def _dataset(folder: Path) -> list[Path]:
    """The files of a folder that `Dataset.save_to_disk` wrote."""
    state = _read_json(folder / _DATASET)
    try:
        names = [file["filename"] for file in state["_data_files"]]
    except (KeyError, TypeError):
        names = []
    if not names or not all(isinstance(n, str) and Path(n).name == n for n in names):
        raise ValueError(
            f"{folder / _DATASET} names no files of its folder: save the dataset again"
        )
    return [folder / name for name in names]


def _read_json(path: Path) -> dict:
    if files.check_ordinary(path) > 2**24:
        raise ValueError(f"{path} has more than {2**24:,} bytes: save the dataset again")
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is no object of JSON: save the dataset again")
    return found


def _check_no_pairs(folder: Path) -> None:
    """Raises `SettingError` for sentence pairs: files of several splits in two languages."""
    languages = []
    for path in sorted(folder.glob("train.??")):
        found = map(splits.named, (other.name for other in folder.glob(f"*{path.suffix}")))
        if {x.split for x in found if x} - {"train"}:
            languages.append(path.suffix.removeprefix("."))
    if len(languages) > 1:
        raise SettingError(
            f"{folder} holds sentence pairs ({', '.join(languages)}): translate them with "
            "--config_file=transformer_multi30k.gin, or choose files by text.text.pattern"
        )
