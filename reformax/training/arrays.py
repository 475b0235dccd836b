"""The arrays of a checkpoint, as orbax writes and reads them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np


def save(folder: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes tensors into a new folder and flushes them to the disk.

    When this raises, nothing is in progress any more: the folder can be deleted.
    """
    import orbax.checkpoint as ocp  # half a second, which an evaluation's --help need not take

    with _alone():
        ocp.PyTreeCheckpointer().save(folder, dict(tensors))


def restore(folder: Path) -> dict[str, np.ndarray]:
    """Reads the tensors of a folder."""
    import orbax.checkpoint as ocp

    with _alone():
        return ocp.PyTreeCheckpointer().restore(folder)


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
