"""Reading checkpoints: whole ones, or one line that says what is wrong and what to do."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Sharding

from reformax import durable, memory
from reformax.declared import SettingError
from reformax.training import arrays as arrays_lib
from reformax.training import description, manifest
from reformax.training.named_tensors import FIX, as_tree, check_fits, named

Shapes = dict[str, jax.ShapeDtypeStruct]  # of tensors, by name


OLD = "tmp.old."  # begins the name of a checkpoint while a new one takes its name
TEMPORARY = "temporary"  # the name in checkpoint.json


def is_temporary(described: dict[str, Any]) -> bool:
    """Whether a description is of a temporary checkpoint; see `Checkpoints.save`."""
    return described["extra"].get(TEMPORARY) is True


class CheckpointReader:
    """Reads the checkpoints of a run; it changes none, and training may write others meanwhile.

    Attributes:
      folder: DIR/checkpoints.
    """

    def __init__(self, output_dir: str | os.PathLike):
        """Takes a run's folder, which need not exist."""
        self.folder = Path(output_dir).absolute() / "checkpoints"
        self._checked: int | None = None  # a step that was found whole

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, ascending.

        Raises:
          OSError: the folder cannot be read.
        """
        names = [name for name in self._entries() if name.isascii() and name.isdecimal()]
        # Others, such as 007, are no name that a checkpoint gets.
        steps = {int(name) for name in names if len(name) < 19 and name == str(int(name))}
        return sorted({*steps, *self.renamed()})

    def of_step(self, step: int) -> Path:
        """The folder of a checkpoint, which need not exist."""
        folder = self.folder / str(step)
        return folder if os.path.lexists(folder) else self.renamed().get(step, folder)

    def starting_with(self, prefix: str) -> list[Path]:
        """The paths of the names that start so."""
        return [self.folder / name for name in self._entries() if name.startswith(prefix)]

    def renamed(self) -> dict[int, Path]:
        """Checkpoints that were about to be replaced when a run was killed."""
        return {
            int(step): old
            for old in self.starting_with(OLD)
            if (step := old.name.removeprefix(OLD)).isdecimal()
            and not os.path.lexists(self.folder / step)
            and not old.is_symlink()
        }

    def best_step(self, skip_unreadable: bool = False) -> int | None:
        """The step with the lowest score; None if no checkpoint has one.

        Scores of another split, metric or context than the latest score's are left out.

        Args:
          skip_unreadable: whether to leave out a checkpoint whose score cannot be read.

        Raises:
          ValueError, OSError: as `score`, unless those are left out.
        """
        return self._best(self._descriptions(skip_unreadable))

    def best_or_latest(self) -> int:
        """The step of the best of the checkpoints; of the latest where none is scored yet."""
        best = self.best_step()
        return self.steps()[-1] if best is None else best

    def score(self, step: int) -> float | None:
        """The score that `save` was given; None if there was none.

        Raises:
          ValueError: the checkpoint is damaged.
          OSError: it cannot be read.
        """
        return self._description(step)["score"]

    def restore(self, step: int, like: Any, shardings: Any = None) -> tuple[Any, dict[str, Any]]:
        """Reads a state, of which a process reads what its devices hold.

        Args:
          step: the checkpoint's.
          like: a pytree of arrays or `jax.ShapeDtypeStruct`s. The checkpoint must hold tensors of
            these names and shapes and no others.
          shardings: a tree like it of `jax.sharding.Sharding`s, of any mesh; None: the state is
            read whole into NumPy arrays.

        Returns:
          The state in a tree like `like`, and a dict of 'step', 'score' and the extra values of
          `save`.

        Raises:
          ValueError: damaged, of another format or of another model; the line says what to do.
          OSError: it cannot be read, which says nothing about its content.
        """

        shardings = None if shardings is None else named(shardings)
        tensors, info = self._read(step, self._whole(step, like), shardings)
        return as_tree(tensors, like, ""), info

    def check(self, step: int, like: Any = None) -> dict[str, Any]:
        """Raises as `restore` does of a checkpoint that does not fit `like`, or is damaged.

        Args:
          step: the checkpoint's.
          like: as in `restore`; None: any tensors fit.

        Returns:
          The dict that `restore` returns; no tensor is decoded.
        """
        choose = (lambda there: {}) if like is None else self._whole(step, like)
        described, _ = self._chosen(step, choose)
        return self._info(described)

    def _whole(self, step: int, like: Any) -> Callable[[Shapes], Shapes]:
        """Chooses all tensors, which must be those of `like`."""

        def whole(there: Shapes) -> Shapes:
            check_fits(there, like, "", self.of_step(step))
            return there

        return whole

    def restore_params(
        self,
        step: int,
        like: Any,
        fix: str = FIX,
        names: Collection[str] | None = None,
        without: Collection[str] = (),
    ) -> tuple[Any, dict[str, Any]]:
        """Reads the parameters to score: the moving average if the state has one.

        Takes, returns and raises as `restore` does, for the parameters alone; `fix` says what to do
        with a checkpoint of another model. Of `names` only these parts of the model are read, and
        nothing within a part that has a name of `without`.
        """
        tensors, info = self._read(step, self._scored(step, like, fix, names, without))
        prefix = "ema." if any(name.startswith("ema.") for name in tensors) else "params."
        return as_tree(tensors, like, prefix), info

    def check_params(self, step: int, like: Any, *options: Any) -> dict[str, Any]:
        """As `check`, of the parameters that `restore_params` reads with these options."""
        described, _ = self._chosen(step, self._scored(step, like, *options))
        return self._info(described)

    def _scored(
        self,
        step: int,
        like: Any,
        fix: str,
        names: Collection[str] | None,
        without: Collection[str],
    ) -> Callable[[Shapes], Shapes]:
        """Chooses the tensors of `restore_params`, which must be those of `like`."""

        def scored(there: Shapes) -> Shapes:
            prefix = "ema." if any(name.startswith("ema.") for name in there) else "params."
            parts = [prefix] if names is None else [f"{prefix}{name}." for name in names]
            there = {n: x for n, x in there.items() if f"{n}.".startswith(tuple(parts))}
            there = {n: x for n, x in there.items() if not set(without) & set(n.split("."))}
            check_fits(there, like, prefix, self.of_step(step), fix)
            return there

        return scored

    def config(self, step: int) -> str | None:
        """The settings that a checkpoint was saved with; None if it was saved without any.

        Raises:
          ValueError: damaged, or of a format that this version does not know.
        """
        return self._description(step)["config"]

    def previous(self, step: int) -> int | None:
        """The step of the checkpoint saved right before this one; it may be deleted by now.

        Temporary ones are left out.
        """
        return self._description(step)["previous"]

    def is_temporary(self, step: int) -> bool:
        """Whether a checkpoint is temporary; see `save`."""
        return is_temporary(self._description(step))

    def extra(self, step: int) -> dict[str, Any]:
        """The extra values that a checkpoint was saved with; raises as `config` does."""
        return self._description(step)["extra"]

    def check_vocabulary(
        self, step: int, trained_with: str | None, fingerprint: str | None
    ) -> None:
        """Raises `ValueError` if a checkpoint was trained with another vocabulary.

        Args:
          step: the checkpoint's.
          trained_with: 'vocabulary' of its extra values.
          fingerprint: the vocabulary's; None if there is none.
        """
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

    def _entries(self) -> list[str]:
        """Every name in the folder; none where there is no folder, or a file in its place."""
        try:
            with durable.explaining("read", self.folder):
                return os.listdir(self.folder)
        except (FileNotFoundError, NotADirectoryError):
            if self.folder.is_symlink():
                raise OSError(
                    f"{self.folder} is a link to a folder that is not there: mount its disk"
                ) from None
            return []

    def _best(self, read: dict[int, dict[str, Any]]) -> int | None:
        scores = {step: x["score"] for step, x in read.items() if x["score"] is not None}
        if not scores:
            return None
        kinds = {step: read[step]["extra"].get("scored") for step in scores}
        alike = [step for step in scores if kinds[step] == kinds[max(scores)]]
        return min(alike, key=lambda step: (scores[step], step))

    def _descriptions(self, skip_unreadable: bool) -> dict[int, dict[str, Any]]:
        descriptions = {}
        for step in self.steps():
            try:
                descriptions[step] = self._read_description(step)
            except manifest.Damaged as error:
                # Another process, which trains, may have deleted it just now.
                if not skip_unreadable and os.path.lexists(self.of_step(step)):
                    raise self._refusal(step, str(error)) from None
            except (ValueError, OSError):
                if not skip_unreadable:
                    raise
        return descriptions

    def _scheduled_before(self, step: int) -> int | None:
        """The latest checkpoint before this one that is not temporary."""
        for other in reversed([other for other in self.steps() if other < step]):
            with suppress(ValueError, OSError):  # one that cannot be read counts
                if is_temporary(self._read_description(other)):
                    continue
            return other
        return None

    def _description(self, step: int) -> dict[str, Any]:
        try:
            return self._read_description(step)
        except manifest.Damaged as error:
            raise self._refusal(step, str(error)) from None

    def _read_description(self, step: int) -> dict[str, Any]:
        return description.read(self.of_step(step), step)

    def _read(
        self,
        step: int,
        choose: Callable[[Shapes], Shapes] = dict,
        shardings: dict[str, Sharding] | None = None,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The tensors of a checkpoint that `choose` wants of those that it says it has.

        `choose` raises `SettingError` where they do not fit, before any is read.
        """
        described, wanted = self._chosen(step, choose, shardings)
        folder = self.of_step(step)
        try:
            tensors = arrays_lib.restore_tensors(folder, wanted, shardings)
        except Exception as error:
            folder = self.of_step(step)
            if not os.path.lexists(folder):
                raise self._refusal(step, "deleted") from error
            if (cause := durable.system_error(error)) is not None:
                raise durable.explained(cause, "read", folder) from error
            raise ValueError(
                f"checkpoint {folder} matches its manifest and is none that training writes "
                f"({error}): get it again from where it was trained"
            ) from error
        return tensors, self._info(described)

    @staticmethod
    def _info(described: dict[str, Any]) -> dict[str, Any]:
        return {"step": described["step"], "score": described["score"], **described["extra"]}

    def _chosen(
        self,
        step: int,
        choose: Callable[[Shapes], Shapes],
        shardings: dict[str, Sharding] | None = None,
    ) -> tuple[dict[str, Any], Shapes]:
        """The description of a whole checkpoint, and the tensors that `choose` wants of it."""
        try:
            described = self._read_description(step)
        except manifest.Damaged as error:
            raise self._refusal(step, self._harm(step) or str(error)) from None
        there = description.shapes(described)
        try:
            wanted = choose(there)
            folder = self.of_step(step)
            held = arrays_lib.bytes_held(wanted, shardings)
            memory.check(f"the tensors of {folder}", held, "the model's sizes")
        except SettingError:
            # Damage is reported first, where the check takes no hours.
            if memory.size_of(there) < memory.available():
                self._refuse_damaged(step)
            raise
        self._refuse_damaged(step)
        return described, wanted

    def _refuse_damaged(self, step: int) -> None:
        if step != self._checked and (harm := self._harm(step)) is not None:
            raise self._refusal(step, harm)

    def _harm(self, step: int, part: tuple[int, int] = (0, 1)) -> str | None:
        """The damage of a checkpoint, or of a part of its files, in words; None if whole."""
        folder = self.of_step(step)
        try:
            most = description.most_bytes(self._read_description(step))
        except manifest.Damaged as error:
            return manifest.damage(folder, part=None) or str(error)
        return manifest.damage(folder, most, part)

    def _refusal(self, step: int, harm: str) -> ValueError:
        """The error of a step without a whole checkpoint."""
        folder, others = self.of_step(step), [s for s in self.steps() if s != step]
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
