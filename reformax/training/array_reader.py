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
import zipfile
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

AT = "@"  # between a tensor's name and where a part of it begins, 'params.kernel@128,0'
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


class Part(NamedTuple):
    """A tensor or a part of one, found and not read."""

    tensor: str
    index: Index
    read: Callable[[Index], Callable[[], np.ndarray]]  # begins; the result waits for the end


def read(folder: Path, wanted: Mapping[str, Wanted], out: Mapping[str, list[np.ndarray]]) -> None:
    """Reads regions of tensors.

    Args:
      folder: has `arrays`, and of earlier versions `arrays.N.npz` of processes after the first.
      wanted: by name, of the shapes and dtypes that are expected.
      out: an array for each region, which is filled.

    Raises:
      Unfit: a tensor is missing, incomplete, or has another shape or dtype; none is filled then.
      ValueError: of tensorstore or zipfile, for what they cannot decode.
      OSError: a file cannot be read.
    """
    with ExitStack() as opened:
        paths = sorted(folder.glob("arrays.*.npz"))
        files = [opened.enter_context(zipfile.ZipFile(path)) for path in paths]
        stored = opened.enter_context(plain(folder / "arrays"))
        parts = [*_stored(stored, wanted), *_zipped(files, wanted)]
        found: Counter[str] = Counter()
        for part in parts:
            found[part.tensor] += math.prod(x.stop - x.start for x in part.index)
        for name, tensor in wanted.items():
            if found[name] != (size := math.prod(tensor.shape)):
                raise Unfit(f"{name} has {found[name]:,} of {size:,} numbers")
        waiting: deque[tuple[np.ndarray, Index, Callable[[], np.ndarray]]] = deque()
        for part in parts:
            for region, array in zip(wanted[part.tensor].regions, out[part.tensor], strict=True):
                if (common := _common(part.index, region)) is None:
                    continue
                result = part.read(_within(common, part.index))
                waiting.append((array, _within(common, region), result))
                if len(waiting) == IN_FLIGHT:
                    _fill(*waiting.popleft())
        for one in waiting:
            _fill(*one)


def _fill(array: np.ndarray, at: Index, result: Callable[[], np.ndarray]) -> None:
    array[at] = result()


def whole(shape: Sequence[int]) -> Index:
    """The region that is all of a tensor."""
    return tuple(slice(0, n) for n in shape)


def _common(one: Index, other: Index) -> Index | None:
    pairs = zip(one, other, strict=True)
    found = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in pairs)
    return found if all(x.start < x.stop for x in found) else None


def _within(region: Index, outer: Index) -> Index:
    pairs = zip(region, outer, strict=True)
    return tuple(slice(x.start - o.start, x.stop - o.start) for x, o in pairs)


def _index(name: str, starts: str, shape: tuple[int, ...], tensor: Wanted) -> Index:
    """The region of a tensor that a part of this shape covers; raises `Unfit` if it is outside."""
    n_axes = len(tensor.shape)
    try:
        begin = [int(start) for start in starts.split(",")] if starts else [0] * n_axes
    except ValueError:
        begin = []
    found = tuple(slice(b, b + n) for b, n in zip(begin, shape, strict=False))
    inside = all(x.start >= 0 and x.stop <= n for x, n in zip(found, tensor.shape, strict=False))
    fits = starts or tuple(shape) == tensor.shape
    if not (len(begin) == len(shape) == n_axes and inside and fits):
        raise Unfit(f"{name} has shape {tuple(shape)}, which is not in one of {tensor.shape}")
    return found


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


# What orbax wrote: each tensor by its name or, of earlier versions, parts of it.


def _stored(folder: Path, tensors: Mapping[str, Wanted]) -> Iterator[Part]:
    import tensorstore as ts

    base = {"driver": "file", "path": f"{folder}/"}
    database = {"driver": "ocdbt", "base": base, "cache_pool": _INDEX}
    end = "/.zarray"
    context = ts.Context(CONTEXT)
    for key in ts.KvStore.open(database, context=context).result().list().result():
        name = key.decode(errors="replace").removesuffix(end)
        tensor, _, starts = name.partition(AT)
        if not key.endswith(end.encode()) or tensor not in tensors:
            continue
        spec = {"driver": "zarr", "kvstore": database | {"path": f"{name}/"}}
        stored = ts.open(spec, context=context, read=True, open=True).result()
        _check_dtype(name, stored.dtype.numpy_dtype, tensors[tensor].dtype)
        found = _index(name, starts, stored.shape, tensors[tensor])
        chunk = stored.chunk_layout.read_chunk.shape or ()  # of a scalar
        if any(n > max(most, 1) for n, most in zip(chunk, stored.shape, strict=True)):
            raise Unfit(f"{name} has chunks of {tuple(chunk)}, more than its shape {stored.shape}")
        yield Part(tensor, found, lambda region, stored=stored: stored[region].read().result)


def _check_dtype(name: str, saved: np.dtype, expected: np.dtype) -> None:
    if saved != expected:
        raise Unfit(f"{name} is of {saved}, and of {expected} in checkpoint.json")


# What processes after the first wrote in earlier versions, with NumPy.


def _zipped(files: list[zipfile.ZipFile], tensors: Mapping[str, Wanted]) -> Iterator[Part]:
    for file in files:
        for member in file.infolist():
            name = member.filename.removesuffix(".npy")
            tensor, _, starts = name.partition(AT)
            if tensor not in tensors:
                continue
            expected = tensors[tensor].dtype
            shape, dtype = _header(file, member)
            if not (dtype.kind == "V" and dtype.itemsize == expected.itemsize):  # as of bfloat16
                _check_dtype(name, dtype, expected)
            found = _index(name, starts, shape, tensors[tensor])
            yield Part(tensor, found, partial(_member, file, member, expected))


def _header(file: zipfile.ZipFile, member: zipfile.ZipInfo) -> tuple[tuple[int, ...], np.dtype]:
    """The shape and dtype that a member says it has."""
    with file.open(member) as stream:
        version = np.lib.format.read_magic(stream)
        if version == (1, 0):
            shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
        elif version == (2, 0):
            shape, _, dtype = np.lib.format.read_array_header_2_0(stream)
        else:
            raise Unfit(f"{member.filename} is of version {version}")
    return shape, dtype


def _member(
    file: zipfile.ZipFile, member: zipfile.ZipInfo, dtype: np.dtype, region: Index
) -> Callable[[], np.ndarray]:
    def result() -> np.ndarray:
        with file.open(member) as stream:
            return np.lib.format.read_array(stream, allow_pickle=False).view(dtype)[region]

    return result


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


def main() -> None:
    """Answers a request."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the other process decides what a signal ends
    request, answer = json.load(sys.stdin), {}
    import tensorstore  # noqa: F401  its numbers of fewer bits are NumPy's dtypes from here on

    try:
        wanted = _unpacked(request["tensors"])
        out = arrays_in(mmap.mmap(request["file"], size_of_file(wanted)), wanted)
        _limit_memory(wanted)
        read(Path(request["folder"]), wanted, out)
    except Unfit as error:
        answer = {"unfit": str(error)}
    except OSError as error:
        answer = {"errno": error.errno, "path": error.filename, "text": str(error)}
    except BaseException as error:
        answer = {"text": f"{type(error).__name__}: {error}"}
    sys.stdout.write(json.dumps(answer))
    sys.stdout.flush()
    os._exit(0)  # tensorstore's threads need not end


if __name__ == "__main__":
    main()
