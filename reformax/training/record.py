"""The record of a run: metrics.jsonl, TensorBoard events, loss.png and the progress bar.

Every line of metrics.jsonl is one JSON object with `step`, `split`, the run's metric, such as
`bits_per_dim`, and a `tag`: 'train' is the mean of steps, with the `tokens` seen so far; 'eval' is
an evaluation, with the `n_targets` scored and `whole`: whether these are the split; 'sample' has
`texts` that the model wrote; 'kept_mass' is of `report_kept_mass_every`; 'data' says which splits
have changed, and 'note' how many lines are lost. Numbers that depend on the machine's speed are
under `timing`: `seconds` since the run began, over resumptions, and of training
`tokens_per_second` and `mfu`, null where they are not known. Without them, a run that was stopped
and resumed has the record of a run that was not.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from reformax import durable, memory
from reformax.progress import Progress
from reformax.training import curves, side_channels
from reformax.training.callbacks import Loggers
from reformax.training.events import EventFile
from reformax.training.record_lines import RecordLines


class Record:
    """Shows the metrics of a run that goes on from `step` in each of these files.

    Attributes:
      lines: of metrics.jsonl; None where there is none.
    """

    lines: RecordLines | None

    def __init__(
        self,
        output_dir: str | os.PathLike,
        lines: RecordLines,
        step: int,
        metric: str = "bits_per_dim",
        tokens_per_step: int = 1,
        loggers: Loggers | None = None,
    ):
        folder = Path(output_dir)
        self.lines, self._loggers = lines, loggers or Loggers((), folder)
        self._metric, self._tokens_per_step = metric, tokens_per_step
        self._plot_path = folder / "loss.png"
        self._events = EventFile(folder / "tensorboard", purge_step=step + 1)
        self._best_effort_events = side_channels.BestEffort("TensorBoard's event file")
        self._best_effort_plot = side_channels.BestEffort("the plot")

    def write(
        self,
        step: int,
        split: str,
        values: dict[str, Any],
        timing: dict[str, float | None],
        *,
        tag: str,
    ) -> None:
        """Adds a line for `split` after `step` steps; `tag` is as the module says."""
        line = {"step": step, "tag": tag, "split": split, **values}
        self.lines.append({**line, "timing": timing})
        # The losses of steps have the name of their split.
        curve = "train_split" if (tag, split) == ("eval", "train") else split
        shown = {f"{curve}/{name}": value for name, value in {**values, **timing}.items()}
        with self._best_effort_events:
            self._events.add(step, shown)
        known = {name: x for name, x in timing.items() if x is not None}
        self._loggers.write(step, curve, values, known)

    def plot(self) -> None:
        """Draws loss.png from all lines so far."""
        with self._best_effort_plot:
            title = self._plot_path.absolute().parent.name
            drawn = curves.draw(self.lines, self._metric, title, self._tokens_per_step)
            durable.write(self._plot_path, drawn)
        # A figure of 30,000 lines is 30 MB of objects that refer to each other, and steps make none
        # for which Python would look for such.
        memory.give_back()

    def close(self) -> None:
        """Flushes everything to disk."""
        with self._best_effort_events:
            self._events.close()
        self.lines.close()
        self._loggers.close()


class NoRecord(Record):
    """The record of a process that writes none."""

    def __init__(self):
        """Opens nothing."""
        self.lines = None

    def write(self, *line: Any, tag: str) -> None:
        """Does nothing."""

    def plot(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


class Bar:
    """A progress bar on stderr: loss in bits, tokens/s and the time left."""

    def __init__(self, step: int, steps: int, shown: bool = True, unit: str = "bits/dim"):
        self._unit = unit
        options = dict(done=step, stays=True, shown=shown)
        self._progress = Progress("train", steps, side_channels.stderr(), **options)

    def advance(self, bits: float, tokens_per_second: float | None) -> None:
        """Moves on by one step."""
        speed = "" if tokens_per_second is None else f", {short(tokens_per_second)} tokens/s"
        self._progress.advance(1, f"{bits:.3f} {self._unit}{speed}")

    def say(self, text: str) -> None:
        """Prints a line on stdout without breaking the bar."""
        self._progress.say(text, side_channels.stdout())

    def close(self) -> None:
        """Leaves the bar as it is."""
        self._progress.close()


def short(number: float) -> str:
    """About three digits: 8,123, 16.9k, 406k."""
    if number < 10_000:
        return f"{number:,.0f}"
    return f"{number / 1000:,.{1 if number < 100_000 else 0}f}k"
