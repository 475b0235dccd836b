"""The dtypes that sums are accumulated in, and products with such sums."""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

# What an indexer rounds its vectors to, in arrays of float32.
IndexDtype = Literal["float32", "bfloat16"]
# The largest magnitude of an index vector's numbers, a power of two. Scores of such vectors, sums
# of products with a weight of about 1e9, are finite.
MAX_INDEX = 2.0**40


def accum_dtype(*dtypes: Any) -> Any:
    """The dtype of logits, softmax and sums: float32, or float64 for float64 inputs."""
    return jnp.float64 if any(dtype == jnp.float64 for dtype in dtypes) else jnp.float32


def product(
    spec: str,
    x: Array,
    y: Array,
    dtype: Any,
    precision: lax.Precision | None = None,
    written: Any = None,
) -> Array:
    """`einsum` of arrays rounded to `dtype`, summed in float32, or in float64 for float64.

    The result has the dtype of the sums, or `written`. A GPU's product then writes that dtype, and
    no array holds the sums in float32.
    """
    x, y = x.astype(dtype), y.astype(dtype)
    sums = accum_dtype(dtype)
    if jax.default_backend() == "cpu":  # XLA there multiplies bfloat16 along the last axis only
        x, y = x.astype(sums), y.astype(sums)
    elif written is not None:
        sums = written
    out = jnp.einsum(spec, x, y, precision=precision, preferred_element_type=sums)
    return out if written is None else out.astype(written)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def rounded(x: Float[Array, "*d"], dtype: IndexDtype) -> Float[Array, "*d"]:
    """Index queries or keys rounded to `dtype`, and clipped to `MAX_INDEX`.

    Infinity is then a number that kernels can split and that `0 * x` does not make NaN. The
    gradient is that of `x`.
    """
    x = jnp.clip(x, -MAX_INDEX, MAX_INDEX)
    # XLA may leave out a cast there and back.
    return lax.reduce_precision(x, 8, 7) if dtype == "bfloat16" else x


rounded.defjvp(lambda dtype, x, dx: (rounded(*x, dtype), *dx))


def in_three(x: Float[Array, "*d"], dtype: Any) -> tuple[Float[Array, "*d"], ...]:
    """Splits numbers of float32 into three parts of a narrower dtype, whose sum they are.

    Three bfloat16 have the digits of one float32, and float32 holds the product of two bfloat16
    exactly. A selection by products of parts is therefore that by products in float32. Infinity,
    which minus itself is NaN, becomes the largest number of `dtype`.
    """
    digits, parts = jnp.finfo(dtype), []
    rest = jnp.clip(x, float(digits.min), float(digits.max))
    for _ in range(3):
        # XLA may leave out a cast there and back.
        part = lax.reduce_precision(rest, digits.nexp, digits.nmant)
        parts.append(part.astype(dtype))
        rest = rest - part
    return tuple(parts)
