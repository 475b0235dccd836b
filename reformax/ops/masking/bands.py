"""The masks of bands: a query sees neighbouring keys, and global tokens anywhere in the sequence.

Letters besides those of `reformax.ops.base`: G global tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

# The position of a global token that does not exist.
NOWHERE = np.iinfo(np.int32).max


class BandMask(NamedTuple):
    """The neighbours that a query sees."""

    window: int  # a key is visible fewer than `window` steps away
    dilation: int  # positions in a step
    causal: bool

    def within(self, length: int) -> BandMask:
        """The band with sizes of at most `length`; it has the same mask there."""
        return self._replace(window=min(self.window, length), dilation=min(self.dilation, length))

    def sees(self, query, key) -> Bool[Array, "*d"]:
        """Whether queries see keys, given by their positions, which broadcast."""
        ahead = key - query
        reach = min(self.window * self.dilation, NOWHERE)
        near = (jnp.abs(ahead) < reach) & (ahead % self.dilation == 0)
        return near & (ahead <= 0) if self.causal else near


def rows_at(x: Array, positions: Int[Array, "#B G"]) -> Array:
    """Rows of `x`, `[B, T, ...]`, at the positions; the last row for `NOWHERE`."""
    index = jnp.minimum(positions, x.shape[1] - 1)
    if index.shape[0] == 1:
        return jnp.asarray(x)[:, index[0]]  # a traced index needs an array of JAX
    return jnp.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - 2)), axis=1)


def ids_at(ids: Int[Array, "#B T"], positions: Int[Array, "#B G"]) -> Int[Array, "#B G"]:
    """The segment ids at the positions; 0 for `NOWHERE`."""
    if ids.shape[0] == 1:
        ids = jnp.broadcast_to(ids, (positions.shape[0], ids.shape[1]))
    return jnp.where(positions < ids.shape[1], rows_at(ids, positions), 0)


def first_where(real: Bool[Array, "B T"], n: int) -> Int[Array, "B G"]:
    """The first `n` positions where `real` is True; `NOWHERE` fills up shorter rows."""
    return jnp.sort(jnp.where(real, jnp.arange(real.shape[1])[None], NOWHERE), axis=1)[:, :n]


def first_global(
    global_tokens: Int[Array, "B T"] | None, segment_ids: Int[Array, "B T"] | None, n: int
) -> Int[Array, "B G"] | None:
    """The positions of the first `n` global tokens of each row; None without global tokens."""
    if global_tokens is None or not n:
        return None
    return first_where(
        (global_tokens > 0) if segment_ids is None else (global_tokens > 0) & (segment_ids != 0), n
    )
