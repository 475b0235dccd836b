"""The state that a run begins with: new weights, those of another run, or its latest checkpoint.

Its memory is reported before it is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax

from reformax import devices, memory
from reformax.buffers import trained
from reformax.declared import SettingError
from reformax.training import evaluation, fingerprints, starting_weights
from reformax.training import mesh as mesh_lib
from reformax.training import step as step_lib
from reformax.training.checkpoint import CheckpointReader, Checkpoints
from reformax.training.evaluations import data_key
from reformax.training.named_tensors import as_tree, named
from reformax.training.run_setup import Models, Setup
from reformax.training.settings import TrainSettings
from reformax.training.stages import naming


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
    data, changed = _checked_data(settings, info)
    return RestoredRun(
        state, info["step"], info, data, changed, n_params, converted=info.get("source")
    )


def check(
    setup: Setup,
    like: step_lib.TrainState,
    checkpoints: CheckpointReader | None,
    newest: int | None,
    vocabulary: Callable[[str | None], str | None],
) -> None:
    """Raises as `restore_or_init` of what does not fit, but for memory; decodes no tensor.

    Args:
      setup, checkpoints, newest: as there; checkpoints may be None if newest is.
      like: the shapes of the state.
      vocabulary: gives the fingerprint, from that of the weights of another run to begin with.
    """
    settings = setup.settings
    if newest is not None:
        _checked_data(settings, checkpoints.check(newest, like))
    elif settings.init_from is not None:
        request = like.params, _names_to_read(setup), settings.fresh_ops
        info = starting_weights.check(settings.init_from, *request)
        starting_weights.check_vocabulary(
            settings.init_from, info, vocabulary(info.get("vocabulary"))
        )


def _checked_data(settings: TrainSettings, info: dict[str, Any]) -> tuple[dict[str, str], dict]:
    """`_data` of a begun run, of which `init_from` is checked too."""
    check_same_source(settings.init_from, info)
    return _data(settings, info.get("data", {}), info["step"])


def check_same_source(init_from: str | None, info: dict[str, Any]) -> None:
    """Raises `SettingError` if a begun run is to begin with weights that it did not begin with.

    Without `init_from` it goes on, and so does a run whose checkpoint is too old to note it.
    """
    before = info.get("init_from", init_from)
    if init_from is None or os.path.abspath(init_from) == os.path.abspath(before or ""):
        return
    first = f"those of {before}" if before else "weights of its own"
    raise SettingError(
        f"init_from={init_from}: the run in this output_dir began with {first} and is at step "
        f"{info['step']}: give another output_dir, or leave init_from out to go on"
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
    names = _names_to_read(setup)
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


def _names_to_read(setup: Setup) -> Sequence[str] | None:
    """The parts of the model that begin with the weights of another run; None: all."""
    model = setup.models.eval
    if not setup.settings.fresh_heads:
        return None
    if not model.backbone_names:
        raise SettingError(
            f"fresh_heads is True and model {type(model).__name__} has no backbone_names, which "
            "say what is no head: leave it out"
        )
    return model.backbone_names


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
