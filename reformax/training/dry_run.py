"""Checks a run's settings and reports the memory of its steps; no step is run.

It also finds the longest sequence and the largest batch that the memory of a device holds.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import jax

from reformax import declared, devices, memory
from reformax.declared import LARGEST, Positive
from reformax.training import (
    capacity,
    compiled_steps,
    evaluation,
    fingerprints,
    first_state,
    forecast,
    run_setup,
    starting_weights,
)
from reformax.training import folder as folder_lib
from reformax.training import mesh as mesh_lib
from reformax.training import step as step_lib
from reformax.training.checkpoint import Checkpoints
from reformax.training.run_setup import Models, Setup
from reformax.training.samples import Samples
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
    setup: Setup, stage: ResolvedStage, model: Any, like: step_lib.TrainState, batch: Any
) -> Needs:
    """Compiles the step of a stage; nothing is computed.

    Args:
      setup: the run's.
      stage, model: the stage, and its model.
      like: the shapes of the run's state.
      batch: arrays of a batch, or their shapes.
    """
    settings, _, mesh, key = setup
    placement = devices.placement(like, mesh)
    arguments = _shapes(like, placement), _shapes(batch, devices.over_tokens(mesh)), key
    step = compiled_steps.step_of(settings, model, mesh, like, stage.fine_tuning)
    # Optimising a CPU's machine code takes half of the time and changes no buffer.
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    options = {"xla_backend_optimization_level": 0} if on_cpu else None
    compiled = step.trace(*arguments).lower().compile(compiler_options=options)
    stats = compiled.memory_analysis()
    return Needs(
        mesh_lib.bytes_stored(like.params, mesh),
        mesh_lib.bytes_stored(like, mesh),
        stats.temp_size_in_bytes,
        forecast.bytes_of(stats),
    )


def _batch(setup: Setup, stage: ResolvedStage) -> Any:
    """The shapes of a stage's first batch."""
    with naming(stage):
        seed = setup.settings.seed
        batch = tuple(stage.task.train_batch(seed, 0, stage.batch_size, stage.length))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)


def _resized(batch: Any, before: ResolvedStage, after: ResolvedStage) -> Any:
    """The shapes of a batch of another stage's sizes."""

    def resized(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        _, *others = x.shape
        if others[:1] == [before.length]:
            others[0] = after.length
        return jax.ShapeDtypeStruct((after.batch_size, *others), x.dtype)

    return jax.tree.map(resized, batch)


def _capacities(
    setup: Setup, stage: ResolvedStage, batch: Any, found: Needs, limit: int
) -> Iterator[str]:
    """Lines on the longest sequence and the largest batch of the last stage that fit.

    `limit` is the bytes of a device; see `capacity`.
    """
    settings, models, mesh, key = setup
    model, started = models.train[-1], time.monotonic()
    only = ""  # why the task has no other length, or no longer ones
    try:
        stage.task.train_batch(settings.seed, 0, 1, 2 * stage.length)
    except ValueError as error:
        only = str(error).partition("\n")[0]

    def bytes_at(name: str, size: int) -> int:
        other = stage._replace(**{name: size})
        shape, ema = (other.batch_size, other.length), settings.ema_decay > 0
        init = step_lib.init_fn(model, settings.built_optimizer, shape, ema)
        # Weights of some algorithms are by the length.
        like = jax.eval_shape(init, key)
        try:
            return needs(setup, other, model, like, _resized(batch, stage, other)).total
        except jax.errors.JaxRuntimeError:  # the compiler's, of arrays that are too large
            return 2**62

    def search(name: str, unit: int, most: int) -> capacity.Capacity:
        begin = getattr(stage, name), found.total
        return capacity.search(partial(bytes_at, name), begin, found.state, limit, unit, most)

    length = None
    if only:
        yield f"longest sequence that fits: not sought, the task has no longer ones: {only}"
    else:
        longest = min(LARGEST // stage.batch_size, getattr(model, "max_length", None) or LARGEST)
        unit = math.lcm(devices.n_sequence_shards(mesh), settings.backprop_len or 1)
        length = search("length", unit, longest)
        words = _words(length, f"{stage.batch_size:,} x {{:,}} tokens")
        yield f"longest sequence that fits: {words}"
    rows = settings.accumulate * devices.n_row_shards(mesh)
    batch_size = search("batch_size", rows, LARGEST // stage.length)
    yield f"largest batch that fits: {_words(batch_size, f'{{:,}} x {stage.length:,} tokens')}"
    n = batch_size.n_programs + (length.n_programs if length else 0)
    yield f"{n} more sizes compiled in {time.monotonic() - started:.0f} s"


def _words(found: capacity.Capacity, size: str) -> str:
    """The result of a search, in words."""
    if not found.fits:
        return "none fits"
    why = f"; more is refused: {found.refused}" if found.refused else ""
    return f"{size.format(found.fits)}{'' if found.is_close else ' or more'}{why}"


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
    models = run_setup.models_of(settings)
    _, like = first_state.first_states(settings, models, jax.random.PRNGKey(settings.seed))
    _check_evaluations(settings, models, like)


def _check_evaluations(
    settings: TrainSettings, models: Models, like: Any, learnt: bool = False, **mesh: Any
) -> None:
    """Raises for an evaluation that the settings do not allow.

    Args:
      settings, models: the run's.
      like: the shapes of its state.
      learnt: whether to check those whose task learns a vocabulary, in minutes, and no others.
      **mesh: the mesh, if one is made.
    """
    for one in settings.all_evaluations:
        if (one.task.kept_vocabulary is not None) == learnt:
            with naming(one):
                one.task.n_targets(one.split)  # raises for an unknown split
                scored = models.eval, like.params, one.task, one.split
                evaluation.check_positions(*scored, **one.sizes, **mesh)


def report(
    *,
    output_dir: str | os.PathLike | None = None,
    has_data: bool = True,
    device_memory: Positive | None = None,
    **settings: Any,
) -> Iterator[str]:
    """Lines on the devices, and on the memory that the step of each stage needs on one.

    Further lines have the longest sequence and the largest batch of the last stage that fit. The
    settings are checked, and all data read, before this returns; each line then comes once it is
    known. Nothing is written.

    Args:
      output_dir: the run's folder, which need not exist; None: no run's.
      has_data: whether the task has the run's data; False: what that decides is not checked, such
        as the number of classes and so the shapes of a checkpoint.
      device_memory: GiB that a device has for the run; None: what the backend says.
      **settings: those of `loop.train`.

    Raises:
      ValueError, OSError: `loop.train` would raise it before its first step, but for memory that is
        too small, another training in the folder, and a vocabulary that is yet to be learnt.
    """
    settings = TrainSettings(**settings)
    setup = run_setup.set_up(settings)
    mesh = setup.mesh
    _, like = first_state.first_states(settings, setup.models, setup.key)
    _check_evaluations(settings, setup.models, like, mesh=mesh)
    _check_beginning(setup, like, output_dir, has_data)
    lines = fingerprints.summary(settings.all_stages)
    if settings.unfinished_warmup is not None:
        lines.append(f"note: {settings.unfinished_warmup}")
    declared.check("device_memory", device_memory, Positive | None)
    limit = memory.available() if device_memory is None else int(device_memory * 2**30)
    lines.append(f"{mesh_lib.words(mesh)}, {memory.words(limit)} of memory each")
    if mesh.devices.flat[0].platform == "cpu":
        lines[-1] += "; programs for cpu have the figures below, those for a GPU have others"
    batches = [_batch(setup, stage) for stage in settings.all_stages]
    _check_evaluations(settings, setup.models, like, learnt=True, mesh=mesh)
    return chain(lines, _memory(setup, like, batches, limit))


def _check_beginning(
    setup: Setup, like: step_lib.TrainState, output_dir: str | os.PathLike | None, has_data: bool
) -> None:
    """Raises for a folder, weights or samples that the settings do not allow.

    Args:
      setup: the run's.
      like: the shapes of its state.
      output_dir: its folder; None: it has none.
      has_data: as in `report`.
    """
    settings, checkpoints, newest = setup.settings, None, None
    kept = settings.task.kept_vocabulary
    if output_dir is not None:
        folder_lib.check_output_dir(output_dir)
        checkpoints = Checkpoints(output_dir, settings.keep, copies=settings.checkpoint_copies)
        if checkpoints.steps():  # it fetches no copies then
            newest = checkpoints.newest_whole()
        elif checkpoints.begun_elsewhere():
            return
    is_kept = checkpoints is not None and run_setup.has_vocabulary(checkpoints.folder.parent)
    if not has_data:
        if newest is not None:
            info = {"step": newest, **checkpoints.extra(newest)}
            first_state.check_same_source(settings.init_from, info)
        elif settings.init_from is not None:
            # Raises where a vocabulary cannot be read.
            run_setup.has_vocabulary(starting_weights.check_whole(settings.init_from))
        return
    if newest is not None:
        run_setup.keep_vocabulary(settings, checkpoints, newest, begun=True)

    def vocabulary(of_weights: str | None) -> str | None:
        if kept is None or is_kept:
            return kept and kept.keep_in(checkpoints.folder.parent, begun=True)
        return of_weights or "one of its own"  # learning it would take minutes

    first_state.check(setup, like, checkpoints, newest, vocabulary)
    if settings.sample_every is not None and (kept is None or is_kept):
        samples = Samples(setup.models.eval, settings, setup.mesh)
        jax.eval_shape(lambda params: samples.check(params, lambda line: None), like.eval_params)


def _memory(
    setup: Setup, like: step_lib.TrainState, batches: list[Any], limit: int
) -> Iterator[str]:
    """Lines on the memory of each stage, and on the sizes of the last one that fit.

    `like` and `batches` are shapes, of the state and of a batch of each stage.
    """
    stages = setup.settings.all_stages
    for number, (stage, model) in enumerate(zip(stages, setup.models.train, strict=True)):
        if stage.program in (after.program for after in stages[number + 1 : number + 2]):
            continue  # the line of the stage after it is its own
        found = needs(setup, stage, model, like, batches[number])
        parts = {
            "parameters": found.params,
            "state": found.state,
            "temporary": found.temp,
            "in all": found.total,
        }
        sizes = ", ".join(f"{name} {n / MIB:,.1f}" for name, n in parts.items())
        what = f"to step {stage.until:,}, {stage.batch_size:,} x {stage.length:,} tokens"
        over = ", more than there is" if found.total > limit else ""
        yield f"{what}: MiB of a device: {sizes}{over}"
    try:
        yield from _capacities(setup, stages[-1], batches[-1], found, limit)
    except Exception as error:  # of a size that no run would take
        what = str(error).partition("\n")[0]
        yield f"note: the sizes that fit are not known: {type(error).__name__}: {what}"
