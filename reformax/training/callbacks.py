"""Callbacks and loggers: code of the user that a run calls, and other outputs of its lines.

A callback is a part of the run: one that raises ends it, once it is saved. A logger shows the run:
one that raises is reported in a line, and the run goes on without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from reformax.training import side_channels


def _nothing(*_) -> None:
    pass


class Callback(NamedTuple):
    """Functions that the loop's thread calls, in every process; training waits for each.

    Attributes:
      on_step: takes a step's number and its values: the run's metric, such as 'bits_per_dim',
        'accuracy', 'grad_norm' and perhaps 'learning_rate'. Up to two later steps are under way.
      on_evaluation: takes the step, the score as its line of the record has it, and the parameters
        that were scored. The next step overwrites these: copy what is to stay.
      on_checkpoint: takes the step and the folder of a checkpoint that is on the disk.
      on_end: takes what `loop.train` returns.
    """

    on_step: Callable[[int, dict[str, float]], None] = _nothing
    on_evaluation: Callable[[int, dict[str, Any], Any], None] = _nothing
    on_checkpoint: Callable[[int, Path], None] = _nothing
    on_end: Callable[[dict[str, Any]], None] = _nothing


@runtime_checkable
class Logger(Protocol):
    """Gets the lines of a run's record, in process 0."""

    def open(self, folder: Path, step: int, config: str | None) -> None:
        """Begins, or goes on from `step`, before the first line.

        Args:
          folder: the run's.
          step: done so far.
          config: the text of the run's config.
        """

    def write(
        self, step: int, split: str, values: dict[str, Any], timing: dict[str, float]
    ) -> None:
        """Takes a line: the numbers of `timing` depend on the machine's speed.

        `split` is the line's, but 'train_split' of an evaluation of 'train'.
        """

    def close(self) -> None:
        """Ends."""


class Callbacks:
    """Calls callbacks until one raises.

    Attributes:
      error: what it raised; None so far.
    """

    def __init__(self, callbacks: Sequence[Callback]):
        self._callbacks = callbacks
        self.error: Exception | None = None

    def call(self, name: str, *arguments: Any) -> None:
        """Calls the function `name` of each callback."""
        for callback in self._callbacks:
            if self.error is None:
                try:
                    getattr(callback, name)(*arguments)
                except Exception as error:
                    error.add_note(f"raised by {name} of a callback; what is trained is saved")
                    self.error = error

    def check(self) -> None:
        """Raises what a callback raised."""
        if self.error is not None:
            raise self.error


class Loggers:
    """Gives lines to loggers, and says in a line which of them failed."""

    def __init__(
        self, loggers: Sequence[Logger], folder: Path, step: int = 0, config: str | None = None
    ):
        """Opens none before the first line; the arguments are those of `Logger.open`."""
        self._unopened = [(x, side_channels.BestEffort(type(x).__name__)) for x in loggers]
        self._opened: list[tuple[Logger, side_channels.BestEffort]] = []
        self._options = folder, step, config

    def write(
        self, step: int, split: str, values: dict[str, Any], timing: dict[str, float]
    ) -> None:
        """Gives a line to each that could be opened."""
        while self._unopened:
            logger, best_effort = self._unopened.pop(0)
            with best_effort:
                logger.open(*self._options)
                self._opened.append((logger, best_effort))
        for logger, best_effort in self._opened:
            with best_effort:
                logger.write(step, split, dict(values), dict(timing))

    def close(self) -> None:
        """Closes those that were opened."""
        for logger, best_effort in self._opened:
            with best_effort:
                logger.close()
