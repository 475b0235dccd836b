"""Training from the first step to the last, through any interruption.

`train` below is the loop. It reads top to bottom:

* `start.opened` checks the settings and opens the folder; by `first_state` it restores or
  draws the weights, and by `compiled_steps` compiles the step.
* `run.train_step` makes one step. The step is `step.step_fn`; `step.mean_loss` computes the loss.
* `run.evaluate` and `run.save` score and save what `RunState` holds, which each step replaces.
  `Run` has the rest, the same objects all through: settings, model, batches, record.
* `schedule.due_after` says what comes after a step.
"""

from __future__ import annotations

from typing import Any

from reformax.declared import PathName, check
from reformax.training.folder import output_folder
from reformax.training.run import evaluate, is_scored, result_of, save, train_step
from reformax.training.schedule import due_after
from reformax.training.settings import TrainSettings, takes_settings
from reformax.training.start import opened


@takes_settings
def train(output_dir: PathName, **settings) -> dict[str, Any]:
    """Trains a model on a task, from the latest checkpoint in `output_dir` if there is one.

    Args:
      output_dir: gets checkpoints/, config.gin, metrics.jsonl, tensorboard/ and loss.png. It is
        made if need be, and deleted where a run that cannot begin would leave it empty.
      **settings: the fields of `reformax.training.settings.TrainSettings`. Six have no
        default: model, task, optimizer, steps, batch_size and length.

    Returns:
      step, steps, eval_split, n_params, output_dir: the run's.
      metric: 'bits_per_dim', 'bits_per_token' of a translation, or 'bits_per_label' of classes.
      METRIC, under that name: the last score; None if the run was stopped before an evaluation.
      n_targets, whole: the number of its targets, and whether they are the whole split.
      best_step, best_METRIC, best_whole: the same of the best score.
      evaluations: the scores besides the run's own, each with its `metric`.
      interrupted_by: a `signal.Signals`, or None. After SIGTERM, SIGINT or SIGHUP the step in
        progress is finished and saved before this returns.

    Raises:
      ValueError: arguments that do not fit, or a checkpoint that is damaged or of another model.
      OSError: the folder cannot be written, or another training writes into it.
      FloatingPointError: loss or parameters are no longer finite; the checkpoints are from before.
      Exception: what a callback raised, once the run is saved.
    """
    check("output_dir", output_dir, PathName)
    settings = TrainSettings(**settings)
    with output_folder(output_dir) as folder, opened(folder, settings) as (run, state):
        first = state.step
        while True:
            # Only this call reads clocks; process 0 decides for all.
            now = run.decisions.now()
            due = due_after(settings, first, state.step, now.minutes, now.since_save)
            # A resumed run has its score, unless it was stopped before it could evaluate.
            if due.evaluate and not is_scored(run, state, run.main, due.stop) and not now.stopping:
                evaluate(run, state, run.main, due.stop)
                now = run.decisions.now()
            others = [x for x in due.others if not is_scored(run, state, x, due.stop)]
            if due.save or due.save_temporary or now.stopping or others:
                # Before the others, whose failure then loses no step and no score.
                save(run, state, temporary=not due.save)
            for label in others:
                if not now.stopping:
                    evaluate(run, state, label, due.stop)
                    now = run.decisions.now()
            if due.stop or now.stopping:
                if others:  # a run that goes on later has their scores; else it scores again
                    save(run, state, temporary=not due.save)
                break
            train_step(run, state)
    result = result_of(run, state)
    run.callbacks.call("on_end", result)
    run.callbacks.check()
    return result
