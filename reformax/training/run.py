"""One run that is open: what stays, what changes, and the three things that a loop does with it.

A step is a function of the state and of (seed, step) alone: the batch, the hashes and the dropout.
A run that is resumed from a checkpoint therefore computes what it would have computed anyway. Its
record is first cut back to that checkpoint.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from reformax.training import kept_mass
from reformax.training import step as step_lib
from reformax.training.callbacks import Callbacks
from reformax.training.checkpoint import Checkpoints, NotSaved
from reformax.training.decisions import Decisions
from reformax.training.evaluator import Evaluator
from reformax.training.lock import Lock
from reformax.training.messages import Messages
from reformax.training.processes import Processes
from reformax.training.samples import Samples
from reformax.training.settings import TrainSettings
from reformax.training.step_log import StepLog


@dataclass(frozen=True, eq=False)
class Run:
    """The constants of a run, from the first step to the last; `start.opened` makes them once.

    Attributes:
      folder: the run's.
      settings: the run's.
      processes: that train it.
      key: the source of all random numbers.
      train_steps: the compiled step of each stage, a function of (state, batch, key); see
        `step.step_fn`.
      batches: those of the steps to come, on the devices.
      measure_kept_mass: (params, inputs, rng) -> {layer: share}, see `kept_mass.measure_fn`.
      evaluators: of the evaluations, by their labels.
      samples: writes text.
      checkpoints: of the folder.
      kept: the values that every checkpoint keeps, such as the data's fingerprints.
      config: the text of config.gin.
      n_params: numbers in the parameters.
      lock: held while the run is open; None in processes other than the first.
      log: has the record, the bar and the seconds since the run began, without those of steps
        that were lost.
      messages: prints lines.
      callbacks: those of the settings; one that raised stops the run.
      decisions: whether to go on.
    """

    folder: Path
    settings: TrainSettings
    processes: Processes
    key: jax.Array
    train_steps: list[Callable[..., tuple[step_lib.TrainState, dict[str, Any]]]]
    batches: Iterator[Any]
    measure_kept_mass: Callable[[Any, Any, jax.Array], dict[int, jax.Array]]
    evaluators: dict[str, Evaluator]
    samples: Samples
    checkpoints: Checkpoints
    kept: dict[str, Any]
    config: str | None
    n_params: int
    lock: Lock | None
    log: StepLog
    messages: Messages
    callbacks: Callbacks
    decisions: Decisions

    @property
    def main(self) -> str:
        """The label of the run's own evaluation."""
        return self.settings.main_evaluation.label


@dataclass(eq=False)
class RunState:
    """The variables of a run, which steps, evaluations and saves change.

    Attributes:
      arrays: parameters, the optimizer's state and the moving average, on the devices.
      step: steps done.
      scores: those after this step, by their labels, as `Evaluator.evaluate` returns them.
      saved: what the last checkpoint holds, as `to_save` has it.
      unreported: the step of a save that is not reported yet.
      program: the key of the last step's program.
    """

    arrays: step_lib.TrainState
    step: int
    scores: dict[str, dict[str, Any]] = field(default_factory=dict)
    saved: tuple[int, dict[str, Any]] | None = None
    unreported: int | None = None
    program: tuple[Any, ...] | None = None

    @property
    def to_save(self) -> tuple[int, dict[str, Any]]:
        """The contents of a checkpoint at this step, to compare with the last one's."""
        return self.step, dict(self.scores)


def train_step(run: Run, state: RunState) -> None:
    """Dispatches one step."""
    if run.checkpoints.done:
        report_saves(run, state)
    number = run.settings.stage_after(state.step)
    program = run.settings.all_stages[number].program
    if state.program not in (None, program):  # the next call compiles this one
        run.log.drain()
        run.log.pause()
    state.program = program
    batch = next(run.batches)
    state.arrays, metrics = run.train_steps[number](state.arrays, batch, run.key)
    state.step, state.scores = state.step + 1, {}
    run.log.add(state.step, metrics)
    every = run.settings.report_kept_mass_every
    if every is not None and state.step % every == 0:
        report_kept_mass(run, state, batch[0])


def report_kept_mass(run: Run, state: RunState, inputs: Any) -> None:
    """Records what attention sees of dense attention's mass, in the batch of the last step."""
    run.log.drain()
    rng = jax.random.fold_in(run.key, state.step)
    found = kept_mass.named(run.measure_kept_mass(state.arrays.params, inputs, rng))
    timing = {"seconds": run.log.seconds()}
    run.log.record.write(state.step, "train", found, timing, tag=kept_mass.NAME)
    if run.settings.progress:
        run.log.bar.say(f"step {state.step}: {kept_mass.words(found)}")
    run.log.pause()


def is_scored(run: Run, state: RunState, label: str, last: bool) -> bool:
    """Whether this step has the evaluation that it needs as the run's last, or as another."""
    return run.evaluators[label].finished(state.scores.get(label), last)


def evaluate(run: Run, state: RunState, label: str, last: bool) -> None:
    """Scores the parameters and records the score; an interrupt abandons it.

    Args:
      run, state: the run; its score of this step changes.
      label: of the evaluation.
      last: whether no evaluation follows.

    Raises:
      FloatingPointError: the score is not finite.
    """
    run.log.drain()
    evaluator, params = run.evaluators[label], state.arrays.eval_params

    def stop() -> bool:
        return run.decisions.now().stopping

    score = evaluator.evaluate(params, state.step, last, stop)
    run.log.pause()
    if score is None:
        return
    run.log.record.write(state.step, label, score, {"seconds": run.log.seconds()}, tag="eval")
    run.log.record.plot()
    if run.settings.progress:
        run.log.bar.say(f"step {state.step}: {evaluator.words(score)}")
    state.scores[label] = score
    if label == run.main:
        run.samples.write(params, state.step, last, run.log, stop)
        run.log.pause()
        run.callbacks.call("on_evaluation", state.step, dict(score), params)


def save(run: Run, state: RunState, temporary: bool = False) -> None:
    """Writes a checkpoint in the background, unless this one is written already.

    A checkpoint that cannot be written is reported, and training goes on to the next one.

    Args:
      run, state: the run.
      temporary: whether only the time or a signal asks for it, so that the next save replaces it.

    Raises:
      FloatingPointError: parameters are not finite; nothing is written.
      Lost: the save before found the folder deleted, or another training's in its place.
    """
    report_saves(run, state)
    run.decisions.saved_at = time.monotonic()
    if state.saved == state.to_save:
        return
    run.log.drain()
    if not step_lib.all_finite(state.arrays):
        raise FloatingPointError(f"parameters are not finite after step {state.step}")
    data, extra = run.kept["data"], dict(run.kept)
    found = {
        label: {"scored": run.evaluators[label].kind(data), "evaluation": score}
        for label, score in state.scores.items()
    }
    main_score = state.scores.get(run.main)
    extra |= found.pop(run.main, {})
    if found:
        extra["evaluations"] = found

    def check_folder() -> None:
        """A restored checkpoint finds its lines; none is written into another's folder."""
        run.log.record.lines.sync()
        run.lock.check()

    run.checkpoints.save(
        state.step,
        state.arrays,
        None if main_score is None else main_score[run.evaluators[run.main].metric],
        run.config,
        check_folder,
        temporary,
        window=run.log.window,
        tokens=run.log.tokens,
        timing={"seconds": run.log.seconds()},
        record=run.log.record.lines.mark() if run.log.record.lines else None,
        **extra,
    )
    run.log.pause()
    state.saved, state.unreported = state.to_save, state.step


def report_saves(
    run: Run, state: RunState, then: str = "; training goes on to the next one"
) -> None:
    """Waits for the last save and reports its error, if any."""
    try:
        run.checkpoints.wait()
    except NotSaved as error:
        state.saved = state.unreported = None
        run.messages.note(f"note: {error}{then}")
    if state.unreported is not None:
        step, state.unreported = state.unreported, None
        run.callbacks.call("on_checkpoint", step, run.folder / "checkpoints" / str(step))
    report_notes(run)


def report_notes(run: Run) -> None:
    """Prints what the checkpoints have to say."""
    while run.checkpoints.notes:
        run.messages.note(f"note: {run.checkpoints.notes.pop(0)}")


def result_of(run: Run, state: RunState) -> dict[str, Any]:
    """The result of `loop.train`."""

    def best() -> list[Any]:
        step = run.checkpoints.best_step(skip_unreadable=True)
        return [step, None if step is None else run.checkpoints.score(step)]

    best_step, best_score = run.processes.broadcast(best)
    number = run.decisions.now().signal
    others = {label: score for label, score in state.scores.items() if label != run.main}
    metric = run.evaluators[run.main].metric
    score = state.scores.get(run.main) or {metric: None, "n_targets": 0, "whole": False}
    if "whole_split" in score:
        score = {**score["whole_split"], "whole": True}
    return {
        "step": state.step,
        "steps": run.settings.steps,
        "eval_split": run.settings.eval_split,
        "metric": metric,
        metric: score[metric],
        **{name: score[name] for name in ("bits_per_byte",) if name in score},
        "n_targets": score["n_targets"],
        "whole": score["whole"],
        "best_step": best_step,
        "best_whole": not run.evaluators[run.main].of_part,
        "best_" + metric: best_score,
        "evaluations": {
            label: {"metric": run.evaluators[label].metric, **score}
            for label, score in others.items()
        },
        "n_params": run.n_params,
        "output_dir": str(run.folder),
        "interrupted_by": None if number is None else signal.Signals(number),
    }
