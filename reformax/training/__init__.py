"""Training and evaluation of any model on any task, on all devices of all processes.

Where to look:

* A run: `loop.train` is the loop. `run` has its step, evaluation and save, `start` what comes
  before and after: `run_setup`, `first_state`, `compiled_steps`. `schedule` says what is due
  after a step.
* What it computes: `step.step_fn` makes the compiled step, and `step.mean_loss` the loss, by
  `loss.cross_entropy`. `metrics` has a function for each metric, `optimizer` the updates.
* Settings: `settings.TrainSettings`, `stages.Stage`, `evaluations.Evaluation`.
* Scores: `evaluation.evaluate` scores a split, `evaluator` a run's own; `by_position`, `samples`.
* Checkpoints: `checkpoint`; `arrays` and `array_reader` below it; `manifest`, `description`.
* What one sees: `step_log` to `record`, and from there `record_lines`, `events`, `curves`.
* Before a run: `dry_run`, `capacity`, `forecast`; while it goes on: `profile`, `utilization`.
* Several devices and processes: `mesh`, `placing`, `processes`, `environment`, `watcher`.

No module imports a model, a task or gin: `loop.train` gets them as arguments.
"""
