"""Hashed and dense attention scored at 65,536 tokens: the table of docs/does_hashing_help.md."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from style import Palette, figure

# By text: the model, whether it hashes, bits per byte by seed, tokens/s of the last stage.
MODELS = {
    "English books": (
        ("dense at 4,096", False, (1.494,), 975),
        ("dense at 16,384", False, (1.461, 1.456, 1.467), 741),
        ("dense at 65,536", False, (1.458, 1.453, 1.457, 1.459), 385),
        ("LSH at 16,384", True, (1.468, 1.454, 1.454), 770),
        ("LSH at 65,536", True, (1.455, 1.461, 1.453, 1.466), 765),
    ),
    "Python sources": (
        ("dense at 4,096", False, (0.915,), 959),
        ("dense at 16,384", False, (0.778,), 735),
        ("dense at 65,536", False, (0.770,), 384),
        ("LSH at 16,384", True, (0.766, 0.769, 0.766), 779),
        ("LSH at 65,536", True, (0.766,), 762),
    ),
}
RANGES = {"English books": (1.445, 1.475), "Python sources": (0.755, 0.785)}


def draw(colors: Palette) -> Figure:
    """A panel for each text."""
    made, axes = figure(11.0, 2.75)
    title = "Bits per byte of windows of 65,536 tokens, lower is better"
    axes.text(0.35, 2.5, title, size=13, weight="bold", color=colors.text, va="center")
    for left, text in zip((0.35, 6.1), MODELS, strict=True):
        _panel(axes, left, text, colors)
    return made


def _panel(axes: Axes, left: float, text: str, colors: Palette) -> None:
    low, high = RANGES[text]
    start, width, top, row = left + 1.35, 2.1, 1.77, 0.3

    def at(bits: float) -> float:
        return start + width * (bits - low) / (high - low)

    style = dict(size=9, color=colors.faint, va="center")
    axes.text(left, top + 0.34, text, size=11, weight="bold", color=colors.text, va="center")
    axes.text(start + width + 1.25, top + 0.34, "tokens/s", ha="right", **style)
    for tick in (low + 0.005, low + 0.015, low + 0.025):
        axes.plot((at(tick),) * 2, (top - 0.5 * row, top - 4.5 * row), color=colors.line, lw=0.5)
        axes.text(at(tick), top - 5 * row, f"{tick:.2f}", ha="center", **style)
    for i, (name, hashes, bits, speed) in enumerate(MODELS[text]):
        y, color = top - i * row, colors.hues[0 if hashes else 1]
        axes.text(left, y, name, size=10, color=color, weight="bold", va="center")
        inside = [b for b in bits if low <= b <= high]
        for n, b in enumerate(inside):
            over = y + 0.06 * inside[:n].count(b)  # equal scores of two seeds
            axes.plot(at(b), over, "o", ms=8, color=color, alpha=0.75, mec="none")
        if not inside:
            label = f"{bits[0]:.3f}  →"
            axes.text(start + width, y, label, size=9, color=color, ha="right", va="center")
        speed_text = f"{speed:,},000"
        axes.text(
            *(start + width + 1.25, y, speed_text),
            **dict(size=10, color=colors.text, ha="right", va="center"),
        )
