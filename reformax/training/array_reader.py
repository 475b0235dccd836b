"""A program that reads regions of a checkpoint's arrays, and that may die of them.

`arrays.restore` starts it. A folder of somebody else may hold what makes tensorstore abort, or what
decodes to more than the machine's memory. Here shapes and dtypes are compared with those that are
expected before a number is read, and what memory decoding takes is limited. Orbax restores in the
process itself, where neither can be had.

stdin has a request in JSON, stdout gets an answer. The numbers go into a file that both processes
have open. The program imports nothing of the package: it begins in a tenth of a second.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import re
import resource
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

IN_FLIGHT = 4  # tensors that are read at once
ROOM = 2**28  # bytes for decoding, besides the tensors: indices, decompression
# Of tensorstore, whatever the number of cores: a thread's stack counts as memory in whole.
THREADS = 16
_FEW = {"limit": IN_FLIGHT}
# The index of the database, which every tensor and every chunk is looked up in.
_INDEX = "cache_pool#index"
CONTEXT = {
    "data_copy_concurrency": _FEW,
    "file_io_concurrency": _FEW,
    _INDEX: {"total_bytes_limit": 2**25},
}


# Letters of a path that no library takes for more. etils globs a whole path, and so finds no file
# below one with brackets, or those of another run; tensorstore takes a backslash for a slash.
_PLAIN = re.compile(r"[\w/.,=+@ -]*")
_DESCRIPTORS = Path("/proc/self/fd")


class Unfit(ValueError):
    """The arrays are not those that are expected; the text says which one, and how it differs."""


Index = tuple[slice, ...]  # a region of a tensor, with a begin and an end along each axis


class Wanted(NamedTuple):
    """A tensor, and the regions of it that are read."""

    shape: tuple[int, ...]
    dtype: np.dtype
    regions: list[Index]

    @property
    def nbytes(self) -> int:
        """The bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def read(folder: Path, wanted: Mapping[str, Wanted], out: Mapping[str, list[np.ndarray]]) -> None:
    """Reads regions of tensors.

    Args:
      folder: has `arrays`.
      wanted: by name, of the shapes and dtypes that are expected.
      out: an array for each region, which is filled.

    Raises:
      Unfit: a tensor is missing, or has another shape or dtype; none is filled then.
      ValueError: of tensorstore, for what it cannot decode.
      OSError: a file cannot be read.
    """
    with plain(folder / "arrays") as stored:
        tensors = _opened(stored, wanted)
        waiting: deque[tuple[np.ndarray, Callable[[], np.ndarray]]] = deque()
        for name, tensor in tensors.items():
            for region, array in zip(wanted[name].regions, out[name], strict=True):
                waiting.append((array, tensor[region].read().result))
                if len(waiting) == IN_FLIGHT:
                    _fill(*waiting.popleft())
        for one in waiting:
            _fill(*one)


def _opened(folder: Path, wanted: Mapping[str, Wanted]) -> dict[str, Any]:
    """The tensors that orbax wrote, of tensorstore, once all are as expected; none is read yet."""
    import tensorstore as ts

    base = {"driver": "file", "path": f"{folder}/"}
    database = {"driver": "ocdbt", "base": base, "cache_pool": _INDEX}
    context, found = ts.Context(CONTEXT), {}
    keys = set(ts.KvStore.open(database, context=context).result().list().result())
    for name, tensor in wanted.items():
        if f"{name}/.zarray".encode() not in keys:
            raise Unfit(f"{name} is not there")
        spec = {"driver": "zarr", "kvstore": database | {"path": f"{name}/"}}
        stored = ts.open(spec, context=context, read=True, open=True).result()
        for saved, expected in (
            (stored.dtype.numpy_dtype, tensor.dtype),
            (f"shape {tuple(stored.shape)}", f"shape {tuple(tensor.shape)}"),
        ):
            if saved != expected:
                raise Unfit(f"{name} is of {saved}, and of {expected} in checkpoint.json")
        chunk = stored.chunk_layout.read_chunk.shape or ()  # of a scalar
        if any(n > max(most, 1) for n, most in zip(chunk, stored.shape, strict=True)):
            raise Unfit(f"{name} has chunks of {tuple(chunk)}, more than its shape {stored.shape}")
        found[name] = stored
    return found


def _fill(array: np.ndarray, result: Callable[[], np.ndarray]) -> None:
    array[...] = result()


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


# The program.


def size_of_file(wanted: Mapping[str, Wanted]) -> int:
    """The bytes of the file that both processes have."""
    return max((end for *_, end in _layout(wanted)), default=0)


def arrays_in(memory: mmap.mmap, wanted: Mapping[str, Wanted]) -> dict[str, list[np.ndarray]]:
    """The arrays in that file: one for each region of each tensor."""
    found: dict[str, list[np.ndarray]] = {name: [] for name in wanted}
    for name, shape, offset, _ in _layout(wanted):
        flat = np.frombuffer(memory, wanted[name].dtype, math.prod(shape), offset)
        found[name].append(flat.reshape(shape))
    return found


def _layout(wanted: Mapping[str, Wanted]) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
    """Each region's tensor, its shape, and where it begins and ends in the file."""
    end = 0
    for name, tensor in wanted.items():
        for region in tensor.regions:
            shape = tuple(axis.stop - axis.start for axis in region)
            begin, size = end, math.prod(shape) * tensor.dtype.itemsize
            end += -(-size // 64) * 64
            yield name, shape, begin, end


def packed(wanted: Mapping[str, Wanted]) -> dict[str, list]:
    """The request, in JSON."""
    return {
        name: [list(x.shape), str(x.dtype), [[[a.start, a.stop] for a in r] for r in x.regions]]
        for name, x in wanted.items()
    }


def _unpacked(tensors: Mapping[str, list]) -> dict[str, Wanted]:
    return {
        name: Wanted(tuple(shape), np.dtype(d), [tuple(slice(*a) for a in r) for r in regions])
        for name, (shape, d, regions) in tensors.items()
    }


def _limit_memory(wanted: Mapping[str, Wanted]) -> None:
    """Lets this process take what decoding takes, and no more: beyond that it dies."""
    status = Path("/proc/self/status")
    if not status.is_file():  # not on Linux, where the system's own limit is all there is
        return
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
    now = int(lines["VmData"].split()[0]) * 1024
    # A region may lie in one chunk that is the whole tensor.
    largest = sorted((x.nbytes for x in wanted.values()), reverse=True)[:IN_FLIGHT]
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    stack = 2**21 if stack == resource.RLIM_INFINITY else stack  # as glibc has it
    most = now + ROOM + THREADS * stack + 3 * sum(largest)  # encoded, decoded, and a copy
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def answered(
    request: Mapping[str, Any], limit: Callable[[Mapping[str, Wanted]], None] | None = None
) -> dict[str, Any]:
    """The answer to a request, whose numbers are in its file then.

    Args:
      request: the `folder`, the `tensors` of `packed`, and the descriptor of the `file`.
      limit: is called before anything is read.
    """
    import tensorstore  # noqa: F401  its numbers of fewer bits are NumPy's dtypes from here on

    try:
        wanted = _unpacked(request["tensors"])
        out = arrays_in(mmap.mmap(request["file"], size_of_file(wanted)), wanted)
        if limit is not None:
            limit(wanted)
        read(Path(request["folder"]), wanted, out)
    except Unfit as error:
        return {"unfit": str(error)}
    except OSError as error:
        return {"errno": error.errno, "path": error.filename, "text": str(error)}
    except BaseException as error:
        return {"text": f"{type(error).__name__}: {error}"}
    return {}


def main() -> None:
    """Answers a request."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the other process decides what a signal ends
    answer = answered(json.load(sys.stdin), _limit_memory)
    sys.stdout.write(json.dumps(answer))
    sys.stdout.flush()
    os._exit(0)  # tensorstore's threads need not end


if __name__ == "__main__":
    main()
