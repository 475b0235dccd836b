"""Recall of pairs among 512 tokens: docs/associative_recall.csv."""

from __future__ import annotations

import csv

import lines
from matplotlib.figure import Figure
from pages import FOLDER
from style import Palette

N_PAIRS = (4, 8, 16, 32, 64)
PANELS = {
    "Choose among all keys": (
        *("flash", "LSH, 4 hashes", "LSH, 1 hash", "nsa", "moba"),
        "bigbird",
    ),
    "Windows": ("window 64 and 4 sinks", "window 64"),
    "A state of constant size": (
        *("performer", "linear", "long_short"),
        *("gated_delta, gate, memory 1,000", "gated_delta"),
    ),
}
SHORT = {
    "flash": "dense",
    "performer": "performer, 33 KiB",
    "linear": "linear, 8 KiB",
    "long_short": "long_short, 48 KiB",
    "gated_delta, gate, memory 1,000": "gated_delta, gate",
    "gated_delta": "gated_delta, 8 KiB",
    "window 64 and 4 sinks": "with 4 sinks",
}


def read() -> dict[str, list[tuple[float, float]]]:
    """Percent of values named by pairs, of models of 64 features."""
    with (FOLDER / "associative_recall.csv").open() as file:
        return {
            row["attention"]: [(n, float(row[f"pairs_{n}"])) for n in N_PAIRS]
            for row in csv.DictReader(file)
            if (row["tokens"], row["d_model"]) == ("512", "64")
        }


def draw(colors: Palette) -> Figure:
    """A panel for each kind of state."""
    found = read()
    x, y = lines.ticks(N_PAIRS), lines.ticks((0, 25, 50, 75, 100), "{}%")
    panels = [
        lines.Panel(title, {SHORT.get(n, n): found[n] for n in names}, x, (0, 103), y)
        for title, names in PANELS.items()
    ]
    title = "Values named among 512 tokens, by pairs to remember"
    return lines.draw(colors, title, panels, room=0.49, xlabel="pairs")
