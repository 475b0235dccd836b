"""Scores a run with other numbers of hashes: `reformax evaluate --n_hashes=2,4,8,16`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from reformax.cli import flags
from reformax.cli.report import markdown, width
from reformax.declared import SettingError
from reformax.ops.lsh import HashCount
from reformax.task import TaskModel

# A count suffices where its bits are at most so far above the fewest of all counts.
SUFFICES = 0.005


def counts_of(text: str) -> list[int]:
    """The numbers of --n_hashes, in order; `SettingError` for a wrong or a repeated one."""
    return flags.numbers("n_hashes", text, HashCount, "2,4,8,16")


def with_n_hashes(model: TaskModel, count: int) -> TaskModel:
    """The model with so many hashes; `SettingError` where no attention of it hashes."""
    changed = model.with_n_hashes(count)
    if changed is None:
        raise SettingError(
            f"--n_hashes: no attention of model {type(model).__name__} hashes, leave it out"
        )
    return changed


def score(
    model: TaskModel,
    counts: Sequence[int],
    metric: str,
    evaluate: Callable[[TaskModel], dict[str, Any]],
    measure: Callable[[TaskModel], dict[str, float]],
) -> dict[str, Any]:
    """Scores a model with each number of hashes.

    Args:
      model: built for evaluation.
      counts: numbers of hashes, growing.
      metric: the name of the score, less being better.
      evaluate: model -> scores.
      measure: model -> kept mass, as `training.kept_mass.named` returns it.

    Returns:
      by_n_hashes, a line for each count with its bits, their standard error and the kept mass; and
      fewest_n_hashes, the fewest that suffice.
    """
    lines = []
    for count in counts:
        changed = with_n_hashes(model, count)
        found = evaluate(changed)
        scores = {name: found[name] for name in (metric, "standard_error")}
        lines.append({"n_hashes": count, **scores, **measure(changed)})
    best = min(line[metric] for line in lines)
    fewest = next(line["n_hashes"] for line in lines if line[metric] <= best + SUFFICES)
    return {"by_n_hashes": lines, "fewest_n_hashes": fewest}


def table(found: dict[str, Any], metric: str) -> str:
    """The result of `score` as a Markdown table and a line.

    Where the terminal is too narrow for a column of each layer, a line says where they are.
    """
    lines = found["by_n_hashes"]

    def table_of(columns: Sequence[str]) -> str:
        heads = [name.removeprefix("kept_mass_").replace("_", " ") for name in columns]
        rows = [[str(line["n_hashes"]), *(f"{line[x]:.4f}" for x in columns)] for line in lines]
        return markdown(["hashes", *heads], rows)

    names = [metric, *(name for name in lines[0] if name.startswith("kept_mass"))]
    layers = [name for name in names if name.startswith("kept_mass_layer")]
    text, note = table_of(names), ""
    if layers and (room := width()) is not None and text.index("\n") > room:
        text = table_of([name for name in names if name not in layers])
        note = f"\nkept mass of each of {len(layers)} layers: by_n_hashes of the file"
    fewest = f"fewest hashes within {SUFFICES} bits of the best: {found['fewest_n_hashes']}"
    return f"{text}{note}\n{fewest}"
