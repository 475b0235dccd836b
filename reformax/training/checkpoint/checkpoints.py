"""Opening the checkpoints of a run that trains; it has the folder's lock."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from reformax import durable
from reformax.training import manifest
from reformax.training.checkpoint.copies import Copies, in_words
from reformax.training.checkpoint.writing import Writer

# Seconds after which a network file system shows a machine what another one has written: NFS keeps
# what it knows of a folder for 60 s at most, unless it is mounted otherwise.
_SHOWN_AFTER = 70.0


class Checkpoints(Writer):
    """The checkpoints of one run: the latest `keep` and the best.

    Who only reads them calls neither `newest_whole` nor `tidy` nor `save`.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        """Takes what `Writer` takes."""
        super().__init__(*args, **kwargs)
        self._damaged: dict[int, str] = {}  # found by `newest_whole`

    def newest_whole(self) -> int | None:
        """The latest step whose checkpoint is whole; None if there is no checkpoint.

        All processes call it: each reads a part of the files. A folder without checkpoints is first
        given those of the copies.

        Raises:
          ValueError: there are some and none is whole.
          OSError: one cannot be read, so nobody knows whether it is whole.
        """
        damaged, together = {}, self._processes
        part = together.index, together.count
        if self._copies is not None and not together.same(self.steps):
            self._fetch(self._copies)
        for step in reversed(together.same(self.steps)):
            listed = together.count > 1 and together.same(partial(self._is_listed, step))
            harms = together.by_all(partial(self._harm_once_shown, step, part, listed))
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

    def _is_listed(self, step: int) -> bool:
        """Whether this process sees the files of a checkpoint by their names and sizes."""
        return manifest.difference_of_sizes(self._folder(step)) is None

    def _harm_once_shown(self, step: int, part: tuple[int, int], listed: bool) -> str | None:
        """`_harm`, after a wait for the files that process 0 sees if they are `listed` there."""
        end = time.monotonic() + _SHOWN_AFTER
        while listed and not self._is_listed(step) and time.monotonic() < end:
            time.sleep(0.2)
        return self._harm(step, part)

    def _fetch(self, copies: Copies) -> None:
        together = self._processes

        def make(folder: Path) -> None:
            durable.make_folder(self.folder)
            durable.remove(folder)
            folder.mkdir()

        def name(step: int) -> None:
            durable.rename(self.folder / f"tmp.{step}", self.folder / str(step))

        fetched, damaged = [], None
        try:
            for step in together.same(copies.steps):
                temporary = self.folder / f"tmp.{step}"
                together.by_first(partial(make, temporary))
                try:
                    copies.fetch(step, temporary)
                    fetched.append(step)
                except manifest.Damaged as error:
                    damaged = error
                    self.notes.append(f"the copy {step} in {copies.address} is left out: {error}")
            if damaged is not None and not fetched:
                raise damaged
            # A run that is killed here goes on from the newest, or fetches all again.
            for step in reversed(fetched):
                together.by_first(partial(name, step))
        except Exception as error:  # of any store's library
            raise OSError(
                f"checkpoint_copies={copies.address} cannot be read ({in_words(error)}): give a "
                "folder that this machine reaches, and install its package, such as s3fs or gcsfs"
            ) from error

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
