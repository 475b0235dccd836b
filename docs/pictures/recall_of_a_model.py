"""What attentions find of a trained model's: the table of docs/zoo_measured.md."""

from __future__ import annotations

import lines
import pages
from matplotlib.figure import Figure
from style import Palette

FIRST = "share of the weight at"
BEST = "largest weights"
PANELS = {
    "Learnt, and blocks": ("dsa", "routing", "moba", "nsa"),
    "Windows, and hashes": ("local", "hash_sparse", "smyrf", "asymmetric_lsh"),
}


def draw(colors: Palette) -> Figure:
    """Two panels, each beside the largest weights."""
    rows = pages.table("zoo_measured.md", FIRST)
    found = {
        name.partition(",")[0].partition(":")[0]: pages.line(row) for name, row in rows.items()
    }
    x, y = lines.ticks((64, 128, 256, 512)), lines.ticks((0, 0.25, 0.5, 0.75, 1), "{:.0%}")
    panels = [
        lines.Panel(title, {n: found[n] for n in (BEST, *names)}, x, (0, 1), y, behind=[BEST])
        for title, names in PANELS.items()
    ]
    title = "Share of a trained model's attention weight, by the keys that a query sees"
    return lines.draw(colors, title, panels, room=0.32, xlabel="keys of 4,096")
