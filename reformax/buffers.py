"""Buffers: weights that a training step updates without a gradient, such as running means.

    value = updated(params["count"], params["count"].value + 1)

Such a weight is a `Buffer`. A function of the weights says what it becomes by `updated`, and the
change arrives where a gradient would: through any transformation, scan and recomputation of the
backward pass. A step of training adds it (`Buffer.after`), and neither optimizer, clipping nor
weight decay sees the weight.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from reformax.derivatives import CustomDerivatives

# What layers call the buffers that scales of FP8 products come from. A run that begins with the
# weights of another one has its own.
HISTORY = "amax_history"


class Buffer(NamedTuple):
    """A weight whose cotangent is its change."""

    value: Float[Array, "*d"]

    def after(self, change: Float[Array, "*d"]) -> Buffer:
        """The buffer after a step, from the mean of the cotangents of the batch's parts."""
        return type(self)(self.value + change)


class Meter(Buffer):
    """A buffer that measures: a step of training reports what it becomes, by its name."""


@CustomDerivatives
def _becoming(value, after):
    # In a `jax.vmap` over `after` alone the result is batched, as its derivative is.
    return jnp.where(False, after.astype(value.dtype), value)


def _backward(change, gradient):
    del gradient
    return change, jnp.zeros_like(change)


_becoming.define(
    lambda value, after: (_becoming.function(value, after), (after - value).astype(value.dtype)),
    _backward,
    lambda _, tangents: tangents[0],
)


def updated(weight: Buffer, after: Float[Array, "*d"]) -> Float[Array, "*d"]:
    """The weight's value, which after the step is `after`.

    The output must depend on what is returned, if only by a factor of 0: a part of a function that
    nothing depends on is not differentiated, and the weight stays as it is. Of a batch that is
    computed in parts, one after the other or each on its device, each part says what the weight
    becomes, and it becomes the mean.
    """
    return _becoming(weight.value, jax.lax.stop_gradient(after))


def in_parts(params: Any, n_parts: int) -> Any:
    """The weights as each of `n_parts` parts of a batch reads them.

    The parts' gradients are summed. A buffer's are divided, so that it becomes the parts' mean.
    """

    def part(x):
        if not is_buffer(x):
            return x
        fixed = jax.lax.stop_gradient(x.value)
        return type(x)(fixed + (x.value - fixed) / n_parts)

    return jax.tree.map(part, params, is_leaf=is_buffer)


def is_buffer(x: Any) -> bool:
    """Whether a node of a tree is a `Buffer`."""
    return isinstance(x, Buffer)


def trained(tree: Any) -> Any:
    """The tree with None for each buffer, as an optimizer reads it."""
    return jax.tree.map(lambda x: None if is_buffer(x) else x, tree, is_leaf=is_buffer)


def advanced(params: Any, changes: Any) -> Any:
    """The tree with each buffer as it is after a step.

    Args:
      params: the weights before it.
      changes: the gradient with respect to `params`.
    """

    def after(before, change):
        if not is_buffer(before):
            return before
        return before.after(change.value)

    return jax.tree.map(after, params, changes, is_leaf=is_buffer)


def measured(params: Any) -> dict[str, Array]:
    """The mean of the meters of each name, by name."""
    found: dict[str, list[Array]] = {}
    for path, x in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_buffer):
        if isinstance(x, Meter):
            name = jax.tree_util.keystr(path[-1:], simple=True)
            found.setdefault(name, []).append(x.value.mean())
    return {name: jnp.stack(values).mean() for name, values in found.items()}


def merged(params: Any, weights: Any) -> Any:
    """The buffers of `params`, and all else from `weights`, a tree like `trained(params)`."""
    return jax.tree.map(lambda x, w: x if is_buffer(x) else w, params, weights, is_leaf=is_buffer)
