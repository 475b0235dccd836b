"""One run in its folder: it opens, advances, evaluates, saves and closes.

A step is a function of the state and of (seed, step) alone: the batch, the hashes and the dropout.
A run that is resumed from a checkpoint therefore computes what it would have computed anyway. Its
record is first cut back to that checkpoint.
"""

from __future__ import annotations

import json
import signal
import sys
import time
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from reformax import devices
from reformax.declared import SettingError
from reformax.training import (
    alike,
    fingerprints,
    forecast,
    opening,
    optimizer,
    placing,
    side_channels,
    utilization,
)
from reformax.training import mesh as mesh_lib
from reformax.training import step as step_lib
from reformax.training.callbacks import Callbacks
from reformax.training.checkpoint import Checkpoints, NotSaved
from reformax.training.decisions import Decisions, Tick
from reformax.training.folder import tell_changes, write_config
from reformax.training.interrupt import Interrupt
from reformax.training.lock import alone_in
from reformax.training.loss import n_classes_of, vocabulary_of
from reformax.training.prefetch import prefetch
from reformax.training.processes import Processes
from reformax.training.record import Bar, NoRecord, Record
from reformax.training.scores import Scores
from reformax.training.settings import TrainSettings
from reformax.training.stages import ResolvedStage, naming
from reformax.training.step_log import IN_FLIGHT, StepLog


class Run:
    """A run, from the latest checkpoint in its folder if there is one; a context manager.

    Attributes:
      folder: the run's.
      step: steps done.
      score: the evaluation after this step, as `Scores.of` returns it; None if there was none.
      interrupt: true after the first SIGTERM, SIGINT or SIGHUP of this process, once the context is
        open.
      callbacks: those of the settings; one that raised stops the run.
    """

    def __init__(self, folder: Path, settings: TrainSettings):
        """Checks that devices, model and task fit; writes no file yet."""
        self._processes = Processes.of_jax()
        if not self._processes.first:  # which alone says anything
            settings = replace(settings, progress=False)
        self._settings, self._task = settings, settings.task
        self._mesh = mesh_lib.make(settings.mesh)
        opening.check_sizes(settings, self._mesh)
        self.folder = folder
        together = self._processes.branch("checkpoints")
        kept = settings.keep, together, settings.checkpoint_copies
        self._checkpoints = Checkpoints(self.folder, *kept)
        self._models = opening.models_of(settings)
        options = self._models.eval, settings, self._mesh
        self._scores = Scores(*options, settings.own_evaluation)
        self._others = {x.label: Scores(*options, x) for x in settings.other_evaluations}
        self._other_scores: dict[str, dict[str, Any]] = {}  # of this step
        self._metric = self._scores.metric
        self._key = jax.random.PRNGKey(settings.seed)
        self.interrupt = Interrupt(self._acknowledge)
        self.callbacks = Callbacks(settings.callbacks)
        self._saving: int | None = None  # the step of a save that is not reported yet
        self._program: tuple | None = None  # what the last step's went by
        self._decisions = Decisions(
            self._processes, self.interrupt, self.callbacks, self._acknowledge
        )

    # Opening and closing.

    def __enter__(self) -> Run:
        """Opens the folder, the state, the record and the stream of batches.

        Raises:
          ValueError: the data or a checkpoint does not fit, or no checkpoint is whole.
          SettingError: a step takes more memory than a device has.
          OSError: another training writes into the folder, or it cannot be read or written.
        """
        settings, processes = self._settings, self._processes
        with ExitStack() as opened:
            if processes.count > 1:
                processes.compare(alike.facts())
            self._check_alike("settings", settings.config_text)
            self._lock = processes.by_first(
                lambda: opened.enter_context(alone_in(self.folder, self._say))
            )
            newest = self._checkpoints.newest_whole()
            if vocabulary_of(self._task) is not None:  # which may be learnt first, in minutes
                self._say("tokenizing")
            self._vocabulary = self._keep_vocabulary(newest)
            for one in (settings.own_evaluation, *settings.other_evaluations):
                with naming(one):
                    one.task.n_targets(one.split)  # an unknown split fails now
            setup = opening.Setup(settings, self._models, self._mesh, self._key)
            restored = opening.begin(setup, self._checkpoints, newest, self._vocabulary)
            self._go_on_from(restored)
            self._tell_changes()
            self._tell_schedule(restored.info.get("schedule_steps"))
            # From here on a signal lets the step in progress finish.
            opened.enter_context(self.interrupt)
            batches = opened.enter_context(prefetch(self._placed_batches()))
            self._train_steps, self._batches = opening.compiled(
                setup, restored, batches, self._batch, self._say, self._note
            )
            # Now the config is known to be the run's own, and that it can run.
            processes.meet()
            processes.by_first(lambda: self._checkpoints.tidy(self._note))
            self._config = self._write_config()
            self._open_record(restored)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, kind, error, traceback) -> None:
        """Waits for the last checkpoint and closes everything.

        Raises:
          FloatingPointError: the error that ended the run, with the way back.
          NotSaved: the last checkpoint could not be written.
          Exception: what a callback raised.
        """
        with self._opened:
            try:
                if error is None:
                    self._checkpoints.wait()
                self._report_saves("")
                if error is None:
                    self.callbacks.check()
                if isinstance(error, FloatingPointError):
                    raise self._with_way_back(error) from None
            finally:
                self._checkpoints.close()
                self._record.close()
                self._bar.close()

    def _check_alike(self, what: str, value: Callable[[], Any] | None) -> None:
        """Raises `SettingError` in a process where something is not what it is in process 0."""
        if self._processes.count == 1 or value is None:
            return
        crc = zlib.crc32(json.dumps(value()).encode())
        if crc != self._processes.same(lambda: crc):
            raise SettingError(
                f"process {self._processes.index} has other {what} than process 0: give all the "
                "same command, files and data"
            )

    def _keep_vocabulary(self, newest: int | None) -> str | None:
        begun = newest is not None
        keep = partial(opening.keep_vocabulary, self._settings, self._checkpoints, newest)
        fingerprint = self._processes.same(partial(keep, begun))
        return fingerprint if self._processes.first else keep(True)

    def _go_on_from(self, restored: opening.RestoredRun) -> None:
        """Takes on the state, and says where the run begins."""
        self._state, self.step = restored.state, restored.step
        self._data, self._n_params = restored.data, restored.n_params
        self._check_alike("data", lambda: self._data)
        self._seconds_before = restored.seconds
        # A score of another split, its data or context is not this run's: it evaluates again.
        same = restored.info.get("scored") == self._scores.kind(self._data)
        self.score = restored.info.get("evaluation") if same else None
        for name, found in restored.info.get("evaluations", {}).items():
            if name in self._others and found["scored"] == self._others[name].kind(self._data):
                self._other_scores[name] = found["evaluation"]
        self._saved = self._state_of_save() if restored.info else None
        if self._settings.progress:
            for line in fingerprints.summary(self._settings.all_stages):
                self._say(line)
        if restored.changed_data:
            words = fingerprints.described(restored.changed_data)
            self._say(f"note: the data has changed: {words}")
        shown = mesh_lib.words(self._mesh)
        if self._processes.count > 1:
            shown += f" of {self._processes.count} processes"
        steps = self._settings.steps
        if self.step >= steps:
            part = f"at step {self.step} of {steps} already"
        elif self.step:
            part = f"going on from step {self.step} to {steps}"
        else:
            part = f"{restored.source}from step 1 to {steps}"
        self._say(
            f"{self._task.name}: {self._n_params:,} parameters, {shown}, {part}, in {self.folder}"
        )

    @property
    def _uses_config(self) -> bool:
        """Whether the run computes anything by its config."""
        names = (None, *self._others)
        return self.step < self._settings.steps or not all(map(self._score_of, names))

    def _score_of(self, name: str | None) -> dict[str, Any] | None:
        """The score of this step, by the run's own evaluation or by the one of a name."""
        return self.score if name is None else self._other_scores.get(name)

    def _state_of_save(self) -> tuple:
        """What a checkpoint of now would hold, to be compared with the last one."""
        return self.step, self.score, dict(self._other_scores)

    def _tell_changes(self) -> None:
        """Says which settings changed, before minutes go into compiling."""
        if self._settings.config_text is not None and self._processes.first:
            tell_changes(self.folder, self._settings.config_text(), self._uses_config, self._say)

    def _tell_schedule(self, before: int | None) -> None:
        """Says that the learning rate does not reach its peak, or has another length than before.

        Args:
          before: the schedule's length when the checkpoint was saved; None if it is not known.
        """
        settings = self._settings
        if self.step >= settings.steps:
            return
        if (line := optimizer.peakless(settings.optimizer, settings.steps)) is not None:
            self._note(f"note: {settings.named(line) if settings.named else line}")
        now = optimizer.schedule_steps(settings.built_optimizer)
        if None not in (before, now) and before != now:
            self._note(
                f"note: the learning rate's schedule is {now:,} steps long, and was {before:,} "
                f"until step {self.step}"
            )

    def _write_config(self) -> str | None:
        if self._settings.config_text is None:
            return None
        text = self._settings.config_text()
        write = partial(write_config, self.folder, text, self._uses_config)
        return self._processes.by_first(write)

    def _open_record(self, restored: opening.RestoredRun) -> None:
        settings = self._settings

        def first() -> Record:
            says = self._note, self._lock.check
            return opening.open_record(
                settings, self.folder, restored, self._metric, self._config, *says
            )

        self._record = self._processes.by_first(first) or NoRecord()
        self._pace = forecast.Pace(settings.steps, IN_FLIGHT + 1)
        unit = "bits_per_byte" if getattr(self._task, "of_bytes", False) else self._metric
        self._bar = Bar(self.step, settings.steps, settings.progress, unit)
        self._log = StepLog(
            settings,
            self._record,
            self._bar,
            list(restored.info.get("window", ())),
            restored.info.get("tokens", self.step * settings.batch_size * settings.length),
            lambda: self.seconds,
            partial(self.callbacks.call, "on_step"),
            self._utilization(),
        )

    def _utilization(self) -> Callable[[int, float], float | None]:
        """The utilization of the devices after a step, at so many tokens per second."""
        settings, shares = self._settings, {}  # of a token per second, by stages
        left = range(settings.stage_after(self.step), len(settings.all_stages))
        # Traced now, for the time of steps has nothing else in it.
        for number in left if self.step < settings.steps else ():
            stage, model = settings.all_stages[number], self._models.train[number]
            if (peak := utilization.peak(model)) is not None:
                inputs = self._batch(stage, stage.until - 1)[0]
                flops = utilization.flops_of_step(model, self._state.params, inputs, self._mesh)
                of_token = flops / (stage.batch_size * stage.length)
                shares[number] = of_token / (peak * self._mesh.size)

        def mfu(step: int, speed: float) -> float | None:
            share = shares.get(settings.stage_after(step - 1))
            return None if share is None else share * speed

        return mfu

    def _batch(self, stage: ResolvedStage, step: int, rows: np.ndarray | None = None):
        """The batch of the step after `step`, which is in this stage, or some rows of it."""
        number = self._settings.batch_number(step)
        request = self._settings.seed, number, stage.batch_size, stage.length
        if rows is not None and (train_rows := getattr(stage.task, "train_rows", None)):
            return tuple(train_rows(*request, rows))
        return placing.take(tuple(stage.task.train_batch(*request)), rows)

    def _placed_batches(self):
        """The batches of the steps to come, on the devices."""
        rows = devices.over_tokens(self._mesh)
        for step in range(self.step, self._settings.steps):
            stage = self._settings.all_stages[self._settings.stage_after(step)]
            yield placing.place_batch(partial(self._batch, stage, step), stage.batch_size, rows)

    def _with_way_back(self, error: FloatingPointError) -> FloatingPointError:
        good = self._checkpoints.steps()
        last = f"step {good[-1]} is the last good checkpoint" if good else "no checkpoint yet"
        return FloatingPointError(
            f"{error}: {last} in {self.folder}; lower the learning rate or clip the gradient, "
            "then run again to go on from there"
        )

    def _say(self, text: str) -> None:
        if self._settings.progress:
            print(text, file=side_channels.stdout(), flush=True)

    def _acknowledge(self, text: str) -> None:
        if self._settings.progress:
            print(f"\n{text}", file=sys.stderr, flush=True)  # below the bar

    def _note(self, text: str) -> None:
        """Says what a user must know, even where progress is not shown."""
        if not self._processes.first:
            return
        progress = self._settings.progress
        out = side_channels.stdout() if progress else side_channels.stderr()
        print(text, file=out, flush=True)

    # Going on.

    def now(self) -> Tick:
        """Whether to go on, the same in all processes, which call it equally often."""
        return self._decisions.now()

    @property
    def seconds(self) -> float:
        """Time since the run began, without that of steps that were lost."""
        return self._seconds_before + time.monotonic() - self._decisions.started

    def advance(self) -> None:
        """Dispatches one step."""
        if self._checkpoints.done:
            self._report_saves()
        number = self._settings.stage_after(self.step)
        program = self._settings.all_stages[number].program
        if self._program not in (None, program):  # which is compiled now
            self._log.drain()
            self._log.pause()
        self._program = program
        train_step = self._train_steps[number]
        self._state, metrics = train_step(self._state, next(self._batches), self._key)
        self.step, self.score, self._other_scores = self.step + 1, None, {}
        self._log.add(self.step, metrics)
        if (line := self._pace.after(self.step)) and self._settings.progress:
            self._bar.say(line)

    def is_scored(self, last: bool, name: str | None = None) -> bool:
        """Whether this step has the evaluation that it needs as the run's last, or as another."""
        scores = self._scores if name is None else self._others[name]
        return scores.finished(self._score_of(name), last)

    def evaluate(self, last: bool, name: str | None = None) -> None:
        """Scores the parameters and records the score; an interrupt abandons it.

        Args:
          last: whether no evaluation follows.
          name: of one of `evaluations`; None: the run's own.

        Raises:
          FloatingPointError: the score is not finite.
        """
        self._log.drain()
        self._pace.restart()
        scores = self._scores if name is None else self._others[name]
        score = scores.of(self._state.eval_params, self.step, last, self._is_stopping)
        self._log.pause()
        if score is None:
            return
        timing = {"seconds": self.seconds}
        self._record.write(self.step, scores.evaluation.label, score, timing, tag="eval")
        self._record.plot()
        if self._settings.progress:
            self._bar.say(f"step {self.step}: {scores.words(score)}")
        if name is not None:
            self._other_scores[name] = score
            return
        self.score = score
        self.callbacks.call("on_evaluation", self.step, dict(score), self._state.eval_params)

    def _is_stopping(self) -> bool:
        return self.now().stopping

    def save(self, temporary: bool = False) -> None:
        """Writes a checkpoint in the background, unless this one is written already.

        A checkpoint that cannot be written is reported, and training goes on to the next one.

        Args:
          temporary: whether no step requests it; see `Checkpoints.save`.

        Raises:
          FloatingPointError: parameters are not finite; nothing is written.
          Lost: when the last one was due, the folder was deleted or another training's.
        """
        self._report_saves()
        self._decisions.saved_at = time.monotonic()
        if self._saved == self._state_of_save():
            return
        self._log.drain()
        self._pace.restart()
        if not step_lib.all_finite(self._state):
            raise FloatingPointError(f"parameters are not finite after step {self.step}")
        extra: dict[str, Any] = {"data": self._data}
        if self._vocabulary is not None:
            extra["vocabulary"] = self._vocabulary
        if (n_classes := n_classes_of(self._task)) is not None:
            extra["n_classes"] = n_classes
        length = optimizer.schedule_steps(self._settings.built_optimizer)
        if length is not None:
            extra["schedule_steps"] = length
        if self.score is not None:
            extra |= {"scored": self._scores.kind(self._data), "evaluation": self.score}
        if self._other_scores:
            extra["evaluations"] = {
                name: {"scored": self._others[name].kind(self._data), "evaluation": score}
                for name, score in self._other_scores.items()
            }
        self._checkpoints.save(
            self.step,
            self._state,
            None if self.score is None else self.score[self._metric],
            self._config,
            self._check_folder,
            temporary,
            window=self._log.window,
            tokens=self._log.tokens,
            timing={"seconds": self.seconds},
            record=self._record.lines.mark() if self._record.lines else None,
            **extra,
        )
        self._log.pause()
        self._saved, self._saving = self._state_of_save(), self.step

    def _check_folder(self) -> None:
        """A restored checkpoint finds its lines; none is written into another's folder."""
        self._record.lines.sync()
        self._lock.check()

    def _report_saves(self, then: str = "; training goes on to the next one") -> None:
        """Waits for the last save and reports its error, if any."""
        try:
            self._checkpoints.wait()
        except NotSaved as error:
            self._saved = self._saving = None
            self._note(f"note: {error}{then}")
        if self._saving is not None:
            step, self._saving = self._saving, None
            self.callbacks.call("on_checkpoint", step, self.folder / "checkpoints" / str(step))
        while self._checkpoints.notes:
            self._note(f"note: {self._checkpoints.notes.pop(0)}")

    def result(self) -> dict[str, Any]:
        """The result of `loop.train`."""
        best, best_score = self._processes.same(self._best)
        number = self.now().signal
        score = self.score or {self._metric: None, "n_targets": 0, "whole": False}
        if "whole_split" in score:
            score = {**score["whole_split"], "whole": True}
        return {
            "step": self.step,
            "steps": self._settings.steps,
            "eval_split": self._settings.eval_split,
            "metric": self._metric,
            self._metric: score[self._metric],
            **{name: score[name] for name in ("bits_per_byte",) if name in score},
            "n_targets": score["n_targets"],
            "whole": score["whole"],
            "best_step": best,
            "best_whole": not self._scores.of_part,
            "best_" + self._metric: best_score,
            "evaluations": {
                name: {"metric": self._others[name].metric, **score}
                for name, score in self._other_scores.items()
            },
            "n_params": self._n_params,
            "output_dir": str(self.folder),
            "interrupted_by": None if number is None else signal.Signals(number),
        }

    def _best(self) -> list[Any]:
        best = self._checkpoints.best_step(skip_unreadable=True)
        return [best, None if best is None else self._checkpoints.score(best)]
