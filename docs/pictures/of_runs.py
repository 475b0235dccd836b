"""The command of a picture of runs: their folders, and where the picture goes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import style
from matplotlib.figure import Figure
from style import Palette


def parser(doc: str) -> argparse.ArgumentParser:
    """The flags that all have; `doc` is the docstring of the command's file."""
    made = argparse.ArgumentParser(description=doc.partition("\n")[0])
    made.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    made.add_argument("--out", type=Path, required=True, help="path without -light.svg")
    made.add_argument("--format", choices=("svg", "png"), default="svg")
    return made


def write(
    flags: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    read: Callable[[argparse.Namespace], Any],
    draw: Callable[[Palette, Any], Figure],
) -> None:
    """Writes OUT-light and OUT-dark of what `read` finds; its `ValueError` is the command's."""
    args = flags.parse_args(argv)
    try:
        found = read(args)
    except ValueError as error:
        flags.error(str(error))
    for mode, colors in style.MODES.items():
        path = args.out.with_name(f"{args.out.name}-{mode}.{args.format}")
        style.save(draw(colors, found), path)
