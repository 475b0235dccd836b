"""An indexer with hashed candidates: hash, find candidates, score them, choose the best.

Everything drawn is computed: 16 keys in the plane and one query, hashed by their angle.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle, Wedge
from style import Palette, arrow, figure, headings

N, BUCKETS, TOP_K = 16, 4, 3
SIDE = 0.27  # of a token, in inches
LEFT, TURN = 3.35, 2 * np.pi / BUCKETS


class Found(NamedTuple):
    """What is drawn: of the keys, and of one query after them.

    Attributes:
      keys: vectors.
      query: the query's vector.
      buckets: of the keys.
      bucket: of the query.
      scores: of all keys.
      candidates: positions of the keys of the query's bucket.
      chosen: those of them with the highest scores.
      missed: keys of other buckets with higher scores than the last of these.
    """

    keys: np.ndarray  # [N, 2]
    query: np.ndarray  # [2]
    buckets: np.ndarray  # [N]
    bucket: int
    scores: np.ndarray  # [N]
    candidates: np.ndarray  # [C]
    chosen: np.ndarray  # [TOP_K]
    missed: np.ndarray


def found(seed: int = 0) -> Found:
    """Draws vectors, and does what an indexer does."""
    rng = np.random.default_rng(seed)
    angles = rng.uniform(0, 2 * np.pi, N)
    lengths, angle = rng.uniform(0.55, 1.0, N), 0.7 * TURN
    keys = lengths[:, None] * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    query = np.array([np.cos(angle), np.sin(angle)])
    buckets, bucket = (angles // TURN).astype(int), int(angle // TURN)
    scores = np.maximum(keys @ query, 0)
    candidates = np.flatnonzero(buckets == bucket)
    best = candidates[np.argsort(-scores[candidates], kind="stable")[:TOP_K]]
    missed = np.flatnonzero((buckets != bucket) & (scores > scores[best].min()))
    return Found(keys, query, buckets, bucket, scores, candidates, np.sort(best), missed)


def draw(colors: Palette) -> Figure:
    """The steps, left to right and down."""
    made, axes = figure(11.0, 4.1)
    known = found()
    parts = (
        (0.35, "1  Hash", "keys by angle; the query, an arrow, too"),
        (LEFT, "2  Candidates", "keys of the query's bucket, before it"),
        (8.35, "3  Choose", f"the {TOP_K} best exact scores"),
    )
    headings(axes, colors, 3.83, parts)
    _circle(axes, known, colors)
    _tokens(axes, known, colors)
    _scores(axes, known, colors)
    return made


def _circle(axes: Axes, known: Found, colors: Palette) -> None:
    x, y, radius = 1.6, 1.75, 1.2
    for b in range(BUCKETS):
        start = 360 * b / BUCKETS
        wedge = Wedge((x, y), radius, start, start + 360 / BUCKETS, color=colors.hues[b], lw=0)
        axes.add_patch(wedge).set_alpha(0.3 if b == known.bucket else 0.1)
    for (dx, dy), b in zip(known.keys * radius, known.buckets, strict=True):
        axes.plot(x + dx, y + dy, "o", ms=6, color=colors.hues[b])
    end = x + known.query[0] * radius * 1.12, y + known.query[1] * radius * 1.12
    arrow(axes, (x, y), end, color=colors.text, width=1.8)


def _tokens(axes: Axes, known: Found, colors: Palette) -> None:
    """The keys by position, and below those of the query's bucket."""
    top, low = 2.75, 0.9
    for i, b in enumerate(known.buckets):
        is_candidate = i in known.candidates
        color = colors.hues[b]
        _token(axes, LEFT + SIDE / 2 + i * SIDE, top, str(i + 1), color, colors.on_hue)
        if not is_candidate:
            continue
        rank = int(np.searchsorted(known.candidates, i))
        middle, n = LEFT + N * SIDE / 2, len(known.candidates)
        end = middle + (rank - (n - 1) / 2) * 1.4 * SIDE
        arrow(axes, (LEFT + SIDE / 2 + i * SIDE, top - 0.18), (end, low + 0.18), color=color)
        _token(axes, end, low, str(i + 1), color, colors.on_hue)
    middle = LEFT + N * SIDE / 2
    note = dict(size=9, color=colors.faint, ha="center", va="center")
    axes.text(middle, top + 0.28, "keys by position, a colour is a bucket", **note)
    axes.text(middle, 0.45, f"{len(known.candidates)} of {N} keys are scored", **note)


def _token(axes: Axes, x: float, y: float, label: str, color: str, on: str) -> None:
    half = SIDE / 2 - 0.015
    axes.add_patch(Rectangle((x - half, y - half), 2 * half, 2 * half, color=color, lw=0))
    axes.text(x, y, label, size=7.5, color=on, ha="center", va="center", weight="bold")


def _scores(axes: Axes, known: Found, colors: Palette) -> None:
    left, bottom, step, height = 8.55, 0.9, 0.38, 1.9
    shown = *known.candidates, *known.missed
    for rank, i in enumerate(shown):
        x, is_chosen = left + rank * step, i in known.chosen
        size = height * known.scores[i] / known.scores.max()
        color, style = colors.hues[known.buckets[i]], ":" if i in known.missed else "-"
        bar = Rectangle((x - 0.12, bottom), 0.24, size, edgecolor=color, lw=1.2, ls=style)
        bar.set_facecolor(color if is_chosen else "none")
        axes.add_patch(bar)
        axes.text(x, bottom - 0.17, str(i + 1), size=8, color=colors.text, ha="center", va="center")
    middle = left + (len(shown) - 1) * step / 2
    note = dict(size=9, color=colors.faint, ha="center", va="center")
    axes.text(middle, 0.45, "filled: all heads attend to it", **note)
    axes.text(middle, 0.2, "dotted: missed, in another bucket", **note)
