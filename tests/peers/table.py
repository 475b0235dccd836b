"""Writes the table of docs/peers.md: `python -m tests.peers.table`."""

import re
from importlib import metadata
from pathlib import Path

from tests.peers.comparisons import COMPARISONS, Comparison, Deviations

PAGE = Path(__file__).resolve().parents[2] / "docs/peers.md"
HEAD = "| Peer | Of it | Here | Output | Gradients | Allowed |"
PACKAGES = (
    *("jax", "trax", "torch", "transformers", "reformer_pytorch", "local_attention"),
    *("linformer", "nystrom_attention", "performer_pytorch"),
)


def line(row: Comparison, found: Deviations) -> str:
    gradients = "none on a CPU" if found.gradients is None else f"{found.gradients:.1e}"
    cells = (row.peer, row.subject, row.ours, f"{found.output:.1e}", gradients, f"{row.allowed:g}")
    return f"| {' | '.join(cells)} |"


def rows(page: str) -> list[list[str]]:
    """The cells of the table's rows."""
    lines = page[page.index(HEAD) :].splitlines()[2:]
    table = [x for x in lines if x.startswith("|")]
    return [[cell.strip() for cell in x.strip("|").split(" | ")] for x in table]


def main() -> None:
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES)
    table = [HEAD, "| --- | --- | --- | ---: | ---: | ---: |"]
    table += [line(row, row.measure()) for row in COMPARISONS]
    before = re.split(r"^Measured with ", PAGE.read_text(), flags=re.MULTILINE)[0]
    PAGE.write_text(f"{before}Measured with {versions}.\n\n" + "\n".join(table) + "\n")


if __name__ == "__main__":
    main()
