"""One run in its folder: it opens, advances, evaluates, saves and closes.

A step is a function of the state and of (seed, step) alone: the batch, the hashes and the dropout.
A run that is resumed from a checkpoint therefore computes what it would have computed anyway. Its
record is first cut back to that checkpoint.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Any

import jax

from reformax import memory
from reformax.declared import SettingError
from reformax.training import evaluation, fingerprints, forecast, side_channels, starting_weights
from reformax.training import mesh as mesh_lib
from reformax.training import step as step_lib
from reformax.training.callbacks import Callbacks, Loggers
from reformax.training.checkpoint import Checkpoints, NotSaved
from reformax.training.folder import make_output_dir, write_config
from reformax.training.interrupt import Interrupt
from reformax.training.lock import alone_in
from reformax.training.loss import vocabulary_of
from reformax.training.metrics import Bar, Record
from reformax.training.prefetch import prefetch
from reformax.training.record_lines import RecordLines
from reformax.training.scores import Scores
from reformax.training.settings import Settings, build
from reformax.training.step_log import IN_FLIGHT, StepLog


class Run:
    """A run, from the latest checkpoint in its folder if there is one; a context manager.

    Attributes:
      folder: the run's.
      step: steps done.
      score: the evaluation after this step, as `Scores.of` returns it; None if there was none.
      interrupt: true after the first SIGTERM, SIGINT or SIGHUP, once the context is open.
      callbacks: those of the settings; one that raised stops the run.
    """

    def __init__(self, output_dir: str | os.PathLike, settings: Settings):
        """Makes the folder and checks that devices, model and task fit; writes no file yet."""
        self._started = self._saved_at = time.monotonic()
        self._settings, self._task = settings, settings.task
        self._source = ""  # of the weights, in words
        self._mesh = mesh_lib.data_mesh()
        eval_batch_size = settings.eval_sizes["batch_size"]
        self._stages = settings.all_stages
        for stage in self._stages:
            mesh_lib.check_batch_size(
                "batch_size", stage.batch_size, self._mesh, settings.accumulate
            )
            evaluation.check_tokens(stage.batch_size, stage.length, "batch_size or length")
        mesh_lib.check_batch_size("eval_batch_size", eval_batch_size, self._mesh)
        sizes = settings.eval_sizes["batch_size"], settings.eval_sizes["length"]
        evaluation.check_tokens(*sizes, "eval_batch_size or eval_length")
        self.folder = make_output_dir(output_dir)
        self._checkpoints = Checkpoints(self.folder, settings.keep)
        self._train_models = [build(stage.model, "train") for stage in self._stages]
        self._eval_model = settings.built("eval")
        self._scores = Scores(self._eval_model, settings, self._mesh)
        self._metric = self._scores.metric
        for model in self._train_models:
            evaluation.check_vocabulary(model, self._task)
        self.interrupt = Interrupt(self._acknowledge)
        self.callbacks = Callbacks(settings.callbacks)
        self._saving: int | None = None  # the step of a save that nobody has heard of

    # Opening and closing.

    def __enter__(self) -> Run:
        """Opens the folder, the state, the record and the stream of batches.

        Raises:
          ValueError: the data or a checkpoint does not fit, or no checkpoint is whole.
          SettingError: a step takes more memory than a device has.
          OSError: another training writes into the folder, or it cannot be read or written.
        """
        with ExitStack() as opened:
            self._lock = opened.enter_context(alone_in(self.folder, self._say))
            newest = self._checkpoints.newest_whole()
            self._vocabulary = self._keep_vocabulary(newest)
            self._task.n_targets(self._settings.eval_split)  # an unknown split fails now
            info = self._restore(newest)
            self._announce()
            # From here on a signal lets the step in progress finish.
            opened.enter_context(self.interrupt)
            self._batches = opened.enter_context(prefetch(self._placed_batches()))
            self._train_steps = self._compiled()
            # Now the config is known to be the run's own, and that it can run.
            self._checkpoints.tidy(self._note)
            self._config = self._write_config()
            self._open_record(info)
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
                self._hear_of_saves("")
                if error is None:
                    self.callbacks.check()
                if isinstance(error, FloatingPointError):
                    raise self._with_way_back(error) from None
            finally:
                self._checkpoints.close()
                self._record.close()
                self._bar.close()

    def _keep_vocabulary(self, newest: int | None) -> str | None:
        """Makes the vocabulary of pieces the run's; returns its fingerprint."""
        vocabulary = vocabulary_of(self._task)
        if vocabulary is None:
            return None
        if self._task.translation is not None:  # before minutes go into the vocabulary
            self._task.translation.sentences(self._settings.eval_split)
        fingerprint = vocabulary.keep_in(self.folder, begun=newest is not None)
        if newest is not None:
            self._checkpoints.check_vocabulary(newest, fingerprint)
        return fingerprint

    def _restore(self, newest: int | None) -> dict[str, Any]:
        """Sets state, step and score, from a checkpoint if there is one; returns its values."""
        settings, whole = self._settings, mesh_lib.replicated(self._mesh)
        self._key = jax.random.PRNGKey(settings.seed)
        inits = [
            step_lib.init_fn(
                model, settings.optimizer, (stage.batch_size, stage.length), settings.ema_decay > 0
            )
            for model, stage in zip(self._train_models, self._stages, strict=True)
        ]
        init, like = inits[-1], jax.eval_shape(inits[-1], self._key)
        for number, other in enumerate(inits[:-1]):
            if jax.eval_shape(other, self._key) != like:
                raise SettingError(
                    f"stages[{number}].model has other parameters than model: give it the same "
                    "sizes, and attention with the same weights"
                )
        self._n_params = sum(x.size for x in jax.tree.leaves(like.params))
        memory.check(
            f"{self._n_params:,} parameters, their gradient and the optimizer's state",
            memory.size_of(like) + memory.size_of(like.params),
            "the model's sizes",
        )
        n_features = evaluation.check_positions(
            self._eval_model,
            like.params,
            self._task,
            settings.eval_split,
            **settings.eval_sizes,
        )
        for stage in self._stages:
            rows = stage.batch_size // (settings.accumulate * self._mesh.size)
            evaluation.check_features(rows, stage.length, n_features, "batch_size or length")
        if newest is None:
            self._state = self._first_state(init, like.params)
            self.step, self.score, self._saved = 0, None, None
            self._check_data({})
            self._seconds_before = 0.0
            return {"score": None, "window": [], "tokens": 0}
        state, info = self._checkpoints.restore(newest, like)
        self._state = jax.device_put(state, whole)
        self.step = info["step"]
        self._check_data(info.get("data", {}))
        # A score of another split, its data or context is not this run's: it evaluates again.
        same = info.get("scored") == self._scores.kind(self._data)
        self.score = info.get("evaluation") if same else None
        self._saved = self.step, self.score
        self._seconds_before = info.get("timing", {}).get("seconds", 0.0)
        return info

    def _first_state(self, init, like: Any) -> step_lib.State:
        """The state of step 0, with other weights of the shapes `like` if the settings say so."""
        settings, whole = self._settings, mesh_lib.replicated(self._mesh)
        if settings.init_from is None:
            return jax.jit(init, out_shardings=whole)(self._key)
        params, source = starting_weights.read(settings.init_from, like, self._vocabulary)
        self._source = f"with the weights of {source[0]} after step {source[1]} "
        begin = partial(
            step_lib.first_state, optimizer=settings.optimizer, ema=settings.ema_decay > 0
        )
        return jax.jit(begin, out_shardings=whole)(params)

    def _check_data(self, kept: dict[str, str]) -> None:
        """Compares the data with the checkpoint's and sets what the next checkpoint keeps."""
        now = fingerprints.of(self._task, ("train", self._settings.eval_split))
        self._data = kept | now
        allowed = self._settings.allow_changed_data
        self._changed_data = fingerprints.changes(kept, now, self.step, allowed)
        if self._changed_data:
            self._say(f"note: the data has changed: {fingerprints.described(self._changed_data)}")

    def _write_config(self) -> str | None:
        if self._settings.config_text is None:
            return None
        text = self._settings.config_text()
        write_config(self.folder, text, self._say)
        return text

    def _announce(self) -> None:
        n = self._mesh.size
        devices = f"{n} {jax.default_backend()} device{'s' if n > 1 else ''}"
        begin = f"going on from step {self.step}" if self.step else f"{self._source}from step 1"
        self._say(
            f"{self._task.name}: {self._n_params:,} parameters, {devices}, {begin} to "
            f"{self._settings.steps}, in {self.folder}"
        )

    def _compiled(self) -> list:
        """The step of each stage; compiles the next one's, and says what the run will take.

        It compiles none if there is none to do.
        """
        settings, n_devices = self._settings, self._mesh.size
        steps = [
            step_lib.step_fn(
                model,
                settings.optimizer,
                self._mesh,
                accumulate=settings.accumulate,
                loss_chunk_len=settings.loss_chunk_len,
                label_smoothing=settings.label_smoothing,
                ema_decay=settings.ema_decay,
            )
            for model in self._train_models
        ]
        if self.step >= settings.steps:
            return steps
        begun, first = time.monotonic(), next(self._batches)
        self._batches = chain([first], self._batches)
        now, start, flops = settings.stage_after(self.step), self.step, 0
        for stage, step in zip(self._stages[now:], steps[now:], strict=True):
            batch = first if start == self.step else tuple(self._batch(start))
            traced = step.trace(self._state, batch, self._key)
            found = forecast.products(traced.jaxpr)
            forecast.check_step(found, self._state, n_devices)
            flops += found.flops * (stage.until - start)
            if start == self.step:
                # A call of the jitted function finds what is compiled here.
                asked = forecast.memory_of(traced.lower().compile(), n_devices)
            start = stage.until
        if line := forecast.long_run(flops, n_devices):
            self._note(line)
        self._say(
            f"compiled in {time.monotonic() - begun:.0f} s: a step takes {memory.words(asked)} of "
            f"{memory.words(memory.available())} of memory"
        )
        return steps

    def _open_record(self, info: dict[str, Any]) -> None:
        """Opens the record where a checkpoint, whose values are `info`, left it."""
        settings = self._settings
        scored = info["score"] is not None
        seen = info.get("tokens", self.step * settings.batch_size * settings.length)
        path = self.folder / "metrics.jsonl"
        lines = RecordLines(
            path, self.step, info.get("record"), scored, say=self._note, check=self._lock.check
        )
        n_tokens = settings.batch_size * settings.length
        self._pace = forecast.Pace(settings.steps, IN_FLIGHT + 1)
        loggers = Loggers(settings.loggers, self.folder, self.step, self._config)
        self._record = Record(self.folder, lines, self.step, self._metric, n_tokens, loggers)
        if self._changed_data and self.step < settings.steps:
            self._record.write(self.step + 1, "data", {"changed": self._changed_data}, {})
        self._bar = Bar(self.step, settings.steps, settings.progress, self._metric)
        self._log = StepLog(
            settings,
            self._record,
            self._bar,
            list(info["window"]),
            seen,
            lambda: self.seconds,
            partial(self.callbacks.call, "on_step"),
        )

    def _batch(self, step: int):
        """The batch of the step after `step`, of its stage's sizes."""
        stage = self._stages[self._settings.stage_after(step)]
        sizes = stage.batch_size, stage.length
        return self._task.train_batch(self._settings.seed, step, *sizes)

    def _placed_batches(self):
        """The batches of the steps to come, on the devices."""
        rows = mesh_lib.over_batch(self._mesh)
        return (
            jax.device_put(tuple(self._batch(step)), rows)
            for step in range(self.step, self._settings.steps)
        )

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
        progress = self._settings.progress
        out = side_channels.stdout() if progress else side_channels.stderr()
        print(text, file=out, flush=True)

    # Going on.

    @property
    def stopping(self) -> bool:
        """Whether a signal or a callback asks to save and to stop."""
        return bool(self.interrupt) or self.callbacks.error is not None

    @property
    def minutes(self) -> float:
        """Time since this run was made."""
        return (time.monotonic() - self._started) / 60

    @property
    def seconds(self) -> float:
        """Time since the run began, without that of steps that were lost."""
        return self._seconds_before + time.monotonic() - self._started

    @property
    def minutes_since_save(self) -> float:
        """Time since the last checkpoint was begun, or since this run was made."""
        return (time.monotonic() - self._saved_at) / 60

    def advance(self) -> None:
        """Dispatches one step."""
        if self._checkpoints.done:
            self._hear_of_saves()
        if any(stage.until == self.step for stage in self._settings.stages):
            self._log.drain()
            self._log.pause()  # the next stage compiles
        train_step = self._train_steps[self._settings.stage_after(self.step)]
        self._state, metrics = train_step(self._state, next(self._batches), self._key)
        self.step, self.score = self.step + 1, None
        self._log.add(self.step, metrics)
        if (line := self._pace.after(self.step)) and self._settings.progress:
            self._bar.say(line)

    def is_scored(self, last: bool) -> bool:
        """Whether this step has the evaluation that it needs as the run's last, or as another."""
        if self.score is None:
            return False
        return "whole_split" in self.score or not self._scores.needs_all(last)

    def evaluate(self, last: bool) -> None:
        """Scores the parameters and records the score; an interrupt abandons it.

        Args:
          last: whether no evaluation follows.

        Raises:
          FloatingPointError: the score is not finite.
        """
        self._log.drain()
        self._pace.restart()
        score = self._scores.of(self._state.eval_params, self.step, last, lambda: self.stopping)
        self._log.pause()
        if score is None:
            return
        timing = {"seconds": self.seconds}
        self._record.write(self.step, self._settings.eval_split, score, timing)
        self._record.plot()
        if self._settings.progress:
            self._bar.say(f"step {self.step}: {self._scores.words(score)}")
        self.score = score
        self.callbacks.call("on_evaluation", self.step, dict(score), self._state.eval_params)

    def save(self, in_passing: bool = False) -> None:
        """Writes a checkpoint in the background, unless this one is written already.

        One that could not be written is told, and training goes on to the next.

        Args:
          in_passing: whether no step asked for it; see `Checkpoints.save`.

        Raises:
          FloatingPointError: parameters are not finite; nothing is written.
          Lost: when the last one was due, the folder was deleted or another training's.
        """
        self._hear_of_saves()
        self._saved_at = time.monotonic()
        if self._saved == (self.step, self.score):
            return
        self._log.drain()
        self._pace.restart()
        if not step_lib.all_finite(self._state):
            raise FloatingPointError(f"parameters are not finite after step {self.step}")
        extra: dict[str, Any] = {"data": self._data}
        if self._vocabulary is not None:
            extra["vocabulary"] = self._vocabulary
        if self.score is not None:
            extra |= {"scored": self._scores.kind(self._data), "evaluation": self.score}
        self._checkpoints.save(
            self.step,
            self._state,
            None if self.score is None else self.score[self._metric],
            self._config,
            self._check_folder,
            in_passing,
            window=self._log.window,
            tokens=self._log.tokens,
            timing={"seconds": self.seconds},
            record=self._record.lines.mark(),
            **extra,
        )
        self._log.pause()
        self._saved, self._saving = (self.step, self.score), self.step

    def _check_folder(self) -> None:
        """A restored checkpoint finds its lines; none is written into another's folder."""
        self._record.lines.sync()
        self._lock.check()

    def _hear_of_saves(self, then: str = "; training goes on to the next one") -> None:
        """Waits for the last save and says what went wrong with it."""
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
        best = self._checkpoints.best_step(skip_unreadable=True)
        score = self.score or {self._metric: None, "n_targets": 0, "whole": False}
        if "whole_split" in score:
            score = {**score["whole_split"], "whole": True}
        return {
            "step": self.step,
            "steps": self._settings.steps,
            "eval_split": self._settings.eval_split,
            "metric": self._metric,
            self._metric: score[self._metric],
            "n_targets": score["n_targets"],
            "whole": score["whole"],
            "best_step": best,
            "best_whole": not self._scores.of_part,
            "best_" + self._metric: None if best is None else self._checkpoints.score(best),
            "n_params": self._n_params,
            "output_dir": str(self.folder),
            "interrupted_by": self.interrupt.signal,
        }
