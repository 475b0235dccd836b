"""Small multiples of times by length: panels with the same axes and names beside the lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.figure import Figure
from style import Palette, label_ends

Lines = Mapping[str, Sequence[tuple[int, float]]]  # (length, milliseconds), ascending


SHORT = {  # names that would not fit beside their line, in a panel that says what it is of
    "dense, impl='xla'": "dense, XLA",
    "fla linear": "fla",
    "fla gated_linear": "fla",
    "fla gated_delta": "fla",
    "fla nsa": "fla",
    "fla moba": "fla",
    "fla linear, from inputs": "fla, from inputs",
    "fla gated_linear, from inputs": "fla, from inputs",
    "fla gated_delta, from inputs": "fla, from inputs",
    "linear-attention-transformer": "in PyTorch",
    "linformer, PyTorch": "in PyTorch",
    "nystrom-attention, float32": "in PyTorch",
    "performer-pytorch": "in PyTorch",
    "transformers Longformer": "transformers",
    "FlexAttention, longformer": "FlexAttention",
    "FlexAttention, sinks": "FlexAttention",
    "nsa, a mean a block": "nsa, of means",
}


class Axes(NamedTuple):
    """The axes that all panels share."""

    lengths: tuple[int, ...]  # at the ticks
    last: float  # where x ends: names have the place behind the last length
    times: tuple[float, float]


def draw(
    colors: Palette,
    title: str,
    panels: Mapping[str, Sequence[str]],
    lines: Lines,
    shared: Axes,
    reference: str | None = None,
) -> Figure:
    """Two rows of three panels.

    Args:
      colors: of the mode.
      title: over all.
      panels: by their titles, the names of their lines.
      lines: by name.
      shared: the axes.
      reference: a line that stands in every panel, behind the others.
    """
    made = Figure(figsize=(11.0, 6.4))
    grid = made.subplots(2, 3, sharex=True, sharey=True).flat
    for axes, (heading, names) in zip(grid, panels.items(), strict=True):
        colors.axes(axes)
        hues = [*colors.hues, colors.text]
        drawn = [] if reference is None else [(reference, colors.line, colors.faint, 3)]
        drawn += [(name, hue, hue, 2) for name, hue in zip(names, hues, strict=False)]
        ends = []
        for name, color, of_text, width in drawn:
            x, y = zip(*lines[name], strict=True)
            axes.plot(x, y, color=color, lw=width, solid_capstyle="round")
            ends.append((x[-1], y[-1], SHORT.get(name, name), of_text))
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set(xlim=(shared.lengths[0], shared.last), ylim=shared.times)
        axes.set_xticks(shared.lengths, [_short(n) for n in shared.lengths])
        ticks = [10.0**n for n in range(-1, 5) if shared.times[0] <= 10.0**n <= shared.times[1]]
        axes.set_yticks(ticks, [f"{n:,g}" for n in ticks])
        axes.minorticks_off()
        axes.set_title(heading, loc="left", size=11.5, weight="bold", color=colors.text)
        label_ends(axes, ends)
    made.text(0.045, 0.965, title, size=13, weight="bold", color=colors.text, va="center")
    made.subplots_adjust(left=0.055, right=0.995, top=0.885, bottom=0.06, hspace=0.24, wspace=0.05)
    return made


def _short(length: int) -> str:
    """A length in units of 1,024."""
    return f"{length >> 20}M" if length >= 2**20 else f"{length >> 10}K"
