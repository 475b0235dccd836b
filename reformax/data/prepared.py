"""Prepares datasets of tensorflow-datasets once, with errors in one line.

tensorflow-datasets is an extra of the package, and imported at first use.
"""

from __future__ import annotations

import contextlib
import urllib.error
import urllib.request
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import tensorflow_datasets as tfds

T = TypeVar("T")
_TIMEOUT = 20  # seconds


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


def load(
    name: str,
    builder: Callable[[], tfds.core.DatasetBuilder],
    read: Callable[[tfds.core.DatasetBuilder], T],
    url: str,
    instead: str,
) -> T:
    """Prepares a dataset if that was not done before, and returns the result of `read`.

    Args:
      name: the dataset's name in errors.
      builder: makes the dataset's builder.
      read: reads the prepared dataset.
      url: the source of the data, or of the greater part.
      instead: the advice of the error where there is no network.

    Raises:
      ModuleNotFoundError: tensorflow-datasets is not installed.
      OSError: the data could not be downloaded, checked, written or read.
    """
    config = library(name, instead).download.DownloadConfig(force_checksums_validation=True)
    try:
        dataset = builder()
        if not dataset.is_prepared():
            # Without a network tensorflow-datasets retries for minutes, so ask first.
            with contextlib.suppress(urllib.error.HTTPError):
                urllib.request.urlopen(url, timeout=_TIMEOUT).close()
            dataset.download_and_prepare(download_config=config)
        return read(dataset)
    except Exception as error:  # tensorflow-datasets has no base class of its errors
        reason = str(error).strip().partition("\n")[0].rstrip(":") or type(error).__name__
        raise OSError(f"{name} could not be prepared from {url} ({reason}): {instead}") from error
