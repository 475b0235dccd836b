"""A program that reads the arrays of a checkpoint, and that may die of them.

`arrays.restore` starts it. A folder of somebody else may hold what makes tensorstore abort, or what
decodes to more than the machine's memory. Here shapes and dtypes are compared with those that are
expected before a number is read, and what memory decoding takes is limited.

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
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

AT = "@"  # between a tensor's name and where a part of it begins, 'params.kernel@128,0'
IN_FLIGHT = 4  # tensors that are read at once
ROOM = 2**28  # bytes for decoding, besides the tensors: indices, decompression
# Of tensorstore, whatever the number of cores: a thread's stack counts as memory in whole.
THREADS = 16
_FEW = {"limit": IN_FLIGHT}
CONTEXT = {"data_copy_concurrency": _FEW, "file_io_concurrency": _FEW}


# Letters of a path that no library takes for more. etils globs a whole path, and so finds no file
# below one with brackets, or those of another run; tensorstore takes a backslash for a slash.
_PLAIN = re.compile(r"[\w/.,=+@ -]*")
_DESCRIPTORS = Path("/proc/self/fd")


class Unfit(ValueError):
    """The arrays are not those that are expected; the text says which one, and how it differs."""


class Part(NamedTuple):
    """A tensor or a part of one, found and not read."""

    tensor: str
    index: tuple[slice, ...]
    read: Callable[[], Callable[[], np.ndarray]]  # begins to read; the result waits for the end


def read(folder: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Fills tensors with what a checkpoint's folder has of them.

    Args:
      folder: has `arrays`, and files `arrays.N.npz` of processes after the first.
      tensors: by name, of the shapes and dtypes that are expected.

    Raises:
      Unfit: one is missing, incomplete, or has another shape or dtype; none is filled then.
      ValueError: of tensorstore or zipfile, for what they cannot decode.
      OSError: a file cannot be read.
    """
    with ExitStack() as opened:
        paths = sorted(folder.glob("arrays.*.npz"))
        files = [opened.enter_context(zipfile.ZipFile(path)) for path in paths]
        stored = opened.enter_context(plain(folder / "arrays"))
        parts = [*_stored(stored, tensors), *_zipped(files, tensors)]
        found: Counter[str] = Counter()
        for part in parts:
            found[part.tensor] += math.prod(x.stop - x.start for x in part.index)
        for name, tensor in tensors.items():
            if found[name] != tensor.size:
                raise Unfit(f"{name} has {found[name]:,} of {tensor.size:,} numbers")
        waiting: deque[tuple[Part, Callable[[], np.ndarray]]] = deque()
        for part in parts:
            waiting.append((part, part.read()))
            if len(waiting) == IN_FLIGHT:
                _fill(tensors, *waiting.popleft())
        for part, result in waiting:
            _fill(tensors, part, result)


def _fill(tensors, part: Part, result: Callable[[], np.ndarray]) -> None:
    tensors[part.tensor][part.index] = result()


def index(name: str, starts: str, shape: tuple[int, ...], tensor: np.ndarray) -> tuple[slice, ...]:
    """The slices of a tensor that a part of this shape covers; raises `Unfit` if it is outside."""
    try:
        begin = [int(start) for start in starts.split(",")] if starts else [0] * tensor.ndim
    except ValueError:
        begin = []
    found = tuple(slice(b, b + n) for b, n in zip(begin, shape, strict=False))
    inside = all(x.start >= 0 and x.stop <= n for x, n in zip(found, tensor.shape, strict=False))
    whole = starts or tuple(shape) == tensor.shape
    if not (len(begin) == len(shape) == tensor.ndim and inside and whole):
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


# What the first process wrote, with orbax.


def _stored(folder: Path, tensors: Mapping[str, np.ndarray]) -> Iterator[Part]:
    import tensorstore as ts

    database = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/"}}
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
        found = index(name, starts, stored.shape, tensors[tensor])
        chunk = stored.chunk_layout.read_chunk.shape or ()  # of a scalar
        if any(n > max(most, 1) for n, most in zip(chunk, stored.shape, strict=True)):
            raise Unfit(f"{name} has chunks of {tuple(chunk)}, more than its shape {stored.shape}")
        yield Part(tensor, found, lambda stored=stored: stored.read().result)


def _check_dtype(name: str, saved: np.dtype, expected: np.dtype) -> None:
    if saved != expected:
        raise Unfit(f"{name} is of {saved}, and of {expected} in checkpoint.json")


# What other processes wrote, with NumPy.


def _zipped(files: list[zipfile.ZipFile], tensors: Mapping[str, np.ndarray]) -> Iterator[Part]:
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
            found = index(name, starts, shape, tensors[tensor])
            yield Part(tensor, found, lambda f=file, m=member, d=expected: _member(f, m, d))


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
    file: zipfile.ZipFile, member: zipfile.ZipInfo, dtype: np.dtype
) -> Callable[[], np.ndarray]:
    def result() -> np.ndarray:
        with file.open(member) as stream:
            return np.lib.format.read_array(stream, allow_pickle=False).view(dtype)

    return result


# The program.


def layout(shapes: Mapping[str, tuple[Any, Any]]) -> tuple[dict[str, int], int]:
    """The offset of each tensor in the file that both processes have, and the file's size."""
    offsets, size = {}, 0
    for name, (shape, dtype) in shapes.items():
        offsets[name] = size
        size += -(-math.prod(shape) * np.dtype(dtype).itemsize // 64) * 64
    return offsets, size


def views(memory: mmap.mmap, shapes: Mapping[str, tuple[Any, Any]]) -> dict[str, np.ndarray]:
    """The tensors in that file."""
    offsets, _ = layout(shapes)
    return {
        name: np.frombuffer(memory, dtype, math.prod(shape), offsets[name]).reshape(shape)
        for name, (shape, dtype) in shapes.items()
    }


def _limit_memory(tensors: Mapping[str, np.ndarray]) -> None:
    """Lets this process take what decoding takes, and no more: beyond that it dies."""
    status = Path("/proc/self/status")
    if not status.is_file():  # not on Linux, where the system's own limit is all there is
        return
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
    now = int(lines["VmData"].split()[0]) * 1024
    largest = sorted((x.nbytes for x in tensors.values()), reverse=True)[:IN_FLIGHT]
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

    shapes = request["tensors"]
    try:
        tensors = views(mmap.mmap(request["file"], layout(shapes)[1]), shapes)
        _limit_memory(tensors)
        read(Path(request["folder"]), tensors)
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
