"""The arrays of a checkpoint, as orbax writes and reads them.

Of several processes each writes what its devices hold, every number once: the first one with orbax,
the others, whose NumPy arrays orbax leaves out, into a file of NumPy's. A part of a tensor has the
tensor's name and where it begins, such as `params.kernel@128,0`. Reading joins the parts, so that a
checkpoint fits any number of processes and devices.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

_AT = "@"


def save(folder: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes tensors into a new folder and flushes them to the disk.

    When this raises, nothing is in progress any more: the folder can be deleted.
    """
    with _alone():
        _checkpointer().save(folder, dict(tensors))


def restore(folder: Path) -> dict[str, np.ndarray]:
    """Reads the tensors of a folder."""
    with _alone():
        return _checkpointer().restore(folder)


def save_part(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes what a process but the first holds into a new file and flushes it to the disk."""
    with path.open("xb") as file:
        np.savez(file, **tensors)
        file.flush()
        os.fsync(file.fileno())


def restore_part(path: Path) -> dict[str, np.ndarray]:
    """Reads what `save_part` wrote; numbers that NumPy does not know are bytes."""
    with np.load(path, allow_pickle=False) as file:
        return dict(file)


def copies(tensors: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """What this process has to write of tensors that JAX may have divided among processes."""
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
    return name + _AT + ",".join(str(start) for start, _ in spans)


def join(
    parts: Iterable[Mapping[str, np.ndarray]], shapes: Mapping[str, tuple[list[int], str]]
) -> dict[str, np.ndarray]:
    """Whole tensors of what processes wrote.

    Args:
      parts: what each of them wrote.
      shapes: shape and dtype of each tensor.

    Raises:
      ValueError: a part is missing.
    """
    tensors: dict[str, np.ndarray] = {}
    found: Counter[str] = Counter()  # numbers of tensors in parts
    for name, part in (item for own in parts for item in own.items()):
        whole, at, starts = name.partition(_AT)
        if part.dtype.kind == "V":  # such as bfloat16
            part = part.view(shapes[whole][1])
        if at:
            tensor = tensors.setdefault(whole, np.zeros(*shapes[whole]))
            spans = zip(map(int, starts.split(",")), part.shape, strict=True)
            tensor[tuple(slice(start, start + n) for start, n in spans)] = part
            found[whole] += part.size
        else:
            tensors[name] = part
    for name, n in found.items():
        if n != tensors[name].size:
            raise ValueError(f"{name} has {n:,} of {tensors[name].size:,} numbers")
    return tensors


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
