"""The settings of a run: their meaning, their defaults, their bounds."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optax

# Whole numbers above 0. Those that are None by default may be None.
_WHOLE = (
    "steps",
    "batch_size",
    "length",
    "accumulate",
    "log_every",
    "keep",
    "eval_every",
    "eval_batch_size",
    "eval_length",
    "eval_stride",
    "eval_batches",
    "checkpoint_every",
    "loss_chunk_len",
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The keyword arguments of `loop.train`; in gin `loop.train.NAME`.

    Attributes:
      model: `model(mode='train')` and `model(mode='eval')` build the model for training and for
        evaluation, with the same parameters. Both have `init_params`, `features`, `logits` and
        `vocab_size`; a model of sentence pairs also has `source_vocab_size` and `max_length`.
      task: a `reformax.data.base.Task`.
      optimizer: a transformation of gradients; see `reformax.training.optimizer`.
      steps: updates in total, over all resumptions.
      batch_size: sequences per step; a multiple of the number of devices times `accumulate`.
      length: tokens per sequence.
      seed: of initial values, batches, hashes and dropout.
      accumulate: micro-batches that a batch is split into, to save memory.
      ema_decay: evaluate a moving average of the parameters with this decay; 0 for none.
      loss_chunk_len: positions of a row whose logits are in memory together; None: as many as
        `loss.max_logits` allows.
      label_smoothing: the share of a target's probability that the loss spreads over the
        vocabulary; printed and recorded losses are without it.
      eval_every: steps between evaluations, each followed by a checkpoint. None: only at the end.
      eval_split: the split that evaluations score.
      eval_batch_size: windows scored together; None: `batch_size`.
      eval_length: context of an evaluation, in tokens; None: `length`.
      eval_stride: tokens that the window of an evaluation moves by; None: its length.
      eval_batches: batches that an evaluation scores; None: the whole split.
      checkpoint_every: steps between checkpoints, besides those after evaluations; None: no more.
      keep: latest checkpoints kept, besides the best. An average of n needs n.
      log_every: steps between lines of the record; each line has the mean since the last.
      max_minutes: minutes after which training evaluates, saves and returns, as if `steps` were
        reached. The learning rate's schedule still goes by `steps`. None: no limit.
      allow_changed_data: whether to go on from a checkpoint of other data; a line of the record
        then says what changed.
      config_text: returns the text of config.gin, once everything is built.
      progress: whether to print and show a bar.

    Raises:
      ValueError: a value out of bounds.
    """

    model: Callable[..., Any]
    task: Any
    optimizer: optax.GradientTransformation
    steps: int
    batch_size: int
    length: int
    seed: int = 0
    accumulate: int = 1
    ema_decay: float = 0.0
    loss_chunk_len: int | None = None
    label_smoothing: float = 0.0
    eval_every: int | None = None
    eval_split: str = "valid"
    eval_batch_size: int | None = None
    eval_length: int | None = None
    eval_stride: int | None = None
    eval_batches: int | None = None
    checkpoint_every: int | None = None
    keep: int = 2
    log_every: int = 10
    max_minutes: float | None = None
    allow_changed_data: bool = False
    config_text: Callable[[], str] | None = None
    progress: bool = True

    def __post_init__(self):
        for name in _WHOLE:
            value = getattr(self, name)
            if value is None and getattr(Settings, name, ...) is None:
                continue
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number above 0")
        if self.max_minutes is not None and not self.max_minutes > 0:
            raise ValueError(
                f"max_minutes={self.max_minutes} must be above 0, or None for no limit"
            )
        if not 0 <= self.ema_decay < 1:
            raise ValueError(
                f"ema_decay={self.ema_decay} must be in [0, 1): 0.999 averages 1,000 steps"
            )
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(
                f"label_smoothing={self.label_smoothing} must be in [0, 1), such as 0.1"
            )
        length = self.eval_length or self.length
        if self.eval_stride is not None and self.eval_stride > length:
            raise ValueError(
                f"eval_stride={self.eval_stride} must not be above eval_length={length}"
            )

    @property
    def eval_sizes(self) -> dict[str, int]:
        """batch_size, length and stride of an evaluation."""
        length = self.eval_length or self.length
        return {
            "batch_size": self.eval_batch_size or self.batch_size,
            "length": length,
            "stride": self.eval_stride or length,
        }


def takes_settings(function):
    """Gives `function(..., **settings)` the signature that lists every setting.

    gin reads the names and defaults of arguments from it, and so does `help`.
    """
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    settings = inspect.signature(Settings).parameters.values()
    function.__signature__ = signature.replace(parameters=[*own, *settings])
    # A misspelt or missing argument is then an error of the function that the user called.
    Settings.__init__.__qualname__ = function.__qualname__
    return function
