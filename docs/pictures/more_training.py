"""Bits per byte by training: the table of docs/does_hashing_help.md."""

from __future__ import annotations

import lines
import pages
from matplotlib.figure import Figure
from style import Palette

FIRST = "valid bits, windows"


def draw(colors: Palette) -> Figure:
    """Windows of 4,096 and of 65,536."""
    rows = pages.table("does_hashing_help.md", FIRST).values()

    def of(minutes: str, column: str) -> list[tuple[float, float]]:
        found = []
        for row in rows:
            n, each = row[minutes].split(" x ")
            found.append((int(n) * float(each), pages.number(row[column])))
        return found

    dense, slots = "Transformer, GPUs x minutes", "six slots, GPUs x minutes"
    short = {"Transformer": of(dense, "dense, 4,096"), "six slots": of(slots, "six slots, 4,096")}
    long = {
        "Transformer": of(dense, "dense, 65,536"),
        "six slots, 8 hashes": of(slots, "six slots, 65,536"),
        "Transformer, 8 hashes": of(dense, "8 hashes, 65,536"),
    }
    x, y = lines.ticks((2, 4, 8, 16, 32, 64)), lines.ticks((0.6, 0.7, 0.8, 0.9), "{:.1f}")
    panels = [
        lines.Panel(f"Windows of {n}", found, x, (0.59, 0.92), y)
        for n, found in (("4,096", short), ("65,536", long))
    ]
    return lines.draw(
        colors,
        "Bits per byte of Python sources by minutes of an H200",
        panels,
        room=0.32,
        xlabel="minutes of one GPU",
    )
