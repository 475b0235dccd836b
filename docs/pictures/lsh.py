"""LSH attention: hash, sort, cut into chunks, attend (Kitaev et al. 2020, figure 2).

Everything drawn is computed: 16 vectors in the plane, hashed by their angle into four buckets.
"""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle, Wedge
from style import Palette, figure, headings

N, CHUNK, BUCKETS = 16, 4, 4
SIDE = 0.27  # of a token, in inches


def hashed(seed: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Angles of the vectors [N], and the buckets that they fall into."""
    rng = np.random.default_rng(seed)
    middles = (rng.permutation(np.repeat(np.arange(BUCKETS), N // BUCKETS)) + 0.5) * 2 * np.pi
    angles = (middles / BUCKETS + rng.normal(0, 0.45, N)) % (2 * np.pi)
    return angles, (angles // (2 * np.pi / BUCKETS)).astype(int)


def sees(buckets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which sorted key a sorted query sees, and which it reads [N, N].

    It reads its own chunk and the one before. It sees there what hashes alike and is not later.
    """
    order = np.argsort(buckets, kind="stable")
    chunk = np.arange(N) // CHUNK
    back = chunk[:, None] - chunk[None, :]
    read = (back == 0) | (back == 1)
    alike = buckets[order][:, None] == buckets[order][None, :]
    return read & alike & (order[:, None] >= order[None, :]), read


def draw(colors: Palette) -> Figure:
    """The four steps, left to right."""
    made, axes = figure(11.0, 4.1)
    angles, buckets = hashed()
    parts = (
        (0.35, "1  Hash", "by angle; a colour is a bucket"),
        (2.95, "2  Sort by bucket, cut into chunks", "time T log T"),
        (7.65, "3  Attend", "own chunk and the one before, same bucket"),
    )
    headings(axes, colors, 3.83, parts)
    _circle(axes, angles, buckets, colors)
    _sorting(axes, buckets, colors)
    _matrix(axes, buckets, colors)
    return made


def _circle(axes: Axes, angles: np.ndarray, buckets: np.ndarray, colors: Palette) -> None:
    x, y, radius = 1.4, 1.85, 1.05
    for b in range(BUCKETS):
        start = 360 * b / BUCKETS
        wedge = Wedge((x, y), radius, start, start + 360 / BUCKETS, color=colors.hues[b], lw=0)
        axes.add_patch(wedge).set_alpha(0.16)
    for angle, b in zip(angles, buckets, strict=True):
        to = x + radius * np.cos(angle), y + radius * np.sin(angle)
        axes.plot((x, to[0]), (y, to[1]), color=colors.hues[b], lw=0.8, alpha=0.6)
        axes.plot(*to, "o", ms=6, color=colors.hues[b])


def _token(axes: Axes, x: float, y: float, label: str, color: str, on: str) -> None:
    half = SIDE / 2 - 0.015
    axes.add_patch(Rectangle((x - half, y - half), 2 * half, 2 * half, color=color, lw=0))
    axes.text(x, y, label, size=7.5, color=on, ha="center", va="center", weight="bold")


def _sorting(axes: Axes, buckets: np.ndarray, colors: Palette) -> None:
    order, left, top, low = np.argsort(buckets, kind="stable"), 2.95 + SIDE / 2, 2.95, 1.1
    t = np.linspace(0, 1, 30)
    for rank, i in enumerate(order):
        start = left + i * SIDE
        end = left + rank * SIDE
        ease = t * t * (3 - 2 * t)
        y = top - SIDE / 2 - t * (top - low - SIDE)
        axes.plot(start + (end - start) * ease, y, color=colors.hues[buckets[i]], lw=1.3)
        _token(axes, end, low, str(i + 1), colors.hues[buckets[i]], colors.on_hue)
    for i in range(N):
        _token(axes, left + i * SIDE, top, str(i + 1), colors.hues[buckets[i]], colors.on_hue)
    for c in range(N // CHUNK):
        x = left + (c * CHUNK - 0.5) * SIDE + 0.05, left + (c * CHUNK + CHUNK - 0.5) * SIDE - 0.05
        axes.plot((x[0], x[0], x[1], x[1]), (0.84, 0.76, 0.76, 0.84), color=colors.text, lw=1.2)
        middle = (x[0] + x[1]) / 2
        axes.text(middle, 0.6, f"chunk {c + 1}", size=9, color=colors.faint, ha="center")
    for y, label in (
        (top + 0.26, "tokens in their order"),
        (0.3, "tokens by bucket"),
    ):
        axes.text(left + 7.5 * SIDE, y, label, size=9, color=colors.faint, ha="center", va="center")


def _matrix(axes: Axes, buckets: np.ndarray, colors: Palette) -> None:
    order, (seen, read) = np.argsort(buckets, kind="stable"), sees(buckets)
    cell, left, top = 0.172, 8.05, 3.13
    for i in range(N):
        for j in range(N):
            if not read[i, j]:
                continue
            color = colors.hues[buckets[order[i]]] if seen[i, j] else colors.panel
            corner = left + j * cell, top - (i + 1) * cell
            axes.add_patch(Rectangle(corner, cell - 0.015, cell - 0.015, color=color, lw=0))
    edge = Rectangle((left - 0.02, top - N * cell - 0.01), N * cell + 0.02, N * cell + 0.02)
    edge.set(fill=False, edgecolor=colors.line, linewidth=0.8)
    axes.add_patch(edge)
    middle = left + N * cell / 2
    axes.text(middle, 0.2, "keys, sorted", size=9, color=colors.faint, ha="center", va="center")
    axes.text(
        *(left - 0.2, top - N * cell / 2, "queries, sorted"),
        **dict(size=9, color=colors.faint, ha="center", va="center", rotation=90),
    )
    axes.text(
        *(left + N * cell - 0.1, top - 0.14, "never computed"),
        **dict(size=9, color=colors.faint, ha="right", va="top", style="italic"),
    )
