"""Positions as a bias of the logits, by how far a key is from its query: ALiBi and T5's.

An algorithm needs `bias`. The bias of a call is an array of each head, query and key.
"""

from __future__ import annotations

import math
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

# Raffel et al. 2020 have 32 numbers a head, and tell distances apart up to 128.
N_BUCKETS, MAX_DISTANCE = 32, 128

PositionBias = Literal["alibi", "t5"]


def slopes(n_heads: int) -> Float[np.ndarray, " N"]:
    """ALiBi's slope of each head (Press et al. 2022, sec. 3): `2^(-8 i / N)` for i from 1 to N.

    Where N is no power of two, the next lower power's slopes come first, and then every other one
    of twice that power, as in the paper's code.
    """
    whole = 2 ** int(math.log2(n_heads))
    first = 2.0 ** (-8 * np.arange(1, whole + 1) / whole)
    between = 2.0 ** (-8 * np.arange(1, 2 * whole + 1, 2) / (2 * whole))
    return np.concatenate([first, between])[:n_heads].astype(np.float32)


def buckets(ahead: Int[Array, "*d"], causal: bool) -> Int[Array, "*d"]:
    """T5's bucket of a key `ahead` positions after its query, or before it if negative.

    Raffel et al. 2020, sec. 2.1: small distances have a bucket each, greater ones share buckets
    whose width grows with the distance. If not causal, keys ahead have the upper half of them.
    """
    n_buckets = N_BUCKETS if causal else N_BUCKETS // 2
    offset = 0 if causal else jnp.where(ahead > 0, n_buckets, 0)
    distance = jnp.maximum(-ahead, 0) if causal else jnp.abs(ahead)
    n_exact = n_buckets // 2
    ratio = jnp.log(jnp.maximum(distance, n_exact).astype(jnp.float32) / n_exact)
    further = ratio / math.log(MAX_DISTANCE / n_exact) * (n_buckets - n_exact)
    far = n_exact + further.astype(jnp.int32)
    return offset + jnp.where(distance < n_exact, distance, jnp.minimum(far, n_buckets - 1))


def position_bias(
    kind: PositionBias,
    table: Float[Array, "32 N"] | None,
    n_heads: int,
    query: Int[Array, "B T"],
    key: Int[Array, "B S"],
    causal: bool,
) -> Float[Array, "B N T S"]:
    """The bias that is added to the logits of queries and keys at these positions.

    Args:
      kind: "alibi": minus the distance times the head's slope; "t5": a number of the distance's
        bucket.
      table: T5's numbers.
      n_heads: N.
      query: the positions of queries.
      key: those of keys.
      causal: whether keys ahead are hidden.
    """
    ahead = key[:, None, :] - query[:, :, None]
    if kind == "alibi":
        slope = jnp.asarray(slopes(n_heads))[None, :, None, None]
        return -slope * jnp.abs(ahead).astype(jnp.float32)[:, None]
    return jnp.moveaxis(table[buckets(ahead, causal)], -1, 1)
