"""Checkpoints: each is a folder, either whole or refused.

    DIR/checkpoints/1200/arrays/        every tensor of the state, by name, as orbax writes them
                         checkpoint.json  format, step, the step of the checkpoint before, score,
                                          names and shapes, operative config, package versions
                         manifest.json    size and CRC-32 of every other file

A folder has a temporary name until its manifest is complete, so a killed run leaves the checkpoints
before it as they were. A file that is cut or changed afterwards does not match the manifest, and
restoring refuses it.
"""

from __future__ import annotations

import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any

import jax
import numpy as np

from reformax.training import description, manifest
from reformax.training.named_tensors import as_tree, named


class Checkpoints:
    """The checkpoints of one run: the latest `keep` and the best."""

    def __init__(self, output_dir: str | os.PathLike, keep: int = 2):
        """Takes a run's folder, which need not exist.

        Args:
          output_dir: the run's folder.
          keep: the number of latest checkpoints that stay; the best one stays as well.
        """
        if keep < 1:
            raise ValueError(f"keep={keep} must be at least 1: a run goes on from its latest")
        self.folder = Path(output_dir).absolute() / "checkpoints"
        self.keep = keep
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future | None = None

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, ascending."""
        names = os.listdir(self.folder) if self.folder.is_dir() else []
        return sorted(int(name) for name in names if name.isdigit())

    def best_step(self) -> int | None:
        """The step with the lowest score; None if no checkpoint has one.

        Scores of another split, metric or context than the latest score's are left out.
        """
        scores = {step: self.score(step) for step in self.steps()}
        scored = [step for step, score in scores.items() if score is not None]
        if not scored:
            return None
        kinds = {step: description.scored(self._folder(step)) for step in scored}
        # Checkpoints of earlier versions do not say what their scores are of.
        alike = [step for step in scored if kinds[step] in (None, kinds[scored[-1]])]
        return min(alike, key=lambda step: (scores[step], step))

    def score(self, step: int) -> float | None:
        """The score that `save` was given; None if there was none, or the checkpoint is damaged."""
        return description.score(self._folder(step))

    # Writing.

    def save(
        self,
        step: int,
        state: Any,
        score: float | None = None,
        config: str | None = None,
        **extra,
    ) -> None:
        """Copies `state` to the host and writes it in the background.

        Args:
          step: steps trained.
          state: any pytree of arrays.
          score: what `best_step` minimises, such as valid bits per dim; None if not evaluated.
          config: the settings of the run, as text.
          **extra: JSON values that `restore` gives back. `scored` says what the score is of, such
            as the split and the metric; scores of different kinds are not compared.
        """
        self.wait()
        # On a CPU device_get gives a view of a buffer that the next step writes into.
        arrays = {name: np.array(leaf) for name, leaf in named(jax.device_get(state)).items()}
        # The caller may change its lists while the writer is at work.
        self._pending = self._writer.submit(
            self._write, step, arrays, score, config, deepcopy(extra)
        )

    def wait(self) -> None:
        """Returns when the last save is on disk; raises the error of the writer, if any."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def remove_unfinished(self) -> None:
        """Deletes what a killed run left half written. Only the run that trains may do this."""
        for leftover in self.folder.glob("tmp.*"):
            shutil.rmtree(leftover)

    def _write(self, step, arrays, score, config, extra) -> None:
        import orbax.checkpoint as ocp  # half a second, which an evaluation's --help need not take

        folder = self.folder / f"tmp.{step}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        # orbax refuses arrays without elements; the description has their shapes.
        tensors = {name: array for name, array in arrays.items() if array.size}
        ocp.PyTreeCheckpointer().save(folder / "arrays", tensors)
        description.write(
            folder,
            step=step,
            previous=self._before(step),
            score=score,
            config=config,
            extra=extra,
            arrays=arrays,
        )
        manifest.write(folder)
        if self._folder(step).exists():
            self._remove(self._folder(step))
        folder.rename(self._folder(step))
        self._prune()

    def _prune(self) -> None:
        steps = self.steps()
        for step in set(steps[: -self.keep]) - {self.best_step()}:
            self._remove(self._folder(step))

    def _remove(self, folder: Path) -> None:
        # Renamed first: a run killed while deleting must not leave half a checkpoint by its name.
        doomed = folder.with_name(f"tmp.old.{folder.name}")
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed)

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
        """
        tensors, info = self._read(step)
        return as_tree(tensors, like, "", self._folder(step)), info

    def restore_params(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """Reads the parameters to score: the moving average if the state has one.

        Takes, returns and raises as `restore` does, for the parameters alone.
        """
        tensors, info = self._read(step)
        part = "ema." if any(name.startswith("ema.") for name in tensors) else "params."
        tensors = {name: array for name, array in tensors.items() if name.startswith(part)}
        return as_tree(tensors, like, part, self._folder(step)), info

    def config(self, step: int) -> str | None:
        """The settings that a checkpoint was saved with; None if it was saved without any.

        Raises:
          ValueError: damaged, or of a format that this version does not know.
        """
        return self._description(step)["config"]

    def previous(self, step: int) -> int | None:
        """The step of the checkpoint saved right before this one; it may be deleted by now.

        Does not check for damage: meant for a checkpoint that was just restored.
        """
        return description.read(self._folder(step), self._before(step))["previous"]

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

    def _folder(self, step: int) -> Path:
        return self.folder / str(step)

    def _before(self, step: int) -> int | None:
        return max((other for other in self.steps() if other < step), default=None)

    def _description(self, step: int) -> dict[str, Any]:
        self._check_whole(step)
        return description.read(self._folder(step), self._before(step))

    def _read(self, step: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        described = self._description(step)
        import orbax.checkpoint as ocp

        tensors = {
            name: np.zeros(shape, dtype)
            for name, (shape, dtype) in described["tensors"].items()
            if 0 in shape
        }
        tensors |= ocp.PyTreeCheckpointer().restore(self._folder(step) / "arrays")
        return tensors, {"step": step, "score": described["score"], **described["extra"]}

    def _check_whole(self, step: int) -> None:
        folder = self._folder(step)
        if not folder.is_dir():
            there = ", ".join(map(str, self.steps())) or "none"
            raise ValueError(f"no checkpoint of step {step} in {self.folder}: there is {there}")
        harm = manifest.damage(folder)
        if harm is None:
            return
        whole = [s for s in self.steps() if s < step and manifest.damage(self._folder(s)) is None]
        then = f"go back to step {whole[-1]}" if whole else "begin again from step 0"
        raise ValueError(f"checkpoint {folder} is damaged ({harm}): delete that folder to {then}")
