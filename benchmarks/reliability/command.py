"""What the campaigns share: their flags, the shares of their rows, and endings that must be."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.command_line import positive
from benchmarks.reliability.runs import Ending, Runner


def parse(doc: str, cases: int, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses --cases and --seed; `doc` describes the campaign."""
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=shape)
    parser.add_argument(
        "--cases", type=positive, default=cases, help=f"how many (default: {cases})"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the cases (default: 0)")
    return parser.parse_args(argv)


def share(cases: int, row: int, rows: int) -> int:
    """How many of the cases a row takes: all rows the same, the first ones the rest."""
    return cases // rows + (row < cases % rows)


def need_calls(runner: Runner) -> None:
    """Ends the process where calls cannot be watched."""
    if not runner.can_strike:
        sys.exit("this campaign compiles a small library: install cc, or run it where there is one")


def must_end(ending: Ending, code: int = 0) -> None:
    """Raises `RuntimeError` unless a run that prepares a campaign ended with this exit code."""
    if ending.code != code:
        raise RuntimeError(f"ended with {ending.code} instead of {code}: {ending.err[-2000:]}")


def complaint(ending: Ending, run: Path) -> str | None:
    """What is wrong with the ending of a run that nothing disturbed; None if nothing is."""
    if ending.code == 0:
        return None
    if ending.code is None:
        return f"{run.name} hangs"
    return f"{run.name} ended with {ending.code}: {ending.err.strip().splitlines()[-1:]}"
