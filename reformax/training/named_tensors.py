"""A tree of tensors as a flat dict of names, and back into a tree of the same shapes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np

from reformax.declared import SettingError


def name_of(path) -> str:
    """The dotted path of a leaf, such as 'params.layers.0.query'."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def n_axes_of(name: str, weight: Any) -> int:
    """The axes of a weight in its layer: those of a stack have one more in front, the depth."""
    return weight.ndim - bool(re.search(r"(^|\.)block_\d+\.", name))


def named(tree: Any) -> dict[str, Any]:
    """The leaves by their names."""
    return {name_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


# How a checkpoint of another model is mended where a run would go on from it.
FIX = "give another output_dir, or the config that the run began with"


def check_fits(there: dict[str, Any], like: Any, prefix: str, where: Path, fix: str = FIX) -> None:
    """Compares a checkpoint's tensors with those that are expected; no number is needed.

    Args:
      there: what has a shape, by name.
      like: a tree of arrays or `jax.ShapeDtypeStruct`s with the same names and shapes.
      prefix: of every name in `there`; `like` has none.
      where: the checkpoint's folder, for errors.
      fix: what to do where it does not fit.

    Raises:
      ValueError: a tensor is missing, is one too many or has another shape.
    """
    expected = {prefix + name: leaf for name, leaf in named(like).items()}

    def shape(tree, name):
        return f"shape {tuple(tree[name].shape)}" if name in tree else "no such tensor"

    def is_of_optimizer(name):
        return not name.startswith(prefix or "params.")

    # The model's first, for an optimizer's are of the same shapes.
    for name in sorted(dict.fromkeys([*expected, *there]), key=is_of_optimizer):
        saved, wanted = shape(there, name), shape(expected, name)
        if saved != wanted:
            other = "optimizer or ema_decay" if is_of_optimizer(name) else "model"
            raise SettingError(
                f"checkpoint {where} is of another {other}: {name} has "
                f"{saved} there and {wanted} in this config: {fix}"
            )


def as_tree(tensors: dict[str, np.ndarray], like: Any, prefix: str) -> Any:
    """Tensors that fit `like` as a tree."""
    names = [prefix + name for name in named(like)]
    return jax.tree.unflatten(jax.tree.structure(like), [tensors[name] for name in names])


def check_finite(tree: Any, what: str) -> None:
    """Raises `FloatingPointError` that names the first tensor with a NaN or an infinity.

    Args:
      tree: of arrays.
      what: what they are, for the error.
    """
    for name, leaf in named(tree).items():
        numbers = np.asarray(leaf)
        # NumPy does not know whether a bfloat16 is finite.
        if not np.isfinite(numbers.astype(np.float32, copy=False)).all():
            raise FloatingPointError(
                f"{what}: {name} has numbers that are not finite (NaN or infinity): such a model "
                "computes nothing, give another"
            )
