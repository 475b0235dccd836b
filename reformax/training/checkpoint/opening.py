"""Opening the checkpoints of a run that trains; it has the folder's lock."""

from __future__ import annotations

import os
from collections.abc import Callable

from reformax import durable
from reformax.training.checkpoint.writing import Writer
from reformax.training.processes import Processes


class Checkpoints(Writer):
    """The checkpoints of one run: the latest `keep` and the best.

    Who only reads them calls neither `newest_whole` nor `tidy` nor `save`.
    """

    def __init__(
        self, output_dir: str | os.PathLike, keep: int = 2, processes: Processes | None = None
    ):
        """Takes what `Writer` takes."""
        super().__init__(output_dir, keep, processes)
        self._damaged: dict[int, str] = {}  # found by `newest_whole`

    def newest_whole(self) -> int | None:
        """The latest step whose checkpoint is whole; None if there is no checkpoint.

        All processes call it: each reads a part of the files.

        Raises:
          ValueError: there are some and none is whole.
          OSError: one cannot be read, so nobody knows whether it is whole.
        """
        damaged, together = {}, self._processes
        part = together.index, together.count
        for step in reversed(together.same(self.steps)):
            harms = together.by_all(lambda step=step: self._harm(step, part))
            if (harm := next(filter(None, harms), None)) is None:
                self._damaged, self._checked = damaged, step
                return step
            damaged[step] = harm
        if damaged:
            words = "; ".join(f"{step}: {harm}" for step, harm in damaged.items())
            raise ValueError(
                f"no checkpoint in {self.folder} is whole ({words}): copy one back from where you "
                "have it, or give another --output_dir"
            )
        return None

    def tidy(self, say: Callable[[str], None]) -> None:
        """Renames those that `newest_whole` found damaged; deletes what a killed run left.

        Args:
          say: gets a line for each damaged one.

        Raises:
          OSError: a file or folder cannot be renamed or deleted.
        """
        with durable.explaining("renamed or deleted", self.folder):
            for step, harm in self._damaged.items():
                aside = self._unused(f"damaged.{step}")
                durable.rename(self._folder(step), aside)
                say(
                    f"note: checkpoint {step} is damaged ({harm}) and is {aside} now; this run "
                    f"goes on from the newest whole one, step {self._checked}"
                )
            for step, old in self._renamed().items():
                durable.rename(old, self.folder / str(step))
            self._sweep()
