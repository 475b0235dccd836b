"""enwik8: the first 10^8 bytes of an English Wikipedia dump of 2006.

The benchmark of byte-level language models, the Reformer's among them (Kitaev et al. 2020, section
5). http://mattmahoney.net/dc/textdata.html describes it.
"""

from __future__ import annotations

import logging
from pathlib import Path

from reformax.data import files
from reformax.data.base import byte_language_model, split_bytes
from reformax.declared import PathName, SettingError, checked
from reformax.task import Task

N_BYTES = 100_000_000


@checked
def enwik8(data_dir: PathName | None = None) -> Task:
    """The byte language model of enwik8: 90M bytes to train on, 5M to choose by, 5M to report.

    Args:
      data_dir: a file, plain or .gz, .xz or .zip, or a folder with one whose name begins with
        `enwik8`. A part of enwik8 is split 90/5/5 in proportion, and a warning says so, because its
        figures compare with no published ones. None: tensorflow-datasets downloads it once, to
        TFDS_DATA_DIR or ~/tensorflow_datasets.

    Raises:
      FileNotFoundError: data_dir does not exist or holds no enwik8.
      ValueError: the file is empty, damaged or too short, or the folder holds several.
      ModuleNotFoundError: data_dir is None and tensorflow-datasets is not installed.
      OSError: the download failed.
    """
    if data_dir is None:
        from reformax.data import enwik8_builder  # which needs tensorflow-datasets

        return byte_language_model("enwik8", enwik8_builder.load())
    path = files.existing(data_dir)
    if path.is_dir():
        path = _find(path)
    data = files.as_array(files.read_file(path))
    if len(data) != N_BYTES:
        logging.getLogger(__name__).warning(
            f"enwik8: {path} has {len(data):,} bytes, not the {N_BYTES:,} of enwik8: "
            "split 90/5/5 in proportion; --config_file=reformer_text.gin is for any text"
        )
    splits = split_bytes(data, str(path))
    sizes = ", ".join(f"{split} {len(part):,}" for split, part in splits.items())
    task = byte_language_model("enwik8", splits)
    return task.replace(summary=lambda: [f"{path}: {len(data):,} bytes, cut into {sizes}"])


def _find(folder: Path) -> Path:
    endings = ("", *files.PACKED)
    for ending in endings:
        if (path := folder / f"enwik8{ending}").is_file():
            return path
    parts = [p for p in sorted(folder.glob("enwik8*")) if p.is_file() and p.suffix in endings]
    if len(parts) > 1:
        names = ", ".join(p.name for p in parts)
        raise SettingError(f"{folder} holds {names}: set data_dir to one of them")
    if not parts:
        raise files.Missing(
            f"{folder} has no file enwik8, .zip, .gz or .xz: put one there, leave data_dir out to "
            "download it, or for a text of your own take --config_file=reformer_text.gin"
        )
    return parts[0]
