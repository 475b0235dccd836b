"""Whether the bytes of a file are text, by samples of them."""

from __future__ import annotations

import codecs
from pathlib import Path

from reformax.data import arrow_tables
from reformax.declared import SettingError

RAW = "--config='text.text.raw=True'"
_PATTERN = """--config='text.text.pattern="*.txt"'"""
# Of the bytes of a sample; text in Latin-1 has a few percent, a picture half.
MOST_NO_TEXT = 1 / 3
_PIECE, _PIECES = 2**12, 16  # the sample
_CONTROLS = bytes(set(range(32)) - set(b"\t\n\v\f\r\b\x1b")) + b"\x7f"
# The beginnings of files that hold others, or are no text: what they are, what to do instead.
_UNPACK = "unpack it and give the folder"
_KINDS = {
    b"PK\x03\x04": ("a zip archive", _UNPACK),
    b"7z\xbc\xaf\x27\x1c": ("a 7z archive", _UNPACK),
    b"Rar!\x1a\x07": ("a rar archive", _UNPACK),
    b"\x1f\x8b": ("packed by gzip", "name it .gz"),
    b"\xfd7zXZ\0": ("packed by xz", "name it .xz"),
    b"BZh": ("packed by bzip2", "unpack it"),
    b"\x28\xb5\x2f\xfd": ("packed by zstd", "name it .zst"),
    b"%PDF-": ("a PDF", "convert it, as with pdftotext"),
    b"PAR1": ("a Parquet file", "name it .parquet"),
    b"ARROW1": ("an Arrow file", "name it .arrow"),
    arrow_tables.LFS_POINTER: ("a pointer of Git LFS, not the file", "run git lfs pull"),
    b"SQLite format 3\0": ("a database of SQLite", "export its text"),
    codecs.BOM_UTF16_LE: ("UTF-16", "convert it, as with iconv -f UTF-16 -t UTF-8"),
    codecs.BOM_UTF16_BE: ("UTF-16", "convert it, as with iconv -f UTF-16 -t UTF-8"),
}


class Samples:
    """Samples of a file's bytes, which say whether it is text in UTF-8."""

    def __init__(self, path: Path, instead: str = f"or train on its bytes as they are with {RAW}"):
        """Takes the file, and what to do with what is no text, for errors."""
        self._path, self._instead = path, instead
        self._others = f"choose other files by {_PATTERN}, " if RAW in instead else ""
        self._no_text = self._total = 0

    def add(self, data: bytes) -> None:
        """Takes samples of the next block; raises `SettingError` if the first one says a kind."""
        kinds = [kind for begin, kind in _KINDS.items() if data.startswith(begin)]
        if data[257:262] == b"ustar":
            kinds = [("a tar archive", _UNPACK)]
        if kinds and not self._total:
            what, fix = kinds[0]
            raise SettingError(f"{self._path} is {what}: {fix}; {self._instead}")
        every = max(_PIECE, len(data) // _PIECES)
        sample = [data[begin : begin + _PIECE] for begin in range(0, len(data), every)]
        self._no_text += sum(map(_no_text, sample))
        self._total += sum(map(len, sample))

    def check(self) -> None:
        """Raises `SettingError` if they are mostly no text."""
        if self._no_text > MOST_NO_TEXT * self._total:
            raise SettingError(
                f"{self._path} is no text: {self._no_text / self._total:.0%} of a sample is not "
                f"UTF-8; convert it, {self._others}{self._instead}"
            )


def check_text(path: Path, data: bytes, instead: str) -> None:
    """Raises `SettingError` if a sample of a file's bytes is mostly no text; see `Samples`."""
    samples = Samples(path, instead)
    samples.add(data)
    samples.check()


def _no_text(piece: bytes) -> int:
    """The bytes of a piece that are no UTF-8, or that control a device."""
    kept = piece.translate(None, _CONTROLS)
    return len(piece) - len(kept.decode("utf-8", "ignore").encode())
