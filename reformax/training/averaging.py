"""The mean of a run's last checkpoints.

Attention Is All You Need, section 6.1, averages 5 checkpoints of its base models and 20 of its big
ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from reformax.declared import SettingError
from reformax.training.checkpoint import CheckpointReader

# A run is read by its own config, so the command's settings make the model another.
FIX = "leave out the settings that change it"


def last_configs(checkpoints: CheckpointReader, n: int) -> dict[int, str | None]:
    """The configs of a run's last `n` checkpoints by their steps, ascending.

    Temporary ones are not counted, because the machine's speed decides when they are saved. A best
    checkpoint that was kept while later ones were deleted is not one of the last.

    Raises:
      ValueError: there are fewer, or as `CheckpointReader.config` does.
    """
    if n < 1:
        raise SettingError(f"average:{n} must be of at least 1 checkpoint: average:5")
    there, found = checkpoints.steps(), {}
    step = there[-1] if there else None
    if there and checkpoints.is_temporary(step):
        step = checkpoints.previous(step)
    while len(found) < n and step in there:
        found = {step: checkpoints.config(step), **found}
        step = checkpoints.previous(step)
    if len(found) < n:
        last = ", ".join(map(str, found)) or "none"
        # The best one, which is kept apart, and temporary ones.
        if others := ", ".join(str(step) for step in there if step not in found):
            last += f"; {others} is from before others that were deleted, or is temporary"
        raise SettingError(
            f"average:{n} needs the last {n} checkpoints and {checkpoints.folder} has "
            f"{len(found)} ({last}): average fewer, or train with loop.train.keep={n} and "
            "loop.train.checkpoint_every"
        )
    return found


def restore_mean(
    checkpoints: CheckpointReader, steps: Sequence[int], like: Any
) -> tuple[Any, dict[str, Any]]:
    """The mean of the parameters to score of some checkpoints.

    Args:
      checkpoints: those of a run.
      steps: the steps of those to average, ascending; of one it is its parameters.
      like: as in `CheckpointReader.restore_params`.

    Returns:
      The mean, and what `CheckpointReader.restore_params` says of the last.

    Raises:
      ValueError: as `CheckpointReader.restore_params` does.
    """
    if len(steps) == 1:
        return checkpoints.restore_params(steps[0], like, FIX)
    total = None
    for step in steps:
        # One checkpoint at a time is in memory, and sums are float64.
        params, info = checkpoints.restore_params(step, like, FIX)
        params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
        total = params if total is None else jax.tree.map(np.add, total, params)
    mean = jax.tree.map(lambda x, old: (x / len(steps)).astype(old.dtype), total, like)
    return mean, info
