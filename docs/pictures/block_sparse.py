"""Block-sparse attention beside FlexAttention: the table of docs/results.md."""

from __future__ import annotations

import pages
from matplotlib.figure import Figure
from style import Palette

DENSE = (9.17, 34.76)  # in the text under the table


def draw(colors: Palette) -> Figure:
    """A panel for each pass, a row for each mask."""
    rows = pages.table("results.md", "mask")
    made = Figure(figsize=(11.0, 2.7))
    grid = made.subplots(1, 2, sharey=True)
    for of, (axes, title) in enumerate(zip(grid, ("Forward", "Both passes"), strict=True)):
        colors.axes(axes)
        axes.grid(axis="y", lw=0)
        for y, row in enumerate(reversed(rows.values())):
            ours = pages.number(row["forward / gradient ms"], of)
            flex = pages.number(row["FlexAttention ms"], of)
            axes.plot((ours, flex), (y, y), color=colors.line, lw=1.5, zorder=1)
            axes.plot(flex, y, "o", ms=9, color=colors.hues[1])
            axes.plot(ours, y, "o", ms=6, color=colors.hues[0])
        axes.axvline(DENSE[of], color=colors.faint, lw=1.5, ls=(0, (3, 2)))
        axes.text(
            DENSE[of] * 0.97, 3.45, "dense", size=9, color=colors.faint, ha="right", va="center"
        )
        axes.set_yticks(range(len(rows)), list(reversed(rows)))
        axes.tick_params(axis="y", colors=colors.text, labelsize=10, length=0)
        axes.set(xlim=(0, DENSE[of] * 1.05), ylim=(-0.5, 3.7))
        axes.set_title(f"{title}, ms", loc="left", size=11, weight="bold", color=colors.text)
    title = "65,536 tokens, blocks of 128, one H200:"
    made.text(0.012, 0.93, title, size=12.5, weight="bold", color=colors.text, va="center")
    for x, name, hue in ((0.395, "reformax", 0), (0.49, "FlexAttention", 1)):
        made.text(x, 0.93, name, size=12.5, weight="bold", color=colors.hues[hue], va="center")
    made.subplots_adjust(left=0.115, right=0.99, top=0.74, bottom=0.1, wspace=0.06)
    return made
