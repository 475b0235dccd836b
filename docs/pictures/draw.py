"""Draws the pictures of the README and the site, in light and in dark.

python docs/pictures/draw.py                      all, as SVG, beside this file
python docs/pictures/draw.py --only=lsh --format=png --folder=/tmp
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path

import style

PICTURES = (
    *("lsh", "indexer", "reversible", "package", "training_step"),
    *("fair", "fair_by_position"),
    *("attention_table", "linear_attention", "sparse_attention", "lsh_by_length", "block_sparse"),
    *("recall", "recall_of_a_model", "associative_recall", "depth", "scaling"),
)
MATPLOTLIB = "3.11.2"  # which drew the kept files


def main(argv: Sequence[str] | None = None) -> None:
    """Writes NAME-light and NAME-dark of each picture."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PICTURES, default=PICTURES)
    parser.add_argument("--format", choices=("svg", "png"), default="svg")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent)
    args = parser.parse_args(argv)
    for name in args.only:
        picture = importlib.import_module(name)
        for mode, colors in style.MODES.items():
            path = args.folder / f"{name}-{mode}.{args.format}"
            style.save(picture.draw(colors), path)


if __name__ == "__main__":
    main()
