"""Runs `loop.train` on the tiny model in a process of its own: `worker.py DIR JSON`.

JSON holds arguments of `train`, and under 'task' and 'model' those of the tiny ones. The process
kills itself at the first call of 'die', a function of `manifest` or `Checkpoints`.
"""

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path

import jax

from reformax.training import loop, manifest, optimizer
from reformax.training.checkpoint import Checkpoints
from tests.training import tiny


def arguments(task=None, model=None, **others):
    """Arguments of a short run, with `others` in their place."""
    return {
        "model": partial(tiny.TinyLM, **(model or {})),
        "task": tiny.counting(**(task or {})),
        "optimizer": optimizer.adamw(3e-2),
        "steps": 24,
        "batch_size": 8,
        "length": 16,
        "eval_every": 10,
        "log_every": 4,
        "progress": False,
    } | others


def record(folder):
    """The lines of metrics.jsonl without times and speeds."""
    lines = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k != "timing"} for line in lines]


def params(folder, step=None):
    """The parameters of the tiny model in a checkpoint, by default the latest."""
    checkpoints = Checkpoints(folder)
    like = jax.eval_shape(lambda: tiny.TinyLM().init_params(jax.random.PRNGKey(0), (1, 1)))
    step = checkpoints.steps()[-1] if step is None else step
    return checkpoints.restore_params(step, like)[0]


def die(*args, **kwargs):
    """Kills this process."""
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    settings = json.loads(sys.argv[2])
    if name := settings.pop("die", None):
        owner, function = name.split(".")
        owner = {"manifest": manifest, "Checkpoints": Checkpoints}[owner]
        assert hasattr(owner, function)
        setattr(owner, function, die)
    loop.train(sys.argv[1], **arguments(**settings))
