"""Keeps what is no number to the rows that see it.

A weight of 0 keeps nothing out of a sum, for 0 times NaN is NaN. Products therefore read `finite`
vectors. A row that sees one that is not finite has a NaN logit in its place: a mask hides it from
the others, and the row's softmax is NaN. Such a row has no gradient. So it is with a position that
sees itself alone, in a call and in a step of decoding; the kernels of attention in chunks, for
finite values, leave it its own value. Of what else a step sees `ops.decoding.cache.attend_to`
tells.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def finite(x: Float[Array, "*d"]) -> Float[Array, "*d"]:
    """`x` with zeros in the place of NaN and infinities."""
    return jnp.where(jnp.isfinite(x), x, 0)


def is_finite(*vectors: Float[Array, "*d H"] | None) -> Bool[Array, "*d 1"]:
    """Whether all numbers of a position's vectors are finite; None is no vector."""
    each = (jnp.isfinite(x).all(axis=-1, keepdims=True) for x in vectors if x is not None)
    whole = next(each)
    for other in each:
        whole = whole & other
    return whole


def marked(x: Float[Array, "*d H"], *others: Float[Array, "*d V"]) -> Float[Array, "*d H"]:
    """`x` with NaN in the vectors of positions where it, or one of `others`, is not finite."""
    return jnp.where(is_finite(x, *others), x, jnp.nan)
