"""The rngs of a layer's parts; None where the layer has none, as at evaluation without hashes."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jaxtyping import PRNGKeyArray


def fold_in(rng: PRNGKeyArray | None, number: int) -> PRNGKeyArray | None:
    """The rng of a part by its number."""
    return None if rng is None else jax.random.fold_in(rng, number)


def split(rng: PRNGKeyArray | None, n: int) -> Sequence[PRNGKeyArray | None]:
    """The rngs of n parts."""
    return (None,) * n if rng is None else jax.random.split(rng, n)
