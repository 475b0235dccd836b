"""Layer normalisation (Ba et al. 2016) and RMSNorm, with float32 statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from reformax import devices
from reformax.declared import NonNegative, SettingError, check
from reformax.layers.base import Layer, check_shape
from reformax.ops.calls.dispatch import INTERPRETED, KERNELS, check_impl, choose_impl
from reformax.ops.numerics.arrays import check_floats
from reformax.ops.numerics.normalization import length_normalize

# The sizes for which "auto" takes the kernel. XLA fuses the norm of fewer rows than `LEAST_ROWS`,
# but makes three kernels of a single one's, as in a step of decoding. More than `MOST` numbers were
# never tested.
LEAST_ROWS, MOST = 4096, 2**31


class LayerNorm(Layer):
    """`(x - mean) / sqrt(variance + epsilon) * scale + bias` over the last axis, `[..., D]`.

    Ba et al. 2016, "Layer Normalization", sec. 3. Mean and variance are float32 for any input
    dtype, so that bfloat16 sublayers can read a float32 stream. Weights: `scale` and `bias`, `[D]`.
    """

    def __init__(self, epsilon: float = 1e-6, dtype: str | None = None, impl: str = "auto"):
        """Args:
        epsilon: added to the variance.
        dtype: of the output, such as "bfloat16"; None: that of the input.
        impl: "xla" runs everywhere; "pallas" is a kernel for NVIDIA GPUs of Ampere or later. "auto"
          takes the kernel on one such GPU for many rows, and for a single one.

        Raises:
          SettingError: an epsilon below 0, a dtype that is not of floats, or an unknown `impl`.
        """
        super().__init__()
        check("epsilon", epsilon, NonNegative)
        if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
            raise SettingError(f"dtype is {dtype!r}: expected one of floats, such as 'bfloat16'")
        check_impl(impl, *KERNELS)
        self._epsilon = epsilon
        self._dtype = dtype
        self._impl = impl

    @property
    def epsilon(self) -> float:
        """The number that is added to the variance."""
        return self._epsilon

    def init_params(self, rng, shape):
        check_shape(shape)
        return {"scale": jnp.ones(shape[-1:]), "bias": jnp.zeros(shape[-1:])}

    @staticmethod
    def factors(params: dict[str, Array]) -> dict[str, Array]:
        """The weights as the equation has them."""
        return params

    def apply(self, params, x: Float[Array, "*d D"], rng=None) -> Float[Array, "*d D"]:
        check_floats("x", x)
        return self.of_sum(params, x, None, self._dtype or x.dtype)[0]

    def of_sum(
        self,
        params,
        x: Float[Array, "*d D"],
        y: Float[Array, "*d D"] | None,
        *dtypes: Any,
        y_bias: Float[Array, " D"] | None = None,
    ) -> tuple[Float[Array, "*d D"], ...]:
        """The norm of `x + y + y_bias` in each of the dtypes. The sum is float32; None is 0.

        A bias is that of `y`: without `y` there is none.
        """
        return self._norms(params, x, y, dtypes, y_bias)[0]

    def with_residual(
        self,
        params,
        x: Float[Array, "*d D"],
        y: Float[Array, "*d D"] | None = None,
        y_bias: Float[Array, " D"] | None = None,
    ) -> tuple[Float[Array, "*d D"], Float[Array, "*d D"]]:
        """The norm of `x + y + y_bias`, and the sum, in the dtype of `x`, for its other readers.

        The kernel's two passes add these, and the gradients of both results.
        """
        (out,), x = self._norms(params, x, y, (self._dtype or x.dtype,), y_bias, pass_on=True)
        return out, x

    def _norms(self, params, x, y, dtypes: tuple, y_bias=None, pass_on: bool = False):
        """The norms of the sum, and the sum if `pass_on`, which says that it has other readers."""
        if x.shape[-1:] != params["scale"].shape:
            raise ValueError(f"x has shape {x.shape}: expected [..., {params['scale'].size}]")
        dtypes = tuple(jnp.dtype(dtype) for dtype in dtypes)
        y_bias = None if y is None else y_bias
        weights = self.factors(params)["scale"], params.get("bias"), y_bias
        size = x.shape[-1]
        pays = LEAST_ROWS * size <= x.size < MOST or x.size == size
        chosen = choose_impl(self._impl, pays, pallas=None) if x.size else "xla"
        if pass_on and y is not None and chosen == "xla":
            x, y, weights = _sum(x, y, y_bias, x.dtype), None, (*weights[:2], None)

        def normalize(first, x, y, *weights):
            del first
            inputs = _rows(x), _rows(y), *weights
            if chosen == "xla":
                outputs = _in_array_operations(self._epsilon, dtypes, *inputs)
                return tuple(out.reshape(x.shape) for out in outputs), x
            from reformax.layers.kernels import layer_norm as kernel

            options = kernel.LayerNormOptions(self._epsilon, dtypes, pass_on, chosen == INTERPRETED)
            found = kernel.normalize(options, kernel.LayerNormInputs(*inputs))
            return jax.tree.map(lambda z: z.reshape(x.shape), found)

        if chosen == "xla" and devices.n_sequence_shards() == 1:
            return normalize(0, x, y, *weights)
        # XLA would gather sequences to make rows of them.
        outputs, passed = devices.by_positions(normalize, (x, y), weights)
        return outputs, passed if pass_on and chosen != "xla" else x


class RMSNorm(LayerNorm):
    """`x / sqrt(mean(x^2) + epsilon) * scale` over the last axis, `[..., D]`.

    Zhang & Sennrich 2019, "Root Mean Square Layer Normalization", eq. 4. Arguments and methods are
    those of `LayerNorm`; it subtracts no mean and adds no bias. Weights: `scale [D]`.
    """

    def init_params(self, rng, shape):
        check_shape(shape)
        return {"scale": jnp.ones(shape[-1:])}


class RMSPlusOne(RMSNorm):
    """`RMSNorm` whose weights are the scale minus 1, and begin at 0.

    Gemma Team 2024, "Gemma: Open Models Based on Gemini Research and Technology", and its code.
    """

    def init_params(self, rng, shape):
        check_shape(shape)
        return {"scale": jnp.zeros(shape[-1:])}

    @staticmethod
    def factors(params):
        return {"scale": 1 + params["scale"]}


class NoNorm(LayerNorm):
    """The input as it is, in the dtype of a norm: for the place where a design has no norm."""

    def init_params(self, rng, shape):
        return {}

    def _norms(self, params, x, y, dtypes, y_bias=None, pass_on=False):
        x = _sum(x, y, y_bias, x.dtype)
        return tuple(x.astype(dtype) for dtype in dtypes), x


NORMS = {"layer": LayerNorm, "rms": RMSNorm, "rms_plus_one": RMSPlusOne}
NormName = Literal["layer", "rms", "rms_plus_one"]
# Norms of a sublayer's input, of its output, or of both.
NormPlace = Literal["input", "output", "both"]


def norm_places(given: NormPlace | Sequence[NormPlace], n: int) -> tuple[NormPlace, ...]:
    """The place of norms in each of n layers of a cycle, of one for all or as many.

    Raises:
      SettingError: there are more or fewer.
    """
    places = (given,) * n if isinstance(given, str) else tuple(given)
    if len(places) != n:
        raise SettingError(
            f"norm_place is {given} and the cycle has {n} layers: give one place for each, or one "
            "for all"
        )
    return places


def _rows(x: Float[Array, "*d D"] | None) -> Float[Array, "R D"] | None:
    return None if x is None else x.reshape(-1, x.shape[-1])


def _sum(x, y, y_bias, dtype: Any) -> Float[Array, "*d D"]:
    """`x + y + y_bias`, of which those that are None are left out."""
    total = x.astype(dtype)
    total = total if y is None else total + y.astype(dtype)
    if y_bias is None:
        return total
    return total + y_bias.astype(dtype).reshape((1,) * (x.ndim - 1) + y_bias.shape)


def _in_array_operations(
    epsilon: float, dtypes: tuple, x, y, scale, bias, y_bias
) -> tuple[Array, ...]:
    # One row a position: XLA's CPU backend sums over two leading axes ten times slower.
    x = _sum(x, y, y_bias, jnp.float32)
    if bias is None:
        out = length_normalize(x, epsilon) * scale[None]
    else:
        centred = x - x.mean(axis=-1, keepdims=True)
        out = length_normalize(centred, epsilon) * scale[None] + bias[None]
    return tuple(out.astype(dtype) for dtype in dtypes)
