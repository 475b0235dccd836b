"""Bits by position in the window: whether a model gains from far context.

A target at position t of a window is predicted from the t tokens before it there. Windows that
follow each other without overlap have targets of every kind at every position, so that bits that
fall with the position are what the context brings.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from reformax import devices
from reformax.training import curves, evaluation
from reformax.training import loss as loss_lib
from reformax.training.placing import place
from reformax.training.prefetch import prefetch
from reformax.training.processes import go_on

# The first band of positions; each later one is as wide as all before it.
FIRST = 64


class Band(NamedTuple):
    """The targets at positions `[first, end)` of their windows."""

    first: int
    end: int
    bits: float  # of a target, the mean
    n_targets: int


def bands_of(length: int) -> tuple[int, ...]:
    """The positions that bands end at: 0, 64, 128, 256 and so on to `length`."""
    edges = [0]
    while edges[-1] < length:
        edges.append(min(max(FIRST, 2 * edges[-1]), length))
    return tuple(edges)


def by_position(
    model,
    params,
    task,
    split: str = "valid",
    *,
    batch_size: int,
    length: int,
    seed: int = 0,
    max_tokens: int | None = None,
    loss_chunk_len: int | None = None,
    mesh: Mesh | None = None,
) -> list[Band]:
    """The bits of each band of positions, over windows of a split that do not overlap.

    Args:
      model: a model built for evaluation.
      params: its parameters.
      task: a language model's `reformax.data.base.Task`.
      split: 'train', 'valid' or 'test'.
      batch_size: windows scored together; a multiple of the number of devices.
      length: of a window, in tokens.
      seed: of the hashes; the numbers are those of `evaluation.evaluate`.
      max_tokens, loss_chunk_len: as there.
      mesh: as in `evaluation.evaluate`.

    Raises:
      ValueError: sizes or vocabularies that do not fit together.
    """
    mesh = evaluation.fitting_mesh(model, task, batch_size, length, mesh)
    edges = bands_of(length)
    params = place(params, devices.placement(params, mesh))
    score = partial(_sums, model, loss_chunk_len, edges, mesh, params, jax.random.PRNGKey(seed))
    chosen, _ = evaluation.within(max_tokens, task, split)
    batches = evaluation.placed(task.eval_batches(split, batch_size, length, length), mesh, chosen)
    totals = np.zeros((len(edges) - 1, 2))  # a split has more targets than float32 counts
    with prefetch(batches) as ready:
        for index, batch in ready:
            totals += jax.device_get(score(batch, index))
            go_on()
    return [
        Band(*ends, loss_lib.bits_per_dim(nats, weight), round(weight))
        for ends, (nats, weight) in zip(pairwise(edges), totals, strict=True)
        if weight
    ]


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _sums(model, loss_chunk_len, edges, mesh, params, key, batch, index):
    """Nats and weight of each band."""

    def sums_of(params, rng, inputs, targets, weights):
        features, sums = model.features(params, inputs, rng=rng), []
        for first, end in pairwise(edges):
            band = (x[:, first:end] for x in (features, targets, weights))
            found = loss_lib.cross_entropy(model.logits, params, *band, loss_chunk_len)
            sums.append(jax.numpy.stack([found.nats, found.weight]))
        return jax.numpy.stack(sums)

    return devices.on(mesh, sums_of)(params, jax.random.fold_in(key, index), *batch)


def table(bands: list[Band], metric: str) -> str:
    """The bands as lines of text."""
    lines = [f"{'positions':>15} {metric.replace('_', ' '):>13} {'targets':>12}"]
    for band in bands:
        positions = f"{band.first:,}-{band.end - 1:,}"
        lines.append(f"{positions:>15} {band.bits:>13.4f} {band.n_targets:>12,}")
    return "\n".join(lines)


def draw(bands: list[Band], metric: str, title: str) -> bytes:
    """A PNG of the bands, each a level line, over a logarithmic axis of positions."""
    figure, axes = curves.new_figure()
    axes.stairs([band.bits for band in bands], [max(bands[0].first, 1), *(b.end for b in bands)])
    axes.set_xscale("log", base=2)
    axes.set(xlabel="position in the window", ylabel=metric.replace("_", " "), title=title)
    axes.grid(alpha=0.3)
    return curves.png(figure)


def as_json(bands: list[Band], metric: str) -> list[dict[str, Any]]:
    """The bands as a file has them."""
    names = {"bits": metric}
    return [{names.get(k, k): v for k, v in band._asdict().items()} for band in bands]
