"""Bits per dim or token of a split: every target predicted exactly once, with a stated context."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from reformax import memory
from reformax.progress import Progress
from reformax.training import loss as loss_lib
from reformax.training import mesh as mesh_lib
from reformax.training import side_channels
from reformax.training.prefetch import prefetch

# Batches dispatched before the first one's sums are waited for.
_IN_FLIGHT = 2
# A token's bytes on the host: the ids, the targets, the weights and the places of its window.
_TOKEN_BYTES = 4 + 4 + 4 + 8
# Evaluations of as many tokens at a time are traced first, to know what memory they take.
_LARGE = 2**20


def check_vocabulary(model, task) -> None:
    """Raises `ValueError` if the task has ids that the model has no embeddings for."""
    sizes = {"vocab_size": model.vocab_size}
    if task.translation is not None:
        sizes["input_vocab_size"] = model.source_vocab_size
    for name, size in sizes.items():
        if size < task.vocab_size:
            raise ValueError(
                f"task {task.name} has ids below {task.vocab_size} and the model {name}={size}: "
                f"set the model's {name}={task.vocab_size}"
            )


def check_positions(
    model, params, task, split: str, *, batch_size: int, length: int, stride: int, max_batches
) -> int:
    """Traces an evaluation: a row that the positions cannot hold fails now, not at step 1,000.

    Takes the arguments of `evaluate`; `params` may be shapes alone.

    Returns:
      The number of features of a position.

    Raises:
      SettingError: features that no memory holds.
      Exception: what the model raises.
    """
    longest = length
    if task.translation is not None and model.max_length is not None:
        # Pairs that are longer than a row are scored in longer rows.
        batches = itertools.islice(
            task.eval_batches(split, batch_size, length, stride), max_batches
        )
        longest = max((batch.targets.shape[1] for batch in batches), default=length)
    tokens = jax.ShapeDtypeStruct((batch_size, longest), jax.numpy.int32)
    inputs = tokens if task.translation is None else (tokens,) * 4  # SentencePairs
    rng = jax.ShapeDtypeStruct((2,), jax.numpy.uint32)
    found = jax.eval_shape(lambda p, t, r: model.features(p, t, rng=r), params, inputs, rng)
    n_features = found.shape[-1]
    rows = -(-batch_size // jax.local_device_count())
    check_features(rows, longest, n_features, "eval_batch_size or eval_length")
    return n_features


def check_tokens(batch_size: int, length: int, fix: str) -> None:
    """Raises `SettingError` for a batch whose tokens and places alone are more than memory has."""
    memory.check(
        f"tokens of {batch_size:,} rows of {length:,}", _TOKEN_BYTES * batch_size * length, fix
    )


def check_features(rows: int, length: int, n_features: int, fix: str) -> None:
    """Raises `SettingError` for rows whose features, before and after a layer, no device holds."""
    what = f"features of {rows:,} rows of {length:,} positions"
    memory.check(what, 2 * 4 * rows * length * n_features, fix)


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
      task: a `reformax.data.base.Task`.
      split: 'train', 'valid' or 'test'.
      batch_size: windows scored together; a multiple of the number of devices.
      length: the context, in tokens.
      stride: tokens that the window moves by. Each window predicts its last `stride` positions, so
        every target but the first few has at least `length - stride` tokens before it. None:
        `length`.
      seed: of the hashes.
      max_batches: the number of batches to score; None: the whole split.
      loss_chunk_len: positions of a row whose logits are in memory together; None: as many as
        `loss.max_logits` allows.
      mesh: the devices; None: all of this host's.
      progress: whether to show a bar on stderr, or lines where that is no terminal.
      should_stop: called after each batch; True abandons the evaluation.

    Returns:
      bits_per_dim (bits_per_token of a translation), accuracy, n_targets scored, length, stride and
      split; None if abandoned.

    Raises:
      ValueError: sizes or vocabularies that do not fit together.
      RuntimeError: the task's batches did not hold each target of the split once.
    """
    check_vocabulary(model, task)
    stride = length if stride is None else stride
    if not 1 <= stride <= length:
        raise ValueError(f"stride={stride} must be from 1 to length={length}")
    if max_batches is not None and max_batches < 1:
        raise ValueError(f"max_batches={max_batches} must be at least 1, or None for all")
    check_tokens(batch_size, length, "batch_size or length")
    if batch_size * length >= _LARGE:
        sizes = dict(batch_size=batch_size, length=length, stride=stride, max_batches=max_batches)
        check_positions(model, params, task, split, **sizes)
    mesh = mesh or mesh_lib.data_mesh()
    mesh_lib.check_batch_size("eval batch_size", batch_size, mesh)
    params = jax.device_put(params, mesh_lib.replicated(mesh))  # once, not for every batch
    key = jax.random.PRNGKey(seed)
    batches = itertools.islice(task.eval_batches(split, batch_size, length, stride), max_batches)
    rows = mesh_lib.over_batch(mesh)
    on_device = (jax.device_put(tuple(batch), rows) for batch in batches)
    # A window has about `stride` targets: close enough for a bar.
    expected = max_batches or -(-task.n_targets(split) // (stride * batch_size))
    unit = loss_lib.metric_name(task).replace("_per_", "/")
    with Progress(split, expected, side_channels.stderr(), shown=progress) as bar:
        score = partial(_sums, model, loss_chunk_len, params, key)
        total = _total(score, on_device, bar, unit, should_stop)
    if total is None:
        return None
    return _result(total, task, split, max_batches is None) | {"length": length, "stride": stride}


def _total(score, batches: Iterable, bar: Progress, unit: str, should_stop) -> np.ndarray | None:
    """The sum of `score(batch, index)` over all batches; None if abandoned."""
    total = np.zeros(3, np.float64)  # a split has more targets than float32 counts
    in_flight: deque = deque()
    figures = ""
    with prefetch(batches) as ready:
        for index, batch in enumerate(ready):
            in_flight.append(score(batch, index))
            if len(in_flight) > _IN_FLIGHT:
                total += jax.device_get(in_flight.popleft())
                figures = f"{loss_lib.bits_per_dim(total[0], total[1]):.4f} {unit}"
            bar.advance(1, figures)
            if should_stop():
                return None
    for sums in in_flight:
        total += jax.device_get(sums)
    return total


def _result(total: np.ndarray, task, split: str, whole: bool) -> dict[str, Any]:
    nats, weight, correct = total
    if whole and round(weight) != task.n_targets(split):
        raise RuntimeError(
            f"task {task.name}: the batches of {split} hold {weight:.0f} targets and the split "
            f"{task.n_targets(split)}: eval_batches must give each target weight 1 once"
        )
    if not weight:
        raise ValueError(f"task {task.name}: split {split} has no targets: choose another split")
    return {
        "split": split,
        loss_lib.metric_name(task): loss_lib.bits_per_dim(nats, weight),
        "accuracy": float(correct / weight),
        "n_targets": round(weight),
    }


@partial(jax.jit, static_argnums=(0, 1))
def _sums(model, loss_chunk_len, params, key, batch, index):
    """A batch's sums of nats, weight and correct, as one array: one transfer to the host."""
    inputs, targets, weights = batch
    rng = jax.random.fold_in(key, index)
    features = model.features(params, inputs, rng=rng)
    logits_fn = partial(model.logits, params)
    sums = loss_lib.cross_entropy(logits_fn, features, targets, weights, loss_chunk_len)
    return jax.numpy.stack([sums.nats, sums.weight, sums.correct])
