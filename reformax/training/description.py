"""checkpoint.json: what a checkpoint holds and which versions wrote it."""

from __future__ import annotations

import json
import math
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

from reformax import memory
from reformax.training import manifest

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
    arrays: dict[str, Any],
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
        "packages": {package: version(package) for package in _PACKAGES},
    }
    (folder / FILE).write_text(json.dumps(description, indent=1))


def read(folder: Path, step: int) -> dict[str, Any]:
    """The description of a checkpoint, whose folder's name says the step.

    Raises:
      manifest.Damaged: it is not what was written, or is of another step.
      ValueError: a format of another version.
      OSError: it cannot be read.
    """
    try:
        description = json.loads(manifest.read_file(folder, FILE))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise manifest.Damaged(f"{FILE} is no JSON") from None
    if not isinstance(description, dict) or type(description.get("format")) is not int:
        raise manifest.Damaged(f"{FILE} has no format")
    if description["format"] != FORMAT:
        packages = description.get("packages")
        version = packages.get("reformax") if isinstance(packages, dict) else "another version"
        raise ValueError(
            f"{folder} has checkpoint format {description['format']} and this version reads "
            f"{FORMAT}: it was written with reformax {version}, install that version to read it"
        )
    for name, (fits, what) in _FIELDS.items():
        if name not in description or not fits(description[name]):
            raise manifest.Damaged(f"{FILE} has no {name} that is {what}")
    if description["step"] != step:
        raise manifest.Damaged(f"{FILE} is of step {description['step']}")
    return description


def shapes(description: dict[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes and dtypes of the tensors, by name."""
    tensors = description["tensors"].items()
    return {name: jax.ShapeDtypeStruct(tuple(shape), dtype) for name, (shape, dtype) in tensors}


def most_bytes(description: dict[str, Any]) -> int:
    """More than the files of a checkpoint with these tensors have, however few they compress."""
    tensors = shapes(description)
    return 2 * memory.size_of(tensors) + 2**14 * len(tensors) + 2 * manifest.MOST


def _is_step(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_score(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and math.isfinite(value))


def _is_table(value: Any) -> bool:
    """Whether it is names, each with the shape and the dtype of a tensor."""
    return isinstance(value, dict) and all(map(_is_shaped, value.values()))


def _is_shaped(value: Any) -> bool:
    if not (isinstance(value, list) and len(value) == 2 and isinstance(value[0], list)):
        return False
    return isinstance(value[1], str) and _is_number(value[1]) and all(map(_is_step, value[0]))


def _is_number(dtype: str) -> bool:
    """Whether it is one of NumPy's or JAX's dtypes of numbers, which have 16 bytes at most."""
    try:
        found = np.dtype(dtype)
    except (TypeError, ValueError, SyntaxError):
        return False
    return found.kind in "biufcV" and found.type is not np.void and found.subdtype is None


_FIELDS = {
    "step": (_is_step, "a whole number"),
    "previous": (lambda value: value is None or _is_step(value), "a step or null"),
    "score": (_is_score, "a finite number or null"),
    "config": (lambda value: value is None or isinstance(value, str), "a text or null"),
    "extra": (lambda value: isinstance(value, dict), "a table"),
    "tensors": (_is_table, "a table of shapes and dtypes"),
    "packages": (lambda value: isinstance(value, dict), "a table of versions"),
}


def version(package: str, missing: str = "unknown") -> str:
    """The version of a package, or `missing` where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return missing
