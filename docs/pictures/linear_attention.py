"""Attention in linear time beside its peers in PyTorch: docs/linear_attention.jsonl."""

from __future__ import annotations

import multiples
import peers
from matplotlib.figure import Figure
from style import Palette

PANELS = {
    "Linear": (
        *("linear", "fla linear", "fla linear, from inputs", "linear-attention-transformer"),
        "retention",
    ),
    "Gated linear": ("gated_linear", "fla gated_linear", "fla gated_linear, from inputs"),
    "Gated delta rule": ("gated_delta", "fla gated_delta", "fla gated_delta, from inputs"),
    "Nystromformer": ("nystromformer", "nystrom-attention, float32"),
    "Performer": ("performer", "performer-pytorch"),
    "Linformer": ("linformer", "linformer, PyTorch"),
}


def draw(colors: Palette) -> Figure:
    """A panel for each attention and its peers."""
    title = (
        "Milliseconds of both passes by length, one row of 8 heads, one H200, Linformer one H100"
    )
    shared = multiples.Axes((1024, 131_072, 1_048_576), 2**26, (0.1, 2000))
    return multiples.draw(colors, title, PANELS, peers.read("linear_attention"), shared)
