"""Datasets of tensorflow-datasets, downloaded and written once, with errors in one line."""

from __future__ import annotations

import contextlib
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import TypeVar

import tensorflow_datasets as tfds

T = TypeVar("T")
_TIMEOUT = 20  # seconds


def load(
    name: str,
    builder: Callable[[], tfds.core.DatasetBuilder],
    read: Callable[[tfds.core.DatasetBuilder], T],
    url: str,
    instead: str,
) -> T:
    """What `read` makes of a dataset, which is prepared first if it is not yet.

    Args:
      name: of the data, for the error.
      builder: makes the dataset's builder.
      read: reads what is prepared.
      url: where the data, or the greater part of them, come from.
      instead: what to do where there is no network, for the error.

    Raises:
      OSError: the data could not be downloaded, checked, written or read.
    """
    try:
        made = builder()
        if not made.is_prepared():
            # tensorflow-datasets retries for minutes where there is no network: ask first.
            with contextlib.suppress(urllib.error.HTTPError):
                urllib.request.urlopen(url, timeout=_TIMEOUT).close()
            made.download_and_prepare(
                download_config=tfds.download.DownloadConfig(force_checksums_validation=True)
            )
        return read(made)
    except Exception as error:  # tensorflow-datasets and its downloader have no common one
        reason = str(error).strip().partition("\n")[0].rstrip(":") or type(error).__name__
        raise OSError(f"{name} could not be prepared from {url} ({reason}): {instead}") from error
