"""Opens a run in its folder, and closes it: what comes before the first step and after the last.

The order is part of what resuming promises: nothing is written before the config is known to be the
run's own and able to run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from reformax import devices
from reformax.training import (
    compiled_steps,
    environment,
    evaluation,
    fingerprints,
    first_state,
    kept_mass,
    optimizer,
    placing,
    run_setup,
    utilization,
)
from reformax.training import mesh as mesh_lib
from reformax.training.callbacks import Callbacks, Loggers
from reformax.training.checkpoint import Checkpoints
from reformax.training.decisions import Decisions
from reformax.training.evaluator import Evaluator
from reformax.training.first_state import RestoredRun
from reformax.training.folder import tell_changes, write_config
from reformax.training.interrupt import Interrupt
from reformax.training.lock import alone_in
from reformax.training.loss import unit_of
from reformax.training.messages import Messages
from reformax.training.prefetch import prefetch
from reformax.training.processes import Processes
from reformax.training.record import Bar, NoRecord, Record
from reformax.training.record_lines import RecordLines
from reformax.training.run import Run, RunState, report_notes, report_saves
from reformax.training.run_setup import Setup
from reformax.training.samples import SPLIT as SAMPLES
from reformax.training.samples import Samples
from reformax.training.settings import TrainSettings
from reformax.training.stages import ResolvedStage, naming
from reformax.training.step_log import StepLog


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
    processes = Processes.of_jax()
    if not processes.first:  # which alone says anything
        settings = replace(settings, progress=False)
    setup = run_setup.set_up(settings)
    with ExitStack() as stack:
        run, state = _open(setup, folder, processes, stack)
        with _closing(run, state):
            yield run, state


def _open(
    setup: Setup, folder: Path, processes: Processes, stack: ExitStack
) -> tuple[Run, RunState]:
    """Opens the folder, the state, the record and the stream of batches."""
    settings, models, mesh, key = setup
    messages = Messages(settings.progress, processes.first)
    together = processes.branch("checkpoints")
    checkpoints = Checkpoints(folder, settings.keep, together, settings.checkpoint_copies)
    evaluations = settings.all_evaluations
    evaluators = {one.label: Evaluator(models.eval, settings, mesh, one) for one in evaluations}
    samples = Samples(models.eval, settings, mesh)
    interrupt, callbacks = Interrupt(messages.acknowledge), Callbacks(settings.callbacks)
    decisions = Decisions(processes, interrupt, callbacks, messages.acknowledge)
    if processes.count > 1:
        text = settings.config_text
        processes.compare(environment.facts() | ({} if text is None else {"the config": text()}))
    lock = processes.by_first(lambda: stack.enter_context(alone_in(folder, messages.say)))
    newest = checkpoints.newest_whole()
    while checkpoints.notes:
        messages.note(f"note: {checkpoints.notes.pop(0)}")
    vocabulary = _vocabulary(settings, checkpoints, newest, processes, messages.say)
    for one in evaluations:
        with naming(one):
            one.task.n_targets(one.split)  # an unknown split fails now
    restored = first_state.restore_or_init(setup, checkpoints, newest, vocabulary)
    processes.compare({f"the data of {split}": x for split, x in restored.data.items()})
    samples.check(restored.state.eval_params, messages.note)
    state = _state_of(restored, evaluators)
    # Whether the run computes anything by its config.
    used = state.step < settings.steps or not all(map(state.scores.get, evaluators))
    _say_beginning(setup, restored, folder, processes.count, messages.say)
    if settings.config_text is not None and processes.first:  # before minutes go into compiling
        tell_changes(folder, settings.config_text(), used, messages.say)
    _note_surprises(settings, restored, messages.note)
    # From here on a signal lets the step in progress finish.
    stack.enter_context(interrupt)
    batches = stack.enter_context(prefetch(_batches(settings, mesh, state.step)))
    batch = partial(_batch, settings)
    train_steps, batches = compiled_steps.compiled(setup, restored, batches, batch, messages.say)
    # Now the config is known to be the run's own, and that it can run.
    processes.barrier()
    processes.by_first(lambda: checkpoints.tidy(messages.note))
    config = None
    if settings.config_text is not None:
        text = settings.config_text()
        config = processes.by_first(lambda: write_config(folder, text, used))
    record = processes.by_first(
        lambda: _open_record(settings, folder, restored, config, messages.note, lock.check)
    )
    log = _step_log(setup, restored, record or NoRecord(), callbacks, decisions.started)
    return Run(
        folder=folder,
        settings=settings,
        processes=processes,
        key=key,
        train_steps=train_steps,
        batches=batches,
        measure_kept_mass=kept_mass.measure_fn(models.train[-1], mesh, settings.accumulate),
        evaluators=evaluators,
        samples=samples,
        checkpoints=checkpoints,
        kept=_kept(settings, restored, vocabulary),
        config=config,
        n_params=restored.n_params,
        lock=lock,
        log=log,
        messages=messages,
        callbacks=callbacks,
        decisions=decisions,
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
        run.log.record.close()
        run.log.bar.close()


def _with_way_back(run: Run, error: FloatingPointError) -> FloatingPointError:
    good = run.checkpoints.steps()
    last = f"step {good[-1]} is the last good checkpoint" if good else "no checkpoint yet"
    return FloatingPointError(
        f"{error}: {last} in {run.folder}; lower the learning rate or clip the gradient, "
        "then run again to go on from there"
    )


def _vocabulary(
    settings: TrainSettings,
    checkpoints: Checkpoints,
    newest: int | None,
    processes: Processes,
    say: Callable[[str], None],
) -> str | None:
    """The fingerprint of the run's vocabulary, which process 0 makes or reads first."""
    if settings.task.kept_vocabulary is not None:  # which may be learnt first, in minutes
        say("tokenizing")
    keep = partial(run_setup.keep_vocabulary, settings, checkpoints, newest)
    fingerprint = processes.broadcast(partial(keep, newest is not None))
    return fingerprint if processes.first else keep(True)


def _state_of(restored: RestoredRun, evaluators: dict[str, Evaluator]) -> RunState:
    """The state to go on from, with those scores of its step that this run's evaluations have."""
    info, main = restored.info, next(iter(evaluators))
    saved = {label: one for label, one in info.get("evaluations", {}).items() if label != main}
    if info.get("evaluation") is not None:
        saved = {main: {name: info.get(name) for name in ("scored", "evaluation")}} | saved
    # A score of another split, its data or context is not this run's: it evaluates again.
    found = {
        label: one["evaluation"]
        for label, one in saved.items()
        if label in evaluators and one["scored"] == evaluators[label].kind(restored.data)
    }
    state = RunState(restored.state, restored.step, found)
    state.saved = state.to_save if info else None
    return state


def _say_beginning(
    setup: Setup,
    restored: RestoredRun,
    folder: Path,
    n_processes: int,
    say: Callable[[str], None],
) -> None:
    """Says what the run trains on, and where it begins."""
    settings, _, mesh, _ = setup
    if settings.progress:
        for line in fingerprints.summary(settings.all_stages):
            say(line)
    if restored.changed_data:
        say(f"note: the data has changed: {fingerprints.described(restored.changed_data)}")
    shown = mesh_lib.words(mesh)
    if n_processes > 1:
        shown += f" of {n_processes} processes"
    steps = settings.steps
    if restored.step >= steps:
        part = f"at step {restored.step} of {steps} already"
    elif restored.step:
        part = f"going on from step {restored.step} to {steps}"
    else:
        part = f"{restored.source}from step 1 to {steps}"
    say(f"{settings.task.name}: {restored.n_params:,} parameters, {shown}, {part}, in {folder}")


def _note_surprises(
    settings: TrainSettings, restored: RestoredRun, note: Callable[[str], None]
) -> None:
    """Notes on weights that nothing trains, the learning rate, padding and examples in turn."""
    if restored.step >= settings.steps:
        return
    if settings.fine_tuning is not None and settings.init_from is None and not restored.step:
        note("note: fine_tuning is set and init_from is not: all other weights stay as drawn")
    if (line := settings.unfinished_warmup) is not None:
        note(f"note: {line}")
    for one in settings.all_evaluations:
        prefix = f"{one.name}." if one.name else "eval_"
        if line := evaluation.padding_note(one.task, one.split, one.batch_size, one.length, prefix):
            note(f"note: {line}")
    left = settings.all_stages[settings.stage_after(restored.step) :]
    planned = settings.tokens_after(restored.step)
    seen = restored.info.get("tokens", planned)
    if seen != planned and any(stage.task.in_order for stage in left):
        note(
            f"note: the steps so far had {seen:,} tokens, and would have {planned:,} by this "
            "config: examples that are taken in turn go on elsewhere, so that some come twice or "
            "not at all in this epoch"
        )
    before = restored.info.get("schedule_steps")
    now = optimizer.schedule_steps(settings.built_optimizer)
    if None not in (before, now) and before != now:
        note(
            f"note: the learning rate's schedule is {now:,} steps long, and was {before:,} "
            f"until step {restored.step}"
        )


def _kept(settings: TrainSettings, restored: RestoredRun, vocabulary: str | None) -> dict[str, Any]:
    """The values that every checkpoint of the run keeps."""
    first = None if restored.info else os.fspath(settings.init_from or "")
    kept = {
        "data": restored.data,
        "vocabulary": vocabulary,
        "n_classes": settings.task.n_classes,
        "schedule_steps": optimizer.schedule_steps(settings.built_optimizer),
        "source": restored.converted,  # the model is given back by it
        "init_from": restored.info.get("init_from", first),  # None: an older run's, not noted
    }
    return {name: x for name, x in kept.items() if x is not None}


def _open_record(
    settings: TrainSettings,
    folder: Path,
    restored: RestoredRun,
    config: str | None,
    say: Callable[[str], None],
    check: Callable[[], None],
) -> Record:
    """Opens the record where the checkpoint left it; `say` and `check` are of `RecordLines`.

    Raises:
      OSError: the file cannot be read or written.
    """
    step, info = restored.step, restored.info
    split = (info.get("scored") or {}).get("split", settings.eval_split)
    scored = [split, SAMPLES] * (info.get("score") is not None)
    scored += info.get("evaluations", {})
    lines = RecordLines(
        folder / "metrics.jsonl", step, info.get("record"), scored, say=say, check=check
    )
    n_tokens = settings.batch_size * settings.length
    loggers = Loggers(settings.loggers, folder, step, config)
    record = Record(folder, lines, step, settings.main_evaluation.metric, n_tokens, loggers)
    if restored.changed_data and step < settings.steps:
        record.write(step + 1, "data", {"changed": restored.changed_data}, {}, tag="data")
    return record


def _step_log(
    setup: Setup,
    restored: RestoredRun,
    record: Record,
    callbacks: Callbacks,
    started: float,
) -> StepLog:
    """The log of steps, with the run's bar and its clock, which goes on from the checkpoint's."""
    settings, step, info = setup.settings, restored.step, restored.info
    begun = restored.seconds - started  # the clock holds no array of the state
    return StepLog(
        settings,
        record,
        Bar(step, settings.steps, settings.progress, unit_of(settings.task)),
        list(info.get("window", ())),
        info.get("tokens", settings.tokens_after(step)),
        lambda: begun + time.monotonic(),
        partial(callbacks.call, "on_step"),
        _at_peak(setup, restored),
    )


def _at_peak(setup: Setup, restored: RestoredRun) -> dict[int, float]:
    """The seconds that a step takes at the devices' peak, by the number of its stage, if known."""
    settings, models, mesh, _ = setup
    found = {}
    left = range(settings.stage_after(restored.step), len(settings.all_stages))
    # Traced now, for the time of steps has nothing else in it.
    for number in left if restored.step < settings.steps else ():
        stage, model = settings.all_stages[number], models.train[number]
        if (peak := utilization.peak(model)) is not None:
            inputs = _batch(settings, stage, stage.until - 1)[0]
            flops = utilization.flops_of_step(model, restored.state.params, inputs, mesh)
            found[number] = flops / (peak * mesh.size)
    return found


def _batch(
    settings: TrainSettings, stage: ResolvedStage, step: int, rows: np.ndarray | None = None
) -> tuple:
    """The batch of the step after `step`, which is in this stage, or some rows of it."""
    request = settings.seed, settings.batch_number(step), stage.batch_size, stage.length
    task = stage.task
    return tuple(task.train_batch(*request) if rows is None else task.rows_of_batch(*request, rows))


def _batches(settings: TrainSettings, mesh: Mesh, begin: int) -> Iterator[Any]:
    """The batches of the steps after `begin`, on the devices."""
    rows = devices.over_tokens(mesh)
    for step in range(begin, settings.steps):
        stage = settings.all_stages[settings.stage_after(step)]
        yield placing.place_batch(partial(_batch, settings, stage, step), stage.batch_size, rows)
