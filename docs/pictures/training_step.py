"""Data through a training step."""

from __future__ import annotations

from matplotlib.figure import Figure
from style import Palette, arrow, box, figure


def draw(colors: Palette) -> Figure:
    """From (seed, step) to new parameters, and what is kept beside."""
    made, axes = figure(11.0, 3.5)
    blue, orange, green, purple = colors.hues
    places, y = (0.97, 2.78, 4.59, 6.41, 8.22, 10.03), 2.45
    parts = (
        ("seed, step", "all that a batch\ndepends on", 1.5, green),
        ("batch", "tokens [B, T],\ntargets, weights", 1.5, green),
        ("model", "features [B, T, D],\nattention plans", 1.5, blue),
        ("loss", "logits of one chunk\nof positions at a time", 1.5, blue),
        ("gradient", "streams rebuilt,\nplans reused", 1.5, orange),
        ("optimizer", "new parameters,\nnew moments", 1.5, orange),
    )
    for x, (title, note, width, edge) in zip(places, parts, strict=True):
        box(axes, x, y, width, 1.15, title, note, colors=colors, edge=edge)
    edges = [(x - w / 2, x + w / 2) for x, (_, _, w, _) in zip(places, parts, strict=True)]
    for (_, start), (end, _) in zip(edges, edges[1:], strict=False):
        arrow(axes, (start + 0.03, y), (end - 0.03, y), color=colors.line)
    low = 0.7
    box(axes, 3.6, low, 2.6, 0.8, "rng of the step", "hashes, dropout", colors=colors, edge=purple)
    note = "config, state, vocabulary, fingerprints"
    box(axes, 7.3, low, 3.0, 0.8, "checkpoint, record", note, colors=colors, edge=purple)
    arrow(axes, (0.97, y - 0.6), (2.27, low), color=purple, bend=0.3)
    arrow(axes, (4.0, low + 0.42), (4.5, y - 0.6), color=purple)
    arrow(axes, (10.03, y - 0.6), (8.83, low), color=purple, bend=-0.3)
    axes.plot((10.03, 10.03, 4.59), (y + 0.6, 3.27, 3.27), color=colors.line, lw=1.3)
    arrow(axes, (4.59, 3.27), (4.59, y + 0.6), color=colors.line)
    label = "the next step's parameters"
    axes.text(7.3, 3.39, label, size=9, color=colors.faint, ha="center", va="center")
    return made
