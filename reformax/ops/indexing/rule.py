"""Which keys a query may choose by their scores: those it may see, without those it always sees."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from reformax.ops.masking.visibility import Side, Visibility


class ChoiceRule(NamedTuple):
    """The static rule.

    Attributes:
      n_local: keys at a distance below it are always seen, and not chosen.
      group: so many queries from the position of a leader on share its choice. The leader leaves
        out keys that are local to all of them.
    """

    causal: bool = False
    n_local: int = 0
    group: int = 1

    def allows(self, q: Side, k: Side) -> Bool[Array, "*d"]:
        """Which keys each query may choose."""
        seen = Visibility(self.causal).sees(q, k)
        if self.n_local == 0:
            return seen
        leader, last = (Side(q.position + n) for n in (0, self.group - 1))
        near, key = Visibility(window=self.n_local), Side(k.position)
        return seen & ~(near.sees(leader, key) & near.sees(last, key))

    def local_keys(self, position: Int[Array, "1 T"], length: int) -> Int[Array, "1 T L"]:
        """The positions of the keys that each query always sees, the nearest first; -1 is none."""
        distance = jnp.arange(self.n_local, dtype=jnp.int32)
        if not self.causal:
            distance = jnp.concatenate([distance, -distance[1:]])
        at = position[..., None] - distance[None, None]
        return jnp.where((at >= 0) & (at < length), at, -1)
