"""Checkpoints that are either whole or noticed: a folder a step, written aside and then renamed.

    DIR/checkpoints/1200/arrays/        every tensor of the state, by name, as orbax writes them
                         checkpoint.json  format, step, the step before that was saved, score,
                                          names and shapes, operative config, package versions
                         manifest.json    size and CRC-32 of every other file

A folder is written under a temporary name and renamed when its manifest is complete, so a run that
is killed leaves the checkpoints before it as they were. A file cut or changed afterwards does not
match the manifest, and restoring says so instead of training on.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

# 1: without "config". 2: with it. 3: with "previous" too.
FORMAT = 3
_PACKAGES = ("reformax", "jax", "jaxlib", "optax", "orbax-checkpoint")


class Checkpoints:
    """The checkpoints of one run: the latest `keep` and the best are kept."""

    def __init__(self, output_dir: str | os.PathLike, keep: int = 2):
        """Reads what is there.

        Args:
          output_dir: the run's folder.
          keep: how many of the latest checkpoints stay; the best one stays besides.
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

    def _before(self, step: int) -> int | None:
        return max((other for other in self.steps() if other < step), default=None)

    def best_step(self) -> int | None:
        """The step with the lowest score; None if no checkpoint has one."""
        scores = {step: self.score(step) for step in self.steps()}
        scored = [step for step, score in scores.items() if score is not None]
        return min(scored, key=lambda step: (scores[step], step)) if scored else None

    def score(self, step: int) -> float | None:
        """What `save` was given as the score of a step."""
        try:
            return json.loads((self.folder / str(step) / "checkpoint.json").read_text())["score"]
        except (OSError, ValueError, KeyError):
            return None  # damaged: restoring it says so; it cannot be the best

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
          **extra: JSON values that `restore` gives back.
        """
        self.wait()
        # On a CPU device_get gives a view of a buffer that the next step writes into.
        arrays = {name: np.array(leaf) for name, leaf in _named(jax.device_get(state)).items()}
        # What is written is what is true now, whatever the caller does with its lists meanwhile.
        self._pending = self._writer.submit(
            self._write, step, arrays, score, config, deepcopy(extra)
        )

    def wait(self) -> None:
        """Returns when the last save is on disk; raises what went wrong with it."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def _write(self, step, arrays, score, config, extra) -> None:
        import orbax.checkpoint as ocp  # half a second that an evaluation script's --help spares

        folder = self.folder / f"tmp.{step}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        # orbax does not take arrays without elements; their shapes below are all there is to them.
        tensors = {name: array for name, array in arrays.items() if array.size}
        ocp.PyTreeCheckpointer().save(folder / "arrays", tensors)
        described = {
            "format": FORMAT,
            "step": step,
            "previous": self._before(step),
            "score": score,
            "config": config,
            "extra": extra,
            "tensors": {name: [list(a.shape), str(a.dtype)] for name, a in arrays.items()},
            "packages": _versions(),
        }
        (folder / "checkpoint.json").write_text(json.dumps(described, indent=1))
        (folder / "manifest.json").write_text(json.dumps(self._manifest(folder), indent=1))
        final = self.folder / str(step)
        if final.exists():
            self._remove(final)
        folder.rename(final)
        self._prune()

    def _manifest(self, folder: Path) -> dict[str, dict[str, int]]:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return {str(path.relative_to(folder)): _fingerprint(path) for path in files}

    def _prune(self) -> None:
        steps = self.steps()
        for step in set(steps[: -self.keep]) - {self.best_step()}:
            self._remove(self.folder / str(step))

    def _remove(self, folder: Path) -> None:
        # Renamed first: a run killed while deleting must not leave half a checkpoint by its name.
        doomed = folder.with_name(f"tmp.old.{folder.name}")
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed)

    def remove_unfinished(self) -> None:
        """Deletes what a killed run left half written. Only the run that trains may do this."""
        for leftover in self.folder.glob("tmp.*"):
            shutil.rmtree(leftover)

    # Reading.

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """Reads a whole state.

        Args:
          step: which checkpoint.
          like: a pytree of arrays or `jax.ShapeDtypeStruct`s, whose tensors the checkpoint must
            hold: the same names and shapes, and no others.

        Returns:
          The state as NumPy arrays in a tree like `like`, and what `save` was given besides, under
          'step', 'score' and the names of its extra arguments.

        Raises:
          ValueError: damaged, of another format or of another model; the line says what to do.
        """
        tensors, info = self._read(step)
        return self._like(step, like, "", tensors), info

    def restore_params(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """Reads the parameters to score: the moving average if the state has one.

        Takes, returns and raises as `restore` does, for the parameters alone.
        """
        tensors, info = self._read(step)
        part = "ema." if any(name.startswith("ema.") for name in tensors) else "params."
        tensors = {name: array for name, array in tensors.items() if name.startswith(part)}
        return self._like(step, like, part, tensors), info

    def restore_average(self, n: int, like: Any) -> tuple[Any, list[int]]:
        """The mean of the parameters to score of the last `n` checkpoints, and their steps.

        Averaging along the trajectory: Attention Is All You Need, section 6.1, takes 5 checkpoints
        of its base models and 20 of its big ones.

        The best checkpoint, kept while others after it were deleted, is not one of the last.

        Raises:
          ValueError: there are fewer, or as `restore_params` does.
        """
        if n < 1:
            raise ValueError(f"average:{n} must be of at least 1 checkpoint: average:5")
        there, steps, total = self.steps(), [], None
        step = there[-1] if there else None
        while len(steps) < n and step in there:
            # One checkpoint at a time is in memory, and sums are float64.
            params, _ = self.restore_params(step, like)
            params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
            total = params if total is None else jax.tree.map(np.add, total, params)
            steps.insert(0, step)
            step = self._described(step)["previous"]
        if len(steps) < n:
            last = ", ".join(map(str, steps)) or "none"
            if older := ", ".join(map(str, there[: -len(steps)])):  # the best is kept alone
                last += f"; {older} is from before others that were deleted"
            raise ValueError(
                f"average:{n} needs the last {n} checkpoints and {self.folder} has {len(steps)} "
                f"({last}): average fewer, or train with loop.train.keep={n} and "
                "loop.train.checkpoint_every"
            )
        mean = jax.tree.map(lambda x, old: (x / n).astype(old.dtype), total, like)
        return mean, steps

    def check_vocabulary(self, step: int, fingerprint: str | None) -> None:
        """Raises ValueError if a checkpoint was trained with another vocabulary than this one.

        Args:
          step: the checkpoint's.
          fingerprint: the vocabulary's; None if there is none.
        """
        self._check_whole(step)
        trained_with = self._described(step)["extra"].get("vocabulary")
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

    def config(self, step: int) -> str | None:
        """The settings that a checkpoint was saved with; None if it was saved without any.

        Raises:
          ValueError: damaged, or of a format that this version does not know.
        """
        self._check_whole(step)
        return self._described(step)["config"]

    def _described(self, step: int) -> dict[str, Any]:
        """A checkpoint.json in today's format."""
        folder = self.folder / str(step)
        described = json.loads((folder / "checkpoint.json").read_text())
        if described["format"] == 1:  # the run's settings were in its folder alone
            run = self.folder.parent / "config.gin"
            described |= {"format": 2, "config": run.read_text() if run.is_file() else None}
        if described["format"] == 2:  # what was saved before was not noted
            described |= {"format": 3, "previous": self._before(step)}
        if described["format"] != FORMAT:
            raise ValueError(
                f"{folder} has checkpoint format {described['format']} and this version reads 1 to "
                f"{FORMAT}: it was written with reformax {described['packages'].get('reformax')}, "
                "install that version to read it"
            )
        return described

    def _read(self, step: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        self._check_whole(step)
        import orbax.checkpoint as ocp

        folder = self.folder / str(step)
        described = self._described(step)
        tensors = {
            name: np.zeros(shape, dtype)
            for name, (shape, dtype) in described["tensors"].items()
            if 0 in shape
        }
        tensors |= ocp.PyTreeCheckpointer().restore(folder / "arrays")
        return tensors, {"step": step, "score": described["score"], **described["extra"]}

    def _check_whole(self, step: int) -> None:
        folder = self.folder / str(step)
        if not folder.is_dir():
            there = ", ".join(map(str, self.steps())) or "none"
            raise ValueError(f"no checkpoint of step {step} in {self.folder}: there is {there}")
        damage = _damage(folder)
        if damage is None:
            return
        whole = [s for s in self.steps() if s < step and _damage(self.folder / str(s)) is None]
        then = f"go back to step {whole[-1]}" if whole else "begin again from step 0"
        raise ValueError(f"checkpoint {folder} is damaged ({damage}): delete that folder to {then}")

    def _like(self, step: int, like: Any, prefix: str, tensors: dict[str, np.ndarray]) -> Any:
        """The tensors as a tree like `like`; ValueError if they are not those of `like`."""
        expected = {prefix + name: leaf for name, leaf in _named(like).items()}

        def described(tree, name):
            return f"shape {tuple(tree[name].shape)}" if name in tree else "no such tensor"

        for name in [*expected, *(name for name in tensors if name not in expected)]:
            there, here = described(tensors, name), described(expected, name)
            if there != here:
                parameter = name.startswith(prefix or "params.")
                what = "model" if parameter else "optimizer or ema_decay"
                raise ValueError(
                    f"checkpoint {self.folder / str(step)} is of another {what}: {name} has "
                    f"{there} there and {here} in this config: give another output_dir, or the "
                    "config that the run began with"
                )
        return jax.tree.unflatten(jax.tree.structure(like), [tensors[name] for name in expected])


def _named(tree: Any) -> dict[str, Any]:
    """The leaves by dotted path, such as 'params.layers.0.query'."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _fingerprint(path: Path) -> dict[str, int]:
    size = crc = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return {"size": size, "crc32": crc}


def _damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint's files; None if nothing is."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
    except OSError:
        return "manifest.json is missing"
    except ValueError:
        return "manifest.json is cut short"
    for name, noted in manifest.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != noted["size"]:
            return f"{name} has {path.stat().st_size} bytes of {noted['size']}"
        if _fingerprint(path) != noted:
            return f"{name} has changed"
    return None


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:  # a source tree that was not installed
            versions[package] = "unknown"
    return versions
