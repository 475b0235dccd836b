"""The position-wise feed-forward layer, whole or in chunks of the sequence (Reformer, sec. 3)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from reformax import devices
from reformax.declared import Count, Positive, Rate, SettingError, Size, check_fields
from reformax.layers._trax import Layer
from reformax.layers.dropout import check_rng, dropout, rate_in
from reformax.layers.float8 import product
from reformax.layers.matrices import IN_KERNELS, Unnormed, affine, check_input, transposed_on_gpu
from reformax.ops.calls.dispatch import INTERPRETED, KERNELS, check_impl, choose_impl
from reformax.ops.numerics.precision import accum_dtype
from reformax.ops.softmax.dropout import seed_words

glorot = jax.nn.initializers.glorot_uniform()


@jax.custom_vjp
def _narrow(x: Float[Array, "*d F"], w: Float[Array, "F D"]) -> Float[Array, "*d D"]:
    """`x @ w` for `F` greater than `D`.

    On a CPU the gradient of `w` copies its left operand to transpose it. `(dy^T x)^T` copies the
    narrow operand; the barrier keeps the compiler from turning it back into `x^T dy`.
    """
    return x @ w


def _narrow_vjp(residuals, dy):
    x, w = residuals
    rows = tuple(range(x.ndim - 1))
    dw = jax.lax.optimization_barrier(jnp.tensordot(dy, x, (rows, rows))).T
    return dy @ w.T, dw


_narrow.defvjp(lambda x, w: (x @ w, (x, w)), _narrow_vjp)


# The sizes for which "auto" takes the kernel. With few numbers XLA fuses all but the products; more
# than `MOST` were never tested.
LEAST_SIZE, MOST = 2**20, 2**31


@dataclasses.dataclass(eq=False, repr=False)
class FeedForward(Layer):
    """`activation(x w1 + b1) w2 + b2` at each position, `[B, T, D] -> [B, T, D]`.

    Computes in the dtype of its input. Weights: `w1 [D, F]`, `b1 [F]`, `w2 [F, D]`, `b2 [D]`.

    Args:
      d_ff: F, the width of the hidden layer.
      dropout: the rate on the output.
      hidden_dropout: the rate on the hidden layer.
      activation: the nonlinearity.
      chunk_size: if > 0, this many positions at a time, so that no `[T, F]` array exists in either
        pass. The result is the same, and any length fits.
      mode: "train" or "eval"; dropout is off at evaluation.
      impl: of the hidden layer. "xla" runs everywhere; "pallas" is a kernel for `jax.nn.gelu` and
        `jax.nn.relu` on NVIDIA GPUs of Ampere or later. "auto" takes the kernel on one such GPU for
        bfloat16 and float16.
      init_std: the standard deviation of fresh weights; None: Glorot and Bengio's bounds.
      float8: whether both products multiply FP8 numbers in training (`layers.float8`).
    """

    d_ff: Size
    dropout: Rate = 0.0
    hidden_dropout: Rate = 0.0
    activation: Callable[[Array], Array] = jax.nn.gelu
    chunk_size: Count = 0
    mode: Literal["train", "eval"] = "train"
    impl: str = "auto"
    init_std: Positive | None = None
    float8: bool = False

    def __post_init__(self):
        super().__init__()
        check_fields(self)
        check_impl(self.impl, *KERNELS)
        if self.impl in KERNELS and self.activation not in IN_KERNELS:
            raise SettingError(
                f"impl is {self.impl!r} and activation {self.activation}: expected jax.nn.gelu or "
                "jax.nn.relu, or impl='auto'"
            )
        normal = jax.nn.initializers.normal
        self._initializer = glorot if self.init_std is None else normal(self.init_std)
        self._float8 = self.float8 and self.mode == "train"

    @property
    def drops(self) -> bool:
        return rate_in(self.mode, max(self.dropout, self.hidden_dropout)) > 0.0

    def init_params(self, rng, shape):
        d_model = shape[-1]
        rng1, rng2 = jax.random.split(rng)
        return {
            "w1": self._initializer(rng1, (d_model, self.d_ff)),
            "b1": jnp.zeros(self.d_ff),
            "w2": self._initializer(rng2, (self.d_ff, d_model)),
            "b2": jnp.zeros(d_model),
        }

    def cast(self, params, dtype: str):
        """The weights, those of the two products in `dtype`, as `apply_chunk` needs them.

        FP8 products round the weights themselves.
        """
        if self._float8:
            return params
        return params | {name: params[name].astype(dtype) for name in ("w1", "w2")}

    def for_decoding(self, params, dtype: str):
        """The weights for `step`, in `dtype`, matrices `transposed_on_gpu`."""
        cast = jax.tree.map(lambda w: w.astype(dtype), params)
        return cast | {name: transposed_on_gpu(cast[name]) for name in ("w1", "w2")}

    def step(
        self,
        params,
        x: Float[Array, "B T D"] | Unnormed,
        added: Float[Array, "B T D"] | None = None,
    ) -> Float[Array, "B T D"]:
        """`apply` with the weights from `for_decoding`, added to a stream if there is one."""
        (hidden,) = affine(
            x, params["w1"], params["b1"], activation=self.activation, impl=self.impl
        )
        return affine(hidden, params["w2"], params["b2"], added=added, impl=self.impl)[0]

    def _check(self, params, x) -> None:
        """Raises `ValueError` unless weights and an input fit each other."""
        d_model = params["b2"].shape[0]
        check_input(x, d_model)
        if params["w1"].shape != (d_model, self.d_ff):
            raise ValueError(
                f"params['w1'] has shape {params['w1'].shape}: expected [d_model, d_ff], "
                f"{(d_model, self.d_ff)}"
            )

    def apply_chunk(
        self, params, x: Float[Array, "B C D"], start: int | Int[Array, ""] = 0, rng=None
    ) -> Float[Array, "B C D"]:
        """The layer at the positions `start` to `start + C` of a sequence."""
        self._check(params, x)
        hidden_rng, output_rng = (None, None) if rng is None else jax.random.split(rng)
        params = self.cast(params, x.dtype)
        # Products in the dtype of `x`; float32 between them is never stored.
        multiply = product if self._float8 else jnp.matmul
        out = self._activated(params, multiply(x, params["w1"]), start, hidden_rng)
        # In the dtype of the product, a bias is added in its kernel on a GPU.
        out = out + params["b2"][None, None].astype(x.dtype)
        return dropout(out, rate_in(self.mode, self.dropout), output_rng, start=start)

    def _activated(self, params, pre: Float[Array, "B C F"], start, rng) -> Float[Array, "B C D"]:
        """Bias, activation, dropout and the second product, from the output of the first."""
        rate = rate_in(self.mode, self.hidden_dropout)
        narrow = pre.dtype in (jnp.bfloat16, jnp.float16)
        pays = narrow and LEAST_SIZE <= pre.size < MOST and self.activation in IN_KERNELS
        of_float64 = f"inputs of {pre.dtype}" if pre.dtype == jnp.float64 else None
        chosen = choose_impl(self.impl, pays, pallas=of_float64) if pre.size else "xla"
        if chosen == "xla":
            hidden = self.activation(pre.astype(accum_dtype(pre.dtype)) + params["b1"][None, None])
            hidden = dropout(hidden, rate, rng, start=start).astype(pre.dtype)
            return (product if self._float8 else _narrow)(hidden, params["w2"])
        from reformax.layers.kernels import feed_forward as kernel

        options = kernel.FeedForwardOptions(
            self.activation, pre.shape[1], rate, self._float8, chosen == INTERPRETED
        )

        def project(first, pre, b1, w2, start, rng):
            seed = seed_words(rng, len(pre)) if rate else None
            rows = pre.reshape(-1, pre.shape[-1])
            out = kernel.project(
                options, kernel.FeedForwardInputs(rows, b1, seed, start + first), w2
            )
            return out.reshape(*pre.shape[:-1], -1)

        start = jnp.reshape(jnp.asarray(start, jnp.int32), 1)
        rng = check_rng(rng, rate) if rate else None
        return devices.by_positions(project, (pre,), (params["b1"], params["w2"], start, rng))

    def apply(self, params, x: Float[Array, "B T D"], rng=None) -> Float[Array, "B T D"]:
        self._check(params, x)
        size = self.chunk_size
        if size == 0 or size >= x.shape[1]:
            return self.apply_chunk(params, x, rng=rng)
        return devices.by_positions(self._in_chunks, (x,), (params, rng))

    def _in_chunks(self, first, x: Float[Array, "B T D"], params, rng) -> Float[Array, "B T D"]:
        """The layer at the positions from `first` on, in chunks of them."""
        length, size = x.shape[1], min(self.chunk_size, x.shape[1])
        n_chunks = -(-length // size)
        padded = jnp.pad(x, ((0, 0), (0, n_chunks * size - length), (0, 0)))
        chunks = jnp.moveaxis(padded.reshape(x.shape[0], n_chunks, size, -1), 1, 0)

        @jax.checkpoint
        def one_chunk(start_and_x):
            start, x = start_and_x
            return self.apply_chunk(params, x, first + start, rng)

        out = jax.lax.map(one_chunk, (size * jnp.arange(n_chunks), chunks))
        return jnp.moveaxis(out, 0, 1).reshape(padded.shape)[:, :length]
