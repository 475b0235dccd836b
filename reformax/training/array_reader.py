"""Reads regions of a checkpoint's arrays, by tensorstore.

Orbax reads whole tensors of shapes and dtypes that the folder says. Here these are compared with
those that are expected before a number is read, and a process reads what its devices will hold.
"""

from __future__ import annotations

import math
import os
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reformax import durable

_IN_FLIGHT = 4  # regions that are read at once
# The index of the database, which every tensor and every chunk is looked up in.
_INDEX = "cache_pool#index"
_CONTEXT = {_INDEX: {"total_bytes_limit": 2**25}}
# Letters of a path that no library takes for more. etils globs a whole path, and so finds no file
# below one with brackets, or those of another run; tensorstore takes a backslash for a slash.
_PLAIN = re.compile(r"[\w/.,=+@ -]*")
_DESCRIPTORS = Path("/proc/self/fd")

Index = tuple[slice, ...]  # a region of a tensor, with a begin and an end along each axis


class Unreadable(ValueError):
    """A folder does not hold the tensors that are expected; the text says why."""


class Wanted(NamedTuple):
    """A tensor, and the regions of it that are read."""

    shape: tuple[int, ...]
    dtype: np.dtype
    regions: list[Index]

    @property
    def nbytes(self) -> int:
        """The bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def restore(folder: Path, wanted: Mapping[str, Wanted]) -> dict[str, list[np.ndarray]]:
    """Reads regions of tensors of a checkpoint's folder.

    Args:
      folder: has `arrays`.
      wanted: by name; no region is without numbers.

    Raises:
      Unreadable: the folder does not hold these tensors; where one is missing, or has another shape
        or dtype, no number is read.
      OSError: a file cannot be read.
    """
    found: dict[str, list[np.ndarray]] = {name: [] for name in wanted}
    try:
        with plain(folder / "arrays") as stored:
            tensors = _opened(stored, wanted)
            waiting: deque = deque()
            for name, tensor in tensors.items():
                for region in wanted[name].regions:
                    waiting.append((name, tensor[region].read()))
                    if len(waiting) == _IN_FLIGHT:
                        _take(found, *waiting.popleft())
            for one in waiting:
                _take(found, *one)
    except (Unreadable, OSError):
        raise
    except Exception as error:  # of tensorstore
        if (cause := durable.system_error(error)) is not None:
            raise cause from error
        raise Unreadable("its arrays cannot be decoded") from error
    return found


def _take(found: dict[str, list[np.ndarray]], name: str, read: Any) -> None:
    found[name].append(np.asarray(read.result()))


def _opened(folder: Path, wanted: Mapping[str, Wanted]) -> dict[str, Any]:
    """The tensors that orbax wrote, of tensorstore, once all are as expected; none is read yet."""
    import tensorstore as ts

    base = {"driver": "file", "path": f"{folder}/"}
    database = {"driver": "ocdbt", "base": base, "cache_pool": _INDEX}
    context, found = ts.Context(_CONTEXT), {}
    keys = set(ts.KvStore.open(database, context=context).result().list().result())
    for name, tensor in wanted.items():
        if f"{name}/.zarray".encode() not in keys:
            raise Unreadable(f"{name} is not there")
        spec = {"driver": "zarr", "kvstore": database | {"path": f"{name}/"}}
        stored = ts.open(spec, context=context, read=True, open=True).result()
        for saved, expected in (
            (stored.dtype.numpy_dtype, tensor.dtype),
            (f"shape {tuple(stored.shape)}", f"shape {tuple(tensor.shape)}"),
        ):
            if saved != expected:
                raise Unreadable(f"{name} is of {saved}, and of {expected} in checkpoint.json")
        chunk = stored.chunk_layout.read_chunk.shape or ()  # of a scalar
        if any(n > max(most, 1) for n, most in zip(chunk, stored.shape, strict=True)):
            has = f"{name} has chunks of {tuple(chunk)}"
            raise Unreadable(f"{has}, more than its shape {stored.shape}")
        found[name] = stored
    return found


def whole(shape: Sequence[int]) -> Index:
    """The region that is all of a tensor."""
    return tuple(slice(0, n) for n in shape)


# Paths.


def can_be_plain(folder: Path) -> bool:
    """Whether `plain` has a path of a folder."""
    return _PLAIN.fullmatch(str(folder)) is not None or _DESCRIPTORS.is_dir()


@contextmanager
def plain(folder: Path) -> Iterator[Path]:
    """A path of a folder that libraries take literally; errors have the folder's own.

    Raises:
      OSError: the folder cannot be opened.
    """
    if _PLAIN.fullmatch(str(folder)):
        yield folder
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    path = _DESCRIPTORS / str(descriptor)
    try:
        yield path
    except Exception as error:
        # It stays open: a thread that still writes there must not meet another folder.
        texts = [x.replace(str(path), str(folder)) if isinstance(x, str) else x for x in error.args]
        error.args = tuple(texts)
        if isinstance(error, OSError) and error.filename is not None:
            error.filename = str(error.filename).replace(str(path), str(folder))
        raise
    os.close(descriptor)
