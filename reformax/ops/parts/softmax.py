"""The softmax of a row that is computed part by part: its state, and what stands for infinity."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float

# The logit of a hidden key, and the largest of a row that has seen none. Minus infinity would make
# the difference of two of them NaN.
HIDDEN = -1e30


class Softmax(NamedTuple):
    """The softmax of rows over the keys that they have seen so far.

    Attributes:
      acc: `sum_j exp(s_j - top) v_j`.
      top: the largest logit `s_j`.
      total: `sum_j exp(s_j - top)`.
    """

    acc: Float[Array, "*rows V"]
    top: Float[Array, "*rows"]
    total: Float[Array, "*rows"]
