"""The source text of Python's own standard library: real bytes that every machine has."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from reformax.data import files
from reformax.data.base import (
    Windows,
    WindowSettings,
    byte_language_model,
    split_borders,
    split_bytes,
)
from reformax.declared import SettingError, Size, checked
from reformax.task import Task

# Installed packages, and compiled files.
_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}


@checked
def stdlib(
    max_bytes: Size | None = None, windows: Windows = "anywhere", document_mask: bool = False
) -> Task:
    """A byte language model of all .py files of the standard library, split 90/5/5 by bytes.

    Each file is a document.

    The files are joined in the order of their relative paths ('__future__.py' to
    'zoneinfo/_zoneinfo.py'), with a newline after a file that ends without one. The text, and so
    every figure, depends on the Python that runs: 31.5 MB in 3.11.7 and 31.7 MB in 3.12.1 with the
    library's own tests (folder `test`), which some distributions leave out.

    The end of the alphabet, which is held out, is ordinary text of the library: unittest, tkinter
    and typing in valid, urllib, xml and zipfile in test. Bits per byte of n-gram models with the
    counts of train, 0.1 added to each:

        bytes                     bigram valid / test    trigram valid / test
        3.11.7                    3.59 / 3.49            2.77 / 2.58
        3.12.1                    3.63 / 3.59            2.77 / 2.74
        3.11.7 without `test`     3.53 / 3.57            2.63 / 2.71

    Args:
      max_bytes: keeps about so many bytes: the beginning of each split, in proportion. The splits
        of a part lie inside the splits of the whole. Below 16 MB the beginnings of train and valid
        are less alike: with 4 MB, bigram 3.68 and trigram 2.99 on valid.
      windows, document_mask: as in `reformax.data.text.text`.

    Raises:
      FileNotFoundError: this Python has its library in an archive, or has none.
      ValueError: max_bytes is too small to split.
    """
    folder, paths = library_files()
    text = files.join(p.read_bytes() for p in paths)
    splits = split_bytes(text.data, str(folder))
    borders = split_borders({"train": text.begins}, splits)
    if max_bytes is not None:
        whole = sum(map(len, splits.values()))
        splits = {s: part[: len(part) * max_bytes // whole] for s, part in splits.items()}
        if not all(map(len, splits.values())):
            raise SettingError(f"max_bytes={max_bytes} leaves a split empty: use 100 or more")
    divided = WindowSettings(windows, document_mask)
    return byte_language_model("stdlib", splits, 0, borders, divided)


def library_files() -> tuple[Path, list[Path]]:
    """The folder of the standard library and its .py files, in the order of their paths.

    Raises:
      FileNotFoundError: this Python has its library in an archive, or has none.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    there = folder.is_dir()
    paths = files.list_files(folder, "*.py", skip=_NOT_THE_LIBRARY) if there else []
    if not paths:
        raise FileNotFoundError(
            f"{folder} has no .py files of the standard library: use a Python that has them, "
            "or text.text with a folder of your own"
        )
    return folder, paths
