"""The position-wise feed-forward layer, whole or in chunks of the sequence (Reformer, sec. 3)."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from reformax.layers._trax import Layer
from reformax.layers.dropout import check_mode, check_rate, dropout

glorot = jax.nn.initializers.glorot_uniform()


class FeedForward(Layer):
    """`activation(x w1 + b1) w2 + b2` at each position, `[B, T, D] -> [B, T, D]`.

    Computes in the dtype of its input. Weights: `w1 [D, F]`, `b1 [F]`, `w2 [F, D]`, `b2 [D]`.
    """

    def __init__(
        self,
        d_ff: int,
        dropout: float = 0.0,
        hidden_dropout: float = 0.0,
        activation: Callable[[Array], Array] = jax.nn.gelu,
        chunk_size: int = 0,
        mode: str = "train",
    ):
        """Args:
        d_ff: F, the width of the hidden layer.
        dropout: the rate on the output.
        hidden_dropout: the rate on the hidden layer.
        activation: the nonlinearity.
        chunk_size: if > 0, this many positions at a time, so that no `[T, F]` array exists in
          either pass. Any length goes. Hidden dropout then draws its masks chunk by chunk.
        mode: "train" or "eval"; dropout is off at evaluation.
        """
        super().__init__()
        if d_ff < 1:
            raise ValueError(f"d_ff is {d_ff}: expected at least 1")
        if chunk_size < 0:
            raise ValueError(f"chunk_size is {chunk_size}: expected 0 (no chunks) or more")
        self._d_ff = d_ff
        self._dropout = check_rate("dropout", dropout)
        self._hidden_dropout = check_rate("hidden_dropout", hidden_dropout)
        self._activation = activation
        self._chunk_size = chunk_size
        self._mode = check_mode(mode)

    def init_params(self, rng, shape):
        d_model = shape[-1]
        rng1, rng2 = jax.random.split(rng)
        return {
            "w1": glorot(rng1, (d_model, self._d_ff)),
            "b1": jnp.zeros(self._d_ff),
            "w2": glorot(rng2, (self._d_ff, d_model)),
            "b2": jnp.zeros(d_model),
        }

    def apply(self, params, x: Float[Array, "B T D"], rng=None) -> Float[Array, "B T D"]:
        params = jax.tree.map(lambda w: w.astype(x.dtype), params)
        train = self._mode == "train"
        hidden_rate = self._hidden_dropout if train else 0.0
        output_rate = self._dropout if train else 0.0
        hidden_rng, output_rng = (None, None) if rng is None else jax.random.split(rng)

        def at_positions(x, rng):
            hidden = self._activation(x @ params["w1"] + params["b1"])
            hidden = dropout(hidden, hidden_rate, rng)
            return hidden @ params["w2"] + params["b2"]

        length, size = x.shape[1], self._chunk_size
        if size == 0 or size >= length:
            return dropout(at_positions(x, hidden_rng), output_rate, output_rng)
        n_chunks = -(-length // size)
        padded = jnp.pad(x, ((0, 0), (0, n_chunks * size - length), (0, 0)))
        chunks = jnp.moveaxis(padded.reshape(x.shape[0], n_chunks, size, -1), 1, 0)

        @jax.checkpoint
        def one_chunk(index_and_x):
            index, x = index_and_x
            return at_positions(x, None if rng is None else jax.random.fold_in(hidden_rng, index))

        out = jax.lax.map(one_chunk, (jnp.arange(n_chunks), chunks))
        out = jnp.moveaxis(out, 0, 1).reshape(padded.shape)[:, :length]
        return dropout(out, output_rate, output_rng)
