"""A language model that is trained as a config says: a row of `benchmarks.global_layers`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.harness.processes import Answer, alone, stage, tell
from reformax.cli import compilation_cache, config, configs
from reformax.training import loop
from reformax.training.callbacks import Callback


def train(
    *,
    name: str,
    config_file: str,
    settings: Sequence[str],
    data_dir: str | None,
    folder: str,
    turn: str,
    limit: float | None,
) -> Iterator[Answer]:
    """Trains the model and scores it, within `limit` seconds.

    Args:
      name: of the row.
      config_file: the config, which `settings` override.
      settings: as of --config.
      data_dir: the text.
      folder: gets the run.
      turn: the file that is held while the model trains; see `in_turn`.
      limit: seconds; None: any.
    """
    yield stage(f"{name}: begin", limit)
    config.parse([config_file], settings, folders=configs.FOLDERS, data_dir=data_dir)
    compilation_cache.use()
    steps = config.bindings(loop.train, ("steps",))["steps"]
    score = config.configured(loop.train)(
        folder,
        callbacks=[in_turn(Path(turn), steps, name)],
        config_text=config.operative,
        progress=False,
    )
    lines = [json.loads(x) for x in Path(folder, "metrics.jsonl").read_text().splitlines()]
    speeds = [x["timing"].get("tokens_per_second") for x in lines if x["split"] == "train"]
    yield {
        "bits": score["bits_per_dim"],
        "n_targets": score["n_targets"],
        "tokens_per_second": statistics.median(x for x in speeds if x),
    }


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
