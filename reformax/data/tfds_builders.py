"""Reads datasets of tensorflow-datasets, prepared once, with errors in one line.

tensorflow-datasets is an extra of the package, and imported at first use.
"""

from __future__ import annotations

import contextlib
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tensorflow_datasets as tfds

from reformax.data import files

_TIMEOUT = 20  # seconds
_BLOCK = 10_000  # examples read together


def library(name: str, instead: str) -> ModuleType:
    """tensorflow-datasets.

    Args:
      name: the dataset that needs it, for the error.
      instead: what to do without it.

    Raises:
      ModuleNotFoundError: it is not installed.
    """
    try:
        import tensorflow_datasets
    except ModuleNotFoundError as error:
        if error.name != "tensorflow_datasets":
            raise
        raise ModuleNotFoundError(
            f"{name} needs tensorflow-datasets, which is not installed: pip install "
            f"'reformax[tfds]', or {instead}",
            name=error.name,
        ) from None
    return tensorflow_datasets


def builder_of(name: str, data_dir: str | os.PathLike | None = None) -> tfds.core.DatasetBuilder:
    """The builder of a dataset.

    One that was prepared before is read in its format. A new one is written as ArrayRecord, which
    needs no TensorFlow to be read.

    Args:
      name: the dataset's; of this package, not of a folder.
      data_dir: the folder that has it; None: TFDS_DATA_DIR or ~/tensorflow_datasets.

    Raises:
      ValueError: it is unknown.
      FileNotFoundError: it is not in data_dir.
    """
    import tensorflow_datasets as tfds

    # Of a config that it does not know it would import what the folder names.
    dataset, _, config = name.partition("/")
    if config and config not in tfds.builder_cls(dataset).builder_configs:
        raise ValueError(f"{dataset} has no {config}")
    folder = None if data_dir is None else str(Path(data_dir).expanduser())
    there = tfds.builder(name, data_dir=folder)
    if there.is_prepared():
        return there
    if folder is not None:
        raise files.Missing(
            f"data_dir={folder} has no prepared {name}: give the folder that has it, or leave "
            "data_dir out, which downloads to TFDS_DATA_DIR or ~/tensorflow_datasets"
        )
    return tfds.builder(name, file_format="array_record")


def columns(
    name: str,
    split: str,
    wanted: Sequence[str],
    url: str,
    instead: str,
    make: Callable[[], tfds.core.DatasetBuilder] | None = None,
) -> list[list[Any]]:
    """Features of all examples of a split, each a list in the dataset's order.

    The dataset is prepared if that was not done before.

    Args:
      name: as in `builder_of`.
      split: the dataset's own name of the split, or a part of it such as 'train[:90%]'.
      wanted: the features.
      url: the source of the data, or of the greater part.
      instead: the advice of the error where there is no network.
      make: makes the builder; None: it is `builder_of(name)`.

    Raises:
      ModuleNotFoundError: tensorflow-datasets is not installed.
      OSError: the data could not be downloaded, checked, written or read.
    """
    config = library(name, instead).download.DownloadConfig(force_checksums_validation=True)
    found: list[list[Any]] = [[] for _ in wanted]
    try:
        builder = make() if make else builder_of(name)
        if not builder.is_prepared():
            # Without a network tensorflow-datasets retries for minutes, so ask first.
            with contextlib.suppress(urllib.error.HTTPError):
                urllib.request.urlopen(url, timeout=_TIMEOUT).close()
            builder.download_and_prepare(download_config=config)
        for block in _blocks(builder, split):
            for column, feature in zip(found, wanted, strict=True):
                column.extend(block[feature])
    except files.Missing:
        raise
    except Exception as error:  # tensorflow-datasets has no base class of its errors
        reason = str(error).strip().partition("\n")[0].rstrip(":") or type(error).__name__
        raise OSError(f"{name} could not be prepared from {url} ({reason}): {instead}") from error
    return found


def _blocks(builder: tfds.core.DatasetBuilder, split: str) -> Iterator[dict[str, Sequence]]:
    """Examples, many at a time: the values of each feature."""
    import tensorflow_datasets as tfds

    if builder.info.file_format.value != "array_record":
        yield from tfds.as_numpy(builder.as_dataset(split, batch_size=_BLOCK))
        return
    source = builder.as_data_source(split)
    for first in range(0, len(source), _BLOCK):
        examples = source.__getitems__(range(first, min(first + _BLOCK, len(source))))
        yield {name: [example[name] for example in examples] for name in builder.info.features}
