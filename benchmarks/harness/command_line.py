"""The flags that benchmarks share, and the sizes of a run."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection, Mapping
from typing import Any

import jax

from benchmarks.harness import output


def parser(doc: str, repeats: int | None = None, peers: str = "") -> argparse.ArgumentParser:
    """A parser with --tiny, --rows and, if asked, --repeats and --peers.

    `doc` describes the command, and `peers` says what --peers adds.
    """
    shape = argparse.RawDescriptionHelpFormatter
    flags = argparse.ArgumentParser(description=doc, formatter_class=shape)
    flags.add_argument("--tiny", action="store_true", help="tiny sizes, to see that it runs")
    rows = "a file that all rows are added to, as lines of JSON"
    flags.add_argument("--rows", type=output.record, metavar="FILE", help=rows)
    if repeats is not None:
        flags.add_argument(
            "--repeats",
            type=positive,
            default=repeats,
            help=f"timed calls of a row (default: {repeats})",
        )
    if peers:
        # Other processes share the GPU, which JAX has not taken yet.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        options = dict(nargs="?", const=sys.executable, metavar="PYTHON")
        flags.add_argument("--peers", help=f"{peers}, run by this interpreter", **options)
    return flags


def check_read(
    flags: argparse.ArgumentParser, args: argparse.Namespace, read: Collection[str], case: str
) -> None:
    """Ends with a line where a flag is given that is not among those `read` in this case."""
    for name, value in vars(args).items():
        if name not in read and value != flags.get_default(name):
            flags.error(f"--{name} is {value}, which is not read {case}")


def positive(text: str) -> int:
    """An integer of at least 1."""
    return _at_least(1, text)


def natural(text: str) -> int:
    """An integer of at least 0."""
    return _at_least(0, text)


def seconds(text: str) -> float:
    """A number above 0."""
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text}: expected more than 0 seconds")
    return number


def _at_least(least: int, text: str) -> int:
    number = int(text)
    if number < least:
        raise argparse.ArgumentTypeError(f"{number}: expected at least {least}")
    return number


def of_size(sizes: Mapping[str, Any], tiny: bool) -> Any:
    """The entry of `sizes` for this run, "tiny", "cpu" or "gpu". Prints it and the machine."""
    found = sizes["tiny" if tiny else jax.default_backend()]
    print(f"{machine()}, {found}")
    return found


def machine() -> str:
    """The device and JAX's version."""
    cpu = jax.default_backend() == "cpu"
    device = f"{os.cpu_count()} cores" if cpu else jax.devices()[0].device_kind
    return f"{device}, jax {jax.__version__}"
