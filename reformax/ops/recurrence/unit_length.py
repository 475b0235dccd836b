"""Queries and keys of unit length, as the delta rule has them (Yang et al. 2024, sec. 3.3).

Array operations normalise the inputs of a recurrence. Kernels take the results and the rows'
factors, and their gradients are those of the rows before: with `y = f x`, a scale s of y and the
epsilon of its square length, `dx = f (dy - y (y . dy) / s^2)`. The product of a query and its
gradient is that of its output and its gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from reformax.ops.numerics.normalization import length_normalize
from reformax.ops.numerics.precision import accum_dtype
from reformax.ops.recurrence.chunks import RecurrenceInputs

EPSILON = 1e-6  # of the square length


class UnitRows(NamedTuple):
    """The arrays that the gradient of normalised queries and keys reads."""

    q: Float[Array, "B T N"]  # the queries' factors, with that of `scaled`
    k: Float[Array, "B T N"]  # the keys' factors
    out: Float[Array, "B T N V"] | None = None  # the outputs of the recurrence


def of_unit_length(x: RecurrenceInputs) -> RecurrenceInputs:
    """The inputs with keys of length 1, and queries of length 1 that are then `scaled`."""
    q, k = (_unit_length(y).astype(x.v.dtype) for y in x[:2])
    return x._replace(q=scaled(q), k=k)


def with_factors(x: RecurrenceInputs) -> tuple[RecurrenceInputs, UnitRows]:
    """`of_unit_length` with queries rounded once, not twice, and the factors of the rows."""
    size = x.q.shape[-1]
    wide = [y.astype(accum_dtype(y.dtype)) for y in x[:2]]
    factors = [lax.rsqrt(jnp.sum(y * y, axis=-1, keepdims=True) + EPSILON) for y in wide]
    factors[0] = factors[0] * size**-0.5
    q, k = ((y * f).astype(x.v.dtype) for y, f in zip(wide, factors, strict=True))
    return x._replace(q=q, k=k), UnitRows(*(f[..., 0] for f in factors))


def scaled(q: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
    """Queries divided by the square root of their size, as in softmax attention."""
    return (q.astype(accum_dtype(q.dtype)) * q.shape[-1] ** -0.5).astype(q.dtype)


def _unit_length(x: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
    """Vectors of length 1, float32 or wider."""
    size = x.shape[-1]
    return length_normalize(x.astype(accum_dtype(x.dtype)), EPSILON / size) * size**-0.5
