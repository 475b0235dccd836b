"""The flags and the first line that benchmarks share."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax


def parser(
    doc: str, repeats: int | None = None, threads: bool = False, plot: str | None = None
) -> argparse.ArgumentParser:
    """A parser with the flags that several benchmarks have.

    Args:
      doc: the module's docstring, of which the first line describes it.
      repeats: the default of --repeats; None for no such flag.
      threads: whether it has --threads.
      plot: the help of --plot; None for no such flag.
    """
    made = argparse.ArgumentParser(description=doc.partition("\n")[0])
    made.add_argument("--tiny", action="store_true", help="tiny sizes, to see that it runs")
    if repeats is not None:
        made.add_argument("--repeats", type=positive, default=repeats, help="timed calls of a row")
    if threads:
        default = min(8, os.cpu_count() or 1)
        made.add_argument("--threads", type=positive, default=default, help="rows compiled at once")
    if plot is not None:
        made.add_argument("--plot", type=Path, help=plot)
    return made


def add_peers(made: argparse.ArgumentParser, help: str) -> None:
    """Adds --peers, off by default, with an interpreter that is by default this one."""
    options = dict(nargs="?", const=sys.executable, metavar="PYTHON")
    made.add_argument("--peers", help=f"{help}, run by this interpreter", **options)


def positive(text: str) -> int:
    """An integer of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: expected at least 1")
    return number


def backend() -> str:
    return "cpu" if jax.default_backend() == "cpu" else "gpu"


def of_size(sizes: Mapping[str, Any], tiny: bool) -> Any:
    """The entry of `sizes` for this run: "tiny", "cpu" or "gpu"."""
    return sizes["tiny" if tiny else backend()]


def machine() -> str:
    """The device and the version of JAX."""
    device = jax.devices()[0].device_kind if backend() == "gpu" else f"{os.cpu_count()} cores"
    return f"{device}, jax {jax.__version__}"
