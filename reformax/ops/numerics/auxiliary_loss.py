"""Adds a layer's own loss to the gradient of the model's loss."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from reformax.derivatives import CustomDerivatives


@CustomDerivatives
def with_loss(out: Float[Array, "*d"], loss: Float[Array, ""]) -> Float[Array, "*d"]:
    """Returns `out`, and adds the gradient of `loss` to that of the model's loss.

    The sum of both gradients passes through any stack and any recomputation. No metric reports
    `loss` itself.
    """
    return out


def _backward(loss, d_out):
    return d_out, jnp.ones_like(loss)


with_loss.define(lambda out, loss: (out, loss), _backward, lambda loss, tangents: tangents[0])
