"""The dtypes that sums are accumulated in, and products with such sums."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

# What an indexer rounds its vectors to, in arrays of float32.
IndexDtype = Literal["float32", "bfloat16"]


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


def rounded(x: Float[Array, "*d"], dtype: IndexDtype) -> Float[Array, "*d"]:
    """Index queries or keys rounded to `dtype`; the gradient is that of what is not rounded."""
    return x if dtype == "float32" else _to_bfloat16(x)


@jax.custom_jvp
def _to_bfloat16(x: Float[Array, "*d"]) -> Float[Array, "*d"]:
    return lax.reduce_precision(x, 8, 7)  # XLA may leave out a cast there and back


_to_bfloat16.defjvp(lambda x, dx: (_to_bfloat16(*x), *dx))


def in_three(x: Float[Array, "*d"], dtype: Any) -> tuple[Float[Array, "*d"], ...]:
    """Splits numbers of float32 into three parts of a narrower dtype, whose sum they are.

    Three bfloat16 have the digits of one float32, and float32 holds the product of two bfloat16
    exactly. A selection by products of parts is therefore that by products in float32.
    """
    digits, parts, rest = jnp.finfo(dtype), [], x
    for _ in range(3):
        # XLA may leave out a cast there and back.
        part = lax.reduce_precision(rest, digits.nexp, digits.nmant)
        parts.append(part.astype(dtype))
        rest = rest - part
    return tuple(parts)
