"""Bits by position in the window, and in the document: whether a model gains from far context.

A target at position t of a window is predicted from the t tokens before it there. Windows that
follow each other without overlap have targets of every kind at every position, so that bits that
fall with the position are what the context brings.

The position in the document is counted apart, for documents that begin in a window. A target at
position n of its document has n tokens of that document before it. Other documents precede these.
They help little, and nothing with `Task.document_mask`.

Letters in the shapes: B windows, T their length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Int32, Int64

from reformax import devices
from reformax.progress import Progress
from reformax.training import curves, evaluation, side_channels
from reformax.training import loss as loss_lib
from reformax.training.placing import place
from reformax.training.prefetch import prefetch
from reformax.training.processes import go_on

# The first band of positions; each later one is as wide as all before it.
FIRST = 64


class PositionBand(NamedTuple):
    """The targets at positions `[first, end)` of their windows, or of their documents."""

    first: int
    end: int
    bits: float  # of a target, the mean
    n_targets: int


class PositionBands(NamedTuple):
    """The bands of positions in the window, and of those in documents that begin in it."""

    windows: list[PositionBand]
    documents: list[PositionBand]  # empty where no document begins


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
    progress: bool = False,
) -> PositionBands:
    """The bits of each band of positions, over windows of a split that do not overlap.

    Documents begin at the positions `task.borders(split)`.

    Args:
      model: a model built for evaluation.
      params: its parameters.
      task: a language model's `reformax.task.Task`.
      split: 'train', 'valid' or 'test'.
      batch_size: windows scored together.
      length: of a window, in tokens.
      seed: of the hashes; the numbers are those of `evaluation.evaluate`.
      max_tokens, loss_chunk_len: as there.
      mesh, progress: as in `evaluation.evaluate`.

    Raises:
      ValueError: sizes or vocabularies that do not fit together.
    """
    mesh = evaluation.fitting_mesh(model, task, batch_size, length, mesh)
    edges = bands_of(length)
    params = place(params, devices.placement(params, mesh))
    options = model, loss_chunk_len, edges, mesh
    score = partial(_sums, *options, params, jax.random.PRNGKey(seed))
    chosen, budget = evaluation.within(max_tokens, task, split)
    n_batches = -(-budget // (length * batch_size))
    batches = task.eval_batches(split, batch_size, length, length)
    batches = evaluation.placed(_with_positions(batches, task, split, chosen), mesh, chosen)
    totals = np.zeros((2, len(edges) - 1, 2))  # a split has more targets than float32 counts
    bar = Progress(f"{split} by position", n_batches, side_channels.stderr(), shown=progress)
    with bar, prefetch(batches) as ready:
        for index, batch in ready:
            totals += jax.device_get(score(batch, index))
            bar.advance()
            go_on()
    return PositionBands(
        *(
            [
                PositionBand(*ends, loss_lib.bits_per_dim(nats, weight), round(weight))
                for ends, (nats, weight) in zip(pairwise(edges), part, strict=True)
                if weight
            ]
            for part in totals
        )
    )


def _with_positions(
    batches: Iterable, task, split: str, chosen: Callable[[int], bool]
) -> Iterator[tuple]:
    """Batches of windows, the chosen ones with positions in documents.

    Windows follow each other and the last is moved back to end with the split, as `evaluation` has
    it. Of packed rows, whose documents have no place in a text, each begins with its segment.
    """
    borders = task.borders
    if borders is not None or not task.document_mask:
        borders = np.zeros(0, np.int64) if borders is None else borders(split)
    n = task.n_targets(split)
    for index, batch in enumerate(batches):
        if chosen(index) and borders is None:
            batch = *batch, in_segment(batch.inputs.segment_ids)
        elif chosen(index):
            n_rows, length = batch.targets.shape
            starts = (index * n_rows + np.arange(n_rows)) * length
            positions = in_document(borders, np.minimum(starts, max(n - length, 0)), length)
            batch = *batch, positions
        yield batch


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _sums(
    model, loss_chunk_len, edges, mesh, params, key, batch, index
) -> Float[Array, "2 bands 2"]:
    """Nats and weight of each band, of windows and of documents."""

    def sums_of(params, rng, inputs, targets, weights, in_documents):
        features = model.features(params, inputs, rng=rng)

        def loss(weights):
            scored = model.logits, params, features, targets, weights, loss_chunk_len
            return loss_lib.cross_entropy(*scored, impl="xla").loss  # of logits in float32

        nats = jax.grad(loss)(weights) * weights  # the loss is linear in them
        positions = jnp.broadcast_to(jnp.arange(targets.shape[1]), targets.shape)
        return jnp.stack([_of_bands(edges, at, nats, weights) for at in (positions, in_documents)])

    return devices.on(mesh, sums_of)(params, jax.random.fold_in(key, index), *batch)


def _of_bands(edges, position: Int[Array, "B T"], *values: Float[Array, "B T"]) -> Array:
    """The sums of values in each band, `[bands, values]`."""
    inside = [(first <= position) & (position < end) for first, end in pairwise(edges)]
    return jnp.stack([jnp.stack([jnp.sum(x, where=band) for x in values]) for band in inside])


def in_document(
    borders: Int64[np.ndarray, " d"], starts: Int64[np.ndarray, " B"], length: int
) -> Int32[np.ndarray, "B {length}"]:
    """The position of each token in its document; -1 if the document began before the window.

    Args:
      borders: the positions at which documents begin, sorted.
      starts: the positions at which windows begin.
      length: of a window.
    """
    positions = starts[:, None] + np.arange(length)
    before = np.searchsorted(borders, positions, "right")
    begins = np.concatenate([[-1], borders])[before]
    return np.where(begins < starts[:, None], -1, positions - begins).astype(np.int32)


def in_segment(segment_ids: Int32[np.ndarray, "B T"]) -> Int32[np.ndarray, "B T"]:
    """The position of each token in its segment of a row."""
    positions = np.broadcast_to(np.arange(segment_ids.shape[1]), segment_ids.shape)
    begins = np.diff(segment_ids, axis=1, prepend=-1) != 0
    first = np.maximum.accumulate(np.where(begins, positions, 0), axis=1)
    return (positions - first).astype(np.int32)


def table(bands: PositionBands, metric: str) -> str:
    """The bands as lines of text."""
    lines = []
    for what, part in zip(("positions", "in document"), bands, strict=True):
        if part:
            lines.append(f"{what:>15} {metric.replace('_', ' '):>13} {'targets':>12}")
        for band in part:
            positions = f"{band.first:,}-{band.end - 1:,}"
            lines.append(f"{positions:>15} {band.bits:>13.4f} {band.n_targets:>12,}")
    return "\n".join(lines)


def draw(bands: PositionBands, metric: str, title: str) -> bytes:
    """A PNG of the bands, each a level line, over a logarithmic axis of positions."""
    figure, axes = curves.new_figure()
    for what, part in zip(("window", "document that begins in it"), bands, strict=True):
        if part:
            edges = [max(part[0].first, 1), *(band.end for band in part)]
            axes.stairs([band.bits for band in part], edges, baseline=None, label=what)
    axes.set_xscale("log", base=2)
    label = "tokens before the target" if bands.documents else "position in the window"
    axes.set(xlabel=label, ylabel=metric.replace("_", " "), title=title)
    if bands.documents:
        axes.legend()
    axes.grid(alpha=0.3)
    return curves.png(figure)


def as_json(bands: PositionBands, metric: str) -> dict[str, list[dict[str, Any]]]:
    """The bands as a file has them: `by_position`, and `in_document` if a document begins."""
    names = {"bits": metric}
    parts = {"by_position": bands.windows} | (
        {"in_document": bands.documents} if bands.documents else {}
    )
    return {
        what: [{names.get(k, k): v for k, v in band._asdict().items()} for band in part]
        for what, part in parts.items()
    }
