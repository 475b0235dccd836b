"""Opens a run in its folder, and closes it: what comes before the first step and after the last.

The order is part of what resuming promises: nothing is written before the config is known to be the
run's own and able to run.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from reformax import devices
from reformax.declared import SettingError
from reformax.training import (
    alike,
    fingerprints,
    kept_mass,
    opening,
    optimizer,
    placing,
    utilization,
)
from reformax.training import mesh as mesh_lib
from reformax.training.callbacks import Callbacks
from reformax.training.checkpoint import Checkpoints
from reformax.training.decisions import Decisions
from reformax.training.folder import tell_changes, write_config
from reformax.training.interrupt import Interrupt
from reformax.training.lock import alone_in
from reformax.training.messages import Messages
from reformax.training.prefetch import prefetch
from reformax.training.processes import Processes
from reformax.training.record import Bar, NoRecord, Record
from reformax.training.run import Run, RunState, report_notes, report_saves
from reformax.training.samples import Samples
from reformax.training.scores import Scores
from reformax.training.settings import TrainSettings
from reformax.training.stages import ResolvedStage, naming
from reformax.training.step_log import StepLog


class _Parts(NamedTuple):
    """The parts of a run that do not depend on its folder."""

    setup: opening.Setup
    processes: Processes
    messages: Messages
    checkpoints: Checkpoints
    scores: dict[str, Scores]
    samples: Samples
    interrupt: Interrupt
    callbacks: Callbacks
    decisions: Decisions


@contextmanager
def opened(folder: Path, settings: TrainSettings) -> Iterator[tuple[Run, RunState]]:
    """A run, from the latest checkpoint in its folder if there is one; closed with the context.

    Raises:
      ValueError: devices, model, task, data or a checkpoint do not fit, or no checkpoint is whole.
      SettingError: a step takes more memory than a device has.
      OSError: another training writes into the folder, or it cannot be read or written.
      FloatingPointError: the error that ended the run, with the way back.
      NotSaved: the last checkpoint could not be written.
      Exception: what a callback raised.
    """
    parts = _checked(folder, settings)
    with ExitStack() as stack:
        run, state = _open(parts, folder, stack)
        with _closing(run, state):
            yield run, state


def _checked(folder: Path, settings: TrainSettings) -> _Parts:
    """Checks that devices, model and task fit; writes no file yet."""
    processes = Processes.of_jax()
    if not processes.first:  # which alone says anything
        settings = replace(settings, progress=False)
    messages = Messages(settings.progress, processes.first)
    mesh = mesh_lib.make(settings.mesh)
    opening.check_sizes(settings, mesh)
    together = processes.branch("checkpoints")
    checkpoints = Checkpoints(folder, settings.keep, together, settings.checkpoint_copies)
    models, key = opening.models_of(settings), jax.random.PRNGKey(settings.seed)
    scores = {
        one.label: Scores(models.eval, settings, mesh, one) for one in settings.all_evaluations
    }
    interrupt, callbacks = Interrupt(messages.acknowledge), Callbacks(settings.callbacks)
    return _Parts(
        opening.Setup(settings, models, mesh, key),
        processes,
        messages,
        checkpoints,
        scores,
        Samples(models.eval, settings, mesh),
        interrupt,
        callbacks,
        Decisions(processes, interrupt, callbacks, messages.acknowledge),
    )


def _open(parts: _Parts, folder: Path, stack: ExitStack) -> tuple[Run, RunState]:
    """Opens the folder, the state, the record and the stream of batches."""
    setup, processes, messages, checkpoints, scores, samples, interrupt, *_ = parts
    settings, mesh = setup.settings, setup.mesh
    if processes.count > 1:
        processes.compare(alike.facts())
    _check_alike(processes, "settings", settings.config_text)
    lock = processes.by_first(lambda: stack.enter_context(alone_in(folder, messages.say)))
    newest = checkpoints.newest_whole()
    if settings.task.kept_vocabulary is not None:  # which may be learnt first, in minutes
        messages.say("tokenizing")
    vocabulary = _keep_vocabulary(parts, newest)
    for one in settings.all_evaluations:
        with naming(one):
            one.task.n_targets(one.split)  # an unknown split fails now
    restored = opening.begin(setup, checkpoints, newest, vocabulary)
    _check_alike(processes, "data", lambda: restored.data)
    samples.check(restored.state.eval_params, messages.note)
    state = _state_of(restored, scores)
    # Whether the run computes anything by its config.
    used = state.step < settings.steps or not all(map(state.scores.get, scores))
    _say_beginning(parts, restored, folder)
    if settings.config_text is not None and processes.first:  # before minutes go into compiling
        tell_changes(folder, settings.config_text(), used, messages.say)
    _say_schedule(settings, restored, messages.note)
    # From here on a signal lets the step in progress finish.
    stack.enter_context(interrupt)
    batches = stack.enter_context(prefetch(_batches(settings, mesh, state.step)))
    batch, says = partial(_batch, settings), (messages.say, messages.note)
    train_steps, batches = opening.compiled(setup, restored, batches, batch, *says)
    # Now the config is known to be the run's own, and that it can run.
    processes.meet()
    processes.by_first(lambda: checkpoints.tidy(messages.note))
    config = _write_config(processes, settings, folder, used)
    record = processes.by_first(
        lambda: opening.open_record(settings, folder, restored, config, messages.note, lock.check)
    )
    shown = _shown(parts, restored, record or NoRecord())
    return Run(
        folder=folder,
        settings=settings,
        processes=processes,
        key=setup.key,
        train_steps=train_steps,
        batches=batches,
        measure_kept_mass=kept_mass.measure_fn(setup.models.train[-1], mesh, settings.accumulate),
        scores=scores,
        samples=samples,
        checkpoints=checkpoints,
        kept=_kept(settings, restored, vocabulary),
        config=config,
        n_params=restored.n_params,
        lock=lock,
        messages=messages,
        callbacks=parts.callbacks,
        decisions=parts.decisions,
        **shown,
    ), state


@contextmanager
def _closing(run: Run, state: RunState) -> Iterator[None]:
    """Waits for the last checkpoint and closes what is not a context; raises as `opened`."""
    try:
        try:
            yield
        except BaseException as error:
            report_saves(run, state, "")
            if isinstance(error, FloatingPointError):
                raise _with_way_back(run, error) from None
            raise
        run.checkpoints.wait()
        report_saves(run, state, "")
        run.callbacks.check()
    finally:
        run.checkpoints.close()
        report_notes(run)
        run.record.close()
        run.bar.close()


def _with_way_back(run: Run, error: FloatingPointError) -> FloatingPointError:
    good = run.checkpoints.steps()
    last = f"step {good[-1]} is the last good checkpoint" if good else "no checkpoint yet"
    return FloatingPointError(
        f"{error}: {last} in {run.folder}; lower the learning rate or clip the gradient, "
        "then run again to go on from there"
    )


def _check_alike(processes: Processes, what: str, value: Callable[[], Any] | None) -> None:
    """Raises `SettingError` in a process where something is not what it is in process 0."""
    if processes.count == 1 or value is None:
        return
    crc = zlib.crc32(json.dumps(value()).encode())
    if crc != processes.same(lambda: crc):
        raise SettingError(
            f"process {processes.index} has other {what} than process 0: give all the "
            "same command, files and data"
        )


def _keep_vocabulary(parts: _Parts, newest: int | None) -> str | None:
    processes, begun = parts.processes, newest is not None
    keep = partial(opening.keep_vocabulary, parts.setup.settings, parts.checkpoints, newest)
    fingerprint = processes.same(partial(keep, begun))
    return fingerprint if processes.first else keep(True)


def _state_of(restored: opening.RestoredRun, scores: dict[str, Scores]) -> RunState:
    """The state to go on from, with those scores of its step that this run's evaluations have."""
    info, own = restored.info, next(iter(scores))
    saved = {label: one for label, one in info.get("evaluations", {}).items() if label != own}
    if info.get("evaluation") is not None:
        saved = {own: {name: info.get(name) for name in ("scored", "evaluation")}} | saved
    # A score of another split, its data or context is not this run's: it evaluates again.
    found = {
        label: one["evaluation"]
        for label, one in saved.items()
        if label in scores and one["scored"] == scores[label].kind(restored.data)
    }
    state = RunState(restored.state, restored.step, found)
    state.saved = state.to_save if info else None
    return state


def _say_beginning(parts: _Parts, restored: opening.RestoredRun, folder: Path) -> None:
    """Says what the run trains on, and where it begins."""
    (settings, _, mesh, _), processes, say = parts.setup, parts.processes, parts.messages.say
    if settings.progress:
        for line in fingerprints.summary(settings.all_stages):
            say(line)
    if restored.changed_data:
        say(f"note: the data has changed: {fingerprints.described(restored.changed_data)}")
    shown = mesh_lib.words(mesh)
    if processes.count > 1:
        shown += f" of {processes.count} processes"
    steps = settings.steps
    if restored.step >= steps:
        part = f"at step {restored.step} of {steps} already"
    elif restored.step:
        part = f"going on from step {restored.step} to {steps}"
    else:
        part = f"{restored.source}from step 1 to {steps}"
    say(f"{settings.task.name}: {restored.n_params:,} parameters, {shown}, {part}, in {folder}")


def _say_schedule(
    settings: TrainSettings, restored: opening.RestoredRun, note: Callable[[str], None]
) -> None:
    """Says that the learning rate does not reach its peak, or has another length than before."""
    if restored.step >= settings.steps:
        return
    if (line := settings.peakless) is not None:
        note(f"note: {line}")
    before = restored.info.get("schedule_steps")
    now = optimizer.schedule_steps(settings.built_optimizer)
    if None not in (before, now) and before != now:
        note(
            f"note: the learning rate's schedule is {now:,} steps long, and was {before:,} "
            f"until step {restored.step}"
        )


def _write_config(
    processes: Processes, settings: TrainSettings, folder: Path, used: bool
) -> str | None:
    if settings.config_text is None:
        return None
    text = settings.config_text()
    return processes.by_first(partial(write_config, folder, text, used))


def _kept(
    settings: TrainSettings, restored: opening.RestoredRun, vocabulary: str | None
) -> dict[str, Any]:
    """The values that every checkpoint of the run keeps."""
    kept = {
        "data": restored.data,
        "vocabulary": vocabulary,
        "n_classes": settings.task.n_classes,
        "schedule_steps": optimizer.schedule_steps(settings.built_optimizer),
        "source": restored.converted,  # the model is given back by it
    }
    return {name: x for name, x in kept.items() if x is not None}


def _shown(parts: _Parts, restored: opening.RestoredRun, record: Record) -> dict[str, Any]:
    """The outputs of a run: `record`, `bar`, `log` and `clock` of `Run`."""
    settings, step, info = parts.setup.settings, restored.step, restored.info
    begun = restored.seconds - parts.decisions.started
    unit = "bits_per_byte" if settings.task.of_bytes else settings.own_evaluation.metric
    bar = Bar(step, settings.steps, settings.progress, unit)

    def clock() -> float:
        return begun + time.monotonic()

    log = StepLog(
        settings,
        record,
        bar,
        list(info.get("window", ())),
        info.get("tokens", step * settings.batch_size * settings.length),
        clock,
        partial(parts.callbacks.call, "on_step"),
        _utilization(parts.setup, restored),
    )
    return {"record": record, "bar": bar, "log": log, "clock": clock}


def _utilization(
    setup: opening.Setup, restored: opening.RestoredRun
) -> Callable[[int, float], float | None]:
    """The utilization of the devices after a step, at so many tokens per second."""
    settings, models, mesh, _ = setup
    shares = {}  # of a token per second, by stages
    left = range(settings.stage_after(restored.step), len(settings.all_stages))
    # Traced now, for the time of steps has nothing else in it.
    for number in left if restored.step < settings.steps else ():
        stage, model = settings.all_stages[number], models.train[number]
        if (peak := utilization.peak(model)) is not None:
            inputs = _batch(settings, stage, stage.until - 1)[0]
            flops = utilization.flops_of_step(model, restored.state.params, inputs, mesh)
            of_token = flops / (stage.batch_size * stage.length)
            shares[number] = of_token / (peak * mesh.size)

    def mfu(step: int, speed: float) -> float | None:
        share = shares.get(settings.stage_after(step - 1))
        return None if share is None else share * speed

    return mfu


def _batch(
    settings: TrainSettings, stage: ResolvedStage, step: int, rows: np.ndarray | None = None
) -> tuple:
    """The batch of the step after `step`, which is in this stage, or some rows of it."""
    request = settings.seed, settings.batch_number(step), stage.batch_size, stage.length
    if rows is not None and stage.task.train_rows is not None:
        return tuple(stage.task.train_rows(*request, rows))
    return placing.take(tuple(stage.task.train_batch(*request)), rows)


def _batches(settings: TrainSettings, mesh: Mesh, begin: int) -> Iterator[Any]:
    """The batches of the steps after `begin`, on the devices."""
    rows = devices.over_tokens(mesh)
    for step in range(begin, settings.steps):
        stage = settings.all_stages[settings.stage_after(step)]
        yield placing.place_batch(partial(_batch, settings, stage, step), stage.batch_size, rows)
