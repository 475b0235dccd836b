"""Language models of pieces of words, whose figures compare with those of bytes.

A vocabulary is a sentencepiece model that is learnt from the text, or a file: one of sentencepiece,
or tokenizer.json of Hugging Face's `tokenizers`. It stays with its run. A document's end, byte 0 of
the text, is the vocabulary's EOS.

A split has as many bits in pieces as in bytes, so bits per token over bytes per token are bits per
byte. They compare where pieces give the text back, as learnt ones do.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, Int64, UInt8

from reformax import durable
from reformax.data import files
from reformax.data.piece_blocks import BLOCK, BORDER, SAMPLE, SENTENCE, blocks, decoded, sentences
from reformax.data.piece_codecs import ENDS, HuggingFaceTokenizer, codec_of
from reformax.data.sentencepieces import SentencePieceModel, learnt
from reformax.data.stored import crc32_of
from reformax.data.vocabulary import FILE, check_settings, check_size, read_kept, write_kept
from reformax.data.vocabulary import fingerprint as hash_of
from reformax.declared import SettingError
from reformax.shell import user_path

BYTES = 256  # the size of a text's vocabulary without pieces
_LEAST_LEARNT = 260  # a piece for each byte, padding, EOS, unknown and a newline
_TOGETHER = 2**24  # bytes of text whose ids are Python integers until they are joined
_LOOKED_AT = 2**26  # bytes of a text in which documents' ends are looked for
# Bytes of a text that are decoded again together, and how often.
_CHECKED, _CHECKS = 2**11, 2**8
# A tokenizer.json of 250,000 pieces has 20 MB.
_MOST_FILE = 2**28
# Pieces that give every text back: spaces stay as they are, what has no piece is in bytes.
_LOSSLESS: dict[str, Any] = {
    "byte_fallback": True,
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
    "user_defined_symbols": ["\n"],
    "character_coverage": 0.9995,
}


class Encoded(NamedTuple):
    """The ids of a text, and the parts of it that were encoded alone."""

    ids: Int[np.ndarray, " n"]
    bytes_before: Int64[np.ndarray, " parts"]
    ids_before: Int64[np.ndarray, " parts"]


class PieceVocabulary:
    """A vocabulary of pieces, learnt or read when it is first needed."""

    def __init__(
        self,
        size: int,
        text: UInt8[np.ndarray, " n"] | None = None,
        path: str | os.PathLike | None = None,
        model_type: str | None = None,
        option: str = "text.text",
        kept_in: Path | None = None,
    ):
        """Stores the settings; reads a file, but learns nothing yet.

        Args:
          size: pieces of a vocabulary that is learnt. A file has as many; `BYTES` leaves that open.
          text: the bytes to learn from.
          path: a file with a vocabulary, or a folder with a tokenizer.json or a run's vocabulary.
            It may be gone once the run keeps its own copy.
          model_type: 'bpe', 'unigram', 'char' or 'word'. None: a file's own, and 'bpe' is learnt.
          option: the factory that these are settings of, for errors.
          kept_in: a folder of the text, where what is learnt of it stays, to be learnt once.

        Raises:
          ValueError: the file is too large, or no vocabulary; or too few pieces shall be learnt.
        """
        if path is None and text is not None and size < _LEAST_LEARNT:
            raise SettingError(
                f"{option}.vocab_size is {size}: expected {BYTES} for bytes, or {_LEAST_LEARNT} "
                "and more for pieces"
            )
        self.size, self._text, self._model_type = size, text, model_type or "bpe"
        self._option = option
        # A tokenizer.json may have more ids than a model has rows: those that occur count.
        self._rows = size if size and size != BYTES else None
        asked = {"vocab_size": None if size == BYTES else size, "model_type": model_type}
        self._asked = {name: value for name, value in asked.items() if value is not None}
        self._kept_in = kept_in
        self._path = None if path is None else _file_of(user_path(f"{option}.vocabulary", path))
        self._bytes: bytes | None = None
        self._pieces: SentencePieceModel | HuggingFaceTokenizer | None = None
        if self._path is not None and self._path.exists():
            self._take(_read(self._path), self._path)

    @classmethod
    def of(cls, serialised: bytes, size: int) -> PieceVocabulary:
        """A vocabulary as its file has it, for a model of so many ids."""
        vocabulary = cls(size)
        vocabulary._take(serialised, Path(FILE))
        return vocabulary

    def keep_in(self, folder: str | os.PathLike, begun: bool) -> str:
        """Reads the run's vocabulary, or makes it and writes it there; returns its fingerprint.

        Raises:
          ValueError: the run has begun and its vocabulary is missing, damaged or not the config's;
            or it has not begun and another one lies in its folder, or the config's file is of
            another size or kind than the config says.
          FileNotFoundError: the config's file is not there, and the run has not begun.
        """
        path = Path(folder) / FILE
        if begun:
            self._take_kept(path)
        else:
            made = self._made()
            self.check_file()
            write_kept(path, made)
            if self._text is not None:
                self.warn_of_loss(self._text, "train")
                self._warn_of_no_end()
        return hash_of(self._bytes)

    @property
    def mask_id(self) -> int | None:
        """The id of the token that hides others; None if the vocabulary has none."""
        return self._codec.mask

    @property
    def end(self) -> tuple[int, str] | None:
        """The id of a document's end, and its name where it is in text; None if there is none.

        A sentencepiece model reads no name of it in a text: it is empty.
        """
        end = self._codec.end
        return (end, self._codec.names.get(end, "")) if 0 <= end < self.size else None

    def token(self, text: str) -> int | None:
        """The id of a text that is one token by its name, below `size`; None for another."""
        (ids,) = self._codec.encode_all([text])
        found = len(ids) == 1 and ids[0] < self.size and self._codec.name_of(ids[0]) == text
        return ids[0] if found else None

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, on all cores."""
        found = self._codec.encode_all(texts)
        for ids in found:
            self._check_ids(ids)
        return found

    def beyond(self, size: int) -> list[str]:
        """The tokens, by their ids, that a model of so many ids lacks; none of sentencepiece's."""
        names = self._codec.names
        return [names[i] for i in sorted(names) if i >= size]

    def _check_ids(self, ids: Sequence[int]) -> None:
        """Raises `SettingError` for an id that the model's rows lack."""
        codec = self._codec
        if codec.size > self.size and len(ids) and (last := int(max(ids))) >= self.size:
            name = codec.names.get(last, "")
            raise SettingError(
                f"the text has {name!r}, whose id {last} is not below vocab_size={self.size}: take "
                "it out of the text"
            )

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; a document's end is a newline."""
        found, part = [], []
        for i in ids:
            if i == self._codec.end:
                found.append(self._codec.decode(part))
                part = []
            elif i < self._codec.size:  # a model may have more ids than its vocabulary
                part.append(int(i))
        return "\n".join([*found, self._codec.decode(part)])

    @property
    def dtype(self) -> np.dtype:
        """The dtype of ids, in memory and in files."""
        return np.dtype(np.uint16 if self.size <= 2**16 else np.int32)

    def serialised(self) -> bytes:
        """The vocabulary as its file has it; learns it where it is not there yet."""
        return self._bytes if self._bytes is not None else self._made()

    def encode_documents(self, data: bytes, before: int = 0) -> Encoded:
        """The ids of documents that byte 0 ends.

        Args:
          data: the text.
          before: bytes of its split before it, for errors.

        Raises:
          ValueError: the text is not UTF-8.
        """
        end = [self.end[0]] if self.end else self.encode("\n")
        parts, texts, waiting = [np.zeros(0, self.dtype)], [], 0
        firsts, counts = [], [0]
        for first, last in blocks(data):
            firsts.append(first)
            texts.append(decoded(data, first, last, before))
            waiting += last - first
            if waiting >= _TOGETHER or last == len(data):
                ids = self._codec.encode_all([text.rstrip("\0") for text in texts])
                ids = [x + end if t.endswith("\0") else x for x, t in zip(ids, texts, strict=True)]
                ids_of_part = np.array([i for x in ids for i in x], np.int32)
                self._check_ids([ids_of_part.max(initial=0)])
                parts.append(ids_of_part.astype(self.dtype))
                counts.extend(map(len, ids))
                texts, waiting = [], 0
        before = np.cumsum(counts, dtype=np.int64)[:-1]
        return Encoded(np.concatenate(parts), np.array(firsts, np.int64), before)

    def positions(
        self, data: bytes, encoded: Encoded, begins: Int64[np.ndarray, " d"]
    ) -> Int64[np.ndarray, " d"]:
        """The ids, by position, that documents begin with; a piece across two is the first one's.

        The last position may be the number of ids, where a document has no piece of its own.

        Within a block of text, `BLOCK`, that is exact for learnt pieces and a tokenizer.json. A
        sentencepiece model that joins lines, or puts a space before a text, is off by a few ids.

        Args:
          data: the text.
          encoded: what `encode_documents` makes of it.
          begins: the bytes, by position, that documents begin with, sorted.
        """
        part = np.searchsorted(encoded.bytes_before, begins, "right") - 1
        found, first = encoded.ids_before[part], encoded.bytes_before[part]
        ends = np.append(encoded.bytes_before[1:], len(data))[part]
        (inside,) = np.nonzero(begins > first)
        groups = np.split(inside, np.flatnonzero(np.diff(part[inside])) + 1) if len(inside) else []
        for group in groups:
            begin, end = first[group[0]], ends[group[0]]
            text = decoded(data, begin, end).rstrip("\0")
            characters = [len(decoded(data, begin, begins[i])) for i in group]
            found[group] += self._codec.ids_before(text, characters)
        return np.unique(found)

    @property
    def _codec(self) -> SentencePieceModel | HuggingFaceTokenizer:
        if self._pieces is None:
            self._made()
        return self._pieces

    def _made(self) -> bytes:
        """The file's vocabulary, or one learnt from the text."""
        if self._bytes is None:
            if self._path is not None:
                raise files.Missing(
                    f"{self._option}.vocabulary is {self._path}, which does not exist: give a "
                    "tokenizer.json or a sentencepiece model"
                )
            settings = _LOSSLESS | {"model_type": self._model_type}
            self._take(self._learnt(settings), Path(FILE))
        return self._bytes

    def _learnt(self, settings: Mapping[str, Any]) -> bytes:
        """A model that is learnt from the text, or was before by the same settings."""

        def learn() -> bytes:
            return learnt(sentences(self._text), self.size, settings)

        if self._kept_in is None:
            return learn()
        facts = len(self._text), crc32_of(self._text), self.size, sorted(settings.items())
        key = hashlib.sha256(repr((*facts, SAMPLE, SENTENCE, BLOCK)).encode()).hexdigest()
        path = self._kept_in / f"learnt-{key[:16]}.model"
        if path.is_file() and not path.is_symlink():
            return _read(path)
        found = learn()
        try:
            durable.write(path, found)
        except OSError as error:  # a folder that is only read
            logging.getLogger(__name__).warning(f"text: the vocabulary is not kept: {error}")
        return found

    def check_file(self) -> None:
        """Refuses a file that is not what the settings next to it say.

        Raises:
          SettingError: it has another size or kind.
          FileNotFoundError: there is no such file.
        """
        found = {"vocab_size": self.size, "model_type": self._codec.model_type}
        for name, asked in self._asked.items():
            if self._path is not None and asked != found[name]:
                raise SettingError(
                    f"{self._option}.{name} is {asked!r}, and {self._path} has {found[name]!r}: "
                    "set it to that, or leave it out"
                )

    def _take(self, serialised: bytes, path: Path) -> None:
        self._pieces, self._bytes = codec_of(serialised, path), serialised
        rows = self._rows if isinstance(self._pieces, HuggingFaceTokenizer) else None
        self.size = min(self._pieces.size, rows or self._pieces.size)

    def _take_kept(self, path: Path) -> None:
        given, declared = self._bytes, self.size
        self._take(read_kept(path), path)
        if given is not None and given != self._bytes:
            raise SettingError(
                f"{self._option}.vocabulary is {self._path}, which is not {path}: give the run's "
                "own, or another output_dir"
            )
        if self._path is None and self._text is not None:
            if isinstance(self._pieces, SentencePieceModel):
                check_settings(path, self._bytes, {"model_type": self._model_type})
            check_size(path, self.size, declared, self._model_type)

    def warn_of_loss(self, data: bytes, split: str) -> None:
        """Warns if a sample of a text, taken evenly from all of it, is not what its ids give."""
        every = max(_CHECKED, -(-len(data) // _CHECKS))
        lost, n_parts = [], 0
        for begin in range(0, len(data), every):
            part = bytes(data[begin : begin + _CHECKED]).decode("utf-8", "ignore")
            # Whole words, and no space at the begin, which tokenizers may drop in a text's.
            part = re.sub(r"^\S*\s|\s\S*$", "", part).replace("\0", "").strip()
            back = self.decode(self.encode(part))
            n_parts += 1
            if back != part:
                lost.append((part, back))
        if lost:
            part, back = lost[0]
            position = len(os.path.commonprefix(lost[0]))
            first = slice(max(0, position - 9), position + 9)
            logging.getLogger(__name__).warning(
                f"text: the vocabulary does not give the text back as it was in {len(lost):,} of "
                f"{n_parts:,} samples of {split}: {part[first]!r} becomes {back[first]!r}, so bits "
                "per byte compare with no other's"
            )

    def _warn_of_no_end(self) -> None:
        """Warns if documents have ends, and the vocabulary has no id of one."""
        if self._codec.end < 0 and BORDER in bytes(self._text[:_LOOKED_AT]):
            known = f"none of {', '.join(ENDS)}" if self._path is not None else "no EOS"
            logging.getLogger(__name__).warning(
                f"text: the vocabulary {self._path or FILE} has no id for the end of a document "
                f"({known}): documents end in a newline, which a model cannot tell from others"
            )


def load(folder: str | os.PathLike) -> PieceVocabulary:
    """The vocabulary that a run's folder keeps; needs no text.

    Raises:
      ValueError: it is missing or damaged.
    """
    vocabulary = PieceVocabulary(0)
    vocabulary.keep_in(folder, begun=True)
    return vocabulary


def _file_of(path: Path) -> Path:
    """The vocabulary's file, where the path is a folder that has one."""
    names = ("tokenizer.json", FILE, "tokenizer.model")
    return next((path / name for name in names if (path / name).is_file()), path)


def _read(path: Path) -> bytes:
    if (size := files.check_ordinary(path)) > _MOST_FILE:
        raise SettingError(f"{path} has {size:,} bytes: expected a vocabulary of {_MOST_FILE:,}")
    return path.read_bytes()
