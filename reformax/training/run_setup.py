"""What a run is made of: its settings, models and devices, which fit each other, and vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from reformax import durable
from reformax.declared import SettingError
from reformax.training import evaluation, kept_mass, optimizer, truncated_backprop
from reformax.training import mesh as mesh_lib
from reformax.training.checkpoint import Checkpoints
from reformax.training.settings import TrainSettings, build
from reformax.training.stages import naming


class Models(NamedTuple):
    """The models of a run: of each stage's training, and of evaluations."""

    train: list[Any]
    eval: Any


class Setup(NamedTuple):
    """The settings, models, devices and key of a run."""

    settings: TrainSettings
    models: Models
    mesh: Mesh
    key: jax.Array  # of all random numbers


def set_up(settings: TrainSettings) -> Setup:
    """Builds the models and the mesh; raises `SettingError` where devices, model or task misfit."""
    mesh = mesh_lib.make(settings.mesh)
    check_sizes(settings, mesh)
    return Setup(settings, models_of(settings), mesh, jax.random.PRNGKey(settings.seed))


def models_of(settings: TrainSettings) -> Models:
    """Builds the models; raises `SettingError` where they do not fit the task."""
    # Stages of one model share it, and so its programs.
    factories = {id(stage.model): stage.model for stage in settings.all_stages}
    n_classes = settings.task.n_classes
    built = {name: build(model, "train", n_classes) for name, model in factories.items()}
    train = [built[id(stage.model)] for stage in settings.all_stages]
    evaluation.check_model(train[-1], settings.task)
    for model, stage in zip(train[:-1], settings.all_stages, strict=False):
        with naming(stage, ", or give the stage another task"):
            evaluation.check_model(model, stage.task)
    for model, stage in zip(train, settings.all_stages, strict=True):
        with naming(stage):
            truncated_backprop.check(model, settings.backprop_len, stage.length)
    if (every := settings.report_kept_mass_every) is not None:
        kept_mass.check_model(train[-1], f"report_kept_mass_every is {every}")
    models = Models(train, build(settings.model, "eval", n_classes))
    optimizer.check_width(settings.optimizer, models.eval)
    for other in settings.other_evaluations:
        with naming(other):
            evaluation.check_model(models.eval, other.task)
    return models


def check_sizes(settings: TrainSettings, mesh: Mesh) -> None:
    """Raises `SettingError` for batches that do not fit the devices."""
    for stage in reversed(settings.all_stages):  # a stage is not to blame for the run's own values
        with naming(stage):
            evaluation.check_mesh(stage.task, mesh)
            mesh_lib.check_length("length", stage.length, mesh)
            shared = stage.task.labels is None and stage.task.translation is None
            length = stage.length if shared else None
            rows = stage.batch_size, mesh, settings.accumulate, length
            mesh_lib.check_batch_size("batch_size", *rows)
            evaluation.check_tokens(stage.batch_size, stage.length, "batch_size or length")
    main = settings.main_evaluation
    mesh_lib.check_length("eval_length", main.length, mesh)
    evaluation.check_tokens(main.batch_size, main.length, "eval_batch_size or eval_length")
    for other in settings.other_evaluations:
        with naming(other):
            evaluation.check_mesh(other.task, mesh)
            mesh_lib.check_length("length", other.length, mesh)
            evaluation.check_tokens(other.batch_size, other.length, "batch_size or length")


def has_vocabulary(folder: Path) -> bool:
    """Whether a run's folder has a vocabulary of pieces; raises `OSError` if it cannot be read."""
    try:
        durable.read(folder / "vocabulary.model")
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def keep_vocabulary(
    settings: TrainSettings, checkpoints: Checkpoints, newest: int | None, begun: bool
) -> str | None:
    """Makes the vocabulary of pieces the run's; returns its fingerprint.

    Args:
      settings: the run's.
      checkpoints: of its folder.
      newest: the step of the checkpoint that it goes on from.
      begun: whether the folder must hold the vocabulary already.

    Raises:
      ValueError: it is not that of the checkpoint.
    """
    vocabulary = settings.task.kept_vocabulary
    if vocabulary is None:
        return None
    if settings.task.translation is not None:  # before minutes go into the vocabulary
        settings.task.translation.sentences(settings.eval_split)
    folder = checkpoints.folder.parent
    trained_with = None if newest is None else checkpoints.extra(newest).get("vocabulary")
    without = newest is not None and trained_with is None
    if without and not has_vocabulary(folder):
        size = "" if settings.task.translation is not None else ", vocab_size=256 for bytes"
        raise SettingError(
            f"{folder} was trained without a vocabulary of pieces, and the config's task has one: "
            f"give the task as it was{size}, or another output_dir"
        )
    fingerprint = vocabulary.keep_in(folder, begun=begun)
    if newest is not None:
        checkpoints.check_vocabulary(newest, trained_with, fingerprint)
    return fingerprint
