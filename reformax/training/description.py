"""checkpoint.json: what a checkpoint holds and which versions wrote it, in formats 1 to 3."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

# 1: without "config". 2: with it. 3: with "previous" too.
FORMAT = 3
FILE = "checkpoint.json"
_PACKAGES = ("reformax", "jax", "jaxlib", "optax", "orbax-checkpoint")


def write(
    folder: Path,
    *,
    step: int,
    previous: int | None,
    score: float | None,
    config: str | None,
    extra: dict[str, Any],
    arrays: dict[str, np.ndarray],
) -> None:
    """Writes the description of a checkpoint into its folder; see `Checkpoints.save`."""
    description = {
        "format": FORMAT,
        "step": step,
        "previous": previous,
        "score": score,
        "config": config,
        "extra": extra,
        "tensors": {name: [list(a.shape), str(a.dtype)] for name, a in arrays.items()},
        "packages": {package: _version(package) for package in _PACKAGES},
    }
    (folder / FILE).write_text(json.dumps(description, indent=1))


def read(folder: Path, before: int | None) -> dict[str, Any]:
    """A checkpoint's description in today's format.

    Args:
      folder: the checkpoint's.
      before: the step of the checkpoint before it in the run's folder.

    Raises:
      ValueError: a format of a newer version.
    """
    description = json.loads((folder / FILE).read_text())
    if description["format"] == 1:  # only the run's folder had the config
        config = folder.parent.parent / "config.gin"
        description |= {"format": 2, "config": config.read_text() if config.is_file() else None}
    if description["format"] == 2:  # the checkpoint saved before it was not noted
        description |= {"format": 3, "previous": before}
    if description["format"] != FORMAT:
        raise ValueError(
            f"{folder} has checkpoint format {description['format']} and this version reads 1 to "
            f"{FORMAT}: it was written with reformax {description['packages'].get('reformax')}, "
            "install that version to read it"
        )
    return description


def score(folder: Path) -> float | None:
    """The score of a checkpoint; None if it has none or is damaged, which restoring it tells."""
    try:
        return json.loads((folder / FILE).read_text())["score"]
    except (OSError, ValueError, KeyError):
        return None


def scored(folder: Path) -> Any:
    """What the score of a checkpoint is of, as `Checkpoints.save` was told; None if it was not."""
    return json.loads((folder / FILE).read_text())["extra"].get("scored")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # a source tree that was not installed
        return "unknown"
