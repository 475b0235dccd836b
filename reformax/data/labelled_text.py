"""Your own texts with labels: a folder for each class, or tables of rows with text and label."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from reformax.data import files, tables, text_samples
from reformax.data import splits as by_name
from reformax.data.arrow_tables import Column, NoField
from reformax.data.base import SPLITS
from reformax.data.labelled import stored_task
from reformax.declared import Name, PathName, SettingError, checked, some_of
from reformax.task import Labels, Task

_OPTION = "labelled_text.labelled_text"
_FEW = 20  # classes that any number of rows may have
_SHOWN = 9  # classes that are named
_KEPT_BACK = "-1"  # the label of published test rows


class Row(NamedTuple):
    """A text, and the name of its class."""

    text: bytes
    label: str


@checked
def labelled_text(
    data_dir: PathName,
    field: Name = "text",
    label: Name = "label",
    pattern: Name = "*",
    splits: by_name.By = "by_name",
) -> Task:
    """Name the class of a text, by its bytes.

    Classes are the names of folders, as in sport/1.txt, or the labels of rows: numbers, booleans or
    text. They are numbered in the order of these numbers or names; those of all splits count. The
    model's `n_classes` is their number.

    A folder's own splits are kept, such as train.csv and test.csv, or train/sport/1.txt: see
    `reformax.data.splits`. One that it does not have is every tenth row of train. Rows without text
    or label are left out, and so is a split without labels. A token is a byte plus 1; what is
    longer than a batch is cut.

    Args:
      data_dir: a folder of folders, one for each class; or a table or a folder of tables: .jsonl,
        .json, .csv, .tsv, .parquet or .arrow.
      field: the field of a table's rows that is their text.
      label: the field that is their label.
      pattern: the names of files to take.
      splits: 'by_name', a folder's own; or 'cut', all rows together.

    Raises:
      FileNotFoundError: data_dir does not exist.
      OSError: a file cannot be read.
      ValueError: there is one class, a label is no class, a file is damaged or no text, no file
        matches, or there is too much text.
      ImportError: pyarrow is needed and not there.
    """
    path = files.existing(data_dir)
    found = _files(path, pattern, field, splits)
    fields = Column(field, f"{_OPTION}.field"), Column(label, f"{_OPTION}.label", is_text=False)
    rows, notes = {}, list(found.notes)
    for split, paths in found.paths.items():
        try:
            part = list(_rows(path, found, split, fields))
        except NoField as error:
            if split == "train" or f"value {label!r}" not in str(error):
                raise
            part = []
        rows[split] = [row for row in part if row.text and row.label]
        if split != "train" and {row.label for row in rows[split]} <= {_KEPT_BACK}:
            notes.append(f"left out: {by_name.shown(path, paths)} (no labels)")
            del rows[split]
        elif left := len(part) - len(rows[split]):
            notes.append(f"left out: {left:,} rows of {split} (no text or no label)")
    names = _in_order({row.label for part in rows.values() for row in part})
    _check_classes(path, rows, names)
    parts = by_name.with_cut(rows)
    named = {split: by_name.shown(path, paths) for split, paths in found.paths.items()}
    file_names = {split: named[split] for split in rows}
    task = stored_task(
        "labelled_text",
        vocab_size=257,
        labels=Labels(len(names)),
        read=functools.partial(_read, parts, {name: i for i, name in enumerate(names)}),
    )
    return task.replace(summary=lambda: [_described(path, parts, file_names, names), *notes])


def _files(path: Path, pattern: str, field: str, by: by_name.By) -> by_name.Divided:
    """The files of each split: tables alone, or texts alone."""
    if not path.is_dir():
        if tables.reader(path, field) is None:
            raise SettingError(
                f"{path} is no table with a field {field!r}: give one, such as .jsonl or .csv, or "
                "a folder that has one of texts for each class"
            )
        return by_name.Divided({"train": [path]})
    listed = files.listed(path, pattern)
    are_tables = [x for x in listed.paths if tables.reader(x, field) is not None]
    paths = are_tables or listed.paths
    if not paths:
        raise SettingError(f"{path} has no file that matches {pattern!r}: put labelled texts there")
    left_out = {**listed.left_out, "no table": sorted(set(listed.paths) - set(paths))}
    found = by_name.choose(path, paths, by, f"{_OPTION}.splits", left_out)
    if are_tables:
        return found
    several = len(found.paths) > 1
    chosen = {
        split: [x for x in those if _class_of(path, x, several and split)]
        for split, those in found.paths.items()
    }
    apart = {x for those in found.paths.values() for x in those}.difference(*chosen.values())
    lines = by_name.left_out_lines(path, {"in no folder of a class": sorted(apart)})
    return by_name.Divided(chosen, notes=[*found.notes, *lines])


def _class_of(folder: Path, path: Path, split: str | bool) -> str | None:
    """The folder that is a file's class: below that of its split, or above; or the first one."""
    names = path.relative_to(folder).parts[:-1]
    for i, name in enumerate(names if split else ()):
        if (found := by_name.named(name)) and found.split == split:
            return next(iter([*names[i + 1 :], *reversed(names[:i])]), None)
    return names[0] if names else None


def _rows(
    folder: Path, found: by_name.Divided, split: str, fields: Sequence[Column]
) -> Iterator[Row]:
    """The rows of a split; texts are as many bytes as memory has room for."""
    total = 0
    for path in found.paths[split]:
        size = files.check_ordinary(path)
        rows: Iterable[Row]
        if (read := tables.reader(path, fields[0].name)) is not None:
            values = read(path, fields, files.most_unpacked(size))
            rows = (Row(text or b"", _label(value)) for text, value in values)
        else:
            data = files.read_file(path) if size else b""
            text_samples.check_text(path, data, f"or leave it out by {_OPTION}.pattern")
            rows = [Row(data, _class_of(folder, path, len(found.paths) > 1 and split))]
        for row in rows:
            total += len(row.text)
            files.check_room(folder, total)
            yield row


def _label(value: bytes | float | None) -> str:
    """The name of a class, 1 for 1.0; empty for none."""
    if value is None:
        return ""
    text = value.decode("utf-8", "replace").strip() if isinstance(value, bytes) else str(value)
    return "" if text == "nan" else re.sub(r"^(-?\d+)\.0+$", r"\1", text)


def _in_order(labels: set[str]) -> list[str]:
    """Names of classes in the order of their numbers, if all are numbers, else of their letters."""
    numbers = all(re.fullmatch(r"-?\d+(\.\d+)?", label) for label in labels)
    return sorted(labels, key=float if numbers else str)


def _check_classes(path: Path, rows: Mapping[str, Sequence[Row]], names: Sequence[str]) -> None:
    """Raises `SettingError` for labels that are no classes."""
    fix = f"name the field of labels by {_OPTION}.label"
    if len(names) < 2:
        raise SettingError(
            f"{path} has {f'one class, {names[0]!r}' if names else 'no text with a label'}: give a "
            f"folder for each of several, or {fix}"
        )
    n_rows = sum(map(len, rows.values()))
    if len(names) > max(_FEW, n_rows / 2):
        raise SettingError(
            f"{path} has {len(names):,} labels in {n_rows:,} rows, which are no classes: {fix}"
        )


def _read(
    parts: Mapping[str, Sequence[Row]], numbers: Mapping[str, int], split: str
) -> tuple[list[bytes], list[int]]:
    return [row.text for row in parts[split]], [numbers[row.label] for row in parts[split]]


def _described(
    path: Path,
    parts: Mapping[str, Sequence[Row]],
    file_names: Mapping[str, str],
    names: Sequence[str],
) -> str:
    """A line on the classes, and on the rows of each split and their files."""
    shown = some_of([f"{i} {name}" for i, name in enumerate(names)], _SHOWN)
    sizes = [
        f"{split} {len(parts[split]):,} ({file_names.get(split, 'every tenth of train')})"
        for split in SPLITS
    ]
    labels = Counter(row.label for row in parts["valid"])
    most = f"; of valid {max(labels.values()) / labels.total():.0%} are of one class"
    return f"{path}: {len(names):,} classes ({shown}): {'; '.join(sizes)}{most if labels else ''}"
