"""The bits of a target of a split: each is predicted exactly once, with a stated context."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from reformax import devices, memory
from reformax.declared import SettingError, Size, check
from reformax.progress import Progress
from reformax.shell import config_flag
from reformax.task import TaskModel
from reformax.training import loss as loss_lib
from reformax.training import mesh as mesh_lib
from reformax.training import side_channels
from reformax.training.metrics import Ratio
from reformax.training.placing import place, place_batch, take
from reformax.training.prefetch import prefetch
from reformax.training.processes import go_on

# Batches dispatched before the first one's sums are waited for.
_IN_FLIGHT = 2
# A token's bytes on the host: the ids, the targets, the weights and the positions of its window.
_TOKEN_BYTES = 4 + 4 + 4 + 8
# Evaluations of as many tokens at a time are traced first, to know what memory they take.
_LARGE = 2**20
_SIZES = "batch_size or length"  # of `evaluate`, to lower
# Positions that a CPU computes in some seconds.
_A_WAIT = 2**17
# A batch of so many times the tokens that a split has is worth a note: half of it is padding.
_MOSTLY_PADDED = 2


# What a model does, and which models do it, by the kind of its tasks.
_KINDS = {
    "text": ("continues text", "a language model, such as lm.TransformerLM"),
    "translation": ("translates", "an encoder-decoder, such as seq2seq.Transformer"),
    "labels": ("names the class of a row", "a classifier, such as encoder.TransformerEncoder"),
    "pairs": (
        "names the class of a pair of documents",
        "a classifier with pairs=True, such as encoder.TransformerEncoder",
    ),
    "masked": ("fills in hidden tokens", "a model such as encoder.TransformerMaskedLM"),
}


def check_model(model, task) -> None:
    """Raises `SettingError` for a model of other tasks, or with too few ids or other classes."""
    if not isinstance(model, TaskModel):
        raise SettingError(
            f"model {type(model).__name__} is no reformax.task.TaskModel: make its class a subclass"
        )
    if model.task_kind != task.kind:
        wanted, fix = _KINDS[task.kind]
        raise SettingError(
            f"task {task.name} is for a model that {wanted}, and model {type(model).__name__} "
            f"{_KINDS[model.task_kind][0]}: set loop.train.model to {fix}"
        )
    if task.n_classes != model.n_classes and task.labels is not None:
        name = f"{type(model).__module__.rpartition('.')[2]}.{type(model).__name__}.n_classes"
        raise SettingError(
            f"task {task.name} has {task.n_classes} classes and the model "
            f"n_classes={model.n_classes}: set {config_flag(name, task.n_classes)}"
        )
    sizes = {"vocab_size": model.vocab_size}
    if task.translation is not None:
        sizes["input_vocab_size"] = model.source_vocab_size
    for name, size in sizes.items():
        if size < task.vocab_size:
            of_text = name == "vocab_size" and task.n_bytes is not None
            fewer = f", or the task's vocab_size={size}, whose text may then have no id above"
            raise SettingError(
                f"task {task.name} has ids below {task.vocab_size} and the model {name}={size}: "
                f"set the model's {name}={task.vocab_size}{fewer if of_text else ''}"
            )


def check_positions(
    model,
    params,
    task,
    split: str,
    *,
    batch_size: int,
    length: int,
    stride: int,
    mesh: Mesh | None = None,
    fix: str = "eval_batch_size or eval_length",
) -> int:
    """Traces an evaluation: a row that the positions cannot hold fails now, not at step 1,000.

    Takes the arguments of `evaluate`; `params` may be shapes alone. `fix` names the sizes to lower.

    Returns:
      The number of features of a position.

    Raises:
      SettingError: features that no memory holds.
      Exception: what the model raises.
    """
    longest = length
    # A task refuses sizes that it cannot do.
    batches = task.eval_batches(split, batch_size, length, stride)
    if task.translation is not None and model.max_length is not None:
        # Pairs that are longer than a row are scored in longer rows.
        longest = max((batch.targets.shape[1] for batch in batches), default=length)
    n_rows = batch_size if mesh is None else mesh_lib.filled(batch_size, mesh)
    tokens = jax.ShapeDtypeStruct((n_rows, longest), jax.numpy.int32)
    inputs = tokens
    is_plain = task.translation is None and task.labels is None
    if not is_plain or task.document_mask:
        # Documents may be two; segments are booleans where no row is packed.
        first = next(iter(task.eval_batches(split, batch_size, length, stride)))
        inputs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(tokens.shape, x.dtype), first.inputs)
    rng = jax.ShapeDtypeStruct((2,), jax.numpy.uint32)
    if mesh is not None:
        mesh_lib.check_length("the longest row", longest, mesh)
    features = devices.on(mesh, lambda p, t, r: model.features(p, t, rng=r))
    found = jax.eval_shape(features, params, inputs, rng)
    n_features = found.shape[-1]
    rows = n_rows // (1 if mesh is None else devices.n_row_shards(mesh))
    check_features(rows, longest, n_features, fix)
    return n_features


def check_tokens(batch_size: int, length: int, fix: str) -> None:
    """Raises `SettingError` for a batch whose tokens and positions do not fit into memory."""
    memory.check(
        f"tokens of {batch_size:,} rows of {length:,}", _TOKEN_BYTES * batch_size * length, fix
    )


def check_features(rows: int, length: int, n_features: int, fix: str) -> None:
    """Raises `SettingError` for rows whose features, before and after a layer, no device holds."""
    what = f"features of {rows:,} rows of {length:,} positions"
    memory.check(what, 2 * 4 * rows * length * n_features, fix)


def work_in_words(
    task, split: str, length: int, stride: int, max_tokens: int | None = None
) -> str | None:
    """A line on what an evaluation scores, for before it; None where it takes no wait.

    The first line of progress comes after the first batch, which is compiled, and half a minute.
    """
    _, n_targets = within(max_tokens, task, split)
    words, n_positions = f"{split}: scoring {n_targets:,} targets", n_targets
    if task.labels is not None:
        n_positions = n_targets * length
    elif task.translation is None:
        n_windows = -(-n_targets // stride)
        windows = f"{n_windows:,} window{'s' * (n_windows > 1)} of {length:,}"
        words, n_positions = f"{words} in {windows}", n_windows * length
    return words if n_positions >= _A_WAIT else None


def padding_note(task, split: str, batch_size: int, length: int, prefix: str = "") -> str | None:
    """A line on windows of a text that are half padding or more; None where they are not, or small.

    Args:
      task, split, batch_size, length: of the evaluation.
      prefix: before the names of its sizes: 'eval_' in training.
    """
    n, of_batch = task.n_targets(split), batch_size * length
    of_windows = task.translation is None and task.labels is None
    if not of_windows or of_batch < _LARGE or n * _MOSTLY_PADDED > of_batch:
        return None
    fix = f"{prefix}batch_size={-(-n // length)}"
    if n < length:
        fix = f"{prefix}length={max(1, n // batch_size)} or less"
    return (
        f"{1 - n / of_batch:.1%} of what is computed is padding: {split} has {n:,} tokens, and "
        f"{batch_size} windows of {length:,} have {of_batch:,}: set {fix}"
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
    max_tokens: int | None = None,
    all_as_well: bool = False,
    loss_chunk_len: int | None = None,
    mesh: Mesh | None = None,
    progress: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any] | None:
    """Scores `params` on a split.

    Args:
      model: a model built for evaluation.
      params: its parameters.
      task: a `reformax.task.Task`.
      split: 'train', 'valid' or 'test'.
      batch_size: windows scored together. Where devices do not divide them, a device or some have
        a row less to score.
      length: the context, in tokens.
      stride: tokens that the window moves by. Each window predicts its last `stride` positions, so
        every target but the first few has at least `length - stride` tokens before it. None:
        `length`.
      seed: of the hashes.
      max_tokens: the targets to score, up to whole batches: the first batch and others evenly
        spread over the split, always the same ones. None: the whole split.
      all_as_well: whether to score the whole split in the same pass, besides these.
      loss_chunk_len: positions of a row whose logits are in memory together; None: as many as
        `loss.max_logits` allows.
      mesh: the devices; None: all, their rows split over them.
      progress: whether to show a bar on stderr, or lines where that is no terminal.
      should_stop: called after each batch; True abandons the evaluation.

    Returns:
      bits_per_dim (bits_per_token of pieces, with bits_per_byte where they are of one text;
      bits_per_label of classes), accuracy and the other `reformax.training.metrics`, n_targets
      scored, `whole`: whether these are all, the
      n_windows that they lie in and the standard_error over batches (None for one), length,
      stride and split. With `all_as_well`, where these are not all, under `whole_split` the same of
      the whole split. None if abandoned.

    Raises:
      ValueError: sizes or vocabularies that do not fit together, or the task's batches did not
        hold each target of the split once.
    """
    mesh = fitting_mesh(model, task, batch_size, length, mesh)
    stride = length if stride is None else stride
    if not 1 <= stride <= length:
        raise SettingError(f"stride={stride} must be from 1 to length={length}")
    chosen, budget = within(max_tokens, task, split)
    if batch_size * length >= _LARGE:
        sizes = dict(batch_size=batch_size, length=length, stride=stride)
        check_positions(model, params, task, split, **sizes, mesh=mesh, fix=_SIZES)
    params = place(params, devices.placement(params, mesh))  # once, not for every batch
    key = jax.random.PRNGKey(seed)
    n_targets = task.n_targets(split)
    part = budget < n_targets
    batches = task.eval_batches(split, batch_size, length, stride)
    on_device = placed(batches, mesh, (lambda index: True) if all_as_well else chosen)
    # A window has about `stride` targets: close enough for a bar.
    a_row = stride if task.labels is None else 1
    expected = -(-(n_targets if all_as_well else budget) // (a_row * batch_size))
    unit = loss_lib.unit_of(task)
    with Progress(split, expected, side_channels.stderr(), shown=progress) as bar:
        score = partial(_sums, model, loss_chunk_len, mesh, params, key)
        totals = _totals(score, on_device, chosen, bar, unit, should_stop)
    if totals is None:
        return None
    result = _result(totals[0], task, split, not part) | {"length": length, "stride": stride}
    if part and all_as_well:
        everything = _result(totals[1], task, split, True)
        left_out = ("split", "whole", "n_windows", "standard_error")
        result["whole_split"] = {n: x for n, x in everything.items() if n not in left_out}
    return result


def fitting_mesh(model, task, batch_size: int, length: int, mesh: Mesh | None) -> Mesh:
    """The devices of an evaluation; `ValueError` where its vocabularies or sizes do not fit."""
    check_model(model, task)
    check("batch_size", batch_size, Size)
    check_tokens(batch_size, length, _SIZES)
    mesh = mesh or mesh_lib.make()
    mesh_lib.check_length("eval length", length, mesh)
    check_mesh(task, mesh)
    return mesh


def check_mesh(task, mesh: Mesh) -> None:
    """Raises `SettingError` where devices share a row's positions and its target is one class."""
    if task.labels is not None and (n := devices.n_sequence_shards(mesh)) > 1:
        raise SettingError(
            f"task {task.name} has one target a row, which context={n} devices cannot share: leave "
            "context out of the mesh"
        )


def within(max_tokens: int | None, task, split: str) -> tuple[Callable[[int], bool], int]:
    """Whether a batch, by its index, is scored, and the targets that all of these hold."""
    if max_tokens is not None and max_tokens < 1:
        raise SettingError(f"max_tokens={max_tokens} must be at least 1, or None for all")
    n_targets = task.n_targets(split)
    budget = n_targets if max_tokens is None else min(max_tokens, n_targets)
    return partial(in_budget, budget=budget, n_targets=n_targets), budget


def placed(batches: Iterable, mesh: Mesh, chosen: Callable[[int], bool]) -> Iterator:
    """The chosen batches with their indices, on the devices.

    Rows that these do not divide are filled up by rows without weight. What a batch has after its
    weights, of their shape, comes along.
    """
    rows = devices.over_tokens(mesh)

    def one(batch) -> Any:
        n_rows = len(batch[1])
        n_filled = mesh_lib.filled(n_rows, mesh)

        def rows_of(numbers: np.ndarray | None) -> Any:
            if n_filled == n_rows:
                return take(tuple(batch), numbers)
            numbers = np.arange(n_filled) if numbers is None else numbers
            inputs, targets, weights, *others = take(tuple(batch), numbers % n_rows)
            return inputs, targets, weights * (numbers < n_rows)[:, None], *others

        return place_batch(rows_of, n_filled, rows)

    return ((index, one(batch)) for index, batch in enumerate(batches) if chosen(index))


def in_budget(index: int, budget: int, n_targets: int) -> bool:
    """Whether a batch is among those, evenly spread, that hold `budget` of all targets."""
    return -(-(index + 1) * budget // n_targets) > -(-index * budget // n_targets)


class _Totals:
    """Sums over batches, in float64: a split has more targets than float32 counts.

    Attributes:
      metrics: the sum and the weight of each.
      n_windows: rows with a target.
      squares: of nats, of nats times weights, and of weights; the last counts batches.
    """

    def __init__(self):
        self.metrics: dict[str, Ratio] = {}
        self.n_windows, self.squares = 0.0, np.zeros(4)

    def add(self, metrics: dict[str, Ratio], n_windows: Any) -> None:
        """Adds those of a batch."""
        for name, ratio in metrics.items():
            before = self.metrics.get(name, Ratio(0.0, 0.0))
            self.metrics[name] = Ratio(*(x + float(y) for x, y in zip(before, ratio, strict=True)))
        self.n_windows += float(n_windows)
        nats, weight = map(float, metrics["nats"])
        self.squares += nats * nats, nats * weight, weight * weight, weight > 0

    def standard_error(self) -> float | None:
        """The standard error of bits per target, as if batches were drawn from an endless text.

        It is that of a ratio of sums, nats over weights (Cochran 1977, "Sampling Techniques",
        section 6.4), and None for one batch.
        """
        nats, weight = self.metrics["nats"]
        nats_2, both, weight_2, n = self.squares
        if n < 2:
            return None
        mean = nats / weight
        residual = max(0.0, nats_2 - 2 * mean * both + mean * mean * weight_2)
        return loss_lib.bits_per_dim(np.sqrt(residual * n / (n - 1)), weight)


def _totals(
    score, batches: Iterable, chosen, bar: Progress, unit: str, should_stop
) -> list[_Totals] | None:
    """The sums of `score(batch, index)` over the chosen batches and over all; None if abandoned."""
    totals = [_Totals(), _Totals()]
    in_flight: deque = deque()

    def add() -> None:
        index, sums = in_flight.popleft()
        sums = jax.device_get(sums)
        for total in totals[0 if chosen(index) else 1 :]:
            total.add(*sums)

    figures = ""
    with prefetch(batches) as ready:
        for index, batch in ready:
            in_flight.append((index, score(batch, index)))
            if len(in_flight) > _IN_FLIGHT:
                add()
                if nats := totals[0].metrics.get("nats"):
                    figures = f"{loss_lib.bits_per_dim(*nats):.4f} {unit}"
            bar.advance(1, figures)
            go_on()
            if should_stop():
                return None
    while in_flight:
        add()
    return totals


def _result(total: _Totals, task, split: str, whole: bool) -> dict[str, Any]:
    nats, weight = total.metrics.get("nats", Ratio(0.0, 0.0))
    if whole and round(weight) != task.n_targets(split):
        raise ValueError(
            f"task {task.name}: the batches of {split} hold {weight:.0f} targets and the split "
            f"{task.n_targets(split)}: eval_batches must give each target weight 1 once"
        )
    if not weight:
        raise ValueError(f"task {task.name}: split {split} has no targets: choose another split")
    return {
        "split": split,
        **loss_lib.bits_of(task, split, loss_lib.bits_per_dim(nats, weight)),
        **{n: x.sum / x.weight for n, x in total.metrics.items() if n != "nats" and x.weight},
        "n_targets": round(weight),
        "whole": whole,
        "n_windows": round(total.n_windows),
        "standard_error": total.standard_error(),
    }


@partial(jax.jit, static_argnums=(0, 1, 2))
def _sums(model, loss_chunk_len, mesh, params, key, batch, index):
    """A batch's sums of metrics, and its rows with a target."""

    def sums_of(params, rng, inputs, targets, weights):
        features = model.features(params, inputs, rng=rng)
        scored = model.logits, params, features, targets, weights, loss_chunk_len
        sums = loss_lib.cross_entropy(*scored, impl="xla")  # of logits in float32
        return sums.metrics, (weights > 0).any(axis=1).sum()

    return devices.on(mesh, sums_of)(params, jax.random.fold_in(key, index), *batch)
