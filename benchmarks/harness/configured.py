"""What configs train, on a text that every machine has."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from benchmarks.harness.language_models import TINY
from reformax.data import stdlib
from reformax.models import ReformerLM
from reformax.training import optimizer
from reformax.training.settings import TrainSettings


def tiny() -> TrainSettings:
    """Settings that take no time."""
    return TrainSettings(
        model=lambda mode: ReformerLM(
            **TINY.arguments(), attention_type=TINY.attention(), mode=mode
        ),
        task=stdlib.stdlib(max_bytes=100_000),
        optimizer=optimizer.adafactor(1e-3),
        steps=1,
        batch_size=1,
        length=64,
    )


def from_config(files: Sequence[str], overrides: Sequence[str]) -> TrainSettings:
    """The settings of a config, with a text that every machine has."""
    from reformax.cli import config, parsed
    from reformax.training import loop

    config.parse(files, overrides)
    names = {field.name for field in dataclasses.fields(TrainSettings)} - {"task"}
    return TrainSettings(**parsed.bindings(loop.train, names), task=stdlib.stdlib())
