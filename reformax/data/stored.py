"""Arrays of one dimension that lie in files, and are read by windows.

No file is mapped whole: a limit of addresses (`ulimit -v`) then holds no larger text than one of
memory does, and pages that were read count to nobody. A read opens the file, so that an array has
any number of parts.
"""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from reformax import durable
from reformax.declared import SettingError

_EVERY = 512  # of a sorted array, one value of so many stays in memory
_BLOCK = 2**20  # values that are read together
_SAMPLES, _SAMPLE = 256, 2048  # windows that a checksum is of, and values of one


class FilePart(NamedTuple):
    """Values of a file.

    Attributes:
      path: the file.
      first: the byte that they begin at.
      n: how many there are.
      added: to each.
      crc: the CRC-32 of their bytes; None: not known.
    """

    path: str
    first: int
    n: int
    added: int = 0
    crc: int | None = None


class StoredArray:
    """Values in files, one after another, as far as they are needed like an array of NumPy.

    A slice is an array of the same kind and reads nothing. Indices and `np.asarray` read.
    """

    def __init__(self, parts: Sequence[FilePart], dtype: np.dtype | str, below: int | None = None):
        """Takes parts, in order, what values are in the files, and what all must be below."""
        self.parts = [part for part in parts if part.n]
        self.dtype, self._below = np.dtype(dtype), below
        self._ends = np.cumsum([0, *(part.n for part in self.parts)], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, key):
        if isinstance(key, slice):
            first, last, step = key.indices(len(self))
            if step != 1:
                return np.asarray(self)[key]
            inside = list(self._between(first, max(first, last)))
            return StoredArray(inside, self.dtype, self._below)
        indices = np.asarray(key)
        found = self.windows(np.where(indices < 0, indices + len(self), indices).ravel(), 1)
        return found.reshape(indices.shape)[()]

    def __add__(self, n: int) -> StoredArray:
        return StoredArray([p._replace(added=p.added + int(n)) for p in self.parts], self.dtype)

    def __sub__(self, n: int) -> StoredArray:
        return self + -n

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        found = np.concatenate([np.zeros(0, self.dtype), *self.blocks()])
        return found if dtype is None else found.astype(dtype)

    def __bytes__(self) -> bytes:
        return np.asarray(self).tobytes()

    def blocks(self) -> Iterator[np.ndarray]:
        """All values, in arrays of a few."""
        for first in range(0, len(self), _BLOCK):
            yield self.windows([first], min(_BLOCK, len(self) - first))[0]

    def windows(self, starts: Int[np.ndarray, " B"], length: int) -> np.ndarray:
        """The values [B, length] from some positions on.

        Raises:
          OSError: a file cannot be read, or is shorter than it was.
        """
        found = np.empty((len(starts), length), self.dtype)
        for row, start in zip(found, starts, strict=True):
            if not 0 <= start <= len(self) - length:
                raise IndexError(f"{start} is no position of {length} of {len(self)} values")
            at = 0
            for part in self._between(int(start), int(start) + length):
                values = row[at : at + part.n]
                _fill(values, part)
                if self._below is not None and not 0 <= values.min() <= values.max() < self._below:
                    raise SettingError(
                        f"{part.path} has the ids {values.min()} to {values.max()}: expected ids "
                        f"from 0 to {self._below - 1}; set vocab_size, or the dtype that it has"
                    )
                at += part.n
        return found

    def searchsorted(self, values, side: str = "left") -> np.ndarray:
        """As NumPy's, of sorted values."""
        values = np.asarray(values)
        blocks = self._coarse.searchsorted(values, side)  # the first that begins at or after it
        found = np.zeros(values.shape, np.int64)
        for index, value in np.ndenumerate(values):
            first = max(0, int(blocks[index]) - 1) * _EVERY
            block = np.asarray(self[first : first + _EVERY])
            found[index] = first + block.searchsorted(value, side)
        return found[()]

    def sampled_crc32(self) -> int:
        """The CRC-32 of `_SAMPLES` windows, evenly from all of the values: no size takes longer."""
        length = min(_SAMPLE, len(self))
        starts = np.linspace(0, len(self) - length, _SAMPLES).astype(np.int64)
        return zlib.crc32(self.windows(starts, length))

    def crc32(self) -> int:
        """The CRC-32 of the bytes; of parts that know theirs nothing is read."""
        total = 0
        for part in self.parts:
            crc = part.crc
            if crc is None:
                crc = 0
                for block in StoredArray([part], self.dtype).blocks():
                    crc = zlib.crc32(block, crc)
            total = combined_crc32(total, crc, part.n * self.dtype.itemsize)
        return total

    @functools.cached_property
    def _coarse(self) -> np.ndarray:
        assert _BLOCK % _EVERY == 0
        return np.concatenate([np.zeros(0, self.dtype), *(b[::_EVERY] for b in self.blocks())])

    def _between(self, first: int, last: int) -> Iterator[FilePart]:
        """The parts, or parts of them, that have these positions."""
        k = int(np.searchsorted(self._ends, first, "right")) - 1
        while k < len(self.parts) and self._ends[k] < last:
            part, begin = self.parts[k], int(self._ends[k])
            a, b = max(first, begin) - begin, min(last - begin, part.n)
            if (a, b) == (0, part.n):
                yield part
            elif a < b:
                offset = part.first + a * self.dtype.itemsize
                yield part._replace(first=offset, n=b - a, crc=None)
            k += 1


def _fill(row: np.ndarray, part: FilePart) -> None:
    """Reads a part."""
    view, offset = memoryview(row).cast("B"), part.first
    with durable.explaining("read", part.path):
        descriptor = os.open(part.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while len(view):
                n = os.preadv(descriptor, [view], offset)
                if not n:
                    raise ValueError(
                        f"{part.path} is shorter than its manifest says: prepare the text anew"
                    )
                view, offset = view[n:], offset + n
        finally:
            os.close(descriptor)
    if part.added:
        row += part.added


def windows_of(data: np.ndarray | StoredArray, starts, length: int) -> np.ndarray:
    """The values [B, length] of an array from some positions on."""
    if isinstance(data, StoredArray):
        return data.windows(starts, length)
    # Rows of a strided view are contiguous, so this copies values in runs.
    return np.lib.stride_tricks.sliding_window_view(data, length)[starts]


def crc32_of(data: np.ndarray | StoredArray) -> int:
    """The CRC-32 of an array's bytes."""
    return data.crc32() if isinstance(data, StoredArray) else zlib.crc32(data)


def combined_crc32(one: int, other: int, n_bytes: int) -> int:
    """The CRC-32 of bytes after others, from theirs and how many the second ones are.

    A CRC is the remainder of a polynomial over GF(2). Bytes that follow multiply it by x^(8 n).
    """
    return _product(one, _power(8 * n_bytes)) ^ other


_POLYNOMIAL = 0xEDB88320  # of CRC-32; the highest bit is x^0


def _product(a: int, b: int) -> int:
    found = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            found ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return found


def _power(n: int) -> int:
    """x^n modulo the polynomial."""
    found, square = 1 << 31, 1 << 30
    while n:
        if n & 1:
            found = _product(found, square)
        square, n = _product(square, square), n >> 1
    return found
