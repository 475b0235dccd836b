"""The figures of `benchmarks.all` as Markdown tables.

    python -m benchmarks.tables FILE

prints each command, its tables, and what they were measured on and when. Figures that are older
than a change of the files that they measure say so.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import figures, output
from benchmarks.harness.figures import Figures


def markdown(found: Figures) -> str:
    """A part's command, its tables, and a line on where and when."""
    blocks = [f"```bash\n{found.command}\n```"]
    for table in found.tables:
        rows = [output.head(table["columns"]), *map(output.line, table["rows"])]
        blocks += [table["title"], "\n".join(rows)] if table["title"] else ["\n".join(rows)]
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    commit = "no commit" if found.commit is None else f"commit {found.commit[:9]}"
    blocks.append(f"{found.hardware}, {versions}, {commit}, {found.date}, {found.seconds:,.0f} s.")
    if reason := found.stale():
        blocks.append(f"**Stale**: these figures are {reason}.")
    return "\n\n".join(blocks)


def main(argv: Sequence[str] | None = None) -> None:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shape)
    parser.add_argument("file", type=Path, metavar="FILE", help="from benchmarks.all")
    parser.add_argument("--only", nargs="+", help="the tables of these parts")
    args = parser.parse_args(argv)
    known = figures.read(args.file)
    if wrong := set(args.only or ()) - known.keys():
        parser.error(f"--only has {', '.join(wrong)}: {args.file} has {', '.join(known) or 'none'}")
    print("\n\n".join(markdown(known[name]) for name in args.only or known))


if __name__ == "__main__":
    main()
