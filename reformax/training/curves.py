"""The curves of a run's record: losses, scores and time by step, and their figure."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

Lines = Iterable[dict[str, Any]]  # of metrics.jsonl; it is gone over more than once
SIZE, DPI = (7, 4.5), 120  # inches, dots per inch


class Curve(NamedTuple):
    """Values by step."""

    steps: np.ndarray
    values: np.ndarray


def words_of(metric: str, values: Mapping[str, Any]) -> str:
    """A metric in words: 'bits per dim (bits per byte)' where the values have both."""
    of_bytes = metric == "bits_per_dim" and "bits_per_byte" in values
    return metric.replace("_", " ") + " (bits per byte)" * of_bytes


def losses(lines: Lines, metric: str) -> Curve:
    """The means of training steps; `metric` is their name, such as 'bits_per_dim'."""
    return _curve((x["step"], x[metric]) for x in lines if metric in x and x.get("tag") == "train")


def scores(lines: Lines, metric: str) -> dict[str, Curve]:
    """The evaluations by what they scored: a split, or so many targets of it."""
    found: dict[str, list] = {}
    for x in lines:
        if metric in x and x.get("tag") == "eval":
            part = "" if x.get("whole", True) else f", {x['n_targets']:,} targets"
            found.setdefault(x["split"] + part, []).append((x["step"], x[metric]))
            if "whole_split" in x:
                point = x["step"], x["whole_split"][metric]
                found.setdefault(x["split"], []).append(point)
    return {name: _curve(points) for name, points in found.items()}


def seconds(lines: Lines) -> Curve:
    """The time that training took, from its start and over its resumptions."""
    timed = ((x["step"], x["timing"]["seconds"]) for x in lines if "seconds" in x.get("timing", {}))
    return _curve([(0, 0.0), *timed])


def by_minutes(curve: Curve, time: Curve) -> Curve:
    """The curve by minutes instead of steps; `time` is that of `seconds`."""
    return Curve(np.interp(curve.steps, time.steps, time.values) / 60, curve.values)


def smooth(values: np.ndarray) -> np.ndarray:
    """Each value's mean with those around it: a tenth of all, at most 51."""
    if not len(values):
        return values
    window = np.ones(min(len(values) // 10, 50) | 1)
    return np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")


def draw(lines: Lines, metric: str, title: str, tokens_per_step: int) -> bytes:
    """A PNG of a run: losses, smoothed over raw, and scores, by step and by time."""
    figure, axes = new_figure()
    train, found = losses(lines, metric), scores(lines, metric)
    add_losses(axes, train, "C0", "train, last {:.3f}")
    for i, (name, curve) in enumerate(found.items()):
        best = curve.values.argmin()
        label = f"{name}, best {curve.values[best]:.3f} at step {curve.steps[best]:,}"
        axes.plot(*curve, "o-", ms=4, color=f"C{1 + i % 9}", label=label)
    tokens = f"{tokens_per_step:,} token{'s' * (tokens_per_step != 1)}"
    first = next((x for x in lines if metric in x), {})
    axes.set(xlabel=f"step of {tokens}", ylabel=words_of(metric, first), title=title)
    finish(axes, [train, *found.values()])
    add_clock(axes, seconds(lines))
    return png(figure)


def new_figure(size: tuple[float, float] = SIZE):
    """A figure and its axes."""
    # A second to import; pyplot would bring global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots()


def add_losses(axes, curve: Curve, color: str, label: str = "") -> None:
    """Draws the raw curve faintly and the smoothed one over it; `label` formats its last value."""
    if len(curve.steps):
        smoothed = smooth(curve.values)
        axes.plot(*curve, lw=1, alpha=0.3, color=color, marker="o" if len(smoothed) == 1 else "")
        axes.plot(curve.steps, smoothed, lw=1.5, color=color, label=label.format(smoothed[-1]))


def finish(axes, curves: Iterable[Curve]) -> None:
    """Sets limits, grid and legend; the losses of the first steps would flatten the rest."""
    shown = [curve.values for curve in curves if len(curve.values)]
    if shown:
        lowest = min(values.min() for values in shown)
        highest = max(np.quantile(values, 0.95, method="lower") for values in shown)
        if highest > lowest:
            margin = 0.08 * (highest - lowest)
            axes.set_ylim(lowest - margin, highest + margin)
        axes.legend(loc="upper right")  # where losses that fall leave room
    axes.grid(alpha=0.3)
    right = axes.get_xlim()[1]
    axes.set_xlim(0, right)
    axes.xaxis.get_major_locator().set_params(integer=right > 5)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.10g}")


def add_clock(axes, time: Curve) -> None:
    """Adds an axis of wall-clock time on top."""
    from matplotlib.ticker import MaxNLocator

    total = time.values[-1]
    if not total > 0:
        return
    unit, size = next(x for x in _UNITS if total >= 4 * x[1] or x[1] == 1)
    ticks = MaxNLocator(7, integer=True).tick_values(0, total / size)
    ticks = ticks[ticks * size <= total]
    positions = np.interp(ticks * size, time.values, time.steps)
    # Evaluations take time and no steps, so that ticks may fall together: the first of them stays.
    room, kept = np.ptp(axes.get_xlim()) / 20, [0]
    for i, position in enumerate(positions):
        if position - positions[kept[-1]] >= room:
            kept.append(i)
    top = axes.secondary_xaxis("top")
    top.set_xticks(positions[kept], [f"{x:g}" for x in ticks[kept]])
    top.set_xlabel(unit)


_UNITS = (("hours", 3600), ("minutes", 60), ("seconds", 1))


def png(figure) -> bytes:
    """The figure as a file's content."""
    file = io.BytesIO()
    figure.savefig(file, dpi=DPI)
    return file.getvalue()


def _curve(points: Iterable[tuple[int, float]]) -> Curve:
    steps, values = np.fromiter(points, np.dtype((float, 2))).T
    return Curve(steps.astype(int), values)
