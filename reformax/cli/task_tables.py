"""Accuracy by length and depth, as a table and as a picture."""

from __future__ import annotations

from typing import Any

from reformax.cli.report import markdown

Lines = list[dict[str, Any]]
# Inches of a picture's panel.
_PANEL = 3.2, 2.6


def last_row(lines: Lines) -> str:
    """The last of the lines of `evals.in_context.score`, as a row of a Markdown table.

    The table's head is above the first line.
    """
    line = lines[-1]
    depths = line.get("accuracy_by_depth", ())
    by_depth = ("-" if x is None else f"{x:.2f}" for x in depths)
    row = [f"{line['length']:,}", f"{line['accuracy']:.2f}", *by_depth]
    n = len(depths)
    heads = [f"{100 * i // n}-{100 * (i + 1) // n}%" for i in range(n)]
    table = markdown(["length", "accuracy", *heads], [row])
    return table if len(lines) == 1 else table.splitlines()[-1]


def draw(found: dict[str, Lines], title: str) -> bytes:
    """A PNG with a heat map for each task: lengths along, depths down where answers have one."""
    from matplotlib.figure import Figure

    from reformax.training import curves

    figure = Figure(figsize=(_PANEL[0] * len(found), _PANEL[1]), layout="constrained")
    panels = figure.subplots(1, len(found), squeeze=False)[0]
    for axes, (name, lines) in zip(panels, found.items(), strict=True):
        columns = [line.get("accuracy_by_depth", [line["accuracy"]]) for line in lines]
        values = [[float("nan") if x is None else x for x in column] for column in columns]
        rows = [list(row) for row in zip(*values, strict=True)]
        axes.imshow(rows, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        for y, row in enumerate(rows):
            for x, value in enumerate(row):
                if value == value:
                    axes.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=7)
        axes.set_xticks(range(len(lines)), [f"{line['length']:,}" for line in lines], rotation=45)
        n = len(rows)
        axes.set_yticks(range(n), [f"{100 * i // n}%" for i in range(n)] if n > 1 else ["all"])
        axes.set(title=name, xlabel="tokens")
    panels[0].set_ylabel("depth of the answer")
    figure.suptitle(title, fontsize=9)
    return curves.png(figure)
