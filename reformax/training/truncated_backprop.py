"""Truncated backpropagation: rows in parts, whose states are carried from one to the next.

Williams and Peng 1990 ("An Efficient Gradient-Based Algorithm for On-Line Training of Recurrent
Network Trajectories"). The loss is that of whole rows. The gradient of a part goes back to its
first position and takes the states before it as given. A step has the activations of one part in
memory, so a row can be as long as its tokens fit.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from reformax.buffers import in_parts
from reformax.declared import SettingError, Unsupported
from reformax.training.metrics import no_sums


def check(model: Any, backprop_len: int | None, length: int) -> None:
    """Raises a `ValueError` for rows that are no whole parts, or a model that carries no states."""
    if backprop_len is None:
        return
    if length % backprop_len:
        raise SettingError(
            f"backprop_len is {backprop_len}: expected a divisor of length, {length}"
        )
    try:
        if not hasattr(model, "first_states"):
            raise Unsupported(f"{type(model).__name__} carries no states: train a lm.TransformerLM")
        jax.eval_shape(lambda: model.first_states(1))
    except Unsupported as error:
        raise SettingError(f"backprop_len is {backprop_len}, but {error}") from None
    if model.max_length is not None and length > model.max_length:
        raise SettingError(
            f"length is {length}: the model has {model.max_length} positions, in pos_axial_shape"
        )


def gradient(
    model, cross_entropy, backprop_len: int, params, batch, rng, weight
) -> tuple[Any, Any]:
    """The gradient of the loss over `weight` and the sums of metrics, summed over all parts.

    Arguments are those of `step.mean_loss`, and the positions of a part.
    """
    inputs, targets, weights = batch
    n = targets.shape[1] // backprop_len

    def of_part(params, part, states, rng):
        inputs, targets, weights = part
        params = in_parts(params, n)
        features, states = model.features_from(params, inputs, states, rng)
        sums = cross_entropy(model.logits, params, features, targets, weights)
        return sums.loss / weight, (sums.metrics, states)

    def add_part(carry, numbered):
        sums, states = carry
        index, part = numbered
        part_rng = None if rng is None else jax.random.fold_in(rng, index)
        grads, (metrics, states) = jax.grad(of_part, has_aux=True)(params, part, states, part_rng)
        return (jax.tree.map(jnp.add, sums, (grads, metrics)), states), None

    def cut(x):
        return jnp.moveaxis(x.reshape(len(x), n, -1), 1, 0)

    parts = model.parts(inputs, n), cut(targets), cut(weights)
    zeros = jax.tree.map(jnp.zeros_like, params), no_sums()
    carry = zeros, model.first_states(len(targets))
    (sums, _), _ = jax.lax.scan(add_part, carry, (jnp.arange(n), parts))
    return sums
