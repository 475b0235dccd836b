"""Writes the table of docs/attention_table.md from docs/attention_table.csv.

    python docs/attention_table.py                 the page's table
    python docs/attention_table.py --all [FILE]    prints the tables 9 to 21 instead, of another CSV

The CSV has the columns that `python -m benchmarks.attention --table` writes into table.csv, less
the sizes that all rows share. A test compares the page with it.
"""

from __future__ import annotations

import argparse
import csv
import itertools
from pathlib import Path

import marked

FOLDER = Path(__file__).resolve().parent
CSV, PAGE = FOLDER / "attention_table.csv", FOLDER / "attention_table.md"
SETTINGS = (("0.1", "True"), ("0.1", "False"), ("0.0", "True"), ("0.0", "False"))
PASSES = {
    "Forward pass": "forward_ms",
    "Backward pass": "backward_ms",
    "Both passes": "combined_ms",
}
Rows = dict[tuple[str, str, str, str], dict[str, str]]  # by attention, length, dropout, masked
PLAIN, DROPOUT, MASKED = ("0.0", "False"), ("0.1", "False"), ("0.0", "True")
SHOWN = {  # the page's columns: length, dropout and mask, what of it
    "plain": ("65536", PLAIN, "combined_ms"),
    "dropout": ("65536", DROPOUT, "combined_ms"),
    "mask": ("65536", MASKED, "combined_ms"),
}
NONE = "–"


def read(path: Path = CSV) -> Rows:
    """The rows of a CSV."""
    with path.open() as file:
        keys = ("attention", "length", "dropout", "masked")
        return {tuple(row[key] for key in keys): row for row in csv.DictReader(file)}


def cell(row: dict[str, str] | None, column: str) -> str:
    """A figure, or why there is none: a backward pass below 0 is no figure."""
    if row is None:
        return NONE
    if row["error"]:
        short = {"out of memory": "OOM", "left out, slow": "slow"}
        return short.get(row["error"], NONE)
    number = float(row[column])
    if number <= 0:
        return NONE
    return (
        f"{number:,.2f}" if number < 10 else f"{number:,.1f}" if number < 100 else f"{number:,.0f}"
    )


def table(rows: Rows, setting: tuple[str, str], column: str) -> str:
    """A table of all attentions that have a figure, by length."""
    lengths = sorted({key[1] for key in rows}, key=int)
    lines = [
        f"| attention | {' | '.join(f'{int(n):,}' for n in lengths)} |",
        f"| --- |{' ---: |' * len(lengths)}",
    ]
    for name in dict.fromkeys(key[0] for key in rows):
        cells = [cell(rows.get((name, n, *setting)), column) for n in lengths]
        if set(cells) != {NONE}:
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def summary() -> str:
    """The page's table."""
    rows = read()
    lines = [f"| ms | {' | '.join(SHOWN)} |", f"| --- |{' ---: |' * len(SHOWN)}"]
    for name in dict.fromkeys(key[0] for key in rows):
        cells = [cell(rows.get((name, n, *setting)), of) for n, setting, of in SHOWN.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def tables(path: Path = CSV) -> str:
    """The thirteen tables of a CSV as Markdown."""
    rows, parts = read(path), []
    numbers = itertools.count(9)
    for dropout, masked in SETTINGS:
        words = f"{'' if float(dropout) else 'no '}dropout, {'' if masked == 'True' else 'no '}mask"
        for title, column in PASSES.items():
            parts.append(f"### {next(numbers)}. {title}, {words}, ms\n")
            parts.append(table(rows, (dropout, masked), column) + "\n")
    parts.append(f"### {next(numbers)}. Memory of both passes, no dropout, no mask, MiB\n")
    parts.append(table(rows, ("0.0", "False"), "memory_mib") + "\n")
    return "\n".join(parts)


def written(page: str) -> str:
    """The page with the table of the CSV."""
    return marked.written(page, "docs/attention_table.py", f"\n{summary()}\n\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    told = "print the tables 9 to 21 instead (default: of the page's CSV)"
    parser.add_argument("--all", nargs="?", const=CSV, type=Path, metavar="FILE", help=told)
    if path := parser.parse_args().all:
        print(tables(path))
    else:
        PAGE.write_text(written(PAGE.read_text()))
