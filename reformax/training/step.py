"""One optimizer step as one compiled function of (state, batch, key)."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from reformax import devices
from reformax.buffers import advanced, measured, merged, trained
from reformax.training import loss as loss_lib
from reformax.training import truncated_backprop
from reformax.training.fine_tuning import FineTuning
from reformax.training.metrics import no_sums

# XLA has Triton and cuBLASLt compete for each product alone, and then adds a bias, or the sum of
# the products before, in a kernel that reads and writes all of it once more. Without Triton,
# cuBLASLt's product adds them.
GPU_OPTIONS = {"xla_gpu_enable_triton_gemm": False}


def compiler_options(platform: str) -> dict[str, Any] | None:
    """XLA's options for a step on such devices, besides those that the user's XLA_FLAGS name."""
    if platform not in ("gpu", "cuda"):
        return None
    flags = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in GPU_OPTIONS.items() if name not in flags} or None


class TrainState(NamedTuple):
    """Everything that a step changes; a checkpoint holds it."""

    step: Any  # int32 []: steps done
    params: Any  # float32
    opt_state: Any
    ema: Any  # moving average of params; None if it is off

    @property
    def eval_params(self) -> Any:
        """The parameters to score: the moving average if there is one."""
        return self.params if self.ema is None else self.ema


def jit_once(function: Callable, **options: Any) -> Callable:
    """`jax.jit` of what runs once or twice, such as the function of `init_fn`: compiled quickly.

    To optimise it takes longer than it saves, on a GPU, and on a CPU up to some 80 million
    parameters.
    """
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0}, **options)


def init_fn(
    model, optimizer: optax.GradientTransformation, shape: tuple[int, int], ema: bool
) -> Callable[[jax.Array], TrainState]:
    """A function from a key to the first state; `shape` is (batch, length)."""

    return lambda key: first_state(model.init_params(key, shape), optimizer, ema)


def first_state(params: Any, optimizer: optax.GradientTransformation, ema: bool) -> TrainState:
    """The state before the first step; the moving average is on if `ema`."""
    # The type of an array made of a Python number is weak until the first step, and the second one
    # would be compiled again for it.
    params = jax.tree.map(lambda x: jax.lax.convert_element_type(x, x.dtype), params)
    average = jax.tree.map(jnp.copy, params) if ema else None
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(trained(params)), average)


def step_fn(
    model,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    accumulate: int = 1,
    loss_chunk_len: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ema_decay: float = 0.0,
    backprop_len: int | None = None,
    fine_tuning: FineTuning | None = None,
    placement: Any = None,
) -> Callable[..., tuple[TrainState, dict[str, jax.Array]]]:
    """Compiles a step for `model`.

    Args:
      model: a model built for training.
      optimizer: a transformation of gradients.
      mesh: the devices.
      accumulate, loss_chunk_len, label_smoothing, z_loss, ema_decay, backprop_len: those of
        `settings.TrainSettings`; 'nats' below is without label smoothing and `z_loss`.
      fine_tuning: which weights the steps of a stage change; None: all that the optimizer changes.
      placement: of the state after a step, as `devices.placement` gives it; None: every device
        has it whole.

    Returns:
      A function (state, (inputs, targets, weights), key) -> (state, metrics), not to be called
      within another compiled one, for it has options of its own on a GPU. It uses up the state
      given. `inputs` may be a tree of arrays [B, ...]. Metrics are those of
      `reformax.training.metrics`, such as 'nats' and 'accuracy', each a `Ratio` over the batch's
      targets before the update; the number 'grad_norm'; those of `buffers.measured`; and the
      update's 'learning_rate' if the optimizer has a schedule by that name. All randomness comes
      from `key` folded with the step's number, and then with the micro-batch's.
    """
    options = dict(chunk_len=loss_chunk_len, label_smoothing=label_smoothing, z_loss=z_loss)
    cross_entropy = partial(loss_lib.cross_entropy, **options)
    gradient = jax.grad(partial(mean_loss, model, cross_entropy), has_aux=True)
    if backprop_len is not None:
        gradient = partial(truncated_backprop.gradient, model, cross_entropy, backprop_len)
    schedule = getattr(optimizer, "learning_rate", None)
    reads = getattr(optimizer, "reads", lambda gradients: gradients)

    def step(state: TrainState, batch, key):
        rng = jax.random.fold_in(key, state.step)
        # A batch without targets has loss and gradient 0, not 0 / 0.
        weight = jnp.maximum(jnp.sum(batch[2]) / accumulate, jnp.finfo(jnp.float32).tiny)
        if accumulate == 1:
            grads, metrics = gradient(state.params, batch, rng, weight)
        else:
            grads, metrics = _accumulated(gradient, accumulate, state.params, batch, rng, weight)
        grads = devices.stored(grads)
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # optax's
            before, gradients = trained(state.params), trained(grads)
            if fine_tuning is not None:
                gradients = fine_tuning.zeros_elsewhere(gradients)
            updates, opt_state = optimizer.update(gradients, state.opt_state, before)
            if fine_tuning is not None:  # of weight decay, and of moments from before the stage
                updates = fine_tuning.zeros_elsewhere(updates)
            params = optax.apply_updates(before, updates)
        params = merged(advanced(state.params, grads), params)
        done = state.step + 1
        ema = state.ema
        if ema is not None:
            n = done.astype(jnp.float32)
            decay = jnp.minimum(ema_decay, (1.0 + n) / (10.0 + n))
            averaged = jax.tree.map(
                lambda old, new: decay * old + (1 - decay) * new, trained(ema), trained(params)
            )
            ema = merged(advanced(ema, grads), averaged)
        metrics = {**metrics, "grad_norm": _norm(reads(gradients)), **measured(params)}
        if schedule is not None:
            metrics["learning_rate"] = jnp.asarray(schedule(state.step), jnp.float32)
        return TrainState(done, params, opt_state, ema), metrics

    whole = devices.replicated(mesh)
    placements = whole if placement is None else placement, whole
    options = compiler_options(mesh.devices.flat[0].platform)
    step = devices.on(mesh, step)
    return jax.jit(step, donate_argnums=0, out_shardings=placements, compiler_options=options)


def mean_loss(model, cross_entropy, params, batch, rng, weight):
    """The loss divided by `weight`, and the sums of metrics.

    `cross_entropy` is that of `loss`, with its options. A compiled step calls this function once a
    micro-batch: `jax.debug.print("{x}", x=features[0, 0])` here prints then. With `backprop_len`
    it calls `truncated_backprop.gradient` in its place.
    """
    inputs, targets, weights = batch
    features = model.features(params, inputs, rng=rng)
    sums = cross_entropy(model.logits, params, features, targets, weights)
    return sums.loss / weight, sums.metrics


def _accumulated(gradient, n: int, params, batch, rng, weight):
    """The mean gradient and the sums of metrics of n micro-batches, one after the other.

    `weight` is a micro-batch's share of the batch's, so this is the gradient of the whole; what a
    layer adds to the loss as a mean counts once.
    """
    # Row i goes to micro-batch i % n: each one stays spread over all devices.
    micros = jax.tree.map(lambda x: jnp.swapaxes(x.reshape(-1, n, *x.shape[1:]), 0, 1), batch)

    def add_micro(sums, numbered):
        index, micro = numbered
        part = gradient(params, micro, jax.random.fold_in(rng, index), weight)
        return jax.tree.map(jnp.add, sums, part), None

    zeros = jax.tree.map(jnp.zeros_like, params), no_sums()
    (grads, metrics), _ = jax.lax.scan(add_micro, zeros, (jnp.arange(n), micros))
    return jax.tree.map(lambda x: x / n, grads), metrics


def _norm(tree: Any) -> jax.Array:
    return jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(tree)))


@jax.jit
def all_finite(tree: Any) -> jax.Array:
    """Whether no floating-point number in the tree is nan or infinite."""
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in floats]))
