"""Which keys a position sees: a band of neighbours, and a few keys anywhere.

G few keys, besides the letters of `reformax.ops.base`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

# The position of a key that is not there.
NOWHERE = np.iinfo(np.int32).max


class BandMask(NamedTuple):
    """Which neighbours a position sees."""

    window: int  # those less than so many steps away
    dilation: int  # positions of a step
    causal: bool

    def within(self, length: int) -> BandMask:
        """The band that shows the same of so many positions."""
        return self._replace(window=min(self.window, length), dilation=min(self.dilation, length))

    def sees(self, query, key) -> Bool[Array, "*d"]:
        """Whether positions `query` see positions `key`, which broadcast."""
        ahead = key - query
        reach = min(self.window * self.dilation, NOWHERE)
        near = (jnp.abs(ahead) < reach) & (ahead % self.dilation == 0)
        return near & (ahead <= 0) if self.causal else near


def rows_at(x: Array, few: Int[Array, "#B G"]) -> Array:
    """Rows of `x`, `[B, T, ...]`, at some positions; any row for `NOWHERE`."""
    index = jnp.minimum(few, x.shape[1] - 1)
    if index.shape[0] == 1:
        return jnp.asarray(x)[:, index[0]]  # of NumPy too, at a traced index
    return jnp.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - 2)), axis=1)


def ids_at(ids: Int[Array, "#B T"], few: Int[Array, "#B G"]) -> Int[Array, "#B G"]:
    """The segments at some positions; 0 for `NOWHERE`."""
    if ids.shape[0] == 1:
        ids = jnp.broadcast_to(ids, (few.shape[0], ids.shape[1]))
    return jnp.where(few < ids.shape[1], rows_at(ids, few), 0)


def first_where(real: Bool[Array, "B T"], n: int) -> Int[Array, "B G"]:
    """The first `n` positions where `real` is True, all if there are fewer; else `NOWHERE`."""
    return jnp.sort(jnp.where(real, jnp.arange(real.shape[1])[None], NOWHERE), axis=1)[:, :n]


def first_global(
    global_tokens: Int[Array, "B T"] | None, segment_ids: Int[Array, "B T"] | None, n: int
) -> Int[Array, "B G"] | None:
    """The first `n` tokens of each row whose mark is above 0; None where there are no marks."""
    if global_tokens is None or not n:
        return None
    return first_where(
        (global_tokens > 0) if segment_ids is None else (global_tokens > 0) & (segment_ids != 0), n
    )
