"""Small models that benchmarks train to compare what they learn."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import jax

from reformax.training import loop, optimizer
from reformax.training.checkpoint import Checkpoints


def train(build, task: Any, steps: int, learning_rate: float, **sizes: int) -> Any:
    """The weights of a trained model, which `build(mode=...)` makes.

    The rate rises over a tenth of the steps, and falls as a cosine.
    """
    schedule = optimizer.cosine(learning_rate, steps, steps // 10)
    with tempfile.TemporaryDirectory() as folder:
        loop.train(
            folder,
            model=build,
            task=task,
            optimizer=optimizer.adamw(schedule),
            steps=steps,
            progress=False,
            **sizes,
        )
        init = functools.partial(build(mode="eval").init_params, shape=tuple(sizes.values()))
        like = jax.eval_shape(init, jax.random.PRNGKey(0))
        checkpoints = Checkpoints(folder)
        return checkpoints.restore_params(checkpoints.steps()[-1], like)[0]
