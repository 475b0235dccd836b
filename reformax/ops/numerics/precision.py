"""The precision of sums: accumulation dtypes, and products that are summed in them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


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

    Sums are returned as they are, or rounded to the dtype `written`: then a GPU's product writes
    them so, and no array has them in float32.
    """
    x, y = x.astype(dtype), y.astype(dtype)
    sums = accum_dtype(dtype)
    if jax.default_backend() == "cpu":  # which multiplies bfloat16 along the last axis alone
        x, y = x.astype(sums), y.astype(sums)
    elif written is not None:
        sums = written
    out = jnp.einsum(spec, x, y, precision=precision, preferred_element_type=sums)
    return out if written is None else out.astype(written)


def in_three(x: Float[Array, "*d"], dtype: Any) -> tuple[Float[Array, "*d"], ...]:
    """Numbers of float32 as sums of three of a narrower dtype.

    Three of bfloat16 have as many digits, and the product of two bfloat16 is exact in float32:
    products by parts choose what those of float32 do.
    """
    digits, parts, rest = jnp.finfo(dtype), [], x
    for _ in range(3):
        # Not by a cast there and back, which XLA may leave out.
        part = lax.reduce_precision(rest, digits.nexp, digits.nmant)
        parts.append(part.astype(dtype))
        rest = rest - part
    return tuple(parts)
