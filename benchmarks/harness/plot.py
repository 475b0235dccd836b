"""Figures."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def figure(path: Path, title: str = "", n_panels: int = 1, **options: Any) -> Iterator[tuple]:
    """A figure and its axes to draw on, written to `path` in the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    fig, grid = plt.subplots(1, n_panels, layout="constrained", squeeze=False, **options)
    fig.suptitle(title, fontsize=9)
    for axes in grid[0]:
        axes.grid(alpha=0.3)
    yield fig, *grid[0]
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=150)
    plt.close(fig)


def colours(name: str) -> tuple:
    """The colours of one of matplotlib's qualitative maps."""
    from matplotlib import pyplot as plt

    return plt.colormaps[name].colors
