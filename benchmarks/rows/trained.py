"""A model that is trained as configs say: a row of `benchmarks.harness.campaign`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax

from benchmarks.harness.processes import Answer, alone, stage, tell
from reformax.cli import compilation_cache, config, parsed
from reformax.training import loop
from reformax.training.callbacks import Callback


def train(
    *,
    name: str,
    parts: Sequence[tuple[str, Sequence[str]]],
    data_dir: str | None,
    folder: str,
    turn: str,
    limit: float | None,
) -> Iterator[Answer]:
    """Trains the model and scores it, within `limit` seconds.

    Args:
      name: of the row.
      parts: configs, each with the settings that override it, as of --config. Each is a run, which
        begins with the weights of the one before it.
      data_dir: the data.
      folder: gets the runs, in folders by their numbers where they are several.
      turn: the file that is held while the model trains; see `in_turn`.
      limit: seconds; None: any.
    """
    yield stage(f"{name}: begin", limit)
    found, steps, seconds = {}, 0, 0.0
    for number, (file, settings) in enumerate(parts):
        run = Path(folder, str(number)) if len(parts) > 1 else Path(folder)
        before = [f"loop.train.init_from={str(run.with_name(str(number - 1)))!r}"] if number else []
        config.parse([file], [*settings, *before], data_dir=data_dir)
        compilation_cache.use()
        found = _trained(run, Path(turn), name)
        steps, seconds = steps + found["steps"], seconds + found["seconds"]
    yield found | {"steps": steps, "seconds": seconds}


def _trained(folder: Path, turn: Path, name: str) -> Answer:
    """A run's score, speed and the most memory of a device, None where it is not known."""
    sizes = parsed.bindings(loop.train, ("steps", "batch_size", "length"))
    score = parsed.configured(loop.train)(
        folder,
        callbacks=[in_turn(turn, sizes["steps"], name)],
        config_text=parsed.operative,
        progress=False,
    )
    if score["interrupted_by"] is not None:
        raise TimeoutError(f"saved after step {score['step']} of {score['steps']}")
    lines = [json.loads(x) for x in Path(folder, "metrics.jsonl").read_text().splitlines()]
    speed = statistics.median(_of(lines, "train", lambda x: x["timing"].get("tokens_per_second")))
    scores = _of(lines, score["eval_split"], lambda x: x.get("accuracy"))
    return {
        "bits": score[score["metric"]],
        "n_targets": score["n_targets"],
        "accuracy": scores[-1] if scores else None,
        "tokens_per_second": speed,
        "peak_bytes": (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
        "steps": sizes["steps"],
        "seconds": sizes["steps"] * sizes["batch_size"] * sizes["length"] / speed,
    }


def _of(lines: Sequence[dict[str, Any]], split: str, value) -> list[Any]:
    """What the lines of a split have."""
    return [x for x in (value(line) for line in lines if line["split"] == split) if x is not None]


def in_turn(turn: Path, last: int, name: str = "") -> Callback:
    """Holds the file `turn` from a run's first step to its step `last`.

    Of several processes that share the file one trains, while others compile or evaluate. What a
    process holds is given back however it ends. The loop has two more steps under way when it
    hears of the first one: these three run beside the steps of another.
    """
    held, begun = ExitStack(), False

    def on_step(step: int, values: dict[str, float]) -> None:
        nonlocal begun
        if not begun:
            tell(f"{name}: compiled")
            held.enter_context(alone(turn))
            tell(f"{name}: trains")
            begun = True
        if step == last:
            held.close()
            tell(f"{name}: trained")

    return Callback(on_step=on_step)
