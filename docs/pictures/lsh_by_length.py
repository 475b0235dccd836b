"""LSH and local attention by length: the table of docs/results.md."""

from __future__ import annotations

import lines
import pages
from matplotlib.figure import Figure
from style import Palette

OURS = ("dense, cuDNN", "LSH, 8 hashes", "LSH, 4 hashes", "LSH, 2 hashes", "local")
PEERS = (
    *("dense, cuDNN", "transformers, LSH, 4 hashes", "reformer_pytorch, LSH, 4 hashes"),
    *("LSH, 4 hashes", "local in FlexAttention", "local"),
)
SHORT = {
    "transformers, LSH, 4 hashes": "transformers",
    "reformer_pytorch, LSH, 4 hashes": "reformer_pytorch",
    "local in FlexAttention": "FlexAttention, local",
}


def draw(colors: Palette) -> Figure:
    """Ours beside dense attention, and beside peers."""
    rows = pages.table("results.md", "forward / gradient ms")
    found = {name: pages.line(row, 1, "N=")[:4] for name, row in rows.items()}
    x = {1024: "1K", 4096: "4K", 16384: "16K", 65536: "64K"}
    y = lines.ticks((1, 10, 100))
    panels = [
        lines.Panel(
            title,
            {SHORT.get(name, name): found[name] for name in names},
            x,
            (0.3, 100),
            y,
            log=True,
            behind=OURS[:1],
        )
        for title, names in (("LSH and local attention", OURS), ("Beside PyTorch", PEERS))
    ]
    title = "Milliseconds of both passes by length, 65,536 tokens a call, one H200"
    return lines.draw(colors, title, panels, room=0.36)
