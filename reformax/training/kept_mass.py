"""Kept mass of a model on batches of a task: what its attention sees of what dense attention would.

Models say it by layer, of a sample of queries (`TaskModel.kept_mass`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from reformax import devices
from reformax.declared import SettingError
from reformax.task import Batch, Task, TaskModel
from reformax.training import evaluation, placing

NAME = "kept_mass"
# Batches of a split that are measured, evenly spread.
_BATCHES = 4


def check_model(model: TaskModel, argument: str) -> None:
    """Raises `SettingError` for a model without a layer to measure."""
    if not model.kept_mass_layers:
        raise SettingError(
            f"{argument}: no attention of model {type(model).__name__} chooses keys, so that all "
            "mass is kept or none is measured: leave it out"
        )


def measure_fn(
    model: TaskModel, mesh: Mesh, accumulate: int = 1
) -> Callable[[Any, Any, jax.Array], dict[int, jax.Array]]:
    """Compiles `(params, inputs, rng) -> {layer: share}`, of a batch's first micro-batch."""

    def measure(params, inputs, rng):
        inputs = jax.tree.map(lambda x: x.reshape(-1, accumulate, *x.shape[1:])[:, 0], inputs)
        return model.kept_mass(params, inputs, rng)

    return jax.jit(devices.on(mesh, measure), out_shardings=devices.replicated(mesh))


def named(shares: Mapping[int, Any]) -> dict[str, float]:
    """The mean over layers, and each layer's share, by the names of a record's columns.

    Empty for a model that measures no layer.
    """
    found = {f"{NAME}_layer_{layer}": float(x) for layer, x in jax.device_get(shares).items()}
    return {NAME: float(np.mean(list(found.values()))), **found} if found else {}


def words(found: Mapping[str, float]) -> str:
    """The metrics of `named` as a line of text."""
    layers = ((name.removeprefix(f"{NAME}_layer_"), x) for name, x in found.items() if name != NAME)
    of_layers = ", ".join(f"{layer}: {x:.4f}" for layer, x in layers)
    return f"kept mass {found[NAME]:.4f}, by layer {of_layers}"


def of_split(
    model: TaskModel,
    params: Any,
    task: Task,
    split: str,
    *,
    batch_size: int,
    length: int,
    seed: int = 0,
    mesh: Mesh | None = None,
) -> dict[str, float]:
    """The kept mass of a model built for evaluation, as `named` returns it.

    Args:
      model, params: the model.
      task, split: `_BATCHES` batches of it are measured, evenly spread.
      batch_size, length: of these, in rows and tokens.
      seed: of the hashes.
      mesh: the devices; None: all.
    """
    mesh = evaluation.fitting_mesh(model, task, batch_size, length, mesh)
    params = placing.place(params, devices.placement(params, mesh))
    of_row = length if task.labels is None else 1
    n_batches = -(-task.n_targets(split) // (of_row * batch_size))
    every = max(1, n_batches // _BATCHES)
    batches = map(_of_scored_rows, task.eval_batches(split, batch_size, length, length))
    on_device = evaluation.placed(batches, mesh, lambda index: index % every == 0)
    key, found, measure = jax.random.PRNGKey(seed), [], measure_fn(model, mesh)
    for index, batch in itertools.islice(on_device, _BATCHES):
        found.append(measure(params, batch[0], jax.random.fold_in(key, index)))
    found = jax.device_get(found)
    return named({layer: np.mean([one[layer] for one in found]) for layer in found[0]})


def _of_scored_rows(batch: Batch) -> Batch:
    """The batch with its rows again in place of those without weight, which hold no text."""
    rows = np.flatnonzero((batch.weights > 0).any(axis=1))
    return placing.take(batch, rows[np.arange(len(batch.weights)) % len(rows)])
