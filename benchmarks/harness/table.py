"""Markdown tables."""

from __future__ import annotations


class Table:
    """A Markdown table on stdout, whose rows are printed as they become known."""

    def __init__(self, *columns: str, title: str = "", n_names: int = 1):
        """Prints the head.

        Args:
          *columns: their names.
          title: a line above the table.
          n_names: how many columns are aligned to the left.
        """
        self._n_columns = len(columns)
        print(f"\n{title}\n" if title else "")
        self.row(*columns)
        self.row(*["---"] * n_names, *["---:"] * (len(columns) - n_names))

    def row(self, *cells: str) -> None:
        """Prints a row; cells that are missing at its end are dashes."""
        cells += ("-",) * (self._n_columns - len(cells))
        print(f"| {' | '.join(cells)} |", flush=True)
