"""The arrays of a checkpoint: orbax writes them, sharded, and `array_reader` reads them.

Each process writes what its devices hold, every number once, and orbax joins the processes' files
to one database that orbax itself restores too. A process reads the regions that its devices will
hold: a checkpoint fits any number of processes and any mesh.

Orbax's handler writes alone: its checkpointers and its manager neither flush what they rename nor
compare bytes, and where one process fails, the others wait for minutes at a barrier.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from reformax.training import array_reader
from reformax.training.array_reader import Index, Wanted, restore, whole

_CHUNK = 2**20  # bytes at most: a process that needs a part of a tensor reads little more
_FILE = 2**26  # bytes or so: processes divide files among them to compare their CRC-32
_OF_PROCESS = re.compile(r"arrays/(?:ocdbt|array_metadatas)[./]process_(\d+)(?:/|$)")


class Saving:
    """Tensors on their way into a new folder.

    Each process makes one, then calls `finish`; the first one then calls `merge`. All in a thread
    without an event loop.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, Any]):
        """Copies what this process writes to the host, and begins to write it.

        Args:
          folder: is made.
          tensors: by name, with one element at least; arrays of JAX, or of NumPy.
        """
        import orbax.checkpoint as ocp  # half a second, which an evaluation's --help need not take
        from etils import epath

        self._folder, self._handler, self._path = folder, ocp.PyTreeCheckpointHandler(), epath.Path
        folder.mkdir(exist_ok=True)
        held = {name: _held(x) for name, x in tensors.items()}
        sizes = {name: ocp.SaveArgs(chunk_byte_size=_CHUNK) for name in held}
        args = ocp.args.PyTreeSave(held, sizes, ocdbt_target_data_file_size=_FILE)
        with ExitStack() as opened:
            path = opened.enter_context(self._written())
            self._writes = asyncio.run(self._handler.async_save(path, args=args))
            self._opened = opened.pop_all()

    def finish(self) -> None:
        """Returns when this process has written everything."""
        with self._opened:
            for write in self._writes:
                write.result()

    def merge(self) -> None:
        """Joins what all processes have written."""
        with self._written() as path:
            self._handler.finalize(path)

    @contextmanager
    def _written(self) -> Iterator[Any]:
        with _alone(), array_reader.plain(self._folder.parent) as parent:
            yield self._path(parent / self._folder.name)


def _held(tensor: Any) -> Any:
    """A tensor that no step writes into; orbax itself copies what lies on an accelerator."""
    if not isinstance(tensor, jax.Array):
        return np.array(tensor)
    if all(device.platform != "cpu" for device in tensor.devices()):
        return tensor
    # On a CPU NumPy sees the buffer itself, which a later step writes into.
    held, copies = tensor.addressable_shards, {}
    for shard in held:
        if (at := str(shard.index)) not in copies:
            copies[at] = np.array(shard.data)
    parts = [jax.device_put(copies[str(shard.index)], shard.device) for shard in held]
    return jax.make_array_from_single_device_arrays(tensor.shape, tensor.sharding, parts)


def is_written_by(process: int, name: str) -> bool:
    """Whether a process wrote a file of a checkpoint, named relative to its folder."""
    found = _OF_PROCESS.match(name)
    return found is not None and int(found[1]) == process


def _region(index: Index, shape: tuple[int, ...]) -> Index:
    spans = (axis.indices(n)[:2] for axis, n in zip(index, shape, strict=True))
    return tuple(slice(*span) for span in spans)


def restore_tensors(
    folder: Path, shapes: Mapping[str, Any], shardings: Mapping[str, Sharding] | None = None
) -> dict[str, Any]:
    """Reads tensors of a checkpoint's folder; takes and raises as `restore` otherwise.

    Args:
      folder: the checkpoint's.
      shapes: an array or a shape of each tensor.
      shardings: of each; None for NumPy arrays, whole.

    Returns:
      The tensors: arrays of JAX, of which a process reads what its devices hold, or of NumPy.
    """
    wanted = {
        name: Wanted(x.shape, np.dtype(x.dtype), regions(x.shape, (shardings or {}).get(name)))
        for name, x in shapes.items()
    }
    some = {name: x for name, x in wanted.items() if x.nbytes}
    read = restore(folder, some) if some else {}
    read |= {name: [np.zeros(x.shape, x.dtype)] for name, x in wanted.items() if not x.nbytes}
    if shardings is None:
        return {name: arrays[0] for name, arrays in read.items()}

    def placed(name: str, shape: tuple[int, ...]) -> jax.Array:
        of_region = dict(zip(map(str, wanted[name].regions), read[name], strict=True))
        return jax.make_array_from_callback(
            shape, shardings[name], lambda index: of_region[str(_region(index, shape))]
        )

    return {name: placed(name, x.shape) for name, x in wanted.items()}


def regions(shape: tuple[int, ...], sharding: Sharding | None) -> list[Index]:
    """The regions of a tensor that the devices of this process hold, each once."""
    if sharding is None:
        return [whole(shape)]
    held = sharding.addressable_devices_indices_map(shape).values()
    found = {str(region): region for region in (_region(index, shape) for index in held)}
    return list(found.values())


def bytes_held(shapes: Mapping[str, Any], shardings: Mapping[str, Sharding] | None) -> int:
    """The bytes that this process reads of tensors of these shapes."""

    def size(region: Index) -> int:
        return math.prod(axis.stop - axis.start for axis in region)

    found = {name: regions(x.shape, (shardings or {}).get(name)) for name, x in shapes.items()}
    return sum(size(r) * shapes[name].dtype.itemsize for name, each in found.items() for r in each)


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
