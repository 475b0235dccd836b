"""Dropout whose mask is a function of (rng, position), so that a backward pass can repeat it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from reformax.declared import Rate, check_all, hints_of
from reformax.layers.base import Layer
from reformax.ops.numerics.arrays import check_floats, check_key
from reformax.ops.numerics.precision import accum_dtype
from reformax.ops.softmax.dropout import row_word, seed_words

# Two columns this far apart share a hash of 32 bits: the left one takes the upper 16, the right one
# the lower. Hashing would be half of a kernel's arithmetic. A power of two.
APART = 256


def dropout(
    x: Float[Array, "*d"],
    rate: float,
    rng: PRNGKeyArray | None,
    shared_axes: Sequence[int] = (),
    start: int | Int[Array, ""] = 0,
) -> Float[Array, "*d"]:
    """Zeros each number with probability `rate` and scales the others by 1 / (1 - rate).

    Args:
      x: any shape but a scalar.
      rate: in [0, 1), rounded to a multiple of 2^-16; 0 returns `x` itself.
      rng: the mask's source; may be None if rate is 0.
      shared_axes: axes along which one mask serves all positions.
      start: the first position of `x`, along the last axis but one, in a longer array: `x` then
        gets its part of the mask of the whole.

    Raises:
      ValueError: `x` is no array of floats, an rng is needed and is no key, or an axis that `x`
        does not have.
    """
    if rate == 0.0:
        return x
    check_rng(rng, rate)
    check_floats("x", x)
    if not x.ndim:
        raise ValueError("x is a scalar: expected one axis at least")
    if any(not -x.ndim <= axis < x.ndim for axis in shared_axes):
        raise ValueError(f"shared_axes is {tuple(shared_axes)}: x has {x.ndim} axes")
    shared = {axis % x.ndim for axis in shared_axes}
    shape = tuple(1 if axis in shared else n for axis, n in enumerate(x.shape))
    *leading, column = jnp.ogrid[tuple(slice(n) for n in shape)]
    *leading, position = leading or [jnp.zeros((), jnp.int32)]
    index = sum(i * int(np.prod(shape[axis + 1 : -2], initial=1)) for axis, i in enumerate(leading))
    column = column.astype(jnp.uint32)
    right = column & APART  # a bit
    of_rows = x.ndim > 2 and 0 not in shared
    seed = seed_words(rng, int(np.prod(shape[:-2])) if of_rows else 0)
    bits = feature_bits(seed, index, position + start, column ^ right)
    # In float32: in bfloat16, 1 / (1 - rate) would be rounded to eight bits and shift the mean.
    factor = multiplier(bits << right // (APART // 16), rate)
    dtype = accum_dtype(x.dtype)
    return (x.astype(dtype) * factor.astype(dtype)).astype(x.dtype)


def feature_bits(
    seed: Int[Array, 6],
    sequence: Int[Array, "*d"],
    position: Int[Array, "*d"],
    column: Int[Array, "*d"],
) -> Int[Array, "*d"]:
    """32 bits of each address, random in both halves, each of which decides on a column (`APART`).

    Those of `ops.softmax.dropout` are random in the upper half alone. Here a word of the row and a
    multiple of the column are combined by xor, and mixed by two multiplications with a shift
    between them: Wellons' "lowbias32" without its outer shifts (github.com/skeeto/hash-prospector).
    """
    row, column = row_word(seed, sequence, 0, position), jnp.asarray(column).astype(jnp.uint32)
    bits = (row ^ (column * np.uint32(0x9E3779B1) + seed[1])) * np.uint32(0x7FEB352D)
    return (bits ^ (bits >> 15)) * np.uint32(0x846CA68B)


def multiplier(bits: Int[Array, "*d"], rate: float) -> Float[Array, "*d"]:
    """0 or 1 / (1 - rate), by the upper 16 of 32 random bits."""
    least = min(round(rate * 2**16), 2**16 - 1)
    kept = bits >= np.uint32(least << 16)
    return jnp.where(kept, np.float32(1 / (1 - least / 2**16)), np.float32(0))


def check_rng(rng: PRNGKeyArray | None, rate: float) -> PRNGKeyArray:
    """`rng`, or a `ValueError` where dropout needs one and it is None."""
    if rng is None:
        raise ValueError(f"rng is None: dropout of rate {rate} needs one, or mode='eval'")
    check_key("rng", rng)
    return rng


def rate_in(mode: str, rate: float) -> float:
    """`rate` in training, 0 at evaluation."""
    return rate if mode == "train" else 0.0


class Dropout(Layer):
    """`dropout` in training, the identity at evaluation (Srivastava et al. 2014, sec. 4).

    Takes and returns any shape.
    """

    def __init__(
        self,
        rate: Rate = 0.0,
        shared_axes: Sequence[int] = (),
        mode: Literal["train", "eval"] = "train",
    ):
        """Args:
        rate: the probability of a zero.
        shared_axes: axes along which one mask serves all positions.
        mode: "train" or "eval".
        """
        super().__init__()
        check_all(hints_of(Dropout), locals())
        self._rate = rate
        self._shared_axes = tuple(shared_axes)
        self._mode = mode

    @property
    def drops(self) -> bool:
        return rate_in(self._mode, self._rate) > 0.0

    def apply(
        self, params, x: Float[Array, "*d"], rng: PRNGKeyArray | None = None
    ) -> Float[Array, "*d"]:
        return dropout(x, rate_in(self._mode, self._rate), rng, self._shared_axes)
