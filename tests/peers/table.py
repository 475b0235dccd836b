"""Writes the table of docs/peers.md: `python -m tests.peers.table`."""

import itertools
import operator
import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from tests.peers.comparisons import COMPARISONS, Comparison, Deviations

PAGE = Path(__file__).resolve().parents[2] / "docs/peers.md"
HEAD = "| library | its attention | reformax | output | gradients | allowed |"
PACKAGES = (
    *("jax", "trax", "torch", "transformers", "reformer_pytorch", "local_attention"),
    *("linformer", "nystrom_attention", "performer_pytorch"),
)


def groups() -> list[list[Comparison]]:
    """The comparisons by lines of the table: those with a peer within one bound."""
    key = operator.attrgetter("peer", "allowed")
    return [list(group) for _, group in itertools.groupby(sorted(COMPARISONS, key=key), key)]


def names(group: Sequence[Comparison]) -> list[str]:
    """The first cells of a line."""
    masks = f"the masks of {len(group)} rows of `tests/ops/rows.py`"
    subjects = masks if group[0].peer == "SDPA" else "; ".join(row.subject for row in group)
    return [group[0].peer, subjects, ", ".join(dict.fromkeys(row.ours for row in group))]


def line(group: Sequence[Comparison], found: Sequence[Deviations]) -> str:
    """A line of the table, with the largest deviations of its comparisons."""
    gradients = [one.gradients for one in found if one.gradients is not None]
    cells = [*names(group), f"{max(one.output for one in found):.1e}"]
    cells.append(f"{max(gradients):.1e}" if gradients else "none on a CPU")
    return f"| {' | '.join([*cells, f'{group[0].allowed:g}'])} |"


def rows(page: str) -> list[list[str]]:
    """The cells of the table's rows."""
    lines = page[page.index(HEAD) :].splitlines()[2:]
    table = [x for x in lines if x.startswith("|")]
    return [[cell.strip() for cell in x.strip("|").split(" | ")] for x in table]


def main() -> None:
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES)
    table = [HEAD, "| --- | --- | --- | ---: | ---: | ---: |"]
    table += [line(group, [row.measure() for row in group]) for group in groups()]
    before = re.split(r"^Measured with ", PAGE.read_text(), flags=re.MULTILINE)[0]
    PAGE.write_text(f"{before}Measured with {versions}.\n\n" + "\n".join(table) + "\n")


if __name__ == "__main__":
    main()
