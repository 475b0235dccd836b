"""checkpoint.json: what a checkpoint holds and which versions wrote it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np

from reformax import memory
from reformax.declared import Bounds, fits
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
    for name, (hint, what) in _FIELDS.items():
        if name not in description or not fits(description[name], hint):
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


class _OfNumbers:
    """The declaration of a dtype's name: of NumPy's or JAX's numbers, of 16 bytes at most."""

    def hold(self, name: str) -> bool:
        try:
            found = np.dtype(name)
        except (TypeError, ValueError, SyntaxError):
            return False
        return found.kind in "biufcV" and found.type is not np.void and found.subdtype is None


_Whole = Annotated[int, Bounds(0)]
# The fields, and what each is in words.
_FIELDS = {
    "step": (_Whole, "a whole number"),
    "previous": (_Whole | None, "a step or null"),
    "score": (float | None, "a finite number or null"),
    "config": (str | None, "a text or null"),
    "extra": (dict, "a table"),
    "tensors": (
        Mapping[str, tuple[Sequence[_Whole], Annotated[str, _OfNumbers()]]],
        "a table of shapes and dtypes",
    ),
    "packages": (dict, "a table of versions"),
}


def version(package: str, missing: str = "unknown") -> str:
    """The version of a package, or `missing` where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return missing
