"""The run that the flags name: one of its checkpoints, that checkpoint's config, and its model."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from reformax import durable
from reformax.declared import SettingError, some_of
from reformax.durable import user_path

# The settings of a run that building its model, and placing it, takes.
MODEL = ("model", "batch_size", "length", "mesh")
# Training deletes checkpoints. A reader that lost one looks again so many times.
TRIES = 5
# Classes of a model whose config names no number, and whose checkpoint is too old to note it.
_N_CLASSES = 10

T = TypeVar("T")


class Saved(NamedTuple):
    """A trained model as it was saved."""

    model: Any
    params: Any
    steps: list[int]  # of the checkpoints that the parameters are from
    info: dict[str, Any]  # what `CheckpointReader.restore` says of the last of them
    run: dict[str, Any]  # the settings of `MODEL`
    mesh: Any  # the devices that compute with it
    folder: Path


def restore(args: argparse.Namespace, data_dir: str | None = None) -> Saved:
    """`load` with the flags of `flags.add_run`."""
    options = {"trusted": args.trust_config, "data_dir": data_dir}
    return load(args.output_dir, args.checkpoint, args.config, **options)


def load(
    folder: str | Path,
    checkpoint: str = "best",
    overrides: Sequence[str] = (),
    *,
    mode: str = "eval",
    **options,
) -> Saved:
    """Builds the model of the checkpoints that are chosen, and reads its parameters.

    The checkpoints' own config is in use afterwards, with the overrides. The folder's config.gin
    may be that of later steps: it counts only for checkpoints that hold no config.

    Args:
      folder: the run's.
      checkpoint: 'best', 'latest', a step, or 'average:N'.
      overrides: settings of --config.
      mode: "eval" or "train", of the model.
      **options: `trusted` and `data_dir` of `config.parse_saved`.

    Raises:
      ValueError: there is no such checkpoint, it is damaged, the config names more than
        `reformax.cli.trust` allows, or the checkpoints to average are of several models.
    """
    import jax

    from reformax.cli import parsed
    from reformax.training import loop
    from reformax.training import mesh as mesh_lib
    from reformax.training.averaging import restore_mean
    from reformax.training.checkpoint import CheckpointReader
    from reformax.training.named_tensors import check_finite
    from reformax.training.settings import build

    folder = user_path("output_dir", folder)
    checkpoints = CheckpointReader(folder)

    def read(configs: dict[int, str | None]) -> Saved:
        _parse(checkpoints, configs, overrides, **options)
        run = parsed.bindings(loop.train, MODEL)
        steps = list(configs)
        n_classes = checkpoints.extra(steps[-1]).get("n_classes", _N_CLASSES)
        model = build(run["model"], mode, n_classes)
        shape = (run["batch_size"], run["length"])
        like = jax.eval_shape(lambda key: model.init_params(key, shape), jax.random.PRNGKey(0))
        params, info = restore_mean(checkpoints, steps, like)
        check_finite(params, named(steps))
        mesh = mesh_lib.make(run.get("mesh"))
        return Saved(model, params, steps, info, run, mesh, folder)

    return steadily(checkpoints, lambda: _choose(checkpoints, checkpoint), read)


def steadily(checkpoints, choose: Callable[[], dict[int, Any]], read: Callable[[Any], T]) -> T:
    """`read(choose())`, once more where training deleted or wrote a chosen checkpoint meanwhile.

    Args:
      checkpoints: `reformax.training.checkpoint.CheckpointReader`.
      choose: the configs of checkpoints by step.
      read: reads them.

    Raises:
      ValueError: training was faster `TRIES` times.
      Exception: that of `choose` or `read`, where the checkpoints stayed as they were.
    """
    for _ in range(TRIES):
        before = _identities(checkpoints)
        try:
            return read(choose())
        except Exception:
            if _identities(checkpoints) == before:
                raise
    raise ValueError(
        f"training replaced the checkpoints in {checkpoints.folder} while they were read, {TRIES} "
        "times: try again, or raise loop.train.keep"
    )


def parse(
    checkpoints, step: int, text: str | None, overrides: Sequence[str] = (), **options
) -> None:
    """Parses a checkpoint's config, or the folder's config.gin if the checkpoint has none.

    Args:
      checkpoints: `reformax.training.checkpoint.CheckpointReader`.
      step: the checkpoint's.
      text: its config, if it has one.
      overrides: settings of --config.
      **options: `trusted` and `data_dir` of `config.parse_saved`.

    Raises:
      ValueError: neither has a config.
      ConfigError: as `config.parse_saved` does.
    """
    from reformax.cli import config

    folder = checkpoints.folder.parent
    source = checkpoints.folder / str(step) / "checkpoint.json"
    if text is None:
        source = folder / "config.gin"
        if not source.is_file():
            raise _no_run(folder)
        text = durable.read(source, config.MOST).decode()
    config.parse_saved(text, str(_shown(source)), overrides, **options)


def choose(checkpoints, which: str) -> int:
    """The step of 'best', 'latest' or a number.

    Raises:
      ValueError: there is no checkpoint, or `which` is none of these.
    """
    steps = _steps(checkpoints)
    if which == "latest":
        return steps[-1]
    if which == "best":
        return checkpoints.best_or_latest()
    if not which.isdigit():
        raise SettingError(
            f"checkpoint={which} must be best, latest, average:N or one of the steps {steps}"
        )
    return int(which)


def named(steps: list[int]) -> str:
    """The checkpoints of these steps, in words."""
    if len(steps) == 1:
        return f"checkpoint of step {steps[0]}"
    return f"mean of the checkpoints of steps {', '.join(map(str, steps))}"


def identities(folder: str | Path, steps: Sequence[int]) -> list[str]:
    """Tells checkpoints from others of the same steps, wherever their folder is."""
    from zlib import crc32

    from reformax.training.manifest import FILE

    files = [Path(folder) / "checkpoints" / str(step) / FILE for step in steps]
    return [f"{step} ({crc32(durable.read(x)):08x})" for step, x in zip(steps, files, strict=True)]


def keep_vocabulary(vocabulary, saved: Saved) -> None:
    """Reads the run's vocabulary and checks it against a checkpoint.

    Args:
      vocabulary: a `reformax.task.Vocabulary`; takes on what the run's folder holds.
      saved: the model.

    Raises:
      ValueError: the run's folder has no vocabulary, or not the checkpoint's.
    """
    from reformax.training.checkpoint import CheckpointReader

    fingerprint = vocabulary.keep_in(saved.folder, begun=True)
    CheckpointReader(saved.folder).check_vocabulary(
        saved.steps[-1], saved.info.get("vocabulary"), fingerprint
    )


def vocabulary_of(saved: Saved):
    """The run's `reformax.data.pieces.PieceVocabulary`, as `keep_vocabulary`; None without one."""
    if saved.info.get("vocabulary") is None:
        return None
    from reformax.data.pieces import PieceVocabulary

    vocabulary = PieceVocabulary(0)
    keep_vocabulary(vocabulary, saved)
    return vocabulary


def changed_data(args: argparse.Namespace, task, saved: Saved) -> dict[str, dict[str, str]]:
    """Compares a split with the data of a checkpoint; see `reformax.training.fingerprints.changes`.

    Args:
      args: the flags of `flags.add_run` and of `flags.add_changed_data`, and `split`.
      task: a `reformax.task.Task`.
      saved: the model.

    Raises:
      ValueError: the split differs and --allow_changed_data is not given.
    """
    from reformax.training import fingerprints

    kept = saved.info.get("data", {})
    if task.fingerprint is None or args.split not in kept:
        return {}
    now = {args.split: task.fingerprint(args.split)}
    fix = "or score what is there"
    found = fingerprints.changes(kept, now, saved.steps[-1], args.allow_changed_data, fix)
    if found:
        print(f"note: the data has changed: {fingerprints.described(found)}")
    return found


def _steps(checkpoints) -> list[int]:
    """The steps that have a checkpoint; raises `SettingError` if there are none."""
    steps = checkpoints.steps()
    if not steps:
        folder = checkpoints.folder
        _refuse_other(folder.parent)
        if not folder.exists() and not (folder.parent / "config.gin").exists():
            raise _no_run(folder.parent)
        raise SettingError(f"no checkpoint in {folder}: training saves one after a while")
    return steps


def _no_run(folder: Path) -> SettingError:
    return SettingError(
        f"output_dir={_shown(folder)} holds no run: training writes config.gin and checkpoints "
        "into it"
    )


def _refuse_other(folder: Path) -> None:
    """Raises `SettingError` for a folder of checkpoints, for a checkpoint, and for one of runs."""
    if folder.parent.name == "checkpoints" and folder.is_dir():
        flags = f"--output_dir={_shown(folder.parent.parent)} --checkpoint={folder.name}"
        raise SettingError(f"output_dir={_shown(folder)} is a checkpoint: give {flags}")
    if folder.name == "checkpoints" and folder.is_dir():
        run = _shown(folder.parent)
        raise SettingError(f"output_dir={_shown(folder)} is of a run: give --output_dir={run}")
    runs = [_shown(path.parent) for path in sorted(folder.glob("*/config.gin"))]
    if runs and not (folder / "config.gin").exists():
        raise SettingError(
            f"output_dir={_shown(folder)} holds the runs {some_of([x.name for x in runs])}: give "
            f"one, such as --output_dir={shlex.quote(str(runs[0]))}"
        )


def _choose(checkpoints, which: str) -> dict[int, str | None]:
    """The configs of the checkpoints to read, by step."""
    from reformax.training.averaging import last_configs

    if averaged := re.fullmatch(r"average:(\d+)", which):
        _steps(checkpoints)  # refuses a folder that has none
        return last_configs(checkpoints, int(averaged[1]))
    step = choose(checkpoints, which)
    return {step: checkpoints.config(step)}


def _parse(
    checkpoints, configs: dict[int, str | None], overrides: Sequence[str], **options
) -> None:
    """Parses the configs, the latest one last; raises `ValueError` if their models differ."""
    from reformax.cli import parsed
    from reformax.training import loop

    models: dict[int, dict[str, str]] = {}
    for step, text in configs.items():
        parse(checkpoints, step, text, overrides, **options)
        if len(configs) > 1:
            models[step] = parsed.settings_in(parsed.described(loop.train, "model"), "model")
    for one, other in itertools.pairwise(models):
        for name in models[one] | models[other]:
            first, second = (models[step].get(name, "not set") for step in (one, other))
            if first != second:
                raise SettingError(
                    f"average:{len(models)} is of several models: {name} is {first} at step {one} "
                    f"and {second} at step {other}: average the checkpoints after step {one} alone"
                )


def _identities(checkpoints) -> set[tuple]:
    """Tells the checkpoints that are there now from others of the same steps."""
    from reformax.training.checkpoint.reading import OLD

    found = set()
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for entry in checkpoints.folder.iterdir():
            if entry.name.removeprefix(OLD).isdigit():  # see `CheckpointReader.renamed`
                stat = entry.lstat()
                found.add((entry.name, stat.st_ino, stat.st_ctime_ns))
    return found


def _shown(path: Path) -> Path:
    """The path from the working directory, if it is in there."""
    folder = Path.cwd()
    return path.relative_to(folder) if path.is_relative_to(folder) else path
