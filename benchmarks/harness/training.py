"""Small models that benchmarks train to compare what they learn."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from reformax.training import loop, optimizer
from reformax.training.checkpoint import Checkpoints


class Stage(NamedTuple):
    """A part of a training."""

    task: Any
    batch_size: int
    length: int
    steps: int
    learning_rate: float


def train(build, task: Any, steps: int, learning_rate: float, *, batch_size: int, length: int):
    """The weights of a trained model, which `build(mode=...)` makes.

    The rate rises over a tenth of the steps, and falls as a cosine.
    """
    (params,) = train_in_stages(build, [Stage(task, batch_size, length, steps, learning_rate)])
    return params


def train_in_stages(build, stages: Sequence[Stage]) -> Iterator[Any]:
    """The weights after each stage, which begins with those of the one before.

    Each has a schedule and moments of its own.
    """
    before = None
    with tempfile.TemporaryDirectory() as parent:
        for number, (task, *sizes, steps, learning_rate) in enumerate(stages):
            schedule = optimizer.cosine(learning_rate, steps, steps // 10)
            folder = f"{parent}/{number}"
            loop.train(
                folder,
                model=build,
                task=task,
                optimizer=optimizer.adamw(schedule),
                steps=steps,
                batch_size=sizes[0],
                length=sizes[1],
                init_from=before,
                progress=False,
            )
            init = functools.partial(build(mode="eval").init_params, shape=tuple(sizes))
            like = jax.eval_shape(init, jax.random.PRNGKey(0))
            checkpoints = Checkpoints(folder)
            yield checkpoints.restore_params(checkpoints.steps()[-1], like)[0]
            before = folder
