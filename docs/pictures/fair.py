"""Hashed and dense attention at 65,536 tokens: the first table of docs/does_hashing_help.md."""

from __future__ import annotations

from typing import NamedTuple

import pages
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from style import Palette, figure

PAGE = "does_hashing_help.md"


class Line(NamedTuple):
    """A model of a panel: its name, whether it hashes, bits by seed, and what it costs."""

    name: str
    hashes: bool
    bits: tuple[float, ...]
    cost: str


class Panel(NamedTuple):
    """A text: what is scored, the name of the cost, the bits at both ends, and its models."""

    title: str
    cost: str
    low: float
    high: float
    lines: tuple[Line, ...]


def panels() -> tuple[Panel, Panel]:
    """Books and Python sources, both with RMSNorm, SwiGLU and Muon."""
    rows = pages.table(PAGE, "test bits, windows of 65,536")
    return (
        Panel(
            "English books, test, seeds and their mean",
            "training",
            1.33,
            1.37,
            (
                _line(rows, "books, dense", "dense"),
                _line(rows, "books, 8 hashes, equal tokens", "LSH, equal tokens"),
                _line(rows, "books, 8 hashes, equal minutes", "LSH, equal minutes"),
            ),
        ),
        Panel(
            "Python sources, test, seeds and their mean",
            "",
            0.6,
            0.64,
            (
                _line(rows, "Python, dense", "dense"),
                _line(rows, "Python, 8 hashes, equal tokens", "LSH, equal tokens"),
            ),
        ),
    )


def _line(rows: dict[str, pages.Row], row: str, name: str) -> Line:
    found = rows[row]
    seeds = tuple(float(x) for x in found["seeds 0, 1, 2"].split(", "))
    return Line(name, "hashes" in row, seeds, found["training"])


def draw(colors: Palette) -> Figure:
    """A panel for each text."""
    made, axes = figure(11.0, 2.3)
    title = "Bits per byte of windows of 65,536 tokens, lower is better"
    axes.text(0.35, 2.05, title, size=13, weight="bold", color=colors.text, va="center")
    for left, panel in zip((0.35, 6.0), panels(), strict=True):
        _panel(axes, left, panel, colors)
    return made


def _panel(axes: Axes, left: float, panel: Panel, colors: Palette) -> None:
    start, width, top, row = left + 1.5, 2.1, 1.3, 0.3
    right = start + width + 1.15

    def at(bits: float) -> float:
        return start + width * (bits - panel.low) / (panel.high - panel.low)

    style = dict(size=9, color=colors.faint, va="center")
    axes.text(left, top + 0.36, panel.title, size=11, weight="bold", color=colors.text, va="center")
    axes.text(right, top + 0.36, panel.cost, ha="right", **style)
    bottom = top - (len(panel.lines) - 0.5) * row
    for i in range(1, round((panel.high - panel.low) / 0.01)):
        tick = panel.low + 0.01 * i
        axes.plot((at(tick),) * 2, (top + 0.5 * row, bottom), color=colors.line, lw=0.5)
        axes.text(at(tick), bottom - 0.5 * row, f"{tick:.2f}", ha="center", **style)
    for i, line in enumerate(panel.lines):
        y, color = top - i * row, colors.hues[0 if line.hashes else 1]
        axes.text(left, y, line.name, size=10, color=color, weight="bold", va="center")
        axes.plot(
            [at(bits) for bits in line.bits],
            [y] * len(line.bits),
            **dict(marker="o", ls="", ms=8, color=color, alpha=0.75, mec="none"),
        )
        if len(line.bits) > 1:
            mean = at(sum(line.bits) / len(line.bits))
            axes.plot((mean,) * 2, (y - 0.12, y + 0.12), color=colors.text, lw=1.6)
        axes.text(right, y, line.cost, size=10, color=colors.text, ha="right", va="center")
