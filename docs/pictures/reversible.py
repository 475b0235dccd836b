"""Reversible layers: the streams of a layer, forward and back, and what the gradient keeps."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from style import Palette, arrow, box, figure, headings

DEPTHS = (4, 12, 24)
MIB = {"Transformer": (402, 1_035, 1_984), "reversible": (78, 78, 79)}  # of README's table


def draw(colors: Palette) -> Figure:
    """Forward, backward, and memory by depth."""
    made, axes = figure(11.0, 3.7)
    parts = (
        (0.35, "Forward", "keeps no activations"),
        (4.15, "Backward", "rebuilds the inputs from the outputs"),
        (8.0, "Memory of the gradient", "MiB by layers; one CPU"),
    )
    headings(axes, colors, 3.43, parts)
    _streams(axes, 0.35, colors, back=False)
    _streams(axes, 4.15, colors, back=True)
    _memory(axes, 8.0, colors)
    return made


def _streams(axes: Axes, left: float, colors: Palette, *, back: bool) -> None:
    """Two streams through attention F and a feed-forward layer G."""
    high, low, names = 2.35, 1.15, ("x", "y")
    ends = (left + 0.15, left + 3.15)
    sign = "−" if back else "+"
    colour = colors.hues[1] if back else colors.hues[0]
    for y, number in ((high, "1"), (low, "2")):
        for x, name in zip(ends, names, strict=True):
            label = f"${name}_{number}$"
            axes.text(x, y, label, size=14, color=colors.text, ha="center", va="center")
        line = (ends[0] + 0.2, y), (ends[1] - 0.2, y)
        arrow(axes, *(line[::-1] if back else line), color=colors.line)
    first, second = left + 1.1, left + 2.2
    for x, name, start, end in ((first, "F", low, high), (second, "G", high, low)):
        middle = (high + low) / 2
        up = 1 if end > start else -1
        axes.plot((x, x), (start, middle - up * 0.2), color=colour, lw=1.5)
        arrow(axes, (x, middle + up * 0.2), (x, end - up * 0.13), color=colour)
        box(axes, x, middle, 0.62, 0.44, name, colors=colors, edge=colour)
        style = dict(boxstyle="circle,pad=0.12", facecolor=colors.panel, edgecolor=colour)
        axes.text(x, end, sign, size=10, color=colors.text, ha="center", va="center", bbox=style)
    equations = (
        ("$x_2 = y_2 - G(y_1)$", "$x_1 = y_1 - F(x_2)$")
        if back
        else ("$y_1 = x_1 + F(x_2)$", "$y_2 = x_2 + G(y_1)$")
    )
    for x, text in zip((left + 0.85, left + 2.55), equations, strict=True):
        axes.text(x, 0.6, text, size=11, color=colors.text, ha="center", va="center")
    note = "then the gradient of F and G, layer by layer" if back else "F attention, G feed-forward"
    axes.text(left + 1.7, 0.24, note, size=9, color=colors.faint, ha="center", va="center")


def _memory(axes: Axes, left: float, colors: Palette) -> None:
    """A bar for each depth and model."""
    bottom, height, most = 0.62, 2.1, max(MIB["Transformer"])
    for group, depth in enumerate(DEPTHS):
        x = left + 0.3 + group * 0.95
        for shift, (name, hue) in zip((0, 0.36), zip(MIB, (1, 0), strict=True), strict=True):
            value = MIB[name][group]
            tall = height * value / most
            axes.bar(x + shift, tall, 0.32, bottom, color=colors.hues[hue])
            axes.text(
                *(x + shift, bottom + tall + 0.1, f"{value:,}"),
                **dict(size=8.5, color=colors.text, ha="center", va="center"),
            )
        axes.text(x + 0.18, 0.46, f"{depth}", size=9.5, color=colors.text, ha="center", va="center")
    axes.text(left + 1.45, 0.24, "layers", size=9, color=colors.faint, ha="center", va="center")
    for y, name, hue in ((2.62, "Transformer", 1), (2.38, "reversible", 0)):
        axes.text(left + 0.14, y, name, size=10, color=colors.hues[hue], weight="bold", va="center")
