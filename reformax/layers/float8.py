"""Products of FP8 numbers, whose sums are wider: e4m3 forward, e5m2 for gradients.

Micikevicius et al. 2022, "FP8 Formats for Deep Learning": e4m3 has 3 bits of fraction and reaches
448; e5m2 has 2 and reaches 57,344. An array is multiplied by a scale that brings its largest finite
number near the end of the range, and rounded. Scales are powers of two, so that scaling rounds
nothing. Only numbers far below the largest one, by 2^-13 in e4m3 and 2^-28 in e5m2, lose more than
the format's fraction. A number that is not finite is NaN, in the products that read it.

XLA multiplies such operands by cuBLASLt's FP8 products, which take the scales; elsewhere they are
multiplied as what they are after rounding. The gradient of weights is no such product: cuBLASLt
wants both of its operands transposed, which takes longer than the product saves.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from reformax.declared import Unsupported
from reformax.ops.calls.dispatch import compute_capability

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
# The scaled maximum is below 2^TOP, and so is every number that rounds to it.
TOP = {E4M3: 8, E5M2: 15}


class Quantized(NamedTuple):
    """Numbers `values / scale`, of which `values` are FP8 and `scale` is a power of two."""

    values: Float[Array, "*d"]
    scale: Float[Array, ""]


def quantize(x: Float[Array, "*d"], dtype: Any) -> Quantized:
    """`x` rounded to FP8, and the scale of `x`."""
    finite = jnp.where(jnp.isfinite(x), jnp.abs(x), 0)
    largest = jnp.max(finite, initial=0).astype(jnp.float32)
    # The largest number is below 2^exponent. The product of two scales must have an inverse.
    _, exponent = jnp.frexp(largest)
    scale = jnp.ldexp(jnp.float32(1), jnp.clip(TOP[dtype] - exponent, -126, 60))
    scaled = x.astype(_scaled_in(x.dtype))
    return Quantized((scaled * scale.astype(scaled.dtype)).astype(dtype), scale)


def _scaled_in(dtype: Any) -> Any:
    """The dtype that holds numbers of another times their scale: float32 for float16."""
    return jnp.promote_types(dtype, jnp.bfloat16)


@jax.custom_vjp
def product(x: Float[Array, "*d K"], w: Float[Array, "K N"]) -> Float[Array, "*d N"]:
    """`x @ w` in the dtype of `x`, from both rounded to e4m3.

    The gradient of `x` multiplies the rounded `w` by that of the output, rounded to e5m2. The
    gradient of `w` multiplies what was not rounded, and has the dtype of `w`.

    Raises:
      NotImplementedError: a GPU that cannot multiply FP8 numbers.
    """
    return _forward(x, w)[0]


def _forward(x, w):
    check_device()
    narrow = quantize(w, E4M3)
    out = _contract(quantize(x, E4M3), narrow, (x.ndim - 1, 0), x.dtype)
    return out, (x, narrow, jnp.zeros(0, w.dtype))


def _backward(residuals, d_out):
    x, w, like_w = residuals
    rows = tuple(range(x.ndim - 1))
    d_w = jnp.tensordot(x, d_out, (rows, rows), preferred_element_type=like_w.dtype)
    return of_input(d_out, w), d_w


product.defvjp(_forward, _backward)


def of_input(d_out: Float[Array, "*d N"], w: Quantized) -> Float[Array, "*d K"]:
    """`d_out @ w.T`, the gradient of `x`, from `d_out` rounded to e5m2."""
    return _contract(quantize(d_out, E5M2), w, (d_out.ndim - 1, 1), d_out.dtype)


def _contract(x: Quantized, y: Quantized, axes: tuple[int, int], dtype: Any) -> Array:
    of_x, of_y = axes
    values = x.values, y.values
    if jax.default_backend() != "gpu":
        values = (z.astype(jnp.float32) for z in values)
    # XLA hands the factor behind an FP8 product to cuBLASLt, which scales before it rounds.
    axes, accum = (((of_x,), (of_y,)), ((), ())), _scaled_in(dtype)
    out = lax.dot_general(*values, axes, preferred_element_type=accum)
    return (out * (1 / (x.scale * y.scale)).astype(accum)).astype(dtype)


def check_device() -> None:
    """Raises `Unsupported` on a GPU without FP8 products; other machines round and multiply."""
    if jax.default_backend() != "gpu":
        return
    device = jax.local_devices()[0]
    if compute_capability(device) < 8.9:
        raise Unsupported(
            f"dtype is 'float8': the device {device.device_kind!r} does not multiply FP8 numbers, "
            "which takes an NVIDIA GPU of Ada, Hopper or later; use dtype='bfloat16'"
        )
