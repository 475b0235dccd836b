"""Colours and shapes that all pictures share, in light and in dark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
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
        if x < last - 0.15:  # a line that ends early has its name above
            axes.text(x, y + 0.045, name, color=color, ha="right", **style)
    places = sorted((p for p in places if p[0] >= last - 0.15), key=lambda place: place[1])
    heights: list[float] = []
    for _, y, *_ in places:
        heights.append(max(y, heights[-1] + apart) if heights else y)
    over = max(0.0, heights[-1] - 0.98)
    for (_, _, name, color), y in zip(places, heights, strict=True):
        axes.text(last + 0.02, y - over, name, color=color, **style)
