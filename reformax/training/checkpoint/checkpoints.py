"""The checkpoints of a run that trains; it has the folder's lock.

Each is on the disk, whole, before it gets its name and others go.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import jax

from reformax import durable, memory
from reformax.training import arrays as arrays_lib
from reformax.training import description, manifest
from reformax.training.checkpoint.copies import Copies, in_words
from reformax.training.checkpoint.ownership import Others
from reformax.training.checkpoint.reading import OLD, TEMPORARY, CheckpointReader, is_temporary
from reformax.training.lock import Lost, raise_if_lost
from reformax.training.named_tensors import named
from reformax.training.processes import Processes

# Seconds after which a network file system shows a machine what another one has written: NFS keeps
# what it knows of a folder for 60 s at most, unless it is mounted otherwise.
_SHOWN_AFTER = 70.0


class NotSaved(OSError):
    """A checkpoint could not be written; the newest before it and the best are as they were."""


class Checkpoints(CheckpointReader):
    """Writes checkpoints, one at a time, and keeps the latest `keep` and the best.

    Several processes write one together: each its part of the arrays, the first one all else. All
    see the same folder.

    Attributes:
      keep: the number of latest checkpoints that stay.
      notes: lines about checkpoints that were written but not tidied up; the caller empties it.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike,
        keep: int = 2,
        processes: Processes | None = None,
        copies: str | None = None,
    ):
        """Takes a run's folder, which need not exist.

        Args:
          output_dir: the run's folder.
          keep: the number of latest checkpoints that stay; the best one stays as well. Temporary
            ones do not count.
          processes: those that save together, one thread's; None: this one alone.
          copies: the address of a folder that gets copies; see `Copies`.
        """
        super().__init__(output_dir)
        self.keep = keep
        self.notes: list[str] = []
        self._processes = processes or Processes("alone")
        self._copies = None
        if copies:
            self._copies = Copies(copies, self._processes.branch("copies"))
            self._copies.refuse(self.folder)
        self._damaged: dict[int, str] = {}  # found by `newest_whole`
        self._failed: Path | None = None  # the temporary folder of a save that failed
        self._freed: int | None = None  # the checkpoint that was deleted for the last save
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._copier = ThreadPoolExecutor(1, "copies")  # a slow store delays no save
        self._pending: Future | None = None

    def newest_whole(self) -> int | None:
        """The latest step whose checkpoint is whole; None if there is no checkpoint.

        All processes call it: each reads a part of the files. A folder without checkpoints is first
        given those of the copies.

        Raises:
          ValueError: there are some and none is whole.
          SettingError: there are some, and the copies are another run's.
          OSError: one cannot be read, so nobody knows whether it is whole.
        """
        damaged, together = {}, self._processes
        part = together.index, together.count
        if self._copies is not None and together.broadcast(self.steps):
            self._copies.check_owner(self.folder)
        elif self._copies is not None:
            self.notes += self._copies.fetch_all(self.folder)
            if fetched := together.broadcast(self.steps):
                self.notes.append(
                    f"no checkpoint is in {self.folder}: the run goes on from the copies in "
                    f"checkpoint_copies={self._copies.address}, of steps "
                    f"{', '.join(map(str, fetched))}"
                )
        for step in reversed(together.broadcast(self.steps)):
            listed = together.count > 1 and together.broadcast(partial(self._is_listed, step))
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

    def begun_elsewhere(self) -> bool:
        """Whether there are copies of checkpoints, which `newest_whole` would fetch.

        Raises:
          OSError: the copies cannot be read.
        """
        return self._copies is not None and bool(self._copies.listed())

    def _is_listed(self, step: int) -> bool:
        """Whether this process sees the files of a checkpoint by their names and sizes."""
        return manifest.damage(self.of_step(step), part=None) is None

    def _harm_once_shown(self, step: int, part: tuple[int, int], listed: bool) -> str | None:
        """`_harm`, after a wait for the files that process 0 sees if they are `listed` there."""
        end = time.monotonic() + _SHOWN_AFTER
        while listed and not self._is_listed(step) and time.monotonic() < end:
            time.sleep(0.2)
        return self._harm(step, part)

    def tidy(self, say: Callable[[str], None]) -> None:
        """Renames those that `newest_whole` found damaged; deletes what a killed run left.

        Args:
          say: gets a line for each damaged one.

        Raises:
          OSError: a file or folder cannot be renamed or deleted.
        """
        with durable.explaining("renamed or deleted", self.folder):
            for step, harm in self._damaged.items():
                aside = durable.unused(self.folder / f"damaged.{step}")
                durable.rename(self.of_step(step), aside)
                say(
                    f"note: checkpoint {step} is damaged ({harm}) and is {aside} now; this run "
                    f"goes on from the newest whole one, step {self._checked}"
                )
            for step, old in self.renamed().items():
                durable.rename(old, self.folder / str(step))
            self._sweep()

    def save(
        self,
        step: int,
        state: Any,
        score: float | None = None,
        config: str | None = None,
        check: Callable[[], None] = lambda: None,
        temporary: bool = False,
        **extra,
    ) -> None:
        """Copies `state` to the host and writes it in the background.

        Args:
          step: steps trained.
          state: any pytree of arrays.
          score: what `best_step` minimises, such as valid bits per dim; None if not evaluated.
          config: the settings of the run, as text.
          check: called in the background before anything is written, and again once all is on the
            disk. An error of it leaves the checkpoint without its name.
          temporary: whether training alone reads it, to go on. The next checkpoint that is not
            temporary replaces it, so the time of a save does not decide which checkpoints stay.
          **extra: JSON values that `restore` gives back. `scored` says what the score is of, such
            as the split and the metric; scores of different kinds are not compared.
        """
        self.wait()
        if temporary:
            extra[TEMPORARY] = True
        tensors = named(state)
        shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in tensors.items()}
        # The caller may change its lists while the writer is at work.
        described = dict(step=step, score=score, config=config, extra=deepcopy(extra))
        described["arrays"] = shapes
        # orbax refuses arrays without elements; the description has their shapes.
        begun = self._writer.submit(
            self._begin, step, {n: x for n, x in tensors.items() if x.size}, check
        )
        wait([begun])  # for the copies, whatever becomes of them
        self._pending = self._writer.submit(self._write, begun, check, described)

    @property
    def done(self) -> bool:
        """Whether a save has ended and `wait` has not been called since."""
        return self._pending is not None and self._pending.done()

    def wait(self) -> None:
        """Returns when the last save is on disk.

        Raises:
          NotSaved: it could not be written.
          Lost: as `check` raised it.
        """
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def close(self) -> None:
        """Ends the writer's threads, once copies are made; nothing can be saved any more."""
        self._writer.shutdown()
        self._copier.shutdown()
        if self._failed is not None:
            shutil.rmtree(self._failed, ignore_errors=True)

    def _begin(
        self, step: int, tensors: dict[str, Any], check: Callable[[], None]
    ) -> arrays_lib.Saving | None:
        """Makes the folder and copies the tensors."""
        temporary = self.folder / f"tmp.{step}"

        def make() -> None:
            check()
            durable.make_folder(self.folder)
            durable.remove(temporary)
            if not self._has_room():
                with suppress(OSError):  # what can stay is no reason to save nothing
                    self._sweep()
            self._freed = None if self._has_room() else self._make_room()
            if self._freed is not None:
                self.notes.append(
                    f"checkpoint {self._freed} is deleted to make room for that of step {step} in "
                    f"{self.folder}: free space there to keep it"
                )
            temporary.mkdir()

        self._processes.by_first(make)
        return arrays_lib.Saving(temporary / "arrays", tensors) if tensors else None

    def _write(self, begun: Future, check: Callable[[], None], described: dict[str, Any]) -> None:
        step, together = described["step"], self._processes
        temporary, index = self.folder / f"tmp.{step}", together.index

        def write() -> dict[str, dict[str, int]]:
            self._write_arrays(temporary, begun.result())
            return manifest.flushed(temporary, partial(arrays_lib.is_written_by, index))

        def describe() -> None:
            if (saving := begun.result()) is not None:
                saving.merge()
            previous = self._scheduled_before(step)
            description.write(temporary, previous=previous, **described)

        def end() -> None:
            manifest.write(temporary, {name: x for files in each for name, x in files.items()})
            check()
            self._give_name(temporary, step)

        try:
            each = together.by_all(write)
            together.by_first(describe)
            together.by_first(end)
        except Lost:  # all that is there is another's
            raise
        except Exception as error:
            together.by_first(partial(raise_if_lost, check))  # which is why anything else failed
            if together.first:
                shutil.rmtree(temporary, ignore_errors=True)
                self._failed = temporary  # a thread of orbax may still be writing there
            if (cause := durable.system_error(error)) is not None:
                if together.first and self._freed is None and cause.errno in durable.FULL:
                    self._freed = self._make_room()  # for the next one
                raise self._not_saved(step, cause, described["arrays"]) from error
            raise
        try:
            together.by_first(self._prune)
        except OSError as error:
            line = durable.explained(error, "deleted", self.folder)
            self.notes.append(
                f"checkpoint {step} is saved; an older one is not deleted yet: {line}"
            )
        if self._copies is not None:
            self._copier.submit(self._copy, self._copies, step, together.broadcast(self.steps))

    def _copy(self, copies: Copies, step: int, kept: list[int]) -> None:
        try:
            copies.send(self.of_step(step), step, kept)
        except Others as error:
            self.notes.append(f"checkpoint {step} is saved and not copied: {error}")
        except Exception as error:  # of any store's library
            self.notes.append(
                f"checkpoint {step} is saved and not copied to {copies.address} "
                f"({in_words(error)}); the next one is copied too"
            )

    def _write_arrays(self, folder: Path, saving: arrays_lib.Saving | None) -> None:
        if saving is not None:
            saving.finish()

    def _give_name(self, temporary: Path, step: int) -> None:
        named, old = self.folder / str(step), self.folder / f"{OLD}{step}"
        again = os.path.lexists(named)
        if again:  # at every moment one of the two has a name that `_folder` finds
            durable.remove(old)
            os.rename(named, old)
        try:
            os.rename(temporary, named)
        except OSError:
            if again:
                os.rename(old, named)
            raise
        durable.sync_folder(self.folder)  # `_prune` deletes the old one

    def _not_saved(self, step: int, cause: OSError, arrays: dict[str, Any]) -> NotSaved:
        needed = memory.size_of(arrays)
        try:
            free = f"{shutil.disk_usage(self.folder).free / 1e6:,.1f} MB"
        except OSError:
            free = "an unknown number of bytes"
        others = ", those before it are as they were"
        if self._freed is not None:
            others = f", and checkpoint {self._freed} is deleted to make room"
        return NotSaved(
            f"checkpoint of step {step} is not saved{others}: "
            f"{durable.explained(cause, 'written', self.folder)} ({free} are free there, "
            f"{needed / 1e6:,.1f} MB are needed)"
        )

    def _has_room(self) -> bool:
        """Whether the disk says that it has room for another checkpoint like the newest."""
        try:
            steps, usage = self.steps(), shutil.disk_usage(self.folder)
            if not steps or not usage.total:  # a file system that says nothing
                return True
            return usage.free > 1.05 * durable.size_on_disk(self.of_step(steps[-1]))
        except OSError:  # the save meets it too
            return True

    def _make_room(self) -> int | None:
        """Deletes the oldest checkpoint on a full disk; returns its step, or None.

        One is enough, as all are of one size. The best stays, and so does the newest; if that is
        damaged all stay.
        """
        with suppress(OSError, ValueError):  # the save goes on without
            readable, steps = self._descriptions(skip_unreadable=True), self.steps()
            old = min(readable.keys() - {*steps[-1:], self._best(readable)}, default=None)
            if old is not None and self._harm(steps[-1]) is None:
                self._remove(self.of_step(old))
                return old
        return None

    def _prune(self) -> None:
        self._sweep()
        readable = self._descriptions(skip_unreadable=True)
        steps = self.steps()
        temporary = [step for step in steps if step in readable and is_temporary(readable[step])]
        scheduled = [step for step in steps if step not in temporary]
        last = scheduled[-1] if scheduled else -1
        later = [step for step in temporary if step > last]
        # Two of them, for a case of damage.
        kept = {*scheduled[-self.keep :], *later[-min(self.keep, 2) :], self._best(readable)}
        # One whose score cannot be read stays: it may be the best.
        for step in readable.keys() - kept:
            self._remove(self.of_step(step))

    def _sweep(self) -> None:
        """Deletes what killed or failed saves and deletions left; no save may be going on."""
        whole = self.renamed().values()
        for leftover in self.starting_with("tmp."):
            if leftover not in whole:
                durable.remove(leftover)

    def _remove(self, folder: Path) -> None:
        # Renamed first: a run killed while deleting must not leave half a checkpoint by its name.
        gone = folder.with_name(f"tmp.gone.{folder.name}")
        durable.remove(gone)
        os.rename(folder, gone)
        durable.remove(gone)
