"""Bits per dim or token of a split: every target predicted exactly once, with a stated context."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from reformax.training import loss as loss_lib
from reformax.training import mesh as mesh_lib
from reformax.training.prefetch import prefetch

# Batches dispatched before the first one's sums are waited for.
_IN_FLIGHT = 2


def check_vocabulary(model, task) -> None:
    """Raises `ValueError` for a task whose ids the model has no embeddings for."""
    sizes = {"vocab_size": model.vocab_size}
    if task.translation is not None:
        sizes["input_vocab_size"] = model.source_vocab_size
    for name, size in sizes.items():
        if size < task.vocab_size:
            raise ValueError(
                f"task {task.name} has ids below {task.vocab_size} and the model {name}={size}: "
                f"set the model's {name}={task.vocab_size}"
            )


def evaluate(
    model,
    params,
    task,
    split: str = "valid",
    *,
    batch_size: int,
    length: int,
    stride: int | None = None,
    seed: int = 0,
    max_batches: int | None = None,
    loss_chunk_len: int | None = None,
    mesh: Mesh | None = None,
    progress: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any] | None:
    """Scores `params` on a split.

    Args:
      model: a model built for evaluation.
      params: its parameters.
      task: where the batches come from.
      split: 'train', 'valid' or 'test'.
      batch_size: windows scored together; a multiple of the number of devices.
      length: the context, in tokens.
      stride: how far the window moves; each window predicts its last `stride` positions, so every
        target but the first few has at least `length - stride` tokens before it. None: `length`.
      seed: of the hashes.
      max_batches: stop after so many; None scores the whole split.
      loss_chunk_len: positions of a row whose logits are in memory together; None: as many as
        `loss.max_logits` lets.
      mesh: the devices; None takes all of this host's.
      progress: whether to show a bar.
      should_stop: asked after each batch; True abandons the evaluation.

    Returns:
      bits_per_dim (bits_per_token of a translation), accuracy, n_targets scored, length, stride and
      split; None if abandoned.

    Raises:
      ValueError: sizes or vocabularies that do not fit together.
      RuntimeError: the task's batches did not hold each target of the split once.
    """
    check_vocabulary(model, task)
    metric = loss_lib.metric_name(task)
    stride = length if stride is None else stride
    if not 1 <= stride <= length:
        raise ValueError(f"stride={stride} must be from 1 to length={length}")
    if max_batches is not None and max_batches < 1:
        raise ValueError(f"max_batches={max_batches} must be at least 1, or None for all")
    mesh = mesh or mesh_lib.data_mesh()
    mesh_lib.check_batch_size("eval batch_size", batch_size, mesh)
    params = jax.device_put(params, mesh_lib.replicated(mesh))  # once, and not a batch
    rows = mesh_lib.over_batch(mesh)
    batches = itertools.islice(task.eval_batches(split, batch_size, length, stride), max_batches)
    on_device = (jax.device_put(tuple(batch), rows) for batch in batches)
    key = jax.random.PRNGKey(seed)
    total = np.zeros(3, np.float64)  # a split has more targets than float32 counts
    in_flight: deque = deque()
    # A window is stride targets, but for rounding: enough for a bar.
    expected = max_batches or -(-task.n_targets(split) // (stride * batch_size))
    with (
        prefetch(on_device) as ready,
        tqdm(total=expected, unit="batch", desc=split, disable=not progress, leave=False) as bar,
    ):
        for index, batch in enumerate(ready):
            in_flight.append(_sums(model, loss_chunk_len, params, batch, key, index))
            bar.update()
            if len(in_flight) > _IN_FLIGHT:
                total += jax.device_get(in_flight.popleft())
                if progress:
                    bits = loss_lib.bits_per_dim(total[0], total[1])
                    bar.set_postfix_str(f"{bits:.4f} {metric.replace('_per_', '/')}", refresh=False)
            if should_stop():
                return None
    for sums in in_flight:
        total += jax.device_get(sums)
    nats, weight, correct = total
    if max_batches is None and round(weight) != task.n_targets(split):
        raise RuntimeError(
            f"task {task.name}: the batches of {split} hold {weight:.0f} targets and the split "
            f"{task.n_targets(split)}: eval_batches must give each target weight 1 once"
        )
    if not weight:
        raise ValueError(f"task {task.name}: split {split} has no targets: choose another split")
    return {
        "split": split,
        metric: loss_lib.bits_per_dim(nats, weight),
        "accuracy": float(correct / weight),
        "n_targets": round(weight),
        "length": length,
        "stride": stride,
    }


@partial(jax.jit, static_argnums=(0, 1))
def _sums(model, loss_chunk_len, params, batch, key, index):
    """The three sums of a batch as one array: one transfer to the host."""
    inputs, targets, weights = batch
    rng = jax.random.fold_in(key, index)
    features = model.features(params, inputs, rng=rng)
    logits_fn = partial(model.logits, params)
    sums = loss_lib.cross_entropy(logits_fn, features, targets, weights, loss_chunk_len)
    return jax.numpy.stack([sums.nats, sums.weight, sums.correct])
