"""Time of every attention by length, in six panels: docs/attention_table.md."""

from __future__ import annotations

import csv
from pathlib import Path

from matplotlib.figure import Figure
from style import Palette, label_ends

CSV = Path(__file__).resolve().parents[1] / "attention_table.csv"
REFERENCE = "flash"
PANELS = {
    "All keys": ("dense", "shared_qk", "memory_efficient", "dense, impl='xla'"),
    "Windows and blocks": ("sinks", "block_sparse", "bigbird", "longformer", "local"),
    "Keys that hash alike": ("hash_sparse", "asymmetric_lsh", "lsh", "smyrf"),
    "Chosen keys": ("dsa", "nsa", "routing", "moba"),
    "Recurrences": ("gated_linear", "gated_delta", "retention", "linear"),
    "Features and projections": ("performer", "long_short", "nystromformer", "linformer"),
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
    """Six panels with the same axes, each beside the reference."""
    made, times = Figure(figsize=(11.0, 6.4)), read()
    panels = made.subplots(2, 3, sharex=True, sharey=True).flat
    for axes, (title, names) in zip(panels, PANELS.items(), strict=True):
        colors.axes(axes)
        ends = []
        hues = (*colors.hues, colors.text)
        for name, color in ((REFERENCE, colors.line), *zip(names, hues, strict=False)):
            x, y = zip(*times[name], strict=True)
            axes.plot(x, y, color=color, lw=2 if name != REFERENCE else 3, solid_capstyle="round")
            ends.append((x[-1], y[-1], name, color if name != REFERENCE else colors.faint))
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set(xlim=(1024, 65536 * 10), ylim=(0.1, 8000))
        axes.set_xticks([1024, 4096, 16384, 65536], ["1,024", "4,096", "16,384", "65,536"])
        axes.minorticks_off()
        axes.set_yticks([0.1, 1, 10, 100, 1000], ["0.1", "1", "10", "100", "1,000"])
        axes.set_title(title, loc="left", size=11.5, weight="bold", color=colors.text)
        label_ends(axes, ends)
    title = "Milliseconds of both passes by length, 16 rows of 8 heads, one H100"
    made.text(0.045, 0.965, title, size=13, weight="bold", color=colors.text, va="center")
    made.subplots_adjust(left=0.055, right=0.995, top=0.885, bottom=0.06, hspace=0.24, wspace=0.05)
    return made
