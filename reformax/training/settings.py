"""The settings of a run: their meaning, their defaults, their bounds."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import optax

from reformax.declared import (
    Called,
    Name,
    NonNegative,
    PathName,
    Positive,
    Rate,
    Seed,
    SettingError,
    Size,
    check,
    check_fields,
    expected,
    hints_of,
    shown,
)
from reformax.task import CLASSIFIERS, TaskModel
from reformax.training import evaluations as evaluations_lib
from reformax.training import optimizer as optimizer_lib
from reformax.training.callbacks import Callback, Logger
from reformax.training.evaluations import Evaluation, ResolvedEvaluation
from reformax.training.fine_tuning import FineTuning
from reformax.training.loss import metric_name
from reformax.training.mesh import Sizes
from reformax.training.stages import (
    Model,
    ResolvedStage,
    Stage,
    Task,
    check_vocabulary,
    end_of,
    resolved,
)

Transformation = Annotated[
    optax.GradientTransformation, Called("an optimizer, such as optimizer.adamw()")
]


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """The keyword arguments of `loop.train`; in gin `loop.train.NAME`.

    Attributes:
      model: `model(mode='train')` and `model(mode='eval')` build the model for training and for
        evaluation, with the same parameters. Both are a `reformax.task.TaskModel`.
      task: a `reformax.task.Task`.
      optimizer: a transformation of gradients; see `reformax.training.optimizer`. Its schedule is
        as long as `steps`, unless it has a length of its own.
      steps: updates in total, over all resumptions.
      batch_size: sequences per step; a multiple of the number of devices times `accumulate`.
      length: tokens per sequence.
      mesh: sizes of the axes of devices, such as `{'fsdp': 8}`; see docs/devices.md. `data`, over
        which batches are split, takes all devices that the others leave; `fsdp` splits weights
        too, and `context` sequences.
      stages: the first steps with settings of their own, in order; after the last of them come
        those above, which evaluations have throughout. See `reformax.training.stages`.
      seed: of initial values, batches, hashes and dropout.
      accumulate: micro-batches that a batch is split into and computed in, one after the other, to
        save memory; the gradient is that of the whole batch.
      ema_decay: evaluate a moving average of the parameters with this decay; 0 for none. In the
        first t steps it is at most (1 + t) / (10 + t), so that initial values are soon forgotten.
      loss_chunk_len: positions of a row whose logits are in memory together; None: as many as
        `loss.max_logits` allows.
      backprop_len: positions that gradients go back over: rows are computed in parts of so many,
        which go on from the states of the parts before (truncated backpropagation). It divides
        `length`, and a model has recurrences alone. None: over whole rows.
      label_smoothing: the share of a target's probability that the loss spreads over the
        vocabulary; printed and recorded losses are without it.
      z_loss: a factor, such as PaLM's 1e-4, of the squared logarithm of the softmax's sum, which
        the loss of each target gets; printed and recorded losses are without it.
      eval_every: steps between evaluations, each followed by a checkpoint. None: only at the end.
      eval_split: the split that evaluations score.
      eval_batch_size: windows scored together; None: `batch_size`.
      eval_length: context of an evaluation, in tokens; None: `length`.
      eval_stride: tokens that the window of an evaluation moves by; None: its length.
      eval_tokens: targets that an evaluation scores, up to whole batches: evenly spread over the
        split, and always the same ones. None: the whole split.
      eval_whole: whether the last evaluation scores the whole split as well.
      sample_every: steps between samples of text that a language model writes, a multiple of
        `eval_every`, for a sample follows an evaluation; the last one has one too. None: that alone
        has one, if there are `sample_prompts`.
      sample_prompts: the beginnings of the texts of a sample; (): with `sample_every` an empty one.
      sample_tokens: new tokens of each text.
      evaluations: more evaluations by their names, of other splits, tasks or lengths; see
        `reformax.training.evaluations`. The best checkpoint is by the run's own alone.
      checkpoint_every: steps between checkpoints, besides those after evaluations; None: no more.
      checkpoint_minutes: minutes between checkpoints where no step requests one. Such a checkpoint
        is temporary: the next one that a step requests replaces it, and no average counts it.
        None: none.
      keep: latest checkpoints kept, besides the best. An average of n needs n.
      checkpoint_copies: a folder that gets a copy of each checkpoint kept, such as
        `s3://bucket/run`, and that an `output_dir` without checkpoints goes on from; see
        docs/resuming.md. None: none.
      log_every: steps between lines of the record; each line has the mean since the last.
      report_kept_mass_every: steps between lines of the record with the share of dense attention's
        mass on the keys that hashes or another choice show, by layer of `model`, in stages of other
        models too (`TaskModel.kept_mass`); None: there are none.
      max_minutes: minutes after which training evaluates, saves and returns, as if `steps` were
        reached. The learning rate's schedule still goes by `steps`. None: no limit.
      init_from: the folder of a run, or of one of its checkpoints, whose weights the run begins
        with; optimizer and steps begin anew. Once this run has a checkpoint it goes on from that.
      fresh_heads: whether `init_from` gives the model's backbone alone and its heads begin anew, so
        that a masked language model's weights begin a classifier.
      fresh_ops: whether the weights of attention algorithms, such as an indexer's, begin anew, so
        that a model with `dsa.dsa` begins with the weights of a dense one.
      fine_tuning: which weights are trained, and of which matrices low-rank changes (LoRA), a
        `reformax.training.fine_tuning.FineTuning`; None: all weights.
      callbacks: `reformax.training.callbacks.Callback`s: what else is done at steps, evaluations
        and checkpoints. One that raises ends the run, once it is saved.
      loggers: where the record's lines go as well, such as `wandb_log.wandb_log()`. A failure
        is reported, and the run goes on.
      allow_changed_data: whether to go on from a checkpoint of other data; a line of the record
        then says what changed.
      config_text: returns the text of config.gin, once everything is built.
      named: gives a line the names of settings that its reader types; None: those of arguments.
      progress: whether to print and show a bar, or a line every 30 s where stderr is no terminal.

    Raises:
      ValueError: a value out of bounds.
    """

    model: Model
    task: Task
    optimizer: Transformation
    steps: Size
    batch_size: Size
    length: Size
    mesh: Sizes | None = None
    stages: Sequence[Stage] = ()
    seed: Seed = 0
    accumulate: Size = 1
    ema_decay: Rate = 0.0
    loss_chunk_len: Size | None = None
    backprop_len: Size | None = None
    label_smoothing: Rate = 0.0
    z_loss: NonNegative = 0.0
    eval_every: Size | None = None
    eval_split: Name = "valid"
    eval_batch_size: Size | None = None
    eval_length: Size | None = None
    eval_stride: Size | None = None
    eval_tokens: Size | None = 2**18
    eval_whole: bool = True
    sample_every: Size | None = None
    sample_prompts: Sequence[str] = ()
    sample_tokens: Size = 100
    evaluations: Mapping[Name, Evaluation] = field(default_factory=dict)
    checkpoint_every: Size | None = None
    checkpoint_minutes: Positive | None = 5
    keep: Size = 2
    checkpoint_copies: Name | None = None
    log_every: Size = 10
    report_kept_mass_every: Size | None = None
    max_minutes: Positive | None = None
    init_from: PathName | None = None
    fresh_heads: bool = False
    fresh_ops: bool = False
    fine_tuning: FineTuning | None = None
    callbacks: Sequence[Callback] = ()
    loggers: Sequence[Logger] = ()
    allow_changed_data: bool = False
    config_text: Callable[[], str] | None = None
    named: Callable[[str], str] | None = None
    progress: bool = True

    def __post_init__(self):
        check_fields(self)
        own = self.main_evaluation
        if own.stride > own.length:
            raise SettingError(
                f"eval_stride={own.stride} must not be above eval_length={own.length}"
            )
        for name in ("fresh_heads", "fresh_ops"):
            if getattr(self, name) and self.init_from is None:
                raise SettingError(
                    f"{name} is True and init_from is None: set it to a run's folder"
                )
        if self.sample_every is not None:
            self._check_samples()
        ends = [0, *(end_of(stage, self.steps) for stage in self.stages), self.steps]
        are_fractions = [stage.until < 1 for stage in self.stages]  # which may hold no step
        for before, end, is_fraction in zip(ends, ends[1:], [*are_fractions, False], strict=False):
            if end < before or (end == before and not is_fraction):
                raise SettingError(
                    f"stages end at steps {ends[1:-1]}: expected growing numbers below "
                    f"steps={ends[-1]}"
                )
        for stage in self.all_stages:
            check_vocabulary(stage.name, stage.task, self.task)
            if stage.fine_tuning is not None and self.fine_tuning is not None:
                raise SettingError(
                    f"{stage.name}.fine_tuning and the run's fine_tuning are both set: leave one "
                    "of them out"
                )
        _ = self.other_evaluations  # raises for one that does not fit

    @property
    def prompts(self) -> Sequence[str]:
        """The beginnings of the texts of a sample; none if the run writes no samples."""
        return self.sample_prompts or ("",) * (self.sample_every is not None)

    def _check_samples(self) -> None:
        every = self.sample_every
        if self.task.kind != "text":
            raise SettingError(
                f"sample_every is {every} and task {self.task.name} is no text: leave it out"
            )
        if self.eval_every is None or every % self.eval_every:
            raise SettingError(
                f"sample_every={every} must be a multiple of eval_every={self.eval_every}, for a "
                "sample follows an evaluation: change one of them"
            )

    @functools.cached_property
    def built_optimizer(self) -> optax.GradientTransformation:
        """The optimizer of a run of `steps`, of the weights that it trains."""
        built = optimizer_lib.build(self.optimizer, self.steps)
        return built if self.fine_tuning is None else self.fine_tuning.of(built)

    @property
    def unfinished_warmup(self) -> str | None:
        """A line where the learning rate does not reach its peak, with the names that are typed."""
        line = optimizer_lib.unfinished_warmup(self.optimizer, self.steps)
        return line if line is None or self.named is None else self.named(line)

    @functools.cached_property
    def all_stages(self) -> list[ResolvedStage]:
        """The stages that have steps, resolved; the last one has the run's own values."""
        last = ResolvedStage(self.steps, self.model, self.task, self.batch_size, self.length)
        return resolved(self.stages, last)

    def stage_after(self, step: int) -> int:
        """The index in `all_stages` of the stage that has the step after `step`."""
        return sum(stage.until <= step for stage in self.all_stages[:-1])

    def tokens_after(self, step: int) -> int:
        """The tokens of the first `step` steps."""
        found = begin = 0
        for stage in self.all_stages:
            end = min(stage.until, step)
            found, begin = found + (end - begin) * stage.batch_size * stage.length, end
        return found

    def batch_number(self, step: int) -> int:
        """Batch index passed to the stage's task for the batch after `step`: `step`, or more.

        A task that reads in order multiplies the index by the batch size to find its position. The
        index leaps after a stage of larger batches, so no example repeats before all have come.
        """
        number = position = begin = 0
        for stage in self.all_stages[: self.stage_after(step) + 1]:
            if stage.task.in_order:
                number = max(number, -(-position // stage.batch_size))
            end = min(stage.until, step)
            number, begin = number + end - begin, end
            position = max(position, number * stage.batch_size)
        return number

    @functools.cached_property
    def main_evaluation(self) -> ResolvedEvaluation:
        """The evaluation of the run, by which a checkpoint is the best."""
        of_training = dict(batch_size=self.batch_size, length=self.length, stride=self.length)
        given = self.eval_batch_size, self.eval_length, self.eval_stride
        return ResolvedEvaluation(
            label=self.eval_split,
            name="",
            task=self.task,
            split=self.eval_split,
            metric=metric_name(self.task),
            **evaluations_lib.sizes_of(*given, of_training),
            tokens=self.eval_tokens,
            whole=self.eval_whole,
            every=self.eval_every,
        )

    @functools.cached_property
    def other_evaluations(self) -> list[ResolvedEvaluation]:
        """The resolved evaluations of `evaluations`, in their order."""
        given = self.evaluations.items()
        return [evaluations_lib.resolved(x, y, self.main_evaluation) for x, y in given]

    @property
    def all_evaluations(self) -> list[ResolvedEvaluation]:
        """The run's own evaluation, and the others."""
        return [self.main_evaluation, *self.other_evaluations]


def build(model: Callable[..., Any], mode: str, n_classes: int | None = None) -> TaskModel:
    """`model(mode=mode)`, with `n_classes` if the model has none of its own.

    Raises:
      SettingError: the model cannot be built, or is no model.
    """
    check("model", model, Model)
    refusal = SettingError(f"model is {shown(model)}: expected {expected(Model)}")
    if isinstance(model, TaskModel):  # which is a layer, and so can be called too
        raise refusal
    try:
        inspect.signature(model).bind_partial(mode=mode)
    except (TypeError, ValueError):
        raise refusal from None
    built = model(mode=mode)
    if not isinstance(built, TaskModel):
        raise refusal
    if n_classes is not None and built.task_kind in CLASSIFIERS and built.n_classes is None:
        built = model(mode=mode, n_classes=n_classes)
    return built


def takes_settings(function):
    """Gives `function(..., **settings)` the signature that lists every setting.

    gin reads the names and defaults of arguments from it, and so does `help`.
    """
    signature = inspect.signature(function)
    others = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    settings = inspect.signature(TrainSettings).parameters.values()
    function.__signature__ = signature.replace(parameters=[*others, *settings])
    function.__annotations__ |= hints_of(TrainSettings)  # `hints_of(function)` reads them
    # A misspelt or missing argument is then an error of the function that the user called.
    TrainSettings.__init__.__qualname__ = function.__qualname__
    return function
