"""Colours and shapes that all pictures share, in light and in dark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch


class Palette(NamedTuple):
    """What a mode draws with. The background is the page's own."""

    text: str
    faint: str  # of notes
    line: str
    panel: str  # fills boxes
    hues: tuple[str, ...]  # four that differ for colour-blind readers too
    on_hue: str  # text on them

    def axes(self, axes: Axes) -> None:
        """Colours a pair of axes, of which two sides stay."""
        axes.set_facecolor("none")
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(self.line)
        axes.tick_params(colors=self.faint, labelsize=9)
        axes.grid(axis="y", color=self.line, lw=0.4, alpha=0.5)


MODES = {
    "light": Palette(
        text="#1f2430",
        faint="#6b7280",
        line="#9aa1ad",
        panel="#f1f3f7",
        hues=("#3b6fd4", "#e07b2e", "#2a9d78", "#b0529f"),
        on_hue="#ffffff",
    ),
    "dark": Palette(
        text="#e6e9f0",
        faint="#9aa3b2",
        line="#6b7486",
        panel="#262c38",
        hues=("#7aa5ff", "#f2a35e", "#57c7a2", "#dd8bcc"),
        on_hue="#12161f",
    ),
}


def headings(
    axes: Axes,
    colors: Palette,
    height: float,
    parts: Sequence[tuple[float, str, str]],
) -> None:
    """Titles of the parts of a figure, each `(x, title, note)`, with a note below."""
    for x, title, note in parts:
        axes.text(x, height, title, size=13, weight="bold", color=colors.text, va="center")
        axes.text(x, height - 0.28, note, size=9.5, color=colors.faint, va="center")


def figure(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure of inches whose one pair of axes has the same units."""
    made = Figure(figsize=(width, height))
    axes = made.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return made, axes


def save(made: Figure, path) -> None:
    """Writes a picture; the same picture has the same bytes."""
    metadata = {"Date": None} if path.suffix == ".svg" else None
    with rc_context({"svg.hashsalt": "reformax", "svg.fonttype": "path"}):
        made.savefig(path, transparent=True, metadata=metadata, dpi=120)
    if path.suffix == ".svg":  # the writer leaves spaces at the ends of lines
        lines = path.read_text().splitlines()
        path.write_text("\n".join(line.rstrip() for line in lines) + "\n")


def box(
    axes: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    title: str,
    note: str = "",
    *,
    colors: Palette,
    edge: str | None = None,
) -> None:
    """A rounded box around (x, y), with a title and a note under it."""
    shape = FancyBboxPatch(
        (x - width / 2 + 0.06, y - height / 2 + 0.06),
        width - 0.12,
        height - 0.12,
        boxstyle="round,pad=0.06,rounding_size=0.1",
        facecolor=colors.panel,
        edgecolor=edge or colors.line,
        linewidth=1.6 if edge else 1.0,
    )
    axes.add_patch(shape)
    shift = 0.0 if not note else 0.11 + 0.065 * note.count("\n")
    axes.text(
        *(x, y + shift, title), ha="center", va="center", size=11, color=colors.text, weight="bold"
    )
    if note:
        under = y + shift - 0.15
        axes.text(
            *(x, under, note), ha="center", va="top", size=8.5, color=colors.faint, linespacing=1.25
        )


def arrow(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    *,
    color: str,
    bend: float = 0.0,
    dashed: bool = False,
    width: float = 1.3,
) -> None:
    """An arrow between two points."""
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>",
            mutation_scale=11,
            shrinkA=0,
            shrinkB=0,
            color=color,
            linewidth=width,
            linestyle=(0, (3, 2)) if dashed else "-",
            connectionstyle=f"arc3,rad={bend}",
        )
    )


def label_ends(
    axes: Axes, ends: Sequence[tuple[float, float, str, str]], apart: float = 0.065
) -> None:
    """Writes the names of lines beside their ends, none over another.

    Args:
      axes: their scales are set.
      ends: (x, y, name, colour) of each.
      apart: how far two names are, of the height.
    """
    to_axes = axes.transData + axes.transAxes.inverted()
    places = [(*to_axes.transform((x, y)), name, color) for x, y, name, color in ends]
    last = max(place[0] for place in places)
    style = dict(size=9, weight="bold", va="center", transform=axes.transAxes)
    for x, y, name, color in places:
        if x < last - 0.15:  # a line that ends early has its name above or below
            others = [_height(axes, line, max(x - 0.08, 0.0)) for line in axes.lines]
            free = {y + by: min(abs(y + by - other) for other in others) for by in (0.045, -0.06)}
            right = max(x - 0.03, 0.24)  # where the shortest of them ends, a name has room
            axes.text(right, max(free, key=free.get), name, color=color, ha="right", **style)
    places = sorted((p for p in places if p[0] >= last - 0.15), key=lambda place: place[1])
    heights = spread([y for _, y, *_ in places], apart)
    for (_, _, name, color), y in zip(places, heights, strict=True):
        axes.text(last + 0.02, y, name, color=color, **style)


def _height(axes: Axes, line: Line2D, x: float) -> float:
    """Where a line is at x, in units of the axes."""
    to_axes = axes.transData + axes.transAxes.inverted()
    return float(np.interp(x, *to_axes.transform(line.get_xydata()).T))


def spread(heights: Sequence[float], apart: float) -> list[float]:
    """The nearest heights, by squares, that are so far apart, in [0.03, 0.97]; both ascend."""
    groups: list[list[float]] = []  # of heights less what they are apart
    for i, y in enumerate(heights):
        groups.append([y - i * apart])
        while len(groups) > 1 and _mean(groups[-2]) > _mean(groups[-1]):
            last = groups.pop()
            groups[-1] += last
    flat = [_mean(group) for group in groups for _ in group]
    found = [max(y, 0.03) + i * apart for i, y in enumerate(flat)]
    return [min(y, 0.97 - (len(found) - 1 - i) * apart) for i, y in enumerate(found)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
