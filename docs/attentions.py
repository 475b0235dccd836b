"""Writes the table of docs/choosing_an_attention.md that says what each attention can do.

    python docs/attentions.py

Every cell is read off the code: the attributes and methods of the op with its default options, the
values that its `impl` takes, and the gin files. Times and memory are those of
docs/attention_table.csv. A test compares.
"""

from __future__ import annotations

import csv
import functools
import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import marked

import reformax.ops
from reformax.cli import config as cli_config
from reformax.cli import configs, parsed
from reformax.flax.heads import shapes_of_weights
from reformax.ops.base import AttentionOp, Dims
from reformax.training import loop

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/choosing_an_attention.md"
MEASURED = ROOT / "docs/attention_table.csv"
FIGURES = (("combined_ms", 16_384), ("combined_ms", 65_536), ("memory_mib", 65_536))
COLUMNS = (
    *("attention", "ms, 16,384", "ms, 65,536", "MiB, 65,536"),
    *("causal", "packed", "`context`"),
)
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


def config(name: str) -> str:
    """A gin file whose model has it: of its name, the quickstart, or the first by name."""
    found = [file for file, names in _used().items() if name in names]
    chosen = next((file for file in (name, "quickstart") if file in found), min(found, default=NO))
    return chosen if chosen == NO else f"`{chosen}`"


@functools.cache
def _used() -> dict[str, set[str]]:
    """The attentions of the model of each gin file that is a run."""
    found, ours = {}, {a.make: a.name for a in attentions()}
    for path in configs.runs():
        cli_config.parse([str(path)])
        model = parsed.described(loop.train, "model")
        found[path.stem] = {ours[f] for f in _functions(model) if f in ours}
    return found


def _functions(value: Any) -> Iterator[Callable]:
    """What a described config calls."""
    if isinstance(value, parsed.Reference):
        yield value.function
        value = list(value.arguments.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _functions(item)


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
                YES if op.packed else NO,
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

    found = {attention.name: config(attention.name) for attention in every}
    others = ", ".join(
        f"{file} for `{name}`" for name, file in found.items() if file not in (f"`{name}`", NO)
    )
    return (
        f"\n* **Cross-attention**, of two sequences: {named(lambda a: a.op.cross)}.\n"
        f"* **Decoding** from a cache: {all_but(lambda a: a.op.decoding != 'no')}.\n"
        f"* **Kernels** for NVIDIA GPUs: {all_but(lambda a: kernels(a.make) != NO)}. "
        f"Also by cuDNN: {named(lambda a: 'cuDNN' in kernels(a.make))}.\n"
        f"* **[Modules of flax](own_flax_model.md)**: "
        f"{all_but(lambda a: in_flax(a.op) == YES)}.\n"
        f"* **Example**: the gin file of its name, but {others}, "
        f"none for {named(lambda a: found[a.name] == NO)}.\n"
    )


def written(page: str) -> str:
    """The page with the table of now."""
    return marked.written(page, "docs/attentions.py", table() + rules())


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
