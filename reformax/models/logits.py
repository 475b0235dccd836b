"""Logits: the product of features and a table of vectors, one a token, and maybe biases."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

glorot = jax.nn.initializers.variance_scaling(1.0, "fan_avg", "normal")


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def logits_product(
    x: Float[Array, "*d D"], table: Float[Array, "V D"], dtype: str
) -> Float[Array, "*d V"]:
    """`x @ table.T` in float32, both operands rounded to `dtype`.

    The gradient is rounded to bfloat16 too, because products with a float32 gradient take twice as
    long. It is not rounded to float16, which underflows the small gradients of a mean over many
    targets and overflows their sums.
    """
    x, table = x.astype(dtype), table.astype(dtype)
    return jnp.einsum("...d,vd->...v", x, table, preferred_element_type=jnp.float32)


def _forward(x, table, dtype):
    return logits_product(x, table, dtype), (x, table)


def _backward(dtype, inputs, gradient):
    x, table = (z.astype(dtype) for z in inputs)
    if x.dtype != jnp.float16:
        gradient = gradient.astype(dtype)
    d_x = jnp.einsum("...v,vd->...d", gradient, table)
    d_table = jnp.einsum("...v,...d->vd", gradient, x)
    return tuple(d.astype(like.dtype) for d, like in zip((d_x, d_table), inputs, strict=True))


logits_product.defvjp(_forward, _backward)


def affine_params(rng, d_in: int, d_out: int) -> dict[str, Array]:
    """Weights of `affine`: `w [d_in, d_out]`, drawn after Glorot, and `b [d_out]`, zeros."""
    return {"w": glorot(rng, (d_in, d_out)), "b": jnp.zeros(d_out)}


def affine(params, x: Float[Array, "*d D"], dtype: str) -> Float[Array, "*d V"]:
    """`x w + b`, float32, whose product is that of `logits_product`."""
    product = logits_product(x, params["w"].T, dtype)
    return product + jnp.expand_dims(params["b"], tuple(range(product.ndim - 1)))
