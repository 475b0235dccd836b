"""Checkpoints: each is a folder, either whole or refused.

    DIR/checkpoints/1200/arrays/        every tensor of the state, by name, as orbax writes them
                         checkpoint.json  format, step, the step of the checkpoint before, score,
                                          names and shapes, operative config, package versions
                         manifest.json    size and CRC-32 of every other file
                    tmp.1200/           being written
                    tmp.old.1200/       1200 while a new one takes its name
                    tmp.gone.1200/      being deleted
                    damaged.1200/       found damaged, and kept

A folder has a temporary name until its manifest is complete and all of it is on the disk, so a
killed run or a power cut leaves the checkpoints before it as they were. Older ones are deleted only
after that. A file that is cut or changed afterwards does not match the manifest, and restoring
refuses it. An error of the system while reading says nothing about a checkpoint: nothing that could
not be read is deleted or renamed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import jax
import numpy as np

from reformax import durable
from reformax.training import arrays as arrays_lib
from reformax.training import description, manifest
from reformax.training.lock import Lost
from reformax.training.named_tensors import OWN, as_tree, named

_OLD = "tmp.old."


def _in_passing(described: dict[str, Any]) -> bool:
    return described["extra"].get("in_passing") is True


class NotSaved(OSError):
    """A checkpoint could not be written; those before it are as they were."""


class Checkpoints:
    """The checkpoints of one run: the latest `keep` and the best.

    Attributes:
      folder: DIR/checkpoints.
      keep: the number of latest checkpoints that stay.
      notes: lines about checkpoints that were written but not tidied up; the caller empties it.
    """

    def __init__(self, output_dir: str | os.PathLike, keep: int = 2):
        """Takes a run's folder, which need not exist.

        Args:
          output_dir: the run's folder.
          keep: the number of latest checkpoints that stay; the best one stays as well. Those saved
            in passing do not count.
        """
        if keep < 1:
            raise ValueError(f"keep={keep} must be at least 1: a run goes on from its latest")
        self.folder = Path(output_dir).absolute() / "checkpoints"
        self.keep = keep
        self.notes: list[str] = []
        self._damaged: dict[int, str] = {}  # found by `newest_whole`
        self._checked: int | None = None  # found whole by it
        self._failed: Path | None = None  # the temporary folder of a save that failed
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future | None = None

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, ascending.

        Raises:
          OSError: the folder cannot be read.
        """
        names = [name for name in self._names() if name.isascii() and name.isdecimal()]
        # Others, such as 007, are no name that a checkpoint gets.
        steps = {int(name) for name in names if len(name) < 19 and name == str(int(name))}
        return sorted({*steps, *self._renamed()})

    def best_step(self, skip_unreadable: bool = False) -> int | None:
        """The step with the lowest score; None if no checkpoint has one.

        Scores of another split, metric or context than the latest score's are left out.

        Args:
          skip_unreadable: whether to leave out a checkpoint whose score cannot be read.

        Raises:
          ValueError, OSError: as `score`, unless those are left out.
        """
        return self._best(self._descriptions(skip_unreadable))

    def _best(self, read: dict[int, dict[str, Any]]) -> int | None:
        scores = {step: x["score"] for step, x in read.items() if x["score"] is not None}
        if not scores:
            return None
        kinds = {step: read[step]["extra"].get("scored") for step in scores}
        # Checkpoints of earlier versions do not say what their scores are of.
        alike = [step for step in scores if kinds[step] in (None, kinds[max(scores)])]
        return min(alike, key=lambda step: (scores[step], step))

    def _descriptions(self, skip_unreadable: bool) -> dict[int, dict[str, Any]]:
        descriptions = {}
        for step in self.steps():
            try:
                descriptions[step] = self._read_description(step)
            except manifest.Damaged as error:
                # Another process, which trains, may have deleted it just now.
                if not skip_unreadable and os.path.lexists(self._folder(step)):
                    raise self._refusal(step, str(error)) from None
            except (ValueError, OSError):
                if not skip_unreadable:
                    raise
        return descriptions

    def score(self, step: int) -> float | None:
        """The score that `save` was given; None if there was none.

        Raises:
          ValueError: the checkpoint is damaged.
          OSError: it cannot be read.
        """
        return self._description(step)["score"]

    # Writing.

    def save(
        self,
        step: int,
        state: Any,
        score: float | None = None,
        config: str | None = None,
        check: Callable[[], None] = lambda: None,
        in_passing: bool = False,
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
          in_passing: whether it is there to go on from alone. The next one that is not takes its
            place, so that what stays in the end does not depend on when this one was saved.
          **extra: JSON values that `restore` gives back. `scored` says what the score is of, such
            as the split and the metric; scores of different kinds are not compared.
        """
        self.wait()
        if in_passing:
            extra["in_passing"] = True
        # On a CPU device_get gives a view of a buffer that the next step writes into.
        arrays = {name: np.array(leaf) for name, leaf in named(jax.device_get(state)).items()}
        # The caller may change its lists while the writer is at work.
        self._pending = self._writer.submit(
            self._write, step, arrays, score, config, check, deepcopy(extra)
        )

    @property
    def done(self) -> bool:
        """Whether a save has ended and nothing has asked `wait` how."""
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
        """Ends the writer's thread; nothing can be saved any more."""
        self._writer.shutdown()
        if self._failed is not None:
            shutil.rmtree(self._failed, ignore_errors=True)

    def _write(self, step, arrays, score, config, check, extra) -> None:
        temporary = self.folder / f"tmp.{step}"
        try:
            check()
            self._write_files(temporary, step, arrays, score, config, extra)
            check()
            self._give_name(temporary, step)
        except Lost:  # all that is there is another's
            raise
        except Exception as error:
            shutil.rmtree(temporary, ignore_errors=True)
            self._failed = temporary  # a thread of orbax may still be writing there
            if (cause := durable.system_error(error)) is not None:
                raise self._not_saved(step, cause, arrays) from error
            raise
        try:
            self._prune()
        except OSError as error:
            line = durable.explained(error, "deleted", self.folder)
            self.notes.append(
                f"checkpoint {step} is saved; an older one is not deleted yet: {line}"
            )

    def _write_files(self, folder: Path, step, arrays, score, config, extra) -> None:
        durable.make_folder(self.folder)
        durable.remove(folder)
        folder.mkdir()
        # orbax refuses arrays without elements; the description has their shapes.
        tensors = {name: array for name, array in arrays.items() if array.size}
        arrays_lib.save(folder / "arrays", tensors)
        description.write(
            folder,
            step=step,
            previous=self._scheduled_before(step),
            score=score,
            config=config,
            extra=extra,
            arrays=arrays,
        )
        manifest.write(folder)

    def _give_name(self, temporary: Path, step: int) -> None:
        named, old = self.folder / str(step), self.folder / f"{_OLD}{step}"
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
        durable.sync_folder(self.folder)
        if again:
            self._remove(old)

    def _not_saved(self, step: int, cause: OSError, arrays: dict[str, np.ndarray]) -> NotSaved:
        needed = sum(array.nbytes for array in arrays.values())
        try:
            free = f"{shutil.disk_usage(self.folder).free / 1e6:,.1f} MB"
        except OSError:
            free = "an unknown number of bytes"
        return NotSaved(
            f"checkpoint of step {step} is not saved, those before it are as they were: "
            f"{durable.explained(cause, 'written', self.folder)} ({free} are free there, "
            f"{needed / 1e6:,.1f} MB are needed)"
        )

    def _prune(self) -> None:
        self._sweep()
        readable = self._descriptions(skip_unreadable=True)
        steps = self.steps()
        passing = [step for step in steps if step in readable and _in_passing(readable[step])]
        scheduled = [step for step in steps if step not in passing]
        last = scheduled[-1] if scheduled else -1
        later = [step for step in passing if step > last]
        # Two of them, for a case of damage.
        kept = {*scheduled[-self.keep :], *later[-min(self.keep, 2) :], self._best(readable)}
        # One whose score cannot be read stays: it may be the best.
        for step in readable.keys() - kept:
            self._remove(self._folder(step))

    def _sweep(self) -> None:
        """Deletes what killed or failed saves and deletions left; no save may be going on."""
        whole = self._renamed().values()
        for leftover in self._named("tmp."):
            if leftover not in whole:
                durable.remove(leftover)

    def _remove(self, folder: Path) -> None:
        # Renamed first: a run killed while deleting must not leave half a checkpoint by its name.
        gone = folder.with_name(f"tmp.gone.{folder.name}")
        durable.remove(gone)
        os.rename(folder, gone)
        durable.remove(gone)

    # Opening a run. Only the run that trains, and has the lock, may do this.

    def newest_whole(self) -> int | None:
        """The latest step whose checkpoint is whole; None if there is no checkpoint.

        Raises:
          ValueError: there are some and none is whole.
          OSError: one cannot be read, so nobody knows whether it is whole.
        """
        damaged = {}
        for step in reversed(self.steps()):
            harm = self._harm(step)
            if harm is None:
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

    def _unused(self, name: str) -> Path:
        path, n = self.folder / name, 1
        while os.path.lexists(path):
            n += 1
            path = self.folder / f"{name}.{n}"
        return path

    # Reading.

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """Reads a whole state.

        Args:
          step: the checkpoint's.
          like: a pytree of arrays or `jax.ShapeDtypeStruct`s. The checkpoint must hold tensors of
            these names and shapes and no others.

        Returns:
          The state as NumPy arrays in a tree like `like`, and a dict of 'step', 'score' and the
          extra values of `save`.

        Raises:
          ValueError: damaged, of another format or of another model; the line says what to do.
          OSError: it cannot be read, which says nothing about its content.
        """
        tensors, info = self._read(step)
        return as_tree(tensors, like, "", self._folder(step)), info

    def restore_params(self, step: int, like: Any, fix: str = OWN) -> tuple[Any, dict[str, Any]]:
        """Reads the parameters to score: the moving average if the state has one.

        Takes, returns and raises as `restore` does, for the parameters alone; `fix` says what to do
        with a checkpoint of another model.
        """
        tensors, info = self._read(step)
        part = "ema." if any(name.startswith("ema.") for name in tensors) else "params."
        tensors = {name: array for name, array in tensors.items() if name.startswith(part)}
        return as_tree(tensors, like, part, self._folder(step), fix), info

    def config(self, step: int) -> str | None:
        """The settings that a checkpoint was saved with; None if it was saved without any.

        Raises:
          ValueError: damaged, or of a format that this version does not know.
        """
        return self._description(step)["config"]

    def previous(self, step: int) -> int | None:
        """The step of the checkpoint saved right before this one; it may be deleted by now.

        Those saved in passing are left out.
        """
        return self._description(step)["previous"]

    def in_passing(self, step: int) -> bool:
        """Whether a checkpoint was saved in passing; see `save`."""
        return _in_passing(self._description(step))

    def extra(self, step: int) -> dict[str, Any]:
        """The extra values that a checkpoint was saved with; raises as `config` does."""
        return self._description(step)["extra"]

    def check_vocabulary(self, step: int, fingerprint: str | None) -> None:
        """Raises `ValueError` if a checkpoint was trained with another vocabulary.

        Args:
          step: the checkpoint's.
          fingerprint: the vocabulary's; None if there is none.
        """
        trained_with = self.extra(step).get("vocabulary")
        self.compare_vocabulary(step, trained_with, fingerprint)

    def compare_vocabulary(
        self, step: int, trained_with: str | None, fingerprint: str | None
    ) -> None:
        """Does the same for a checkpoint that was read: 'vocabulary' of `restore` is known."""
        if trained_with is not None and fingerprint is None:
            raise ValueError(
                f"{self.folder.parent} has no vocabulary.model, and checkpoint {step} was trained "
                "with one: copy it back from where the run was trained"
            )
        if trained_with is not None and trained_with != fingerprint:
            raise ValueError(
                f"the vocabulary of {self.folder.parent} is {fingerprint} and that of checkpoint "
                f"{step} is {trained_with}: copy the run's own vocabulary.model back"
            )

    def _names(self) -> list[str]:
        try:
            with durable.explaining("read", self.folder):
                return os.listdir(self.folder)
        except FileNotFoundError:
            if self.folder.is_symlink():
                raise OSError(
                    f"{self.folder} is a link to a folder that is not there: mount its disk"
                ) from None
            return []

    def _named(self, prefix: str) -> list[Path]:
        return [self.folder / name for name in self._names() if name.startswith(prefix)]

    def _renamed(self) -> dict[int, Path]:
        """Checkpoints that were about to be replaced when a run was killed."""
        return {
            int(step): old
            for old in self._named(_OLD)
            if (step := old.name.removeprefix(_OLD)).isdecimal()
            and not os.path.lexists(self.folder / step)
            and not old.is_symlink()
        }

    def _folder(self, step: int) -> Path:
        folder = self.folder / str(step)
        return folder if os.path.lexists(folder) else self._renamed().get(step, folder)

    def _before(self, step: int) -> int | None:
        return max((other for other in self.steps() if other < step), default=None)

    def _scheduled_before(self, step: int) -> int | None:
        """The latest checkpoint before this one that was not saved in passing."""
        for other in reversed([other for other in self.steps() if other < step]):
            with suppress(ValueError, OSError):  # one that cannot be read counts
                if _in_passing(self._read_description(other)):
                    continue
            return other
        return None

    def _description(self, step: int) -> dict[str, Any]:
        try:
            return self._read_description(step)
        except manifest.Damaged as error:
            raise self._refusal(step, str(error)) from None

    def _read_description(self, step: int) -> dict[str, Any]:
        return description.read(self._folder(step), step, self._before(step))

    def _read(self, step: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        if step != self._checked and (harm := self._harm(step)) is not None:
            raise self._refusal(step, harm)
        described = self._description(step)
        tensors = {
            name: np.zeros(shape, dtype)
            for name, (shape, dtype) in described["tensors"].items()
            if 0 in shape
        }
        try:
            tensors |= arrays_lib.restore(self._folder(step) / "arrays")
        except Exception as error:
            folder = self._folder(step)
            if not os.path.lexists(folder):
                raise self._refusal(step, "deleted") from error
            if (cause := durable.system_error(error)) is not None:
                raise durable.explained(cause, "read", folder) from error
            text = next(iter(str(error).splitlines()), "")
            raise ValueError(
                f"checkpoint {folder} matches its manifest and orbax cannot read it "
                f"({type(error).__name__}: {text}): see with --traceback"
            ) from error
        return tensors, {"step": step, "score": described["score"], **described["extra"]}

    def _harm(self, step: int) -> str | None:
        """What is wrong with a checkpoint, in words; None if it is whole."""
        harm = manifest.damage(self._folder(step))
        if harm is None:
            try:
                self._read_description(step)
            except manifest.Damaged as error:
                return str(error)
        return harm

    def _refusal(self, step: int, harm: str) -> ValueError:
        """The error of a step without a whole checkpoint."""
        folder, others = self._folder(step), [s for s in self.steps() if s != step]
        if not os.path.lexists(folder):
            there = ", ".join(map(str, others)) or "none"
            return ValueError(
                f"no checkpoint of step {step} in {self.folder}: there is {there} (a run keeps its "
                "latest and its best)"
            )
        whole = [s for s in others if self._is_whole(s)]
        if not whole:
            instead = "no other is whole, copy one back from where you have it"
        else:
            steps = ", ".join(map(str, whole))
            instead = f"whole are those of steps {steps}, and --checkpoint={whole[-1]} takes one"
        return ValueError(f"checkpoint {folder} is damaged ({harm}): {instead}")

    def _is_whole(self, step: int) -> bool:
        try:
            return self._harm(step) is None
        except (ValueError, OSError):
            return False
