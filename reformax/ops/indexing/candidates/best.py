"""The best of each query's candidates.

Letters as in `base.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Int

from reformax.ops.indexing.candidates.base import IndexedKeys, QueryChunk
from reformax.ops.indexing.rule import ChoiceRule
from reformax.ops.indexing.scores import IndexQueries, gathered, scores_of_gathered
from reformax.ops.masking.visibility import Side
from reformax.ops.numerics.best import best_of, taken


def best_candidates(
    rule: ChoiceRule,
    n_best: int,
    keys: IndexedKeys,
    queries: QueryChunk,
    position: Int[Array, "B Q M"],
    choose: Callable[[IndexQueries, Array], Array] | None = None,
) -> Int[Array, "B Q K"]:
    """The best of each query's candidates, by kernels that `choose` or in array operations.

    Their positions are in order, each once; -1 is none.
    """
    at = jnp.clip(position, 0, keys.keys.shape[1] - 1)
    exists = (position >= 0) & (position < keys.keys.shape[1])
    key = Side(position, gathered(keys.ids, at), exists=exists)
    query = Side(queries.position[..., None], queries.ids[..., None])
    allowed = rule.allows(query, key)
    if choose is not None:
        return choose(queries.index, jnp.where(allowed, position, -1))
    found = scores_of_gathered(keys.score, queries.index, gathered(keys.keys, at))
    chosen = taken(position, best_of(found, allowed, min(n_best, found.shape[-1])))
    n_missing = n_best - chosen.shape[-1]
    return jnp.pad(chosen, ((0, 0), (0, 0), (0, n_missing)), constant_values=-1)
