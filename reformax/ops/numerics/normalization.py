"""Length normalisation, which turns shared queries into keys (Reformer, sec. 2)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from reformax.derivatives import CustomDerivatives, tangent_of
from reformax.ops.numerics.precision import accum_dtype

EPSILON = 1e-6  # added to the mean square


def length_normalize(x: Float[Array, "*d H"], epsilon: float = EPSILON) -> Float[Array, "*d H"]:
    """`x` scaled to unit root mean square over its last axis."""
    return _normalize(epsilon, x)


@functools.partial(CustomDerivatives, n_static=1)
def _normalize(epsilon, x):
    y, _ = _normalized(x, epsilon)
    return y.astype(x.dtype)


def _normalize_backward(epsilon, x, dy):
    y, scale = _normalized(x, epsilon)
    dy = dy.astype(y.dtype)
    return (((dy - y * mean_product(y, dy)) * scale).astype(x.dtype),)


_normalize.define(
    lambda epsilon, x: (_normalize.function(epsilon, x), x),
    _normalize_backward,
    lambda epsilon, x, tangents: tangent_of(
        functools.partial(_normalize.function, epsilon), (x,), tangents
    ),
)


def _normalized(x, epsilon):
    x = x.astype(accum_dtype(x.dtype))
    scale = jax.lax.rsqrt(mean_product(x, x) + epsilon)
    return x * scale, scale


def mean_product(x: Float[Array, "*d H"], y: Float[Array, "*d H"]) -> Float[Array, "*d 1"]:
    """The mean of `x * y` over the last axis, float32 or wider."""
    dtype = accum_dtype(x.dtype, y.dtype)
    x, y = x.astype(dtype), y.astype(dtype)
    if jax.default_backend() == "cpu":  # XLA computes a dot product faster than a sum on a CPU
        product = jnp.einsum("...h,...h->...", x, y)
    else:
        product = jnp.sum(x * y, axis=-1)
    return product[..., None] / x.shape[-1]
