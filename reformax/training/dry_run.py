"""Checks a run's settings and reports the memory of its steps; no step is run."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from reformax import devices, memory
from reformax.training import evaluation, fingerprints, opening, optimizer, starting_weights
from reformax.training import mesh as mesh_lib
from reformax.training import step as step_lib
from reformax.training.loss import vocabulary_of
from reformax.training.settings import TrainSettings
from reformax.training.stages import ResolvedStage, naming

MIB = 2**20


class Needs(NamedTuple):
    """The bytes that a step needs on a device.

    Attributes:
      params: of the weights.
      state: of the weights, the optimizer's state and the moving average.
      temp: of everything between: activations, gradients, gathered weights.
      total: of all, the batch and the program too.
    """

    params: int
    state: int
    temp: int
    total: int


def needs(
    setup: opening.Setup, stage: ResolvedStage, model: Any, like: step_lib.TrainState
) -> Needs:
    """Compiles the step of a stage; nothing is computed.

    Args:
      setup: the run's.
      stage, model: the stage, and its model.
      like: the shapes of the run's state.
    """
    settings, _, mesh, key = setup
    placement = devices.placement(like, mesh)
    with naming(stage):
        batch = tuple(stage.task.train_batch(settings.seed, 0, stage.batch_size, stage.length))
    arguments = _shapes(like, placement), _shapes(batch, devices.over_tokens(mesh)), key
    step = opening.step_of(settings, model, mesh, like)
    compiled = step.trace(*arguments).lower().compile()
    stats = compiled.memory_analysis()
    held = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return Needs(
        mesh_lib.bytes_stored(like.params, mesh),
        mesh_lib.bytes_stored(like, mesh),
        stats.temp_size_in_bytes,
        held + stats.temp_size_in_bytes + stats.generated_code_size_in_bytes,
    )


def _shapes(tree: Any, placement: Any) -> Any:
    """The shapes of arrays on their devices."""
    if not isinstance(placement, jax.sharding.Sharding):
        return jax.tree.map(_shape, tree, placement)
    return jax.tree.map(lambda x: _shape(x, placement), tree)


def _shape(x: Any, placement: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placement)


def check(**settings: Any) -> None:
    """Builds what the settings of `loop.train` name and traces the model; compiles nothing.

    No device is used, since the run may have others.

    Raises:
      Exception: the settings do not fit each other, or the model raises it.
    """
    settings = TrainSettings(**settings)
    models = opening.models_of(settings)
    _, like = opening.first_states(settings, models, jax.random.PRNGKey(settings.seed))
    _check_evaluation(settings, models, like)


def _check_evaluation(
    settings: TrainSettings, models: opening.Models, like: Any, **mesh: Any
) -> None:
    """Raises for an evaluation that the settings do not allow; `like` has the state's shapes."""
    for one in (settings.own_evaluation, *settings.other_evaluations):
        if vocabulary_of(one.task) is None:  # learning it would take minutes
            with naming(one):
                one.task.n_targets(one.split)  # raises for an unknown split
                scored = models.eval, like.params, one.task, one.split
                evaluation.check_positions(*scored, **one.sizes, **mesh)


def report(*, begun: bool = False, **settings: Any) -> list[str]:
    """Lines on the devices, and on the memory that the step of each stage needs on one.

    Args:
      begun: whether the run has a checkpoint, and so no need of `init_from`.
      **settings: those of `loop.train`.

    Raises:
      SettingError: the settings do not fit the devices or each other, or `init_from` holds no such
        checkpoint.
    """
    settings = TrainSettings(**settings)
    mesh = mesh_lib.make(settings.mesh)
    opening.check_sizes(settings, mesh)
    models, key = opening.models_of(settings), jax.random.PRNGKey(settings.seed)
    _, like = opening.first_states(settings, models, key)
    _check_evaluation(settings, models, like, mesh=mesh)
    if settings.init_from is not None and not begun:
        starting_weights.found(settings.init_from)
    lines = fingerprints.summary(settings.all_stages)
    if line := optimizer.peakless(settings.optimizer, settings.steps):
        lines.append(f"note: {settings.named(line) if settings.named else line}")
    lines.append(f"{mesh_lib.words(mesh)}, {memory.words(memory.available())} of memory each")
    if mesh.devices.flat[0].platform == "cpu":
        lines[-1] += "; programs for cpu have the figures below, those for a GPU have others"
    setup, stages = opening.Setup(settings, models, mesh, key), settings.all_stages
    for stage, model, after in zip(stages, models.train, [*stages[1:], None], strict=True):
        if after is not None and stage.program == after.program:
            continue  # the line of the stage after it is its own
        found = needs(setup, stage, model, like)
        parts = {
            "parameters": found.params,
            "state": found.state,
            "temporary": found.temp,
            "in all": found.total,
        }
        sizes = ", ".join(f"{name} {n / MIB:,.1f}" for name, n in parts.items())
        what = f"to step {stage.until:,}, {stage.batch_size:,} x {stage.length:,} tokens"
        over = ", more than there is" if found.total > memory.available() else ""
        lines.append(f"{what}: MiB of a device: {sizes}{over}")
    return lines
