"""Layer normalisation (Ba et al. 2016) with float32 statistics."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from reformax.layers._trax import Layer
from reformax.ops.base import length_normalize


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
        # One row a position: XLA's CPU backend sums over two leading axes ten times slower.
        x32 = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
        centred = x32 - x32.mean(axis=-1, keepdims=True)
        y = length_normalize(centred, self._epsilon) * params["scale"] + params["bias"]
        return y.reshape(x.shape).astype(self._dtype or x.dtype)
