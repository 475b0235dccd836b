"""Positions of tokens that are added to the stream: axial embeddings, and sinusoids.

No model is tied to the length it was trained at: axial embeddings hold any length up to the
product of their shape, sinusoids any length at all; so do rotary positions, `ops.numerics.rotary`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from reformax.declared import Positive, SettingError, Size, check_all, hints_of
from reformax.layers.base import Layer, check_shape
from reformax.ops.numerics.arrays import check_floats
from reformax.ops.numerics.rotary import angles_at

# The standard deviation of fresh embeddings: more than one layer adds to the stream, so that the
# first layers learn from the tokens and not from each other's noise.
EMBEDDING_SCALE = 0.3


class AxialPositionalEncoding(Layer):
    """Adds learned embeddings of a position's coordinates in a grid (Ho et al. 2019).

    Position t has the coordinates of t in a row-major grid of `shape`, and the embedding of each
    coordinate fills its part of the D features. With two axes, sqrt(T) vectors of each tell T
    positions apart. `[B, T, D] -> [B, T, D]`. Weights: one `[shape_i, d_i]` per axis.
    """

    needs_past = True

    def __init__(
        self, shape: Sequence[Size], d_embs: Sequence[Size], init_std: Positive = EMBEDDING_SCALE
    ):
        """Args:
        shape: the grid; its product is the largest length.
        d_embs: the features of each axis; they add up to D.
        init_std: the standard deviation of fresh embeddings.

        Raises:
          SettingError: not as many sizes of features as axes.
        """
        super().__init__()
        if not shape or len(shape) != len(d_embs):
            raise SettingError(
                f"shape {tuple(shape)} and d_embs {tuple(d_embs)}: expected as many sizes as axes, "
                "of a model in pos_axial_shape and pos_d_axial_embs"
            )
        check_all(hints_of(AxialPositionalEncoding), locals())
        self._shape = tuple(shape)
        self._d_embs = tuple(d_embs)
        self._init_std = init_std

    def init_params(self, rng, shape):
        check_shape(shape)
        if shape[-1] != sum(self._d_embs):
            raise SettingError(
                f"d_embs {self._d_embs} add up to {sum(self._d_embs)}: expected {shape[-1]}"
            )
        rngs = jax.random.split(rng, len(self._shape))
        return {
            f"axis_{i}": self._init_std * jax.random.normal(r, (n, d))
            for i, (r, n, d) in enumerate(zip(rngs, self._shape, self._d_embs, strict=True))
        }

    @property
    def max_length(self) -> int:
        """The grid's size."""
        return math.prod(self._shape)

    def apply_at(
        self, params, x: Float[Array, "B C D"], position: Int[Array, "B C"]
    ) -> Float[Array, "B C D"]:
        """The layer at any positions below the grid's size."""
        check_floats("x", x, "batch", "length", sum(self._d_embs))
        coordinates = jnp.unravel_index(position, self._shape)
        parts = [params[f"axis_{i}"][c] for i, c in enumerate(coordinates)]
        return x + jnp.concatenate(parts, axis=-1).astype(x.dtype)

    def apply(self, params, x: Float[Array, "B T D"], rng=None) -> Float[Array, "B T D"]:
        check_floats("x", x, "batch", "length", sum(self._d_embs))
        length = x.shape[1]
        if length > self.max_length:
            raise SettingError(
                f"axial positions of shape {self._shape} hold {self.max_length} positions, not "
                f"{length}: enlarge the shape or shorten the sequence"
            )
        grid = [params[f"axis_{i}"] for i in range(len(self._shape))]
        # Only those rows of the first axis that the length reaches.
        rows = -(-length // math.prod(self._shape[1:]))
        sizes = (rows, *self._shape[1:])
        parts = []
        for axis, table in enumerate(grid):
            table = table[: sizes[axis]]
            index = [None] * len(sizes) + [slice(None)]
            index[axis] = slice(None)
            # One copy for the batch and the other axes: a table's gradient is one sum, of which
            # devices with different rows exchange [n, d], not [T, D].
            copies = jnp.broadcast_to(table[tuple(index)], (len(x), *sizes, table.shape[-1]))
            parts.append(copies.astype(x.dtype))
        embedding = jnp.concatenate(parts, axis=-1).reshape(len(x), -1, x.shape[-1])
        return x + embedding[:, :length]


class SinusoidalPositionalEncoding(Layer):
    """Adds sines and cosines of geometric wavelengths (Vaswani et al. 2017, sec. 3.5).

    `[B, T, D] -> [B, T, D]`, without weights.
    """

    max_length = None
    needs_past = True

    def apply_at(
        self, params, x: Float[Array, "B C D"], position: Int[Array, "*B C"]
    ) -> Float[Array, "B C D"]:
        """The layer at any positions."""
        check_floats("x", x, "batch", "length", "features")
        d_model = x.shape[-1]
        angle = angles_at(position, -(-d_model // 2))
        table = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)[..., :d_model]
        return x + table.astype(x.dtype)

    def apply(self, params, x: Float[Array, "B T D"], rng=None) -> Float[Array, "B T D"]:
        check_floats("x", x, "batch", "length", "features")
        return self.apply_at(params, x, jnp.arange(x.shape[1])[None])
