"""Speed on several devices: docs/scaling.jsonl."""

from __future__ import annotations

import json

import lines
from matplotlib.figure import Figure
from pages import FOLDER
from style import Palette

PANELS = {  # of a title the machine and the name of rows
    "Reformer, 65,536 a device, H100": ("H100", "reformer_enwik8 1 x 65,536"),
    "Transformer, 65,536 in all, H100": ("H100", "transformer_enwik8 1 x 65,536, shared"),
    "Transformer, 16 x 4,096, H200": ("H200", "transformer_enwik8 16 x 4,096"),
}


def read() -> dict[tuple[str, str], dict[str, list[tuple[float, float]]]]:
    """Shares of linear scaling by devices, by mesh, of each GPU and name."""
    found: dict[tuple[str, str], dict[str, dict[float, float]]] = {}
    for line in (FOLDER / "scaling.jsonl").read_text().splitlines():
        row = json.loads(line)
        gpu = next(name for name in ("H100", "H200") if name in row["machine"])
        of = found.setdefault((gpu, row["name"]), {}).setdefault(row["mesh"], {1: 1.0})
        of[row["devices"]] = row["times"] / row["devices"]  # the last result counts
    return {key: {k: sorted(v.items()) for k, v in of.items()} for key, of in found.items()}


def draw(colors: Palette) -> Figure:
    """A panel for each model."""
    found, x = read(), lines.ticks((1, 2, 4))
    y = lines.ticks((0.85, 0.9, 0.95, 1), "{:.0%}")
    panels = [lines.Panel(title, found[key], x, (0.85, 1.005), y) for title, key in PANELS.items()]
    title = "Speed relative to perfect scaling, by number of devices"
    return lines.draw(colors, title, panels, room=0.3, xlabel="devices")
