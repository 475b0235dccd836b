"""The position-wise feed-forward layer, whole or in chunks of the sequence (Reformer, sec. 3)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from reformax import devices
from reformax.buffers import in_parts
from reformax.declared import Count, NonNegative, Positive, Rate, SettingError, Size, check_fields
from reformax.layers import float8
from reformax.layers.base import Layer, check_shape, check_weights
from reformax.layers.dropout import check_rng, dropout, rate_in
from reformax.layers.layer_norm import NORMS, NormName
from reformax.layers.matrices import IN_KERNELS, Unnormed, affine, products, transposed_on_gpu
from reformax.layers.rngs import split
from reformax.ops.calls.dispatch import INTERPRETED, KERNELS, check_impl, choose_impl
from reformax.ops.numerics.arrays import check_floats
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

    With `gated` the hidden layer is `activation(x w1 + b1) * (x w3 + b3)` (Shazeer 2020, "GLU
    Variants Improve Transformer", eq. 6; SwiGLU with silu). A third matrix is then in it, so that
    two thirds of the width have the same size. With `relu_squared` for the activation it is that of
    So et al. 2021, "Primer".

    Computes in the dtype of its input. Weights: `w1 [D, F]`, `b1 [F]`, `w2 [F, D]`, `b2 [D]`; with
    `gated` also `w3 [D, F]`, `b3 [F]`; without `bias` no `b`.

    Args:
      d_ff: F, the width of the hidden layer.
      dropout: the rate on the output.
      hidden_dropout: the rate on the hidden layer.
      activation: the nonlinearity.
      chunk_size: if > 0, this many positions at a time, so that no `[T, F]` array exists in either
        pass. The result is the same, and any length fits.
      mode: "train" or "eval"; dropout is off at evaluation.
      impl: of a hidden layer that is not gated. "xla" runs everywhere; "pallas" is a kernel for
        `jax.nn.gelu`, `jax.nn.relu` and `relu_squared` on NVIDIA GPUs of Ampere or later. "auto"
        takes the kernel on one such GPU for bfloat16 and float16.
      init_std: the standard deviation of fresh weights; None: Glorot and Bengio's bounds.
      float8: whether the products multiply FP8 numbers in training (`layers.float8`).
      amax_history: with `float8`, the steps whose largest numbers FP8's scales come from; 0: scales
        are those of the arrays themselves. The weights then have `amax_history`, a buffer a matrix.
      gated: whether a third product multiplies the hidden layer, as above.
      bias: whether the products have biases.
      output_norm: the norm of the output, which precedes its dropout, as of Gemma 2; None: none.
        Its weights are `output_norm`.
      norm_epsilon: added to the mean square in it.

    Raises:
      SettingError: an argument of another type or out of range, or an `impl` that computes no such
        layer.
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
    amax_history: Count = 0
    gated: bool = False
    bias: bool = True
    output_norm: NormName | None = None
    norm_epsilon: NonNegative = 1e-6

    def __post_init__(self):
        super().__init__()
        check_fields(self)
        check_impl(self.impl, *KERNELS)
        if self.impl in KERNELS and self.activation not in IN_KERNELS:
            raise SettingError(
                f"impl is {self.impl!r} and activation {self.activation}: expected jax.nn.gelu, "
                "jax.nn.relu or relu_squared, or impl='auto'"
            )
        if self.impl in KERNELS and self.gated:
            raise SettingError(
                f"impl is {self.impl!r} and gated is True, which no kernel computes: set "
                "impl='auto'"
            )
        normal = jax.nn.initializers.normal
        self._initializer = glorot if self.init_std is None else normal(self.init_std)
        float8.check_history(self.float8, self.amax_history)
        self._float8 = self.float8 and self.mode == "train"
        norm = self.output_norm
        self._norm = None if norm is None else NORMS[norm](self.norm_epsilon)

    @property
    def drops(self) -> bool:
        return rate_in(self.mode, max(self.dropout, self.hidden_dropout)) > 0.0

    def init_params(self, rng, shape):
        check_shape(shape)
        d_model = shape[-1]
        rng1, rng2 = jax.random.split(rng)
        rngs = {"1": rng1, "2": rng2}
        sizes = {"1": (d_model, self.d_ff), "2": (self.d_ff, d_model)}
        if self.gated:
            rngs["3"], sizes["3"] = jax.random.fold_in(rng, 3), sizes["1"]
        params = {f"w{i}": self._initializer(rngs[i], shape) for i, shape in sizes.items()}
        if self.bias:
            params |= {f"b{i}": jnp.zeros(shape[1]) for i, shape in sizes.items()}
        if self._norm is not None:
            params["output_norm"] = self._norm.init_params(None, (d_model,))
        if self.amax_history:
            seen = {f"w{i}": float8.history(self.amax_history) for i in sizes}
            params[float8.HISTORY] = seen
        return params

    def cast(self, params, dtype: str) -> dict[str, Any]:
        """The weights, those of the products in `dtype`, as `apply_chunk` needs them.

        FP8 products round the weights themselves.
        """
        if self._float8:
            return params
        return {name: w.astype(dtype) if name.startswith("w") else w for name, w in params.items()}

    def for_decoding(self, params, dtype: str) -> dict[str, Any]:
        """The weights for `step`, in `dtype`, matrices `transposed_on_gpu`.

        With `gated`, `w1` and `b1` have those of the third product after them.
        """
        kept = {"output_norm": params["output_norm"]} if self._norm else {}
        left_out = {*kept, float8.HISTORY}
        cast = {name: w.astype(dtype) for name, w in params.items() if name not in left_out} | kept
        if self.gated:
            cast |= {
                f"{x}1": jnp.concatenate([cast[f"{x}1"], cast.pop(f"{x}3")], axis=-1)
                for x in ("w", *("b" * self.bias))
            }
        return cast | {name: transposed_on_gpu(cast[name]) for name in ("w1", "w2")}

    def step(
        self,
        params,
        x: Float[Array, "B T D"] | Unnormed,
        added: Float[Array, "B T D"] | None = None,
    ) -> Float[Array, "B T D"]:
        """`apply` with the weights from `for_decoding`, added to a stream if there is one."""
        first = x, params["w1"], params.get("b1")
        if self.gated:
            pre, other = affine(*first, sizes=(self.d_ff, self.d_ff), impl=self.impl)
            hidden = self._gated(pre, other)
        else:
            (hidden,) = affine(*first, activation=self.activation, impl=self.impl)
        last = hidden, params["w2"], params.get("b2")
        if self._norm is None:
            return affine(*last, added=added, impl=self.impl)[0]
        out = self._norm.apply(params["output_norm"], affine(*last, impl=self.impl)[0])
        return out if added is None else added + out.astype(added.dtype)

    def _gated(self, pre: Float[Array, "*d F"], other: Float[Array, "*d F"], *biases: Array):
        """The hidden layer of two products, computed in float32 and rounded to their dtype."""
        gate, linear = (x.astype(accum_dtype(x.dtype)) for x in (pre, other))
        if biases:
            gate, linear = (x + b for x, b in zip((gate, linear), biases, strict=True))
        return (self.activation(gate) * linear).astype(pre.dtype)

    def _check(self, params, x) -> None:
        """Raises `ValueError` unless weights and an input fit each other."""
        numbers = "123" if self.gated else "12"
        check_weights(
            self, params, [kind + i for kind in ("w", *("b" * self.bias)) for i in numbers]
        )
        d_model = params["w2"].shape[1]
        check_floats("x", x, "batch", "length", d_model)
        if params["w1"].shape != (d_model, self.d_ff):
            raise ValueError(
                f"params['w1'] has shape {params['w1'].shape}: expected [d_model, d_ff], "
                f"{(d_model, self.d_ff)}"
            )

    def without_output_bias(self, params) -> tuple[dict[str, Array], Float[Array, " D"] | None]:
        """`Layer.without_output_bias`: `b2`, unless a norm or dropout follows it."""
        if not self.bias or self._norm is not None or rate_in(self.mode, self.dropout):
            return params, None
        return {**params, "b2": None}, params["b2"]

    def apply_chunk(
        self, params, x: Float[Array, "B C D"], start: int | Int[Array, ""] = 0, rng=None
    ) -> Float[Array, "B C D"]:
        """The layer at the positions `start` to `start + C` of a sequence."""
        self._check(params, x)
        hidden_rng, output_rng = split(rng, 2)
        params = self.cast(params, x.dtype)
        # Products in the dtype of `x`; float32 between them is never stored.
        chosen = "xla" if self.gated else self._implementation(x)
        if self.gated:
            out = self._through_gate(params, self._first(params, x), start, hidden_rng)
        elif chosen == "xla":
            out = self._activated(params, self._first(params, x)[0], start, hidden_rng)
        else:
            out = self._in_kernels(params, x, start, hidden_rng, chosen == INTERPRETED)
        if self.bias and params["b2"] is not None:
            # In the dtype of the product, a bias is added in its kernel on a GPU.
            out = out + params["b2"][None, None].astype(x.dtype)
        if self._norm is not None:
            out = self._norm.apply(params["output_norm"], out)
        return dropout(out, rate_in(self.mode, self.dropout), output_rng, start=start)

    def _first(self, params, x: Float[Array, "B C D"]) -> list[Float[Array, "B C F"]]:
        """The products of the input: one, or two of a gated layer."""
        names = ["w1", "w3"] if self.gated else ["w1"]
        if self._float8:
            return float8.named_products(params, x, {name: params[name] for name in names})
        return products(x, [params[name] for name in names])

    def _last(self, params, hidden: Float[Array, "B C F"]) -> Float[Array, "B C D"]:
        """The product of the hidden layer."""
        if self._float8:
            return float8.named_products(params, hidden, {"w2": params["w2"]})[0]
        return _narrow(hidden, params["w2"])

    def _through_gate(
        self, params, both: list[Float[Array, "B C F"]], start, rng
    ) -> Float[Array, "B C D"]:
        """What follows the first two products of a gated layer, without the last one's bias."""
        biases = [params[f"b{i}"][None, None] for i in (1, 3)] if self.bias else []
        # The gradient reads both products and not what is float32 between them.
        hidden = jax.checkpoint(self._gated, prevent_cse=False)(*both, *biases)
        hidden = dropout(hidden, rate_in(self.mode, self.hidden_dropout), rng, start=start)
        return self._last(params, hidden)

    def _implementation(self, x: Float[Array, "B C D"]) -> str:
        """That of the hidden layer: "xla", "pallas" or `INTERPRETED`."""
        size = math.prod(x.shape[:2]) * self.d_ff
        pays = x.dtype in (jnp.bfloat16, jnp.float16) and self.activation in IN_KERNELS
        of_float64 = f"inputs of {x.dtype}" if x.dtype == jnp.float64 else None
        pays = pays and LEAST_SIZE <= size < MOST
        return choose_impl(self.impl, pays, pallas=of_float64) if size else "xla"

    def _activated(self, params, pre: Float[Array, "B C F"], start, rng) -> Float[Array, "B C D"]:
        """Bias, activation, dropout and the second product, from the output of the first."""
        rate = rate_in(self.mode, self.hidden_dropout)
        x = pre.astype(accum_dtype(pre.dtype))
        hidden = self.activation(x + params["b1"][None, None] if self.bias else x)
        hidden = dropout(hidden, rate, rng, start=start).astype(pre.dtype)
        return self._last(params, hidden)

    def _in_kernels(
        self, params, x: Float[Array, "B C D"], start, rng, interpret: bool
    ) -> Float[Array, "B C D"]:
        """Both products and what is between them. With delayed scales all of it is one function."""
        from reformax.layers.kernels import feed_forward as kernel
        from reformax.layers.kernels import feed_forward_float8 as kernel_float8

        rate = rate_in(self.mode, self.hidden_dropout)
        options = kernel.FeedForwardOptions(
            self.activation, x.shape[1], rate, self._float8, interpret
        )
        delayed = self._float8 and float8.HISTORY in params

        def project(first, x, b1, weights, start, rng):
            seed = seed_words(rng, len(x)) if rate else None
            rows = x.reshape(-1, x.shape[-1])
            inputs = kernel.FeedForwardInputs(None, b1, seed, start + first)
            if delayed:
                *matrices, seen1, seen2 = weights
                weights = kernel_float8.Weights(*matrices, seen1.value, seen2.value)
                out = kernel_float8.apply(options, rows, inputs, weights)
            else:
                out = kernel.project(options, inputs._replace(pre=rows), *weights)
            return out.reshape(*x.shape[:-1], -1)

        start = jnp.reshape(jnp.asarray(start, jnp.int32), 1)
        rng = check_rng(rng, rate) if rate else None
        bias = params["b1"] if self.bias else jnp.zeros(self.d_ff)
        if delayed:
            seen = params[float8.HISTORY]
            weights = params["w1"], params["w2"], seen["w1"], seen["w2"]
        else:
            (x,), weights = self._first(params, x), (params["w2"],)
        return devices.by_positions(project, (x,), (bias, weights, start, rng))

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
        params = in_parts(params, n_chunks)

        @jax.checkpoint
        def one_chunk(start_and_x):
            start, x = start_and_x
            return self.apply_chunk(params, x, first + start, rng)

        out = jax.lax.map(one_chunk, (size * jnp.arange(n_chunks), chunks))
        return jnp.moveaxis(out, 0, 1).reshape(padded.shape)[:, :length]
