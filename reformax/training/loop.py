"""Training from the first step to the last, through any interruption.

What a step does is a function of the state and of (seed, step) alone: the batch, the hashes and the
dropout. So a run that goes on from a checkpoint computes what it would have computed anyway, and
its record is cut back to that checkpoint before it goes on.
"""

from __future__ import annotations

import difflib
import itertools
import math
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import optax

from reformax.training import mesh as mesh_lib
from reformax.training import step as step_lib
from reformax.training.checkpoint import Checkpoints
from reformax.training.evaluation import check_vocabulary, evaluate
from reformax.training.interrupt import Interrupt
from reformax.training.lock import alone_in
from reformax.training.loss import bits_per_dim, metric_name
from reformax.training.metrics import Progress, Record
from reformax.training.prefetch import prefetch

# Steps dispatched before the first one's metrics are waited for: the device is never idle, and the
# host notices a bad loss or a signal within this many steps.
_IN_FLIGHT = 2


def train(
    output_dir: str | os.PathLike,
    *,
    model: Callable[..., Any],
    task,
    optimizer: optax.GradientTransformation,
    steps: int,
    batch_size: int,
    length: int,
    seed: int = 0,
    accumulate: int = 1,
    ema_decay: float = 0.0,
    loss_chunk_len: int | None = None,
    label_smoothing: float = 0.0,
    eval_every: int | None = None,
    eval_split: str = "valid",
    eval_batch_size: int | None = None,
    eval_length: int | None = None,
    eval_stride: int | None = None,
    eval_batches: int | None = None,
    checkpoint_every: int | None = None,
    keep: int = 2,
    log_every: int = 10,
    max_minutes: float | None = None,
    config_text: Callable[[], str] | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Trains a model on a task, from the latest checkpoint in `output_dir` if there is one.

    Args:
      output_dir: gets checkpoints/, config.gin, metrics.jsonl, tensorboard/ and loss.png.
      model: `model(mode='train')` and `model(mode='eval')` give the two faces of one model, which
        have `init_params`, `features`, `logits` and `vocab_size` and share their parameters; one of
        sentence pairs also `source_vocab_size` and `max_length`.
      task: a `reformax.data.base.Task`.
      optimizer: a transformation of gradients; see `reformax.training.optimizer`.
      steps: updates to make in all, over all resumptions.
      batch_size: sequences a step; a multiple of the number of devices times `accumulate`.
      length: tokens a sequence.
      seed: of initial values, batches, hashes and dropout.
      accumulate: micro-batches that a batch is computed in to save memory.
      ema_decay: evaluate a moving average of the parameters with this decay; 0 for none.
      loss_chunk_len: positions of a row whose logits are in memory together; None: as many as
        `loss.max_logits` lets.
      label_smoothing: how much of a target's probability the loss spreads over the vocabulary; what
        is printed and recorded is without it.
      eval_every: steps between evaluations; each one ends in a checkpoint. None: only at the end.
      eval_split: what evaluations score.
      eval_batch_size: windows scored together; None: `batch_size`.
      eval_length: context of an evaluation, in tokens; None: `length`.
      eval_stride: how far its window moves; None: its length.
      eval_batches: batches an evaluation scores; None: the whole split.
      checkpoint_every: steps between checkpoints besides those of the evaluations; None: no others.
      keep: latest checkpoints kept; the best by bits is kept besides. Averaging n needs n.
      log_every: steps between lines in the record; each has the mean of the steps since the last.
      max_minutes: after this much time, evaluate, save and return, as if `steps` were reached; the
        learning rate's schedule does not know of it. None: no limit.
      config_text: gives the settings to write to config.gin, once everything is built.
      progress: whether to print and show a bar.

    Returns:
      step, steps, eval_split, metric: 'bits_per_dim', or 'bits_per_token' of a translation; under
      the metric's name its value (None if the run was stopped before an evaluation), best_step and
      under best_METRIC the best value, n_params, output_dir, and interrupted_by: a
      `signal.Signals`, or None. After SIGTERM or SIGINT the step in progress is finished and saved
      before this returns.

    Raises:
      ValueError: arguments that do not fit, or a checkpoint that is damaged or of another model.
      OSError: the folder cannot be written, or another training writes into it.
      FloatingPointError: loss or parameters are no longer finite; the checkpoints are from before.
    """
    started = time.monotonic()
    _check_whole(steps=steps, batch_size=batch_size, length=length, accumulate=accumulate)
    _check_whole(log_every=log_every, keep=keep)
    for name, value in {
        "eval_every": eval_every,
        "eval_batch_size": eval_batch_size,
        "eval_length": eval_length,
        "eval_stride": eval_stride,
        "eval_batches": eval_batches,
        "checkpoint_every": checkpoint_every,
        "loss_chunk_len": loss_chunk_len,
    }.items():
        if value is not None:
            _check_whole(**{name: value})
    if max_minutes is not None and not max_minutes > 0:
        raise ValueError(f"max_minutes={max_minutes} must be above 0, or None for no limit")
    if not 0 <= ema_decay < 1:
        raise ValueError(f"ema_decay={ema_decay} must be in [0, 1): 0.999 averages 1,000 steps")
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing={label_smoothing} must be in [0, 1), such as 0.1")
    eval_batch_size = eval_batch_size or batch_size
    eval_length = eval_length or length
    if eval_stride is not None and eval_stride > eval_length:
        raise ValueError(f"eval_stride={eval_stride} must not be above eval_length={eval_length}")
    mesh = mesh_lib.data_mesh()
    mesh_lib.check_batch_size("batch_size", batch_size, mesh, accumulate)
    mesh_lib.check_batch_size("eval_batch_size", eval_batch_size, mesh)
    folder = make_output_dir(output_dir)
    checkpoints = Checkpoints(folder, keep)

    train_model, eval_model = model(mode="train"), model(mode="eval")
    check_vocabulary(train_model, task)
    say = print if progress else _say_nothing
    with alone_in(folder, say):
        done = checkpoints.steps()
        vocabulary = None  # what the checkpoints know it by
        if task.translation is not None:
            task.translation.sentences(eval_split)  # before minutes are spent on the vocabulary
            vocabulary = task.translation.vocabulary.keep_in(folder, begun=bool(done))
            if done:
                checkpoints.check_vocabulary(done[-1], vocabulary)
        metric = metric_name(task)
        task.n_targets(eval_split)  # a split that does not exist fails now
        key = jax.random.PRNGKey(seed)
        init = step_lib.init_fn(train_model, optimizer, (batch_size, length), ema_decay > 0)
        like = jax.eval_shape(init, key)
        longest = eval_length
        if task.translation is not None and eval_model.max_length is not None:
            # Pairs that are longer than a row are scored in longer rows.
            scored = task.eval_batches(
                eval_split, eval_batch_size, eval_length, eval_stride or eval_length
            )
            scored = itertools.islice(scored, eval_batches)
            longest = max((batch.targets.shape[1] for batch in scored), default=eval_length)
        _check_evaluates(eval_model, like.params, task, eval_batch_size, longest)

        if done:
            state, info = checkpoints.restore(done[-1], like)
            state = jax.device_put(state, mesh_lib.replicated(mesh))
        else:
            state = jax.jit(init, out_shardings=mesh_lib.replicated(mesh))(key)
            info = {"step": 0, "score": None, "window": []}
        step, score = info["step"], info["score"]
        checkpoints.remove_unfinished()  # only now: this config is known to be the run's own
        settings = None if config_text is None else config_text()
        if settings is not None:
            _write_config(folder / "config.gin", settings, say)
        n_params = sum(x.size for x in jax.tree.leaves(like.params))
        devices = f"{mesh.size} {jax.default_backend()} device{'s' if mesh.size > 1 else ''}"
        begin = f"going on from step {step}" if step else "from step 1"
        say(f"{task.name}: {n_params:,} parameters, {devices}, {begin} to {steps}, in {folder}")

        train_step = step_lib.step_fn(
            train_model,
            optimizer,
            mesh,
            accumulate=accumulate,
            loss_chunk_len=loss_chunk_len,
            label_smoothing=label_smoothing,
            ema_decay=ema_decay,
        )
        rows = mesh_lib.over_batch(mesh)
        batches = (
            jax.device_put(tuple(task.train_batch(seed, s, batch_size, length)), rows)
            for s in range(step, steps)
        )
        record = Record(folder, step, metric)
        bar = Progress(step, steps, progress, metric)
        log = _Log(record, bar, metric, log_every, steps, batch_size * length, list(info["window"]))
        saved_step = step if done else None

        def evaluated() -> float | None:
            log.drain()
            result = evaluate(
                eval_model,
                state.eval_params,
                task,
                eval_split,
                batch_size=eval_batch_size,
                length=eval_length,
                stride=eval_stride,
                seed=seed,
                max_batches=eval_batches,
                loss_chunk_len=loss_chunk_len,
                mesh=mesh,
                progress=progress,
                should_stop=lambda: bool(interrupt),
            )
            log.pause()
            if result is None:
                return None
            bits = result[metric]
            if not math.isfinite(bits):
                raise FloatingPointError(f"{eval_split} loss is {bits} after step {step}")
            values = {metric: bits, "accuracy": result["accuracy"]}
            record.write(step, eval_split, values, {"seconds": time.monotonic() - started})
            record.plot()
            if progress:
                bar.say(f"step {step}: {eval_split} {bits:.4f} {metric.replace('_', ' ')}")
            return bits

        def save() -> None:
            log.drain()
            if not step_lib.all_finite(state):
                raise FloatingPointError(f"parameters are not finite after step {step}")
            extra = {} if vocabulary is None else {"vocabulary": vocabulary}
            checkpoints.save(step, state, score, settings, window=log.window, **extra)
            log.pause()

        with Interrupt() as interrupt, prefetch(batches) as ready:
            try:
                while True:
                    minutes = (time.monotonic() - started) / 60
                    # At least a step a run, or a limit below the compile time would never end.
                    late = max_minutes is not None and minutes > max_minutes and step > info["step"]
                    finished = step >= steps or late
                    due = finished or (eval_every is not None and step % eval_every == 0)
                    # A checkpoint without a score where one is due: the run was stopped there.
                    if step > 0 and due and score is None and not interrupt:
                        score = evaluated()
                        if score is not None:
                            saved_step = None
                    keep_step = (
                        checkpoint_every is not None and step > 0 and not step % checkpoint_every
                    )
                    if step != saved_step and (score is not None or keep_step or interrupt):
                        save()
                        saved_step = step
                    if finished or interrupt:
                        break
                    state, metrics = train_step(state, next(ready), key)
                    step, score = step + 1, None
                    log.add(step, metrics)
            except FloatingPointError as error:
                checkpoints.wait()
                good = checkpoints.steps()
                last = "no checkpoint yet"
                if good:
                    last = f"step {good[-1]} is the last good checkpoint"
                raise FloatingPointError(
                    f"{error}: {last} in {folder}; lower the learning rate or clip the gradient, "
                    "then run again to go on from there"
                ) from None
            finally:
                checkpoints.wait()
                record.close()
                bar.close()
    best = checkpoints.best_step()
    return {
        "step": step,
        "steps": steps,
        "eval_split": eval_split,
        "metric": metric,
        metric: score,
        "best_step": best,
        "best_" + metric: None if best is None else checkpoints.score(best),
        "n_params": n_params,
        "output_dir": str(folder),
        "interrupted_by": interrupt.signal,
    }


def make_output_dir(path: str | os.PathLike) -> Path:
    """Makes the folder if need be; raises OSError in one line if nothing can be written there."""
    folder = Path(path).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(
            f"output_dir={folder} cannot be written ({error.strerror}): give a folder of your own "
            "with --output_dir"
        ) from None
    return folder


class _Log:
    """Metrics of steps in flight, fetched once later steps are dispatched, and logged."""

    def __init__(self, record, bar, metric, log_every, steps, tokens_per_step, window):
        self._record, self._bar, self._metric = record, bar, metric
        self._log_every, self._steps, self._tokens = log_every, steps, tokens_per_step
        self.window: list[list[float]] = window  # [bits, accuracy] of steps not in a line yet
        self._in_flight: deque = deque()
        self._last: float | None = None  # when the last step ended; None if work came between
        self._busy, self._timed = 0.0, 0

    def add(self, step: int, metrics: dict[str, jax.Array]) -> None:
        self._in_flight.append((step, metrics))
        if len(self._in_flight) > _IN_FLIGHT:
            self._fetch()

    def drain(self) -> None:
        """Waits for all steps dispatched."""
        while self._in_flight:
            self._fetch()

    def pause(self) -> None:
        """What follows until the next step is no training time."""
        self._last = None

    def _fetch(self) -> None:
        step, metrics = self._in_flight.popleft()
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        if not (math.isfinite(values["nats"]) and math.isfinite(values["grad_norm"])):
            raise FloatingPointError(
                f"loss is {values['nats']} and the gradient's norm {values['grad_norm']} at step "
                f"{step}"
            )
        now = time.monotonic()
        if self._last is not None:
            self._busy, self._timed = self._busy + now - self._last, self._timed + 1
        self._last = now
        speed = self._timed * self._tokens / self._busy if self._busy else None
        bits = bits_per_dim(values["nats"], 1.0)
        self._bar.advance(bits, speed)
        self.window.append([bits, values["accuracy"]])
        if step % self._log_every and step != self._steps:
            return
        means = [sum(column) / len(column) for column in zip(*self.window, strict=True)]
        line = {self._metric: means[0], "accuracy": means[1], "grad_norm": values["grad_norm"]}
        if "learning_rate" in values:
            line["learning_rate"] = values["learning_rate"]
        timing = {} if speed is None else {"tokens_per_second": speed}
        self._record.write(step, "train", line, timing)
        self.window.clear()
        self._busy, self._timed = 0.0, 0


def _check_evaluates(eval_model, params, task, batch_size: int, length: int) -> None:
    """Traces an evaluation: a length that positions cannot hold fails now, not at step 1,000."""
    tokens = jax.ShapeDtypeStruct((batch_size, length), jax.numpy.int32)
    inputs = tokens if task.translation is None else (tokens,) * 4  # SentencePairs
    rng = jax.ShapeDtypeStruct((2,), jax.numpy.uint32)
    jax.eval_shape(lambda p, t, r: eval_model.features(p, t, rng=r), params, inputs, rng)


def _write_config(path: Path, text: str, say) -> None:
    before = path.read_text() if path.exists() else text
    changes = [
        line
        for line in difflib.ndiff(before.splitlines(), text.splitlines())
        if line[:2] in ("- ", "+ ") and line[2:].strip() and not line[2:].startswith("#")
    ]
    if changes:
        say("settings changed since the last run in this folder (- before, + now):")
        say("\n".join(changes))
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.replace(path)


def _check_whole(**values) -> None:
    for name, value in values.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} must be a whole number above 0")


def _say_nothing(text: str) -> None:
    del text
