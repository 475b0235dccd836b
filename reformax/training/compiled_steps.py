"""The compiled steps of a run; what they take is reported before the first one runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from jax.sharding import Mesh

from reformax import devices, memory
from reformax.training import forecast
from reformax.training import mesh as mesh_lib
from reformax.training import step as step_lib
from reformax.training.fine_tuning import FineTuning
from reformax.training.first_state import RestoredRun
from reformax.training.run_setup import Setup
from reformax.training.settings import TrainSettings
from reformax.training.stages import ResolvedStage, naming


def step_of(
    settings: TrainSettings, model, mesh: Mesh, state, fine_tuning: FineTuning | None = None
):
    """The step of a run for a model built for training and a state, or the shapes of one."""
    return step_lib.step_fn(
        model,
        settings.built_optimizer,
        mesh,
        accumulate=settings.accumulate,
        loss_chunk_len=settings.loss_chunk_len,
        backprop_len=settings.backprop_len,
        label_smoothing=settings.label_smoothing,
        z_loss=settings.z_loss,
        ema_decay=settings.ema_decay,
        fine_tuning=fine_tuning,
        placement=devices.placement(state, mesh),
    )


def compiled(
    setup: Setup,
    restored: RestoredRun,
    batches: Iterator,
    batch: Callable[[ResolvedStage, int], Any],
    say: Callable[[str], None],
) -> tuple[list, Iterator]:
    """The step of each stage; compiles the next one's, and says what it takes.

    It compiles none if there is none to do.

    Args:
      setup, restored: the run's.
      batches: those of the steps to come.
      batch: gives the batch of a stage for the step after so many.
      say: gets what a step takes.

    Returns:
      The steps, and `batches`, none of which is used up.

    Raises:
      SettingError: a step takes more memory than a device has.
    """
    settings, models, mesh, key = setup
    steps, made = [], {}  # stages of one model, and of the same weights, have one step
    for model, stage in zip(models.train, settings.all_stages, strict=True):
        program = id(model), id(stage.fine_tuning)
        if program not in made:
            made[program] = step_of(settings, model, mesh, restored.state, stage.fine_tuning)
        steps.append(made[program])
    if restored.step >= settings.steps:
        return steps, batches
    now, start = settings.stage_after(restored.step), restored.step
    started = time.monotonic()
    say("compiling")
    with naming(settings.all_stages[now]):
        first = next(batches)
    for stage, step in zip(settings.all_stages[now:], steps[now:], strict=True):
        with naming(stage):
            example = first if start == restored.step else tuple(batch(stage, start))
        traced = step.trace(restored.state, example, key)
        products = forecast.products(traced.jaxpr)
        forecast.check_step(products, mesh_lib.bytes_stored(restored.state, mesh), mesh.size)
        if start == restored.step:
            # A call of the jitted function finds the program that is compiled now.
            needed = forecast.memory_of(traced.lower().compile(), len(mesh.local_devices))
        start = stage.until
    say(
        f"compiled in {time.monotonic() - started:.0f} s: a step takes {memory.words(needed)} of "
        f"{memory.words(memory.available())} of memory"
    )
    return steps, chain([first], batches)
