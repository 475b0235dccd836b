"""The language model's task on a text in pieces of words."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Int64, UInt8

from reformax.data.base import (
    ANYWHERE,
    WindowSettings,
    check_documents,
    language_model,
    text_fingerprint,
)
from reformax.data.checks import of_split
from reformax.data.pieces import PieceVocabulary
from reformax.task import Task


def piece_language_model(
    name: str,
    splits: Mapping[str, UInt8[np.ndarray, " n"]],
    vocabulary: PieceVocabulary,
    borders: Mapping[str, Int64[np.ndarray, " d"]] | None = None,
    windows: WindowSettings = ANYWHERE,
    segments: Mapping[str, Int64[np.ndarray, " d"]] | None = None,
    encode: Callable[[str], tuple[Any, Any, Any]] | None = None,
) -> Task:
    """The task of predicting each piece of a text; a split is encoded when it is needed.

    Args:
      name: the task's name in logs and errors.
      splits: the bytes of 'train', 'valid' and 'test', none of them empty.
      vocabulary: kept by the run before it is used.
      borders: the bytes, by position, that documents begin with, sorted; None: one document.
      windows: how the text is divided into windows.
      segments: as `borders`, of what the mask hides from each other; None: the documents.
      encode: a split -> its ids, and those that `borders` and `segments` are, in files. None: in
        memory.

    Raises:
      ValueError: settings by the documents of a text without.
    """
    check_documents(borders, windows, segments)
    bytes_of = functools.partial(of_split, name, splits)

    @functools.cache
    def encoded(split: str) -> tuple[Any, Any, Any]:
        data = bytes_of(split)
        if split != "train":  # whose loss the run's vocabulary reported already
            vocabulary.warn_of_loss(data, split)
        if encode is not None:
            return encode(split)
        found = vocabulary.encode_documents(bytes(data))
        positions = [
            begins and vocabulary.positions(bytes(data), found, begins[split])
            for begins in (borders, segments)
        ]
        return found.ids, *(x if x is None else x[x < len(found.ids)] for x in positions)

    task = language_model(
        name,
        vocabulary.size,
        lambda split: encoded(split)[0],
        borders_of=borders and (lambda split: encoded(split)[1]),
        windows=windows,
        segments_of=segments and (lambda split: encoded(split)[2]),
    )
    return task.replace(
        fingerprint=text_fingerprint(bytes_of, windows.document_mask),
        vocabulary=vocabulary,
        n_bytes=lambda split: len(bytes_of(split)),
    )
