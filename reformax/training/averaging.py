"""The mean of a run's last checkpoints.

Attention Is All You Need, section 6.1, averages 5 checkpoints of its base models and 20 of its big
ones.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from reformax.training.checkpoint import Checkpoints


def restore_average(checkpoints: Checkpoints, n: int, like: Any) -> tuple[Any, list[int]]:
    """Averages the parameters to score of the last `n` checkpoints.

    A best checkpoint that was kept while later ones were deleted is not one of the last.

    Args:
      checkpoints: those of a run.
      n: the number of checkpoints.
      like: as in `Checkpoints.restore_params`.

    Returns:
      The mean, and the steps of the checkpoints, ascending.

    Raises:
      ValueError: there are fewer, or as `Checkpoints.restore_params` does.
    """
    if n < 1:
        raise ValueError(f"average:{n} must be of at least 1 checkpoint: average:5")
    there, steps, total = checkpoints.steps(), [], None
    step = there[-1] if there else None
    while len(steps) < n and step in there:
        # One checkpoint at a time is in memory, and sums are float64.
        params, _ = checkpoints.restore_params(step, like)
        params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
        total = params if total is None else jax.tree.map(np.add, total, params)
        steps.insert(0, step)
        step = checkpoints.previous(step)
    if len(steps) < n:
        last = ", ".join(map(str, steps)) or "none"
        if older := ", ".join(map(str, there[: -len(steps)])):  # the best, kept on its own
            last += f"; {older} is from before others that were deleted"
        raise ValueError(
            f"average:{n} needs the last {n} checkpoints and {checkpoints.folder} has "
            f"{len(steps)} ({last}): average fewer, or train with loop.train.keep={n} and "
            "loop.train.checkpoint_every"
        )
    return jax.tree.map(lambda x, old: (x / n).astype(old.dtype), total, like), steps
