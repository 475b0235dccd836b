"""The record of a run: metrics.jsonl, TensorBoard events, loss.png and the progress bar.

Every line of metrics.jsonl is one JSON object with `step`, `split` and the run's metric, such as
`bits_per_dim`. Numbers that depend on the machine's speed are under `timing`. Without them, a run
that was stopped and resumed has the record of a run that was not.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

from tqdm import tqdm

from reformax import durable
from reformax.training import side_channels
from reformax.training.events import EventFile
from reformax.training.record_lines import RecordLines


class Record:
    """Shows the metrics of a run that goes on from `step` in each of these places.

    Attributes:
      lines: of metrics.jsonl.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike,
        lines: RecordLines,
        step: int,
        metric: str = "bits_per_dim",
    ):
        folder = Path(output_dir)
        self.lines = lines
        self._metric = metric
        self._plot_path = folder / "loss.png"
        self._events = EventFile(folder / "tensorboard", purge_step=step + 1)
        self._beside_events = side_channels.Aside("TensorBoard's event file")
        self._beside_plot = side_channels.Aside("the plot")

    def write(self, step: int, split: str, values: dict[str, Any], timing: dict[str, float]):
        """Adds a line for `split` after `step` steps."""
        line = {"step": step, "split": split, **values}
        self.lines.append({**line, "timing": timing})
        scalars = {
            f"{split}/{name}": value
            for name, value in {**values, **timing}.items()
            if isinstance(value, int | float)
        }
        with self._beside_events:
            if scalars:
                self._events.add(step, scalars)

    def plot(self) -> None:
        """Draws loss.png from all lines so far."""
        with self._beside_plot:
            self._draw()

    def _draw(self) -> None:
        # A second to import; pyplot would bring global state.
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()
        lowest, highest = float("inf"), 0.0
        for split, style in {"train": {"lw": 1, "alpha": 0.8}, "valid": {"marker": "o"}}.items():
            points = [(x["step"], x[self._metric]) for x in self.lines if x["split"] == split]
            if points:
                label = f"{split} (last {points[-1][1]:.3f})"
                axes.plot(*zip(*points, strict=True), label=label, **style)
                ordered = sorted(y for _, y in points)
                lowest = min(lowest, ordered[0])
                # The losses of the first steps would flatten the rest: leave out 5%.
                highest = max(highest, ordered[-1 - len(points) // 20])
        axes.set(xlabel="step", ylabel=self._metric.replace("_", " "), title="loss")
        if highest > lowest:
            margin = 0.1 * (highest - lowest)
            axes.set_ylim(lowest - margin, highest + margin)
        axes.grid(alpha=0.3)
        if self.lines:
            axes.legend()
        png = io.BytesIO()
        figure.savefig(png, dpi=120)
        durable.write(self._plot_path, png.getvalue())

    def close(self) -> None:
        """Flushes everything to disk."""
        with self._beside_events:
            self._events.close()
        self.lines.close()


class Progress:
    """The bar on stderr: loss in bits, tokens/s and the time left."""

    def __init__(self, step: int, steps: int, enabled: bool = True, metric: str = "bits_per_dim"):
        self._unit = metric.replace("_per_", "/")
        stderr = side_channels.stderr()
        # Every refresh is a line where stderr is a log file.
        interval = 0.2 if stderr.isatty() else 15
        self._bar = tqdm(
            total=steps, initial=step, unit="step", desc="train", disable=not enabled,
            mininterval=interval, dynamic_ncols=True, file=stderr,
        )  # fmt: skip

    def advance(self, bits: float, tokens_per_second: float | None) -> None:
        """Moves on by one step."""
        speed = "" if tokens_per_second is None else f", {tokens_per_second:,.0f} tokens/s"
        self._bar.set_postfix_str(f"{bits:.3f} {self._unit}{speed}", refresh=False)
        self._bar.update()

    def say(self, text: str) -> None:
        """Prints a line without breaking the bar."""
        self._bar.clear()
        print(text, file=side_channels.stdout(), flush=True)
        self._bar.refresh()

    def close(self) -> None:
        """Leaves the bar as it is."""
        self._bar.close()
