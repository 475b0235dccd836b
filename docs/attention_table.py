"""Writes the table of docs/attention_table.md from docs/attention_table.csv.

    python docs/attention_table.py                 the page's table
    python docs/attention_table.py --all [FILE]    prints the tables 9 to 21 instead, of another CSV
    python docs/attention_table.py --join FILE...  writes the CSV too, of files table.jsonl

The CSV has the columns that `python -m benchmarks.attention --table` writes into table.csv, less
the sizes that all rows share. A test compares the page with it. Tables 22 and 23 have the times of
FlashAttention on an A100, which is another GPU, and of `dense`, which is cuDNN's, over
each attention's. `<` says that the host takes longer than the device.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import marked

sys.path.append(str(Path(__file__).resolve().parents[1]))  # of benchmarks, which is not installed
from benchmarks.harness.calls import is_hidden

FOLDER = Path(__file__).resolve().parent
CSV, PAGE = FOLDER / "attention_table.csv", FOLDER / "attention_table.md"
SETTINGS = (("0.1", "True"), ("0.1", "False"), ("0.0", "True"), ("0.0", "False"))
PASSES = {
    "Forward pass": "forward_ms",
    "Backward pass": "backward_ms",
    "Both passes": "combined_ms",
}
Rows = dict[tuple[str, str, str, str], dict[str, str]]  # by attention, length, dropout, masked
PLAIN, DROPOUT, PADDING = ("0.0", "False"), ("0.1", "False"), ("0.0", "True")
LENGTH = "65536"  # of the page's table
UNSHOWN = ("dense, impl='xla'",)  # in that table: memory is too small
NONE = "–"

# Milliseconds of FlashAttention's forward and backward pass on an A100, 16 rows of 8 heads of 64,
# for 128 tokens and twice as many each: Dao et al. 2022, tables 20 and 14.
FLASH_ATTENTION = {
    PLAIN: (0.31, 0.31, 0.73, 2.29, 7.64, 30.09, 118.50, 470.51, 1876.08, 7492.85),
    DROPOUT: (0.35, 0.36, 0.80, 2.52, 9.16, 36.70, 146.13, 583.45, 2332.01, 9323.63),
}


def read(path: Path = CSV) -> Rows:
    """The rows of a CSV."""
    with path.open() as file:
        keys = ("attention", "length", "dropout", "masked")
        return {tuple(row[key] for key in keys): row for row in csv.DictReader(file)}


def milliseconds(row: dict[str, str] | None, column: str = "combined_ms") -> float | None:
    """A figure of a row, if it has one."""
    number = float(row[column] or 0) if row and not row["error"] else 0.0
    return number if number > 0 else None


def short(number: float) -> str:
    """A number in three digits or more."""
    return f"{number:,.{2 if number < 10 else 1 if number < 100 else 0}f}"


def cell(row: dict[str, str] | None, column: str) -> str:
    """A figure, or why there is none: a backward pass below 0 is no figure."""
    if row is None:
        return NONE
    if row["error"] or not row[column]:
        known = {"": "OOM", "out of memory": "OOM", "left out, slow": "slow"}
        return known.get(row["error"], NONE)
    number = milliseconds(row, column)
    if number is None:
        return NONE
    hidden = column.endswith("_ms") and is_hidden(number, float(row.get("host_ms") or 0))
    return f"{'< ' if hidden else ''}{short(number)}"


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
    """The page's table: milliseconds of each pass, and what the settings multiply both by."""
    rows = read()
    shown = [PASSES["Forward pass"], PASSES["Backward pass"]]  # both: the table of attentions.py
    lines = ["| ms | forward | backward | dropout | padding |", "| --- |" + " ---: |" * 4]
    for name in dict.fromkeys(key[0] for key in rows if key[1] == LENGTH):
        if name in UNSHOWN:
            continue
        plain, *others = (
            rows.get((name, LENGTH, *setting)) for setting in (PLAIN, DROPOUT, PADDING)
        )
        cells = [cell(plain, column) for column in shown]
        for row in others:
            of, number = milliseconds(plain), milliseconds(row)
            cells.append(f"{number / of:.2f}x" if of and number else cell(row, "combined_ms"))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def ratios(rows: Rows, references: Mapping[str, float]) -> str:
    """A table of the references' times, by length, over those of all attentions: both passes."""
    lines = [
        f"| attention | {' | '.join(f'{int(n):,}' for n in references)} |",
        f"| --- |{' ---: |' * len(references)}",
    ]
    for name in dict.fromkeys(key[0] for key in rows):
        found = {n: milliseconds(rows.get((name, n, *PLAIN))) for n in references}
        cells = [f"{x / found[n]:.2f}x" if found[n] else NONE for n, x in references.items()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def tables(path: Path = CSV) -> str:
    """The tables of a CSV as Markdown, those of settings that it has, and two of ratios."""
    rows, parts = read(path), []
    measured = {key[2:] for key in rows}
    numbers = itertools.count(9)
    for dropout, masked in SETTINGS:
        words = f"{'' if float(dropout) else 'no '}dropout, {'' if masked == 'True' else 'no '}mask"
        for title, column in PASSES.items():
            heading = f"### {next(numbers)}. {title}, {words}, ms\n"
            if (dropout, masked) in measured:
                parts += [heading, table(rows, (dropout, masked), column) + "\n"]
    parts.append(f"### {next(numbers)}. Memory of both passes, no dropout, no mask, MiB\n")
    parts.append(table(rows, ("0.0", "False"), "memory_mib") + "\n")
    own = {str(128 << i): x for i, x in enumerate(FLASH_ATTENTION[PLAIN])}
    dense = {n: milliseconds(rows.get(("dense", n, *PLAIN))) for n in own}
    over = "over each, no dropout, no mask"
    for title, of in (("FlashAttention on an A100", own), ("`dense`", dense)):
        known = {n: x for n, x in of.items() if x and any(key[1] == n for key in rows)}
        parts.append(f"### {next(numbers)}. Both passes of {title} {over}\n")
        parts.append(ratios(rows, known) + "\n")
    return "\n".join(parts)


def join(paths: Sequence[Path]) -> None:
    """Writes the CSV of what `python -m benchmarks.attention --table` has measured in folders.

    Raises:
      ValueError: the files are of several machines or sizes. The CSV is as it was.
    """
    from benchmarks.harness import attention_table as measured

    known = {case: x for path in paths for case, x in measured.File(path).known.items()}
    if len(kinds := {case[4:] for case in known}) != 1:
        raise ValueError(
            f"--join has figures of {len(kinds)} machines or sizes, {kinds}: expected 1"
        )
    names, settings = list(measured.attentions()), list(measured.SETTINGS.values())

    def place(case: Any) -> tuple[int, int, int]:
        setting = settings.index((case.dropout, case.masked))
        return setting, case.length, names.index(case.attention)

    cases = sorted(known, key=place)
    with CSV.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        columns = [x for x in measured.Figures._fields if x != "error"]
        table.writerow([*measured.Case._fields[:4], *columns, "error"])
        for case in cases:
            kept = known[case]._asdict()
            numbers = ["" if kept[x] is None else f"{kept[x]:.4g}" for x in columns]
            table.writerow([*case[:4], *numbers, known[case].error])


def written(page: str) -> str:
    """The page with the table of the CSV."""
    return marked.written(page, "docs/attention_table.py", f"\n{summary()}\n\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    told = "print the tables 9 to 21 instead (default: of the page's CSV)"
    parser.add_argument("--all", nargs="?", const=CSV, type=Path, metavar="FILE", help=told)
    parser.add_argument("--join", nargs="+", type=Path, metavar="FILE", help="write the CSV first")
    args = parser.parse_args()
    if args.join:
        join(args.join)
    if args.all:
        print(tables(args.all))
    else:
        PAGE.write_text(written(PAGE.read_text()))
