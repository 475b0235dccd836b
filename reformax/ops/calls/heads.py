"""Grouped-query attention: a head of keys and values for several of queries (Ainslie et al. 2023).

Key head g serves the query heads from g * N / G to (g + 1) * N / G, where G is the number of key
heads. One key head is multi-query attention (Shazeer 2019).

Values may also have more heads than queries and keys, which then serve N / Q of them each (multi-
value attention; Dao and Gu 2024, "Mamba 2", sec. 7.2).
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


class QKV(NamedTuple):
    """Queries, keys and values of all heads, and what else an algorithm reads of a layer's input.

    Keys and values of another sequence have its length.
    """

    q: Float[Array, "B T N H"]
    k: Float[Array, "B S G H"] | None  # None: made of the queries
    v: Float[Array, "B S G V"]
    extra_projections: dict[str, Float[Array, "B T _ _"]] | None = None

    @property
    def arrays(self) -> tuple[Array, Array | None, Array]:
        """Queries, keys and values."""
        return self.q, self.k, self.v


def repeat_heads(
    q: Float[Array, "B T N H"], *others: Float[Array, "B S G _"] | None
) -> tuple[Float[Array, "B S N _"] | None, ...]:
    """Repeats each head of keys and values for its group of query heads."""
    n_heads = q.shape[2]

    def repeated(x):
        if x is None or x.shape[2] >= n_heads:
            return x
        return jnp.repeat(x, n_heads // x.shape[2], axis=2)

    return tuple(map(repeated, others))


def repeat_to_values(x: Float[Array, "B T Q H"], v: Float[Array, "B T N V"]) -> Array:
    """Repeats each head of queries or keys for its heads of values."""
    n, n_values = x.shape[2], v.shape[2]
    return x if n_values <= n else jnp.repeat(x, n_values // n, axis=2)


def grouped(x: Array, n_kv_heads: int, axis: int) -> Array:
    """The axis of query heads as two: the key heads, and the query heads of each."""
    return x.reshape(*x.shape[:axis], n_kv_heads, -1, *x.shape[axis + 1 :])


def splits_head_groups(n_shards: int, n_heads: int, n_kv_heads: int) -> bool:
    """Whether the query heads of one key head fall into several shards.

    This matters to an op with shards of "key heads", whose group chooses the same keys.
    """
    return n_kv_heads < n_heads and n_kv_heads % n_shards != 0
