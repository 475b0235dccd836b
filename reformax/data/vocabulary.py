"""Vocabularies that turn sentences into ids: sentencepiece, kept in the run's folder, and numbers.

Ids 0, 1 and 2 are padding, the end of a sentence and the unknown piece.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from reformax import durable
from reformax.data.base import EOS, PAD, UNKNOWN
from reformax.data.sentencepieces import SentencePieceModel, learnt, settings_of
from reformax.declared import LARGEST, Bounds, SettingError, Size, checked

FILE = "vocabulary.model"
# The settings of a factory that learns one.
Pieces = Annotated[int, Bounds(UNKNOWN + 2, LARGEST)]
ModelType = Literal["unigram", "bpe", "char", "word"]
Coverage = Annotated[float, Bounds(above=0, most=1, name="a number above 0 and at most 1")]


class Numbers:
    """Sentences that are ids separated by spaces, for a task or a model without words."""

    def __init__(self, size: int):
        self.size = size

    def encode(self, sentence: str) -> list[int]:
        """The numbers of a sentence and `EOS`.

        Raises:
          ValueError: a word is no number from 3 to size - 1.
        """
        words = sentence.split()
        ids = [int(word) if word.isascii() and word.isdigit() else -1 for word in words]
        for word, number in zip(words, ids, strict=True):
            if not UNKNOWN < number < self.size:
                raise ValueError(
                    f"{word!r} is no id of this model, which has no {FILE}: give numbers from "
                    f"{UNKNOWN + 1} to {self.size - 1} apart by spaces"
                )
        return [*ids, EOS]

    def decode(self, ids: Iterable[int]) -> str:
        """The numbers before the first `EOS`."""
        return " ".join(str(i) for i in _sentence(ids))

    def keep_in(self, folder: str | os.PathLike, begun: bool) -> None:
        """Does nothing: there is nothing to learn."""


class SentencePieces:
    """A sentencepiece model of `size` pieces, trained when it is first needed.

    Model types 'char' and 'word' have fewer pieces if the text does. Training is deterministic: the
    same sentences and settings give the same vocabulary.
    """

    @checked
    def __init__(
        self,
        size: Pieces,
        sentences: Callable[[], Sequence[str]],
        model_type: ModelType = "unigram",
        character_coverage: Coverage = 1.0,
        max_sentences: Size = 2_000_000,
    ):
        """Stores the settings; reads nothing yet.

        Args:
          size: number of pieces, with those of padding, EOS and unknown.
          sentences: returns the sentences to train on.
          model_type: 'unigram', 'bpe', 'char' or 'word'.
          character_coverage: the share of the text's characters that get a piece of their own; the
            rarest others are unknown.
          max_sentences: trains on at most so many sentences, taken evenly from all.

        Raises:
          ValueError: a size out of range, or another model type.
        """
        self.size = size
        self._sentences = sentences
        self._max_sentences = max_sentences
        self._settings = {"model_type": model_type, "character_coverage": character_coverage}
        self._bytes: bytes | None = None
        self._pieces: SentencePieceModel | None = None

    @property
    def serialised(self) -> bytes:
        """The model as sentencepiece writes it."""
        if self._bytes is None:
            self._bytes = self._trained()
        return self._bytes

    @property
    def fingerprint(self) -> str:
        """Identifies this vocabulary: a hash of its model."""
        return fingerprint(self.serialised)

    def encode(self, sentence: str) -> list[int]:
        """The ids of a sentence's pieces and `EOS`."""
        return self.encode_all([sentence])[0]

    def encode_all(self, sentences: Sequence[str]) -> list[list[int]]:
        """Encodes each sentence, on all cores."""
        return [[*ids, EOS] for ids in self._model().encode_all(sentences)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids before the first `EOS`, without padding."""
        return self._model().decode([int(i) for i in _sentence(ids)])

    def keep_in(self, folder: str | os.PathLike, begun: bool) -> str:
        """Reads FOLDER/vocabulary.model, or trains and writes it if the run has not begun.

        Returns:
          The fingerprint.

        Raises:
          ValueError: the run has begun and the file is missing, damaged or of another size; or the
            run has not begun and the file differs from the vocabulary that training gives.
        """
        path = Path(folder) / FILE
        if begun:
            kept = load(folder)
            if kept.serialised != self._bytes:
                check_settings(path, kept.serialised, self._settings)
                check_size(path, kept.size, self.size, self._settings["model_type"])
            self._bytes, self._pieces = kept._bytes, kept._pieces
        else:
            write_kept(path, self.serialised)
        return self.fingerprint

    def _model(self) -> SentencePieceModel:
        if self._pieces is None:
            self._pieces = _read(self.serialised, "the vocabulary")
        return self._pieces

    def _trained(self) -> bytes:
        sentences = self._sentences()
        every = -(-len(sentences) // self._max_sentences)
        return learnt(itertools.islice(sentences, 0, None, every or 1), self.size, self._settings)


def check_settings(path: Path, serialised: bytes, settings: Mapping[str, Any]) -> None:
    """Raises `SettingError` unless a run's sentencepiece model was learnt by these settings.

    Args:
      path: its file, for the error.
      serialised: the model as sentencepiece writes it.
      settings: the config's model_type, and character_coverage if it has that.
    """
    found = settings_of(serialised)
    for name, value in settings.items():
        if value != found[name]:
            raise SettingError(
                f"{path} has {name}={found[name]!r} and the config {value!r}: set {name} to that, "
                "or give another output_dir"
            )


def check_size(path: Path, n_pieces: int, size: int, model_type: str) -> None:
    """Raises `SettingError` unless a run's vocabulary has the size that the config asks for.

    Pieces of other types than 'unigram' and 'bpe' are fewer if the text has no more.
    """
    exact = model_type in ("unigram", "bpe")
    if n_pieces > size or (exact and n_pieces < size):
        raise SettingError(
            f"{path} has {n_pieces} pieces and the config vocab_size={size}: set "
            f"vocab_size={n_pieces}, or give another output_dir"
        )


def load(folder: str | os.PathLike) -> SentencePieces:
    """Reads the vocabulary of a run's folder; needs no training data.

    Raises:
      ValueError: the file is missing or damaged.
    """
    path = Path(folder) / FILE
    data = read_kept(path)
    pieces = _read(data, str(path))
    vocabulary = SentencePieces(pieces.size, list)
    vocabulary._bytes, vocabulary._pieces = data, pieces
    return vocabulary


def read_kept(path: Path) -> bytes:
    """The vocabulary that a run keeps; raises ValueError if it is missing, OSError if unread."""
    try:
        return durable.read(path)
    except FileNotFoundError:
        raise ValueError(
            f"{path} is missing: the model's ids mean nothing without it, copy it back from where "
            "the run was trained"
        ) from None


def write_kept(path: Path, made: bytes) -> None:
    """Writes the vocabulary of a run that begins; raises ValueError if another one is there."""
    if not path.exists():
        durable.write(path, made)
    elif path.read_bytes() != made:
        raise ValueError(
            f"{path} is not the vocabulary of this text and these settings, and the run has no "
            "checkpoint yet: delete it, or give another output_dir"
        )


def fingerprint(serialised: bytes) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of a model."""
    return hashlib.sha256(serialised).hexdigest()[:16]


def _read(serialised: bytes, source: str) -> SentencePieceModel:
    try:
        model = SentencePieceModel(serialised)
    except RuntimeError as error:
        raise ValueError(f"{source} is no sentencepiece model: copy it again") from error
    if (ids := model.special_ids) != (PAD, EOS, UNKNOWN):
        raise ValueError(
            f"{source} has padding, EOS and unknown at {ids} and this needs {(PAD, EOS, UNKNOWN)}: "
            "use a vocabulary that `reformax train` made"
        )
    return model


def _sentence(ids: Iterable[int]) -> Iterable[int]:
    return (i for i in itertools.takewhile(lambda i: i != EOS, ids) if i != PAD)
