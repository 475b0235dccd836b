"""The flags that benchmarks share, and the sizes of a run."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax


def parser(
    doc: str, repeats: int | None = None, peers: str = "", plot: bool = False
) -> argparse.ArgumentParser:
    """A parser with --tiny and, if asked, --repeats with a default, --peers and --plot.

    The first line of `doc` describes the command, and `peers` says what --peers adds.
    """
    flags = argparse.ArgumentParser(description=doc.partition("\n")[0])
    flags.add_argument("--tiny", action="store_true", help="tiny sizes, to see that it runs")
    if repeats is not None:
        flags.add_argument("--repeats", type=positive, default=repeats, help="timed calls of a row")
    if peers:
        options = dict(nargs="?", const=sys.executable, metavar="PYTHON")
        flags.add_argument("--peers", help=f"{peers}, run by this interpreter", **options)
    if plot:
        flags.add_argument("--plot", type=Path, help="where to draw the figure")
    return flags


def positive(text: str) -> int:
    """An integer of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: expected at least 1")
    return number


def of_size(sizes: Mapping[str, Any], tiny: bool) -> Any:
    """The entry of `sizes` for this run, "tiny", "cpu" or "gpu". Prints it and the machine."""
    backend = jax.default_backend()
    device = f"{os.cpu_count()} cores" if backend == "cpu" else jax.devices()[0].device_kind
    found = sizes["tiny" if tiny else backend]
    print(f"{device}, jax {jax.__version__}, {found}")
    return found
