"""The run that the flags name: its config, its model and one of its checkpoints."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

# The settings of a run that building its model takes.
MODEL = ("model", "batch_size", "length")


def parse(args: argparse.Namespace, data_dir: str | None = None) -> None:
    """Parses the run's config.gin, then the settings of --config."""
    from reformax.cli import config

    config.parse([str(config_file(Path(args.output_dir)))], args.config, data_dir=data_dir)


def config_file(folder: Path) -> Path:
    """A run's config.gin, written anew from its latest checkpoint where it is missing.

    Raises:
      ValueError: the folder holds no run.
    """
    path = folder / "config.gin"
    if not path.is_file():
        from reformax.training.checkpoint import Checkpoints

        checkpoints = Checkpoints(folder)
        steps = checkpoints.steps()
        text = checkpoints.config(steps[-1]) if steps else None
        if text is None:
            raise ValueError(
                f"output_dir={folder} holds no run: train.py writes config.gin into it"
            )
        path.write_text(text)
        print(f"note: {path} was missing; it is written from the checkpoint of step {steps[-1]}")
    return path


def restore_model(args: argparse.Namespace, run: dict[str, Any]) -> tuple[Any, Any, list[int]]:
    """Builds the model for evaluation and reads its parameters.

    Args:
      args: the flags of `flags.add_run`.
      run: the run's settings, at least those of `MODEL`.

    Returns:
      The model, its parameters, and the steps of the checkpoints that they are from.
    """
    import jax

    from reformax.training.averaging import restore_average
    from reformax.training.checkpoint import Checkpoints

    checkpoints = Checkpoints(args.output_dir)
    model = run["model"](mode="eval")
    shape = (run["batch_size"], run["length"])
    like = jax.eval_shape(lambda key: model.init_params(key, shape), jax.random.PRNGKey(0))
    averaged = re.fullmatch(r"average:(\d+)", args.checkpoint)
    if averaged:
        return model, *restore_average(checkpoints, int(averaged[1]), like)
    step = _step(checkpoints, args.checkpoint)
    return model, checkpoints.restore_params(step, like)[0], [step]


def named(steps: list[int]) -> str:
    """The checkpoints of these steps, in words."""
    if len(steps) == 1:
        return f"checkpoint of step {steps[0]}"
    return f"mean of the checkpoints of steps {', '.join(map(str, steps))}"


def keep_vocabulary(args: argparse.Namespace, vocabulary, step: int) -> None:
    """Reads the run's vocabulary and checks it against a checkpoint.

    Args:
      args: the flags of `flags.add_run`.
      vocabulary: a `reformax.data.base.Vocabulary`; takes on what the run's folder holds.
      step: the checkpoint's.

    Raises:
      ValueError: the run's folder has no vocabulary, or not the checkpoint's.
    """
    from reformax.training.checkpoint import Checkpoints

    fingerprint = vocabulary.keep_in(args.output_dir, begun=True)
    Checkpoints(args.output_dir).check_vocabulary(step, fingerprint)


def changed_data(args: argparse.Namespace, task, step: int) -> dict[str, dict[str, str]]:
    """Compares a split with the data of a checkpoint; see `reformax.training.fingerprints.changes`.

    Args:
      args: the flags of `flags.add_run` and of `flags.add_changed_data`, and `split`.
      task: a `reformax.data.base.Task`.
      step: the checkpoint's.

    Raises:
      ValueError: the split differs and --allow_changed_data is not given.
    """
    from reformax.training import fingerprints
    from reformax.training.checkpoint import Checkpoints

    kept = Checkpoints(args.output_dir).extra(step).get("data", {})
    if task.fingerprint is None or args.split not in kept:
        return {}
    now = {args.split: task.fingerprint(args.split)}
    found = fingerprints.changes(kept, now, step, args.allow_changed_data)
    if found:
        print(f"note: the data has changed: {fingerprints.described(found)}")
    return found


def _step(checkpoints, which: str) -> int:
    steps = checkpoints.steps()
    if not steps:
        raise ValueError(f"no checkpoint in {checkpoints.folder}: train.py saves one after a while")
    if which == "latest":
        return steps[-1]
    if which == "best":  # a run stopped before its first evaluation has only unscored ones
        best = checkpoints.best_step()
        return steps[-1] if best is None else best
    if not which.isdigit():
        raise ValueError(
            f"checkpoint={which} must be best, latest, average:N or one of the steps {steps}"
        )
    return int(which)
