"""The layers of the package, from algorithms to commands: who imports whom."""

from __future__ import annotations

from matplotlib.figure import Figure
from style import Palette, arrow, box, figure


def draw(colors: Palette) -> Figure:
    """Boxes, and arrows from a part to what it imports."""
    made, axes = figure(11.0, 4.6)
    blue, orange, green = colors.hues[:3]

    def put(x, y, width, title, note, edge=None):
        box(axes, x, y, width, 0.84, title, note, colors=colors, edge=edge)

    put(1.75, 4.05, 2.9, "convert", "checkpoints of Trax, Hugging Face")
    put(5.5, 4.05, 3.7, "cli", "train, evaluate, generate: flags, gin, one call", orange)
    put(3.0, 2.75, 2.5, "models", "language, translation, classes", blue)
    put(5.75, 2.75, 2.2, "training", "loop, loss, checkpoints", orange)
    put(8.05, 2.75, 1.9, "generation", "sampling, beams", orange)
    put(9.95, 2.75, 1.5, "data", "tasks, batches", orange)
    put(3.0, 1.65, 2.5, "layers", "Trax layers around any attention", blue)
    put(8.35, 1.65, 2.5, "flax", "the same in linen and nnx modules", green)
    put(5.5, 0.55, 7.5, "ops", "attention algorithms: pure functions of JAX, and kernels", blue)
    arrow(axes, (3.2, 4.05), (3.65, 4.05), color=colors.line)
    for x, end in ((4.3, 3.3), (5.6, 5.75), (6.6, 7.8), (7.2, 9.6)):
        arrow(axes, (x, 3.63), (end, 3.19), color=colors.line)
    arrow(axes, (3.0, 2.33), (3.0, 2.09), color=colors.line)
    arrow(axes, (3.0, 1.23), (3.0, 0.99), color=colors.line)
    arrow(axes, (8.35, 1.23), (8.35, 0.99), color=colors.line)
    note = "models and tasks are arguments:\ntraining imports neither"
    axes.text(5.75, 1.9, note, size=9, color=colors.faint, ha="center", va="center", style="italic")
    note = "an arrow goes from a part\nto what it imports"
    axes.text(9.55, 4.05, note, size=9, color=colors.faint, ha="center", va="center")
    return made
