"""Which keys a query sees: one rule for array operations and for kernels.

`Visibility` is what is known before a call: causality, a window, whether a position sees itself. It
has no arrays, so it is hashable, and a compiled program may depend on it. The caller loads the
positions and segment ids of some queries and some keys as two `Side`s. `sees` compares them with
the same operations in an array of T x S, in a block of chunks and in a tile of a kernel. `bounds`
says the same of whole tiles: which of them a loop need not visit, and which need no mask.

What an op chooses itself (buckets, selected blocks, a key that counts in one hash alone) is a mask
of its own, which the op combines with `all_of`. Whether a position that sees nothing attends to
itself is decided after the softmax, where its sum of weights is known.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Shaped

# The position of a token that does not exist, after all others.
NOWHERE = np.iinfo(np.int32).max


def is_token(segment_ids: Shaped[Array, "*d"]) -> Bool[Array, "*d"]:
    """Where there is a token, and not padding: its segment id is not 0, or it is True."""
    return segment_ids if segment_ids.dtype == bool else segment_ids != 0


def same_segment(one: Shaped[Array, "*#d"], other: Shaped[Array, "*#d"]) -> Bool[Array, "*d"]:
    """Where two segment ids are equal. Padding counts as a segment."""
    return one == other


def all_of(*masks: Bool[Array, "*#d"] | None) -> Bool[Array, "*d"] | None:
    """Where all masks are True. A mask of None hides nothing; None: no mask hides anything."""
    masks = [mask for mask in masks if mask is not None]
    return functools.reduce(jnp.logical_and, masks) if masks else None


class Side(NamedTuple):
    """Some queries or some keys. The arrays of two sides broadcast, such as `[Q, 1]` and `[1, K]`.

    Attributes:
      position: indices into the sequence.
      segment_id: ids, 0 at padding; None: one segment without padding.
      exists: whether there is a query, or a key, at all; None: everywhere.
      last: of a key that summarizes several positions, the last one; None: `position`.
    """

    position: Int[Array, "*d"] | None
    segment_id: Int[Array, "*d"] | None = None
    exists: Bool[Array, "*d"] | None = None
    last: Int[Array, "*d"] | None = None


class TileBounds(NamedTuple):
    """Positions that a tile can see, or that can see it. A bound of None is that of the sequence.

    Some position of the tile sees those from `first` to `end - 1`; all positions of the tile see
    those from `whole_first` to `whole_end - 1`.
    """

    first: Any = None
    end: Any = None
    whole_first: Any = None
    whole_end: Any = None


@dataclasses.dataclass(frozen=True)
class Visibility:
    """The static rule of which keys a query sees.

    Attributes:
      causal: whether keys after the query are hidden.
      window: keys `window` or more steps away, before or after, are hidden; None: none is.
      dilation: positions in a step. Keys between two steps are hidden.
      exclude_self: whether the key at the query's own position is hidden.
    """

    causal: bool = False
    window: int | None = None
    dilation: int = 1
    exclude_self: bool = False

    def within(self, length: int) -> Visibility:
        """The rule with sizes of at most `length`. It shows the same keys there."""
        window = None if self.window is None else min(self.window, length)
        return dataclasses.replace(self, window=window, dilation=min(self.dilation, length))

    @property
    def reach(self) -> int | None:
        """Keys `reach` or more positions away are hidden; None: none is."""
        return None if self.window is None else min(self.window * self.dilation, NOWHERE)

    def sees(self, q: Side, k: Side) -> Bool[Array, "*d"] | None:
        """Which keys each query sees; None: all of them.

        A token sees its own segment. No query sees padding.
        """
        last = k.position if k.last is None else k.last
        masks = [k.exists, q.exists]
        if self.causal:
            # One comparison says both: a kernel counts its instructions.
            before = last < q.position if self.exclude_self else last <= q.position
            masks = [before, *masks]
        elif self.exclude_self:
            masks.append(k.position != q.position)
        if self.window is not None:
            masks.append(jnp.abs(q.position - k.position) < self.reach)
        if self.dilation > 1:
            masks.append((k.position - q.position) % self.dilation == 0)
        if k.segment_id is not None:
            masks += [same_segment(q.segment_id, k.segment_id), is_token(k.segment_id)]
        return all_of(*masks)

    def bounds(self, first: Any, end: Any, of_keys: bool = False) -> TileBounds:
        """The bounds of the keys that queries see, or with `of_keys` of the queries that see keys.

        In a tile of whole bounds `sees` hides nothing but padding, other segments and, with
        `exclude_self`, a position from itself. A dilated window has no whole bounds.

        Args:
          first, end: the tile has the positions from `first` to `end - 1`.
          of_keys: whether the positions are keys.
        """
        bounds = TileBounds()
        if self.window is not None:
            reach = self.reach
            bounds = TileBounds(first - reach + 1, end + reach - 1, end - reach, first + reach)
        if self.dilation > 1:
            bounds = bounds._replace(whole_first=first, whole_end=first)
        elif self.causal and of_keys:
            bounds = bounds._replace(whole_first=end - 1)
        elif self.causal:
            bounds = bounds._replace(whole_end=first + 1)
        if not self.causal:
            return bounds
        return bounds._replace(first=first) if of_keys else bounds._replace(end=end)


CAUSAL = Visibility(causal=True)
# By the index of blocks: a query sees what lies before its own block.
EARLIER_BLOCKS = Visibility(causal=True, exclude_self=True)
