"""The arrays of a checkpoint, as orbax writes them.

Of several processes each writes what its devices hold, every number once: the first one with orbax,
the others, whose NumPy arrays orbax leaves out, into a file of NumPy's. A part of a tensor has the
tensor's name and where it begins, such as `params.kernel@128,0`. Reading joins the parts, so that a
checkpoint fits any number of processes and devices.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import mmap
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from reformax import durable
from reformax.training import array_reader

_AT_ONCE = 2**29  # bytes that are read back at once


def save(folder: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes tensors into a new folder and flushes them to the disk.

    When this raises, nothing is in progress any more: the folder can be deleted.
    """
    with _alone(), array_reader.plain(folder.parent) as parent:
        _checkpointer().save(parent / folder.name, dict(tensors))


def restore(folder: Path, shapes: Mapping[str, tuple[Any, Any]]) -> dict[str, np.ndarray]:
    """Reads tensors of a checkpoint's folder, which may be anybody's.

    `array_reader` reads them, in a process that costs a tenth of a second.

    Args:
      folder: the checkpoint's.
      shapes: shape and dtype of each tensor that is read; none is without numbers.

    Raises:
      Unreadable: the folder does not hold these tensors.
      OSError: a file cannot be read, or no process can be started.
    """
    if not shapes:
        return {}
    file, (_, size) = _shared_file(), array_reader.layout(shapes)
    try:
        os.ftruncate(file, size)
        tensors = {name: [list(shape), str(dtype)] for name, (shape, dtype) in shapes.items()}
        _ask({"folder": str(folder), "tensors": tensors, "file": file}, file)
        return array_reader.views(mmap.mmap(file, size), shapes)
    finally:
        os.close(file)


def _ask(request: dict[str, Any], file: int) -> None:
    """Has a request answered by `array_reader`; raises as `restore`."""
    # -P: the working directory and the program's folder are not searched for imports.
    command = [sys.executable, "-P", array_reader.__file__]
    paths = os.pathsep.join(path for path in sys.path if path not in ("", os.getcwd()))
    done = subprocess.run(
        command,
        input=json.dumps(request),
        capture_output=True,
        text=True,
        errors="replace",
        pass_fds=[file],
        env=os.environ | {"PYTHONPATH": paths},
        start_new_session=True,  # Ctrl-C is for this process, which may go on
    )
    if done.returncode:
        _raise_end(done.returncode, request["folder"], done.stderr)
    answer = json.loads(done.stdout)
    if "unfit" in answer:
        raise Unreadable(answer["unfit"])
    if "errno" in answer:
        number = answer["errno"]
        raise OSError(number, os.strerror(number or errno.EIO), answer["path"])
    if "text" in answer:
        error = _ReaderError(answer["text"])
        if (cause := durable.system_error(error)) is not None:
            raise cause
        raise Unreadable("its arrays cannot be decoded") from error


def _raise_end(code: int, folder: str, stderr: str) -> None:
    """Raises `Unreadable` where the reader died of what it read, and `OSError` where not."""
    ended = f"exit code {code}" if code > 0 else signal.Signals(-code).name
    if code < 0 and -code not in _OF_THE_FILES:
        raise OSError(
            f"{folder} cannot be read: the process that reads it was ended by {ended}, as a system "
            "without free memory does: free memory, and run again"
        )
    raise Unreadable(f"reading its arrays ends in {ended}") from _ReaderError(stderr)


# What ends a process that reads what it cannot decode. Others are sent to it.
_OF_THE_FILES = {
    signal.SIGABRT,
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGILL,
    signal.SIGFPE,
    signal.SIGTRAP,
}


def check_written(folder: Path, shapes: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """Reads what was written back; a process for every `_AT_ONCE` bytes or so.

    Args:
      folder: the checkpoint's.
      shapes: arrays or shapes of all tensors that have numbers, by name.
      tensors: those of `copies`, which are compared.

    Raises:
      Unreadable: the folder does not hold them.
      OSError: as `restore`.
    """
    written: dict[str, list[str]] = {name: [] for name in shapes}
    for name in tensors:
        written[name.partition(array_reader.AT)[0]].append(name)
    group: dict[str, tuple[Any, Any]] = {}
    for i, (name, x) in enumerate(shapes.items(), start=1):
        group[name] = (x.shape, x.dtype)
        if i < len(shapes) and array_reader.layout(group)[1] < _AT_ONCE:
            continue
        found = restore(folder, group)
        for part in (part for name in group for part in written[name]):
            name, _, starts = part.partition(array_reader.AT)
            index = array_reader.index(part, starts, tensors[part].shape, found[name])
            if found[name][index].tobytes() != tensors[part].tobytes():
                raise Unreadable(f"{part} has changed")
        group = {}


class Unreadable(ValueError):
    """A folder does not hold the tensors that are expected; the text says why."""


class _ReaderError(Exception):
    """The error of the reading process, as text."""


def _shared_file() -> int:
    """A new file in memory, or where the system has none in its folder for such files."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("arrays")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def save_part(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes what a process but the first holds into a new file and flushes it to the disk."""
    with path.open("xb") as file:
        np.savez(file, **tensors)
        file.flush()
        os.fsync(file.fileno())


def copies(tensors: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The parts of tensors that this process writes; JAX may divide a tensor among processes."""
    # On a CPU device_get gives a view of a buffer that the next step writes into.
    if jax.process_count() == 1:
        return {name: np.array(leaf) for name, leaf in jax.device_get(dict(tensors)).items()}
    mine = {
        _part_name(name, shard.index, tensor.shape): shard.data
        for name, tensor in tensors.items()
        for shard in tensor.addressable_shards
        if shard.replica_id == 0
    }
    return {name: np.array(part) for name, part in jax.device_get(mine).items()}


def _part_name(name: str, index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    spans = [axis.indices(n)[:2] for axis, n in zip(index, shape, strict=True)]
    if all(span == (0, n) for span, n in zip(spans, shape, strict=True)):
        return name
    return name + array_reader.AT + ",".join(str(start) for start, _ in spans)


def _checkpointer():
    """Orbax's, which works for this process alone."""
    import orbax.checkpoint as ocp  # half a second, which an evaluation's --help need not take

    if jax.process_count() == 1:
        return ocp.PyTreeCheckpointer()
    index = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=index, active_processes={index})
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


class _PatientLoop(asyncio.SelectorEventLoop):
    """Closes when its tasks are done.

    At the first error orbax leaves the others' writes in progress: they make files in a folder that
    was deleted, and a traceback each where the loop is closed.
    """

    def close(self) -> None:
        if not self.is_closed() and (tasks := asyncio.all_tasks(self)):
            self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        super().close()


class _Patient(asyncio.DefaultEventLoopPolicy):
    _loop_factory = _PatientLoop


@contextmanager
def _alone() -> Iterator[None]:
    """Orbax raises an error once all else is done, and does not log it as well."""

    def has_no_traceback(record: logging.LogRecord) -> bool:
        return not record.exc_info

    logger, policy = logging.getLogger("absl"), asyncio.get_event_loop_policy()
    logger.addFilter(has_no_traceback)
    asyncio.set_event_loop_policy(_Patient())
    try:
        yield
    finally:
        asyncio.set_event_loop_policy(policy)
        logger.removeFilter(has_no_traceback)
