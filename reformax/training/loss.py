"""Cross-entropy that never holds the logits of a whole batch; `step.mean_loss` calls it.

Logits of 65,536 positions take more memory than a reversible model, and so do those of a vocabulary
of 32,000 pieces. They are therefore computed for a chunk of positions at a time. The forward pass
also computes the gradient of each chunk while its logits are in memory: the loss is one number, so
the backward pass only multiplies by the gradient of that number. No product is computed twice.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from reformax import devices
from reformax.declared import SettingError
from reformax.ops.calls.dispatch import INTERPRETED, KERNELS, check_impl, choose_impl
from reformax.ops.numerics.first_order import first_order
from reformax.task import Task
from reformax.training import metrics
from reformax.training.metrics import Ratio

# With fewer ids the kernel gains nothing, nor with logits in float32.
LEAST_VOCABULARY = 4096


def max_logits() -> int:
    """The most logits in memory together, however long a chunk may be.

    In float32 they take 128 MiB; on a GPU, which needs large products, 1 GiB. With the kernel those
    of a gradient are four times as many, which take twice the memory in bfloat16.
    """
    return 2**25 if jax.default_backend() == "cpu" else 2**28


class Sums(NamedTuple):
    """Sums over targets.

    Attributes:
      loss: what training minimises: `-log p` in nats, with label smoothing if there is any.
      metrics: sums of `reformax.training.metrics`, by name, which have no gradient.
    """

    loss: Float[Array, ""]
    metrics: dict[str, Ratio]


def cross_entropy(
    logits_fn: Callable[[Any, Float[Array, "B C D"]], Float[Array, "B C V"]],
    params: Any,
    features: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    chunk_len: int | None = None,
    label_smoothing: float = 0.0,
    impl: str = "auto",
    z_loss: float = 0.0,
) -> Sums:
    """The weighted sum of `-log p(target)`, `chunk_len` positions of each row at a time.

    With label smoothing e the loss is the cross-entropy to a distribution that has 1 - e at the
    target and e spread evenly over all ids, the target among them: `(1 - e) * -log p(target) + e *
    mean(-log p)`. From Szegedy et al. 2016, "Rethinking the Inception Architecture", section 7.

    `z_loss` times the squared logarithm of the softmax's sum is added to the loss of each target,
    which keeps logits from drifting (Chowdhery et al. 2022, "PaLM", section 5, with 1e-4).

    Args:
      logits_fn: `(params, features) -> logits`, of any numbers of rows and positions; for the
        kernel also with `dtype=`, that of the logits.
      params: a tree of arrays, which get gradients too.
      features: the model's output, a vector for each position.
      targets: ids below V.
      weights: 0 leaves a position out.
      chunk_len: the most positions of each row whose logits are in memory together; None for no
        limit but `max_logits()`, which always holds. Need not divide T: the last chunk is padded
        with weight 0.
      label_smoothing: e, at least 0 and below 1.
      impl: of the loss of logits and its gradient. "xla" runs everywhere; "pallas" is a kernel for
        NVIDIA GPUs of Ampere or later. Its gradient has no derivative of its own. "auto" takes the
        kernel on such a GPU for features in bfloat16 and `LEAST_VOCABULARY` ids or more.
      z_loss: the factor of the squared logarithm, as above.

    Returns:
      float32 sums over the batch.
    """
    if chunk_len is not None and chunk_len < 1:
        raise SettingError(f"loss_chunk_len={chunk_len} must be at least 1: use 1024, or None")
    check_impl(impl, *KERNELS)
    n_sequence_shards = devices.n_sequence_shards()
    if rest := -targets.shape[1] % n_sequence_shards:
        padding = (0, 0), (0, rest)
        features = jnp.pad(features, (*padding, (0, 0)))
        targets, weights = jnp.pad(targets, padding), jnp.pad(weights, padding)
    # Of one device.
    n_row_shards = devices.n_row_shards()
    batch, length = targets.shape[0] // n_row_shards, targets.shape[1] // n_sequence_shards
    # A position of each, for what the logits go through may be divided too.
    one = jax.ShapeDtypeStruct((n_row_shards, n_sequence_shards, features.shape[2]), features.dtype)
    vocab_size = jax.eval_shape(logits_fn, params, one).shape[-1]
    pays = vocab_size >= LEAST_VOCABULARY and features.dtype == jnp.bfloat16
    chosen = choose_impl(impl, pays, pallas=None) if targets.size else "xla"
    # The kernel reads logits as PyTorch's autocast does, in bfloat16, and puts their gradient in
    # their place: four times as many take twice the memory.
    rounded = chosen != "xla" and features.dtype == jnp.bfloat16
    most = max_logits() // (batch * vocab_size)
    chunk_len = max(1, min(chunk_len or length, most * 4 if rounded else most))
    options = Loss(label_smoothing, z_loss), chosen, rounded, max(1, most)

    leaves, tree = jax.tree.flatten(params)
    read = _read(logits_fn, params, one)

    def logits_of(features, *used, **dtype):
        given = iter(used)
        both = zip(leaves, read, strict=True)
        # What is not read has no gradient that would have to be summed up.
        filled = [next(given) if is_read else jax.typeof(x) for x, is_read in both]
        return logits_fn(jax.tree.unflatten(tree, filled), features, **dtype)

    def sums_of(first, features, targets, weights, used):
        del first
        rows = features, targets, weights.astype(jnp.float32)
        return (), _sums(logits_of, options, used, *_chunks(chunk_len, *rows))

    # Each device sums up over its own rows and positions: one sum over devices in place of one a
    # chunk.
    rows = features, targets, weights
    used = [x for x, is_read in zip(leaves, read, strict=True) if is_read]
    return devices.by_positions(sums_of, rows, (used,), sums=True)[1]


def _read(logits_fn, params, features) -> list[bool]:
    """Whether the logits depend on each array of `params`."""
    program = jax.make_jaxpr(logits_fn)(params, features).jaxpr
    inputs = {id(x) for equation in program.eqns for x in equation.invars}
    return [id(x) in inputs for x in program.invars[:-1]]


def _chunks(most: int, *arrays: Array) -> list[Array]:
    """`[B, T, ...]` as `[chunks, B, C, ...]`, with C at most `most`; zeros are after the end."""
    batch, length = arrays[0].shape[:2]
    n_chunks = max(1, -(-length // most))
    size = -(-length // n_chunks)  # the last chunk is then not mostly padding

    def cut(x):
        tail = [(0, 0)] * x.ndim
        tail[1] = (0, n_chunks * size - length)
        x = jnp.pad(x, tail).reshape(batch, n_chunks, size, *x.shape[2:])
        return jnp.swapaxes(x, 0, 1)

    return list(map(cut, arrays))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _sums(logits_fn, options, used, features, targets, weights) -> Sums:
    loss, _, _, most = options

    def add_part(sums, part):
        features, *others = part
        result = _chunk(logits_fn(features, *used), *others, loss)
        return jax.tree.map(jnp.add, sums, result.sums), None

    def add_chunk(sums, chunk):  # logits are float32, unlike the kernel's bfloat16
        return jax.lax.scan(add_part, sums, _chunks(most, *chunk))

    return jax.lax.scan(add_chunk, _zero_sums(), (features, targets, weights))[0]


@_sums.defjvp
def _sums_jvp(logits_fn, options, primals, tangents) -> tuple[Sums, Sums]:
    loss, impl, rounded, _ = options
    dtype = {"dtype": "bfloat16"} if rounded else {}
    used, features, targets, weights = primals
    # Masks and tables of integers have no gradient.
    are_params = [jnp.issubdtype(jnp.result_type(x), jnp.inexact) for x in used]
    params = [x for x, is_param in zip(used, are_params, strict=True) if is_param]

    def logits_of(features, *params):
        given = iter(params)
        both = zip(used, are_params, strict=True)
        arrays = (next(given) if is_param else x for x, is_param in both)
        return logits_fn(features, *arrays, **dtype)

    def add_chunk(carry, chunk):
        features, *others = chunk
        logits, vjp = jax.vjp(logits_of, features, *params)
        if impl == "xla":
            result = _chunk(logits, *others, loss)
        else:
            result = _chunk_by_kernel(logits, *others, loss, features.dtype, impl)
        d_features, *d_params = vjp(result.d_logits.astype(logits.dtype))
        return jax.tree.map(jnp.add, carry, (result.sums, d_params)), (d_features, result.losses)

    start = _zero_sums(), [jnp.zeros_like(x) for x in params]
    chunks = features, targets, weights
    (sums, d_params), (d_features, losses) = jax.lax.scan(add_chunk, start, chunks)
    # The loss is linear in its inputs' changes; its transpose is the backward pass.
    d_used, of_features, _, of_weights = tangents
    of_params = [x for x, is_param in zip(d_used, are_params, strict=True) if is_param]
    gradients, changes = (*d_params, d_features, losses), (*of_params, of_features, of_weights)
    f32 = jnp.float32
    change = sum(
        jnp.sum(x.astype(f32) * y.astype(f32)) for x, y in zip(gradients, changes, strict=True)
    )
    return sums, _zero_sums()._replace(loss=change)


def _zero_sums() -> Sums:
    return Sums(jnp.zeros((), jnp.float32), metrics.no_sums())


class Loss(NamedTuple):
    """The terms that are added to the cross-entropy; see `cross_entropy`."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def with_z(self, losses: Float[Array, "B C"], lse: Float[Array, "B C"]):
        """The losses of targets with `z_loss`."""
        return losses + self.z_loss * lse**2 if self.z_loss else losses


class _Chunk(NamedTuple):
    """The results of a chunk's logits."""

    sums: Sums
    losses: Float[Array, "B C"]  # unweighted
    d_logits: Float[Array, "B C V"]  # the gradient of the loss, of the weighted one


def _chunk(logits, targets, weights, loss: Loss) -> _Chunk:
    label_smoothing, z_loss = loss
    logits = logits.astype(jnp.float32)
    vocab_size = logits.shape[-1]
    target_logits = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    # Logits may take 1 GiB, and logsumexp would read them once more for the maximum.
    best = jnp.argmax(logits, axis=-1)
    row_max = jnp.take_along_axis(logits, best[..., None], axis=-1)[..., 0]
    lse = row_max + jnp.log(jnp.sum(jnp.exp(logits - row_max[..., None]), axis=-1))
    nats = losses = lse - target_logits
    if label_smoothing:
        spread = lse - jnp.mean(logits, axis=-1)
        losses = (1 - label_smoothing) * nats + label_smoothing * spread
    losses = loss.with_z(losses, lse)
    sums = _weighted(logits, best, nats, targets, weights, losses=losses)
    # Softmax minus the distribution of the targets. No constant is broadcast to the logits' shape:
    # XLA would make an array of it before the loop, and read 1 GiB in each turn.
    is_target = jnp.arange(vocab_size)[None, None] == targets[..., None]
    weight = weights[..., None]
    grown = weight * (1 + 2 * z_loss * lse[..., None]) if z_loss else weight
    d_logits = jnp.exp(logits - lse[..., None]) * grown
    d_logits -= is_target.astype(jnp.float32) * ((1 - label_smoothing) * weight)
    if label_smoothing:
        d_logits -= label_smoothing / vocab_size * weight
    return _Chunk(sums, losses, d_logits)


def _weighted(*predictions, losses) -> Sums:
    found = metrics.Predictions(*predictions)
    return Sums(jnp.sum(losses * found.weights), metrics.sums(found))


def _chunk_by_kernel(logits, targets, weights, loss: Loss, dtype, impl) -> _Chunk:
    """`_chunk` by a kernel, the gradient in `dtype`."""
    from reformax.training.kernels import cross_entropy as kernel

    shape, vocab_size = targets.shape, logits.shape[-1]
    logits, targets, weights = first_order((logits, targets, weights))
    rows = logits.reshape(-1, vocab_size), targets.ravel(), weights.ravel()
    interpret = impl == INTERPRETED
    found = kernel.differentiate(*rows, *loss, dtype, interpret)
    d_logits = found.d_logits.reshape(logits.shape)
    lse, target, best, total = (x.reshape(shape) for x in found[:4])
    nats = losses = lse - target
    if loss.label_smoothing:
        spread = lse - total / vocab_size
        losses = (1 - loss.label_smoothing) * nats + loss.label_smoothing * spread
    losses = loss.with_z(losses, lse)
    sums = _weighted(logits, best, nats, targets, weights, losses=losses)
    return _Chunk(sums, losses, d_logits)


def metric_name(task: Task) -> str:
    """The name of the mean `-log2 p` of a target.

    It is 'bits_per_label' if targets are classes, 'bits_per_token' if they are pieces.
    """
    if task.labels is not None:
        return "bits_per_label"
    return "bits_per_dim" if task.kept_vocabulary is None else "bits_per_token"


def unit_of(task: Task) -> str:
    """The unit of the bits that progress shows, such as 'bits/byte' of a text's bytes."""
    return "bits/byte" if task.of_bytes else metric_name(task).replace("_per_", "/")


def bits_of(task: Task, split: str, bits: float) -> dict[str, float]:
    """The bits of a target by the metric's name; of a text also `bits_per_byte`.

    Where tokens are pieces, a byte has the bits of a token over the bytes of a token, in the mean
    of the whole split. In this unit models of bytes and of any pieces compare.
    """
    found = {metric_name(task): bits}
    if task.of_bytes:
        found["bits_per_byte"] = bits
    if task.n_bytes is not None:
        found["bits_per_byte"] = bits * task.n_targets(split) / task.n_bytes(split)
    return found


def bits_per_dim(nats: float, weight: float) -> float:
    """Mean `-log2 p` of a target; nan if there is no target."""
    return float(nats) / math.log(2) / float(weight) if weight else math.nan
