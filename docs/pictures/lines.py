"""A row of panels of lines, with names beside their ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.figure import Figure
from style import Palette, label_ends

Lines = Mapping[str, Sequence[tuple[float, float]]]  # ascending in x


class Panel(NamedTuple):
    """A panel: at most seven lines, on axes of its own.

    Attributes:
      title: over it, which says what y is.
      lines: (x, y) by name.
      ticks: of x, with their labels.
      ylim: of y.
      yticks: of y, with their labels.
      log: whether y is logarithmic, as x always is.
      behind: names of lines that are drawn in grey.
    """

    title: str
    lines: Lines
    ticks: Mapping[float, str]
    ylim: tuple[float, float]
    yticks: Mapping[float, str]
    log: bool = False
    behind: Sequence[str] = ()


def draw(
    colors: Palette, title: str, panels: Sequence[Panel], *, room: float = 0.45, xlabel: str = ""
) -> Figure:
    """Draws the panels beside each other.

    Args:
      colors: of the mode.
      title: over all.
      panels: from left to right.
      room: of a panel's width, for the names.
      xlabel: below each.
    """
    made = Figure(figsize=(11.0, 3.5))
    grid = made.subplots(1, len(panels), squeeze=False)[0]
    for axes, panel in zip(grid, panels, strict=True):
        colors.axes(axes)
        hues, ends = [*colors.hues, colors.text, colors.faint], []
        for name, points in panel.lines.items():
            behind = name in panel.behind
            color = colors.faint if behind else hues.pop(0)
            x, y = zip(*points, strict=True)
            dashed = dict(ls=(0, (3, 2))) if behind else {}
            axes.plot(x, y, color=color, lw=2, marker="o", ms=3.5, **dashed)
            ends.append((x[-1], y[-1], name, color))
        axes.set_xscale("log", base=2)
        axes.set_yscale("log" if panel.log else "linear")
        first, last = min(panel.ticks), max(panel.ticks)
        end = last * (last / first) ** (room / (1 - room))
        axes.set(xlim=(first / 1.08, end), ylim=panel.ylim)
        axes.set_xticks(list(panel.ticks), list(panel.ticks.values()))
        axes.set_yticks(list(panel.yticks), list(panel.yticks.values()))
        axes.minorticks_off()
        axes.set_title(panel.title, loc="left", size=11, weight="bold", color=colors.text)
        axes.set_xlabel(xlabel, size=9, color=colors.faint, loc="left")
        label_ends(axes, ends, apart=0.082)
    made.text(0.012, 0.95, title, size=12.5, weight="bold", color=colors.text, va="center")
    made.subplots_adjust(left=0.05, right=0.995, top=0.78, bottom=0.14, wspace=0.16)
    return made


def ticks(values: Sequence[float], form: str = "{:g}") -> dict[float, str]:
    """Ticks with their labels."""
    return {value: form.format(value) for value in values}
