"""Reversible layers by depth: the tables of docs/results.md."""

from __future__ import annotations

import lines
import pages
from matplotlib.figure import Figure
from style import Palette

MEMORY = ("TransformerLM", "exact=True", "ReformerLM, MiB")
EXACT = "exact=True, float32"


def draw(colors: Palette) -> Figure:
    """Memory, and the error of the gradient."""
    rows = pages.table("results.md", "layers").values()
    memory = {
        name.removesuffix(", MiB"): [(float(r["layers"]), pages.number(r[name])) for r in rows]
        for name in MEMORY
    }
    rows = pages.table("results.md", "error of the gradient by layers")
    errors = {name: pages.line(rows[name]) for name in ("bfloat16", "float32")}
    exact = [pages.line(row) for name, row in rows.items() if name.startswith("exact")]
    assert all(y == 0 for line in exact for x, y in line if x > 2)
    x, y = lines.ticks((2, 4, 8, 12, 24)), lines.ticks((0, 500, 1000, 1500, 2000), "{:,}")
    logs = {10.0**-n: f"$10^{{-{n}}}$" for n in (8, 6, 4, 2)}
    panels = [
        lines.Panel("Memory of the gradient, MiB", memory, x, (0, 2100), y),
        lines.Panel("Error of the gradient; exact: 0", errors, x, (1e-8, 1e-1), logs, log=True),
    ]
    return lines.draw(
        colors, "Reversible layers by depth, one CPU", panels, room=0.3, xlabel="layers"
    )
