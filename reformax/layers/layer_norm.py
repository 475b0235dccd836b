"""Layer normalisation (Ba et al. 2016) with float32 statistics."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from reformax.layers._trax import Layer
from reformax.ops.base import mean_product


class LayerNorm(Layer):
    """`(x - mean) / sqrt(variance + epsilon) * scale + bias` over the last axis, `[..., D]`.

    Mean and variance are float32 whatever comes in, which lets bfloat16 sublayers hang on a
    float32 stream. Weights: `scale` and `bias`, `[D]`.
    """

    def __init__(self, epsilon: float = 1e-6, dtype: str | None = None):
        """Args:
        epsilon: added to the variance.
        dtype: what comes out, such as "bfloat16"; None is the input's.
        """
        super().__init__()
        self._epsilon = epsilon
        self._dtype = dtype

    def init_params(self, rng, shape):
        return {"scale": jnp.ones(shape[-1:]), "bias": jnp.zeros(shape[-1:])}

    def apply(self, params, x: Float[Array, "*d D"], rng=None) -> Float[Array, "*d D"]:
        dtype = self._dtype or x.dtype
        # One row a position: XLA's CPU backend sums over two leading axes ten times slower.
        rows = x.reshape(-1, x.shape[-1])
        y = _layer_norm(rows, params["scale"], params["bias"], self._epsilon, dtype)
        return y.reshape(x.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _layer_norm(x, scale, bias, epsilon, dtype) -> Float[Array, "R D"]:
    return _forward(x, scale, bias, epsilon, dtype)[0]


def _forward(x, scale, bias, epsilon, dtype):
    y, _ = _standardized(x, epsilon)
    return (y * scale + bias).astype(dtype), (x, scale)


def _backward(epsilon, dtype, residuals, d_out):
    """With y the standardised rows, dx is dy without its parts along 1 and y, over the deviation.

    Written out, because JAX's own takes half as many passes over the rows again.
    """
    x, scale = residuals
    y, inverse = _standardized(x, epsilon)
    d_out = d_out.astype(jnp.float32)
    dy = d_out * scale
    dx = (dy - dy.mean(axis=-1, keepdims=True) - y * mean_product(y, dy)) * inverse
    return dx.astype(x.dtype), jnp.sum(d_out * y, axis=0), jnp.sum(d_out, axis=0)


_layer_norm.defvjp(_forward, _backward)


def _standardized(x, epsilon) -> tuple[Float[Array, "R D"], Float[Array, "R 1"]]:
    """Rows of mean 0 and variance 1, and one over the deviation they had."""
    centred = x.astype(jnp.float32)
    centred = centred - centred.mean(axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(mean_product(centred, centred) + epsilon)
    return centred * inverse, inverse
