"""Bits by position of models trained alike: runs of docs/does_hashing_help.md, kept in a file."""

from __future__ import annotations

import json
from pathlib import Path

import by_position
from matplotlib.figure import Figure
from style import Palette

FILE = Path(__file__).parents[1] / "fair_by_position.jsonl"


def draw(colors: Palette) -> Figure:
    """The two panels of `by_position`."""
    rows = map(json.loads, FILE.read_text().splitlines())
    return by_position.draw(colors, {row["run"]: by_position.bands_of(row) for row in rows})
