"""Describes a run's data: in lines, and in fingerprints, which a checkpoint keeps.

Changed data is an error.

A split by shares makes this matter for scores too. Text that grows moves its borders, so that what
is test text now may have been trained on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

# The last two stay in the memory of a task that reads a split when it is needed.
_SPLITS = ("test", "valid", "train")


def summary(stages: Iterable[Any]) -> list[str]:
    """The summaries of the data of all stages, each line once; see `Task.summary`."""
    tasks = [stage.task for stage in stages]
    says = [task.summary for task in reversed(tasks)]  # the run's own first
    return list(dict.fromkeys(line for lines in says if lines is not None for line in lines()))


def of(task: Any, needed: tuple[str, ...]) -> dict[str, str]:
    """The fingerprints of a task's splits.

    Args:
      task: a `reformax.task.Task`; one without fingerprints gives none.
      needed: the splits that must be there; a missing or damaged other one is left out.

    Raises:
      ValueError, OSError: a needed split cannot be read.
    """
    found: dict[str, str] = {}
    for split in _SPLITS if task.fingerprint is not None else ():
        try:
            found[split] = task.fingerprint(split)
        except (ValueError, OSError):
            if split in needed:
                raise
    return found


# How a difference is mended where a run would go on.
FIX = "set the task back, begin in another output_dir, or go on"


def changes(
    kept: Mapping[str, str], now: Mapping[str, str], step: int, allowed: bool, fix: str = FIX
) -> dict[str, dict[str, str]]:
    """The splits that differ from a checkpoint's: split -> {'was': ..., 'is': ...}.

    Args:
      kept: the fingerprints of the checkpoint; a split that is not in both is not compared.
      now: those of the data.
      step: the checkpoint's.
      allowed: whether to return a difference instead of raising it.
      fix: what else than the data as it was there is to do, "with --allow_changed_data" at last.

    Raises:
      ValueError: a split differs and that is not allowed.
    """
    found = {
        split: {"was": kept[split], "is": now[split]}
        for split in now
        if split in kept and kept[split] != now[split]
    }
    if found and not allowed:
        raise ValueError(
            f"the data is not that of checkpoint {step}: {described(found)}; point --data_dir to "
            f"the data as it was, {fix} with --allow_changed_data"
        )
    return found


def described(found: Mapping[str, Mapping[str, str]]) -> str:
    """The result of `changes` in words."""
    return "; ".join(f"{split} was {x['was']} and is {x['is']}" for split, x in found.items())
