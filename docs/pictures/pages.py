"""The tables of the pages, which pictures are drawn from."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1]
Row = dict[str, str]


def table(page: str, first: str) -> dict[str, Row]:
    """Rows of the table whose header begins with the cell `first`, by their first cells.

    Each is a dict of the header's cells. Marks of code and of emphasis are left out.
    """
    text = (FOLDER / page).read_text().replace("*", "").replace("`", "")
    head, _, *lines = text[text.index(f"| {first} |") :].partition("\n\n")[0].splitlines()
    columns = _cells(head)
    found = [dict(zip(columns, _cells(line), strict=True)) for line in lines]
    return {row[columns[0]]: row for row in found}


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def number(cell: str, of: int = 0) -> float:
    """One of the numbers of a cell that slashes divide."""
    return float(cell.split("/")[of].replace(",", ""))


def line(row: Row, of: int = 0, prefix: str = "") -> list[tuple[float, float]]:
    """(x, y) of the cells whose columns are numbers, after a prefix such as N=."""
    points = []
    for column, cell in row.items():
        x = column.removeprefix(prefix).removesuffix(" keys").replace(",", "")
        if x.isdigit() and cell:
            points.append((float(x), number(cell, of)))
    return points
