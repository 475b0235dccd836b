"""The parts of a run that `start.opened` opens: models, state, compiled steps, record.

A run begins with new weights, with those of another run, or where its own latest checkpoint left
it. Its memory and time are reported before it uses them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from reformax import devices, memory
from reformax.buffers import trained
from reformax.declared import SettingError
from reformax.training import (
    evaluation,
    fingerprints,
    forecast,
    kept_mass,
    optimizer,
    samples,
    starting_weights,
    truncated_backprop,
)
from reformax.training import mesh as mesh_lib
from reformax.training import step as step_lib
from reformax.training.callbacks import Loggers
from reformax.training.checkpoint import Checkpoints
from reformax.training.evaluations import data_key
from reformax.training.fine_tuning import FineTuning
from reformax.training.named_tensors import as_tree, named
from reformax.training.record import Record
from reformax.training.record_lines import RecordLines
from reformax.training.settings import TrainSettings, build
from reformax.training.stages import ResolvedStage, naming


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


class RestoredRun(NamedTuple):
    """The state and the values that a run goes on from.

    Attributes:
      state: the state of a step, on the devices.
      step: steps done.
      info: the values that its checkpoint keeps; empty for a new run.
      data: the fingerprints of splits, which the next checkpoint keeps.
      changed_data: those that differ from the checkpoint's.
      n_params: numbers in the parameters.
      source: of a new run's weights, in words; empty for weights of its own.
      converted: what checkpoints say of the source of a converted model, or None.
    """

    state: step_lib.TrainState
    step: int
    info: dict[str, Any]
    data: dict[str, str]
    changed_data: dict[str, dict[str, str]]
    n_params: int
    source: str = ""
    converted: Any = None

    @property
    def seconds(self) -> float:
        """Seconds that the run took so far."""
        return self.info.get("timing", {}).get("seconds", 0.0)


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
    models = Models(train, settings.built("eval"))
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
    own = settings.own_evaluation
    mesh_lib.check_length("eval_length", own.length, mesh)
    evaluation.check_tokens(own.batch_size, own.length, "eval_batch_size or eval_length")
    for other in settings.other_evaluations:
        with naming(other):
            evaluation.check_mesh(other.task, mesh)
            mesh_lib.check_length("length", other.length, mesh)
            evaluation.check_tokens(other.batch_size, other.length, "batch_size or length")


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
    if without and not (folder / "vocabulary.model").exists():
        size = "" if settings.task.translation is not None else ", vocab_size=256 for bytes"
        raise SettingError(
            f"{folder} was trained without a vocabulary of pieces, and the config's task has one: "
            f"give the task as it was{size}, or another output_dir"
        )
    fingerprint = vocabulary.keep_in(folder, begun=begun)
    if newest is not None:
        checkpoints.check_vocabulary(newest, trained_with, fingerprint)
    return fingerprint


def restore_or_init(
    setup: Setup, checkpoints: Checkpoints, newest: int | None, vocabulary: str | None
) -> RestoredRun:
    """The state to go on from: that of the checkpoint `newest`, or a new one.

    Args:
      setup: the run's.
      checkpoints: of its folder.
      newest: the step of the latest whole one; None if there is none.
      vocabulary: the fingerprint of the run's vocabulary.

    Raises:
      ValueError: the data, the weights to begin with or the checkpoint do not fit.
      SettingError: the state alone takes more memory than a device has.
    """
    settings, models, mesh, key = setup
    init, like = first_states(settings, models, key)
    n_params = sum(x.size for x in jax.tree.leaves(like.params))
    _check_memory(setup, like, n_params)
    if newest is None:
        state, source, converted = _first_state(setup, init, vocabulary)
        return RestoredRun(state, 0, {}, *_data(settings, {}, 0), n_params, source, converted)
    state, info = checkpoints.restore(newest, like, devices.placement(like, mesh))
    data, changed = _data(settings, info.get("data", {}), info["step"])
    return RestoredRun(
        state, info["step"], info, data, changed, n_params, converted=info.get("source")
    )


def first_states(
    settings: TrainSettings, models: Models, key: jax.Array
) -> tuple[Callable[[jax.Array], step_lib.TrainState], step_lib.TrainState]:
    """The function of a new run's first state, and the state's shapes.

    Raises:
      SettingError: the model of a stage has other parameters, or its `fine_tuning` names none.
    """
    built, ema = settings.built_optimizer, settings.ema_decay > 0
    inits = [
        step_lib.init_fn(model, built, (stage.batch_size, stage.length), ema)
        for model, stage in zip(models.train, settings.all_stages, strict=True)
    ]
    init, like = inits[-1], jax.eval_shape(inits[-1], key)
    for stage, other in zip(settings.all_stages, inits[:-1], strict=False):
        if jax.eval_shape(other, key) != like:
            raise SettingError(
                f"{stage.name}.model has other parameters than model: give it the same "
                "sizes, and attention with the same weights"
            )
    for stage in settings.all_stages:
        if stage.fine_tuning is not None:
            with naming(stage):
                stage.fine_tuning.are_trained(trained(like.params))
    return init, like


def _check_memory(setup: Setup, like, n_params: int) -> None:
    """Raises `SettingError` for a state or features that no device holds."""
    settings, models, mesh, _ = setup
    memory.check(
        f"{n_params:,} parameters, their gradient and the optimizer's state",
        mesh_lib.bytes_stored(like, mesh) + mesh_lib.bytes_stored(like.params, mesh),
        "the model's sizes",
    )
    n_features = 0
    for one in settings.all_evaluations:
        with naming(one):
            scored = models.eval, like.params, one.task, one.split
            n_features = evaluation.check_positions(*scored, **one.sizes, mesh=mesh)
    for stage in reversed(settings.all_stages):
        rows = stage.batch_size // (settings.accumulate * devices.n_row_shards(mesh))
        with naming(stage):
            evaluation.check_features(rows, stage.length, n_features, "batch_size or length")


def _first_state(
    setup: Setup, init, vocabulary: str | None
) -> tuple[step_lib.TrainState, str, Any]:
    """The state of step 0, with the weights of another run if the settings say so.

    The other values are `source` and `converted` of `RestoredRun`.
    """
    settings, models, mesh, key = setup
    if settings.init_from is None:
        placement = devices.placement(jax.eval_shape(init, key), mesh)
        return step_lib.jit_once(init, out_shardings=placement)(key), "", None
    like = jax.eval_shape(init, key).params
    backbone = models.eval.backbone_names
    if settings.fresh_heads and not backbone:
        raise SettingError(
            f"fresh_heads is True and model {type(models.eval).__name__} has no backbone_names, "
            "which say what is no head: leave it out"
        )
    names = backbone if settings.fresh_heads else None
    weights = starting_weights.read(settings.init_from, like, vocabulary, names, settings.fresh_ops)
    read, (folder, step), converted = weights
    missing = named(like).keys() - named(read).keys()  # drawn, as in a run without init_from
    drawn = step_lib.jit_once(
        lambda key: {n: x for n, x in named(init(key).params).items() if n in missing}
    )
    fresh = jax.device_get(drawn(key)) if missing else {}
    params = as_tree(named(read) | fresh, like, "")
    what = "the weights"
    if settings.fresh_ops:
        what = "the weights, but for fresh ones of attention algorithms,"
    if settings.fresh_heads:
        heads = [name for name in like if name not in read]
        what = f"fresh {', '.join(heads) or 'nothing'} and the {', '.join(read)}"
        what += " without attention algorithms' own" * settings.fresh_ops
    built, ema = settings.built_optimizer, settings.ema_decay > 0
    first = partial(step_lib.first_state, optimizer=built, ema=ema)
    placement = devices.placement(jax.eval_shape(first, params), mesh)
    state = jax.jit(first, out_shardings=placement)(params)
    words = f"with {what} of {folder} after step {step} "
    return state, words, None if settings.fresh_heads or settings.fresh_ops else converted


def _data(settings: TrainSettings, kept: dict[str, str], step: int) -> tuple[dict[str, str], dict]:
    """The data's fingerprints, and what changed since a checkpoint that has those of `kept`."""
    now = fingerprints.of(settings.task, ("train", settings.eval_split))
    known, compared = {x for name, x in kept.items() if name.startswith("train")}, dict(kept)
    for stage in settings.all_stages[:-1]:
        key, fingerprint = f"train of {stage.name}", stage.task.fingerprint
        if fingerprint is not None and stage.until > step:
            now[key] = fingerprint("train")
            # A stage may have another number, or begin with what the run has read before.
            compared[key] = now[key] if now[key] in known or not known else kept.get(key, "none")
    for other in settings.other_evaluations:  # whose score is made anew where its data changes
        if other.task.fingerprint is not None:
            now[data_key(other)] = compared[data_key(other)] = other.task.fingerprint(other.split)
    return kept | now, fingerprints.changes(compared, now, step, settings.allow_changed_data)


def step_of(
    settings: TrainSettings, model, mesh: Mesh, state, fine_tuning: FineTuning | None = None
):
    """The step of a run for a model built for training and a state, or the shapes of one."""
    return step_lib.step_fn(
        model,
        settings.built_optimizer,
        mesh,
        accumulate=settings.accumulate,
        loss_chunk_len=settings.loss_chunk_len,
        backprop_len=settings.backprop_len,
        label_smoothing=settings.label_smoothing,
        z_loss=settings.z_loss,
        ema_decay=settings.ema_decay,
        fine_tuning=fine_tuning,
        placement=devices.placement(state, mesh),
    )


def compiled(
    setup: Setup,
    restored: RestoredRun,
    batches: Iterator,
    batch: Callable[[ResolvedStage, int], Any],
    say: Callable[[str], None],
) -> tuple[list, Iterator]:
    """The step of each stage; compiles the next one's, and says what it takes.

    It compiles none if there is none to do.

    Args:
      setup, restored: the run's.
      batches: those of the steps to come.
      batch: gives the batch of a stage for the step after so many.
      say: gets what a step takes.

    Returns:
      The steps, and `batches`, none of which is used up.

    Raises:
      SettingError: a step takes more memory than a device has.
    """
    settings, models, mesh, key = setup
    steps, made = [], {}  # stages of one model, and of the same weights, have one step
    for model, stage in zip(models.train, settings.all_stages, strict=True):
        program = id(model), id(stage.fine_tuning)
        if program not in made:
            made[program] = step_of(settings, model, mesh, restored.state, stage.fine_tuning)
        steps.append(made[program])
    if restored.step >= settings.steps:
        return steps, batches
    now, start = settings.stage_after(restored.step), restored.step
    started = time.monotonic()
    say("compiling")
    with naming(settings.all_stages[now]):
        first = next(batches)
    for stage, step in zip(settings.all_stages[now:], steps[now:], strict=True):
        with naming(stage):
            example = first if start == restored.step else tuple(batch(stage, start))
        traced = step.trace(restored.state, example, key)
        products = forecast.products(traced.jaxpr)
        forecast.check_step(products, mesh_lib.bytes_stored(restored.state, mesh), mesh.size)
        if start == restored.step:
            # A call of the jitted function finds the program that is compiled now.
            needed = forecast.memory_of(traced.lower().compile(), len(mesh.local_devices))
        start = stage.until
    say(
        f"compiled in {time.monotonic() - started:.0f} s: a step takes {memory.words(needed)} of "
        f"{memory.words(memory.available())} of memory"
    )
    return steps, chain([first], batches)


def open_record(
    settings: TrainSettings,
    folder: Path,
    restored: RestoredRun,
    config: str | None,
    say: Callable[[str], None],
    check: Callable[[], None],
) -> Record:
    """Opens the record where the checkpoint left it.

    Args:
      settings, folder, restored: the run's.
      config: the text of config.gin.
      say, check: see `RecordLines`.

    Raises:
      OSError: the file cannot be read or written.
    """
    step, info = restored.step, restored.info
    own = (info.get("scored") or {}).get("split", settings.eval_split)
    scored = [own, samples.SPLIT] * (info.get("score") is not None)
    scored += info.get("evaluations", {})
    lines = RecordLines(
        folder / "metrics.jsonl", step, info.get("record"), scored, say=say, check=check
    )
    n_tokens = settings.batch_size * settings.length
    loggers = Loggers(settings.loggers, folder, step, config)
    record = Record(folder, lines, step, settings.own_evaluation.metric, n_tokens, loggers)
    if restored.changed_data and step < settings.steps:
        record.write(step + 1, "data", {"changed": restored.changed_data}, {}, tag="data")
    return record
