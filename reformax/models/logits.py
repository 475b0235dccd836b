"""Logits: the product of features and a table of vectors, one a token, and maybe biases."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from reformax.ops.numerics.logits import Logits

glorot = jax.nn.initializers.variance_scaling(1.0, "fan_avg", "normal")


def logits_product(
    x: Float[Array, "*d D"],
    table: Float[Array, "V D"],
    dtype: str,
    bias: Array | None = None,
    to: str = "float32",
) -> Float[Array, "*d V"]:
    """`x @ table.T`, or `x @ table.T + bias`, in `to`, both operands rounded to `dtype`.

    The gradient is rounded to bfloat16 too, because products with a float32 gradient take twice as
    long, and a sum of it for the bias would keep it in memory. It is not rounded to float16, which
    underflows the small gradients of a mean over many targets and overflows their sums.
    """
    return _logits((x, table, bias), dtype, to)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _logits(inputs, dtype, to):
    x, table, bias = inputs
    product = jnp.einsum(
        "...d,vd->...v", x.astype(dtype), table.astype(dtype), preferred_element_type=to
    )
    return (
        product
        if bias is None
        else product + bias.astype(to).reshape((1,) * (x.ndim - 1) + bias.shape)
    )


def _backward(dtype, to, inputs, gradient):
    del to
    x, table, bias = inputs
    if jnp.dtype(dtype) != jnp.float16:
        gradient = gradient.astype(dtype)
    d_x = jnp.einsum("...v,vd->...d", gradient, table.astype(dtype)).astype(x.dtype)
    d_table = jnp.einsum("...v,...d->vd", gradient, x.astype(dtype)).astype(table.dtype)
    if bias is None:
        return ((d_x, d_table, None),)
    rows = tuple(range(gradient.ndim - 1))
    return ((d_x, d_table, jnp.sum(gradient, rows, dtype=jnp.float32).astype(bias.dtype)),)


_logits.defvjp(lambda inputs, *dtypes: (_logits(inputs, *dtypes), inputs), _backward)


def linear_params(
    rng, d_in: int, d_out: int, init_std: float | None = None, bias: bool = True
) -> dict[str, Array]:
    """Weights of `linear`: `w [d_in, d_out]`, after Glorot or of `init_std`, and `b`, zeros."""
    drawn = glorot if init_std is None else jax.nn.initializers.normal(init_std)
    return {"w": drawn(rng, (d_in, d_out))} | ({"b": jnp.zeros(d_out)} if bias else {})


def linear(
    params, x: Float[Array, "*d D"], dtype: str, to: str = "float32"
) -> Float[Array, "*d V"]:
    """`x w + b`, or `x w`, in `to`, by `logits_product`."""
    return logits_product(x, params["w"].T, dtype, params.get("b"), to)


def capped(logits: Float[Array, "*d V"], soft_cap: float | None) -> Float[Array, "*d V"]:
    """`c tanh(x / c)` of logits x (Gemma Team 2024, "Gemma 2", sec. 2); None: as they are."""
    return Logits(soft_cap=soft_cap).capped(logits)
