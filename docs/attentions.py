"""Writes the table of docs/choosing_an_attention.md that says what each attention can do.

    python docs/attentions.py

Every cell is read off the code: the attributes and methods of the op with its default options, and
the values that its `impl` takes. Times and memory are those of docs/attention_table.csv. A test
compares.
"""

from __future__ import annotations

import csv
import functools
import importlib
import pkgutil
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import marked

import reformax.ops
from reformax.flax.heads import shapes_of_weights
from reformax.ops.base import AttentionOp, Dims

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/choosing_an_attention.md"
MEASURED = ROOT / "docs/attention_table.csv"
FIGURES = (("combined_ms", 16_384), ("combined_ms", 65_536), ("memory_mib", 65_536))
COLUMNS = ("attention", "ms, 16,384", "ms, 65,536", "MiB, 65,536", "causal", "`context`")
YES, NO = "yes", "–"


class Attention(NamedTuple):
    """An attention of `reformax.ops`: a module and the function in it of the same name."""

    name: str
    make: Callable[..., AttentionOp]

    @property
    def op(self) -> AttentionOp:
        """The op with its default options."""
        return self.make()


def attentions() -> list[Attention]:
    """All of them, by name."""
    found = []
    for module in pkgutil.iter_modules(reformax.ops.__path__):
        if module.ispkg:
            continue
        make = getattr(importlib.import_module(f"reformax.ops.{module.name}"), module.name, None)
        if callable(make):
            found.append(Attention(module.name, make))
    return found


# What a caller may ask, each in one place.


def is_causal(op: AttentionOp) -> str:
    """Whether it hides the future, always, never, or as it is told."""
    return NO if op.causality == "never" else op.causality


def context(op: AttentionOp) -> str:
    """How devices share a sequence, see reformax/layers/context_parallel.py."""
    if op.reach(True) is not None:
        return "borders"
    names = {"heads": "heads", "key heads": "heads", "sequence": "ring", "queries": "keys"}
    return ", ".join(names[part] for part in op.shards) or NO


def in_flax(op: AttentionOp) -> str:
    """Whether `reformax.flax` takes it: it has no buffers, which steps of training update."""
    try:
        shapes_of_weights(op, Dims(2, 8, 8, 16))
    except NotImplementedError:
        return NO
    return YES


def kernels(make) -> str:
    """The values of `impl` that are kernels; its refusal of another value lists them all."""
    try:
        make(impl="?")
    except TypeError:  # it takes no `impl`
        return NO
    except ValueError as error:
        found = re.findall(r"'(cudnn|pallas)'", str(error).partition("expected")[2])
        return ", ".join({"cudnn": "cuDNN", "pallas": "Pallas"}[name] for name in found) or NO
    raise LookupError(f"{make.__name__} takes impl='?'")


@functools.cache
def _measured() -> dict[tuple[str, str], dict[str, str]]:
    """The rows without dropout and mask by attention and length."""
    with MEASURED.open() as file:
        rows = [r for r in csv.DictReader(file) if (r["dropout"], r["masked"]) == ("0.0", "False")]
    return {(row["attention"], row["length"]): row for row in rows}


def figure(name: str, column: str, length: int) -> str:
    """A time or memory of both passes at a length; why there is none."""
    row = _measured().get((name, str(length)), {})
    if row.get("error"):
        return "OOM" if row["error"] == "out of memory" else NO
    value = float(row.get(column) or 0)
    return NO if value <= 0 else f"{value:,.1f}" if value < 10 else f"{value:,.0f}"


def table() -> str:
    """The table as Markdown."""
    rows = []
    for attention in attentions():
        op = attention.op
        rows.append(
            (
                f"[`{attention.name}`](zoo.md#{attention.name})",
                *(figure(attention.name, *of) for of in FIGURES),
                is_causal(op),
                context(op),
            )
        )
    lines = [COLUMNS, ("---",) * len(COLUMNS), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def rules() -> str:
    """What nearly all have in common, or few, as a list below the table."""
    every = attentions()

    def named(holds: Callable[[Attention], bool]) -> str:
        return ", ".join(f"`{attention.name}`" for attention in every if holds(attention))

    def all_but(holds: Callable[[Attention], bool]) -> str:
        others = named(lambda attention: not holds(attention))
        return f"all but {others}" if others else "all"

    return (
        f"\n* **Cross-attention**, of two sequences: {named(lambda a: a.op.cross)}.\n"
        f"* **[Packed](packing.md)**, several sequences in a row: "
        f"{all_but(lambda a: a.op.packed)}.\n"
        f"* **Decoding** from a cache: {all_but(lambda a: a.op.decoding != 'no')}.\n"
        f"* **Kernels** for NVIDIA GPUs: {all_but(lambda a: kernels(a.make) != NO)}. "
        f"Also by cuDNN: {named(lambda a: 'cuDNN' in kernels(a.make))}.\n"
        f"* **[Modules of flax](own_flax_model.md)**: "
        f"{all_but(lambda a: in_flax(a.op) == YES)}.\n"
    )


def written(page: str) -> str:
    """The page with the table of now."""
    return marked.written(page, "docs/attentions.py", table() + rules())


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
