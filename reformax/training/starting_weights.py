"""The weights of another run, to begin with."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax

from reformax.buffers import HISTORY
from reformax.declared import SettingError
from reformax.shell import user_path
from reformax.training.checkpoint import CheckpointReader

# What layers call the weights of their attention algorithm.
OP = "op"


def read(
    init_from: str | os.PathLike,
    like: Any,
    vocabulary: str | None,
    names: Collection[str] | None = None,
    fresh_ops: bool = False,
) -> tuple[Any, tuple[str, int], Any]:
    """Reads the parameters to score of a checkpoint: the moving average if there is one.

    Args:
      init_from: the folder of a run, for its best checkpoint (the latest if none is scored), or of
        one of its checkpoints. `python -m reformax.convert` writes such a folder.
      like: a tree of arrays or shapes: those of the model.
      vocabulary: the fingerprint of this run's vocabulary; None if it has none.
      names: the parts of the model to read, such as 'stack'; None: all of it.
      fresh_ops: whether the weights of attention algorithms are left out, which are None then.

    Returns:
      The parameters as NumPy arrays, None for histories of FP8 scales; the run's folder and the
      checkpoint's step; and what the checkpoint says of a converted model's source, or None.

    Raises:
      SettingError: there is no checkpoint, or it was trained with another vocabulary.
      ValueError: it is damaged or of another model; the line names the tensor and both shapes.
      OSError: it cannot be read.
    """
    folder, step = found(init_from)
    like, options = _request(like, names, fresh_ops)
    params, info = CheckpointReader(folder).restore_params(step, like, *options)
    check_vocabulary(init_from, info, vocabulary)
    params = jax.tree.map(lambda x, wanted: x.astype(wanted.dtype), params, like)
    return params, (str(folder), step), info.get("source")


def check(
    init_from: str | os.PathLike, like: Any, names: Collection[str] | None, fresh_ops: bool
) -> dict[str, Any]:
    """Raises as `read` of what does not fit; returns what the checkpoint says of itself.

    The vocabulary is left to `check_vocabulary`.
    """
    folder, step = found(init_from)
    like, options = _request(like, names, fresh_ops)
    return CheckpointReader(folder).check_params(step, like, *options)


def check_whole(init_from: str | os.PathLike) -> None:
    """Raises as `read` of a checkpoint that is missing, damaged or unreadable."""
    folder, step = found(init_from)
    CheckpointReader(folder).check(step)


def check_vocabulary(
    init_from: str | os.PathLike, info: dict[str, Any], vocabulary: str | None
) -> None:
    """Raises `SettingError` if a checkpoint that says this was trained with another vocabulary."""
    trained_with = info.get("vocabulary")
    if trained_with != vocabulary:
        raise SettingError(
            f"init_from={init_from} was trained with vocabulary {trained_with} and this run has "
            f"{vocabulary}: copy its vocabulary.model into the output_dir of this run first"
        )


def _request(like: Any, names: Collection[str] | None, fresh_ops: bool) -> tuple[Any, tuple]:
    """The parameters to read, and the options of `restore_params`."""
    fix = "set init_from to a run of this model, or the model's sizes to those of that run"
    if names is None:
        fix += "; fresh_heads=True leaves the heads of an encoder or a language model out"
    else:
        like = {name: x for name, x in like.items() if name in names}
    fresh = [HISTORY, *([OP] if fresh_ops else [])]
    like = _without(fresh, like)
    if not fresh_ops:
        fix += "; fresh_ops=True begins the own weights of attentions anew"
    return like, (fix, names, fresh)


def _without(names: Collection[str], tree: Any) -> Any:
    """The tree with None for what is in a part of one of these names."""

    def kept(path, x):
        return None if any(getattr(key, "key", None) in names for key in path) else x

    return jax.tree_util.tree_map_with_path(kept, tree)


def found(init_from: str | os.PathLike) -> tuple[Path, int]:
    """The folder of the run that `init_from` names, and the step of its checkpoint to begin with.

    Raises:
      SettingError: there is no such checkpoint.
    """
    folder, step = user_path("init_from", init_from), None
    if folder.parent.name == "checkpoints" and folder.name.isdecimal():
        folder, step = folder.parent.parent, int(folder.name)
    checkpoints = CheckpointReader(folder)
    steps = checkpoints.steps()
    if not steps:
        raise SettingError(
            f"init_from={init_from} holds no checkpoint: give the folder of a run; python -m "
            "reformax.convert makes one of weights of Trax and Hugging Face"
        )
    if step is None:
        step = checkpoints.best_or_latest()
    if step not in steps:
        there = ", ".join(map(str, steps))
        raise SettingError(f"init_from={init_from} is no checkpoint: {folder} has {there}")
    return folder, step
