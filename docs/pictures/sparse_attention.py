"""Attention to chosen keys beside its peers in PyTorch: docs/sparse_attention.jsonl."""

from __future__ import annotations

import multiples
import peers
from matplotlib.figure import Figure
from style import Palette

PANELS = {
    "Longformer": ("longformer", "FlexAttention, longformer", "transformers Longformer"),
    "Windows with sinks": ("sinks", "FlexAttention, sinks"),
    "Native sparse": ("nsa", "fla nsa", "nsa, a mean a block"),
    "Mixture of blocks": ("moba", "fla moba"),
    "Keys that hash alike": ("lsh", "asymmetric_lsh", "smyrf", "hash_sparse"),
    "Indexed keys": ("dsa",),
}


def draw(colors: Palette) -> Figure:
    """A panel for each attention and its peers, beside dense attention."""
    title = "Milliseconds of both passes by length, one row of 16 heads, one H100"
    shared = multiples.Axes((1024, 65_536, 1_048_576), 2**26, (0.1, 30_000))
    return multiples.draw(
        colors, title, PANELS, peers.read("sparse_attention"), shared, reference="flash"
    )
