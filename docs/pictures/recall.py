"""What LSH attention finds by hashes: the table of docs/results.md."""

from __future__ import annotations

import lines
import pages
from matplotlib.figure import Figure
from style import Palette

SHARE = "share of the true attention weight, by hashes"


def draw(colors: Palette) -> Figure:
    """One panel."""
    rows = pages.table("results.md", SHARE)
    blind = "a blind choice, noise 1"
    names = {name: name for name in rows} | {"share of the keys, noise 1": blind}
    found = {names[name]: pages.line(row) for name, row in rows.items()}
    y = lines.ticks((0, 0.25, 0.5, 0.75, 1), "{:.0%}")
    x = lines.ticks((1, 2, 4, 8, 16))
    panel = lines.Panel("Share of the attention weight", found, x, (0, 1.03), y, behind=[blind])
    title = "What LSH attention finds, by hashes: 1,024 vectors in 32 clusters"
    return lines.draw(colors, title, [panel], room=0.2)
