"""Time of every attention by length, in six panels: docs/attention_table.md."""

from __future__ import annotations

import csv
from pathlib import Path

import multiples
from matplotlib.figure import Figure
from style import Palette

CSV = Path(__file__).resolve().parents[1] / "attention_table.csv"
GPU = "H200"
REFERENCE = "flash"
PANELS = {
    "All keys": ("dense", "shared_qk", "memory_efficient", "dense, impl='xla'"),
    "Windows and blocks": ("sinks", "block_sparse", "bigbird", "longformer", "local"),
    "Keys that hash alike": ("hash_sparse", "asymmetric_lsh", "lsh", "smyrf"),
    "Chosen keys": ("dsa", "nsa", "routing", "csa", "moba"),
    "Recurrences": ("gated_linear", "gated_delta", "kda", "retention", "linear"),
    "Features and projections": ("performer", "long_short", "nystromformer", "hca", "linformer"),
}


def read() -> dict[str, list[tuple[int, float]]]:
    """Milliseconds of both passes by length, without dropout and mask."""
    found: dict[str, list[tuple[int, float]]] = {}
    with CSV.open() as file:
        for row in csv.DictReader(file):
            plain = (row["dropout"], row["masked"]) == ("0.0", "False")
            if plain and row["combined_ms"] and int(row["length"]) >= 1024:
                point = int(row["length"]), float(row["combined_ms"])
                found.setdefault(row["attention"], []).append(point)
    return {name: sorted(points) for name, points in found.items()}


def draw(colors: Palette) -> Figure:
    """Six panels, each beside the reference; of what the file has."""
    title = f"Milliseconds of both passes by length, 16 rows of 8 heads, one {GPU}"
    shared = multiples.Axes((1024, 4096, 16384, 65536), 65536 * 10, (0.1, 8000))
    lines = read()
    panels = {title: [x for x in names if x in lines] for title, names in PANELS.items()}
    return multiples.draw(colors, title, panels, lines, shared, REFERENCE)
