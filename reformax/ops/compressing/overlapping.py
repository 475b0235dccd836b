"""Overlapping summaries of keys and of values, as native sparse attention has them.

Yuan et al. 2025, sec. 3.3.1, eq. 7. Letters as in `ops.nsa`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from reformax.ops.decoding.cache import KeyValues
from reformax.ops.masking.visibility import CAUSAL, Side, same_segment
from reformax.ops.numerics.precision import accum_dtype, product


class OverlappingSummaries(NamedTuple):
    """The compressed keys and values."""

    keys: Float[Array, "B C G H"]
    values: Float[Array, "B C G V"]
    ids: Int[Array, "B C"]  # the segment of all positions of a summary; 0 for several
    last: Int[Array, "1 C"]  # the last position of each summary

    def seen(self, ids: Int[Array, "B Q"], position: Int[Array, "#B Q"]) -> Bool[Array, "B Q C"]:
        """Which summaries queries see, by their segments and positions."""
        query = Side(position[..., None], ids[..., None])
        return CAUSAL.sees(query, Side(self.last[None], self.ids[:, None]))


class SummarySizes(NamedTuple):
    """P, the positions of a summary, and those between the starts of two, a divisor of P."""

    span: int
    stride: int

    def n(self, length: int) -> int:
        """C, the number of complete summaries; at least one, which no query sees."""
        return max(1, (length - self.span) // self.stride + 1)

    def last(self, n: int) -> Int[Array, "1 C"]:
        """The last positions of the first `n` summaries."""
        number = jnp.arange(n, dtype=jnp.int32)[None]
        return number * self.stride + (self.span - 1)

    def positions_of(self, x: Array) -> Array:
        """Gathers the positions of each summary, from `[B, T, ...]` to `[B, C, P, ...]`."""
        n, per = self.n(x.shape[1]), self.span // self.stride
        length = (n + per - 1) * self.stride
        x = x[:, :length]
        x = jnp.pad(x, [(0, 0), (0, length - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
        strides = x.reshape(x.shape[0], -1, self.stride, *x.shape[2:])
        return jnp.concatenate([strides[:, i : i + n] for i in range(per)], axis=2)

    def of(
        self,
        params: Any,
        k: Float[Array, "B T G H"],
        v: Float[Array, "B T G V"],
        ids: Int[Array, "#B T"],
    ) -> OverlappingSummaries:
        """The summaries of a row, by the weights `{"k": ..., "v": ...}` or means without any."""
        keys, values = (
            _summary(dict(params).get(name), self.positions_of(x))
            for name, x in (("k", k), ("v", v))
        )
        ids = self.positions_of(jnp.broadcast_to(ids, k.shape[:2]))
        ids = jnp.where(same_segment(ids, ids[:, :, :1]).all(axis=2), ids[:, :, 0], 0)
        return OverlappingSummaries(keys, values, ids, self.last(keys.shape[1]))

    def with_newest(
        self, params: Any, summaries: KeyValues, newest: KeyValues, position: Int[Array, " B"]
    ) -> KeyValues:
        """The summaries with the one that ends at `position`, if one does.

        `newest` is a ring of the last positions.
        """
        steps_back = jnp.arange(self.span, dtype=jnp.int32)[None, ::-1]
        read = newest.at(((position[:, None] - steps_back) % newest.keys.shape[2])[:, None])
        number, remainder = jnp.divmod(position - (self.span - 1), self.stride)
        ends = (remainder == 0) & (number >= 0)
        number = jnp.where(ends, number, summaries.keys.shape[2])  # out of bounds: not written
        row = jnp.arange(position.shape[0])

        def with_one(name: str, x: Array, read: Array) -> Array:
            made = _summary(dict(params).get(name), jnp.moveaxis(read, 1, 2)[:, None])[:, 0]
            return x.at[row, :, number].set(made, mode="drop")

        return KeyValues(*map(with_one, "kv", summaries, read))


def init_weights(rng: PRNGKeyArray, span: int, size: int) -> dict[str, Array]:
    """The weights of a hidden layer over the positions of a summary, for keys or for values."""
    rng_positions, rng_hidden, rng_out = jax.random.split(rng, 3)
    hidden = jax.random.normal(rng_hidden, (span, size, size))
    return {
        "positions": 0.02 * jax.random.normal(rng_positions, (span, size)),
        "hidden": hidden / math.sqrt(span * size),
        "out": 0.1 * jax.random.normal(rng_out, (size, size)) / math.sqrt(size),
    }


def _summary(params, x: Float[Array, "B C P G H"]) -> Float[Array, "B C G H"]:
    """Eq. 7's phi of each summary: the mean, plus the output of the hidden layer."""
    dtype = x.dtype
    y = x.astype(accum_dtype(dtype))
    out = y.mean(axis=2)
    if params is not None:
        positions = params["positions"].astype(y.dtype)[None, None, :, None]
        hidden = product("bcpgh,phf->bcgf", y + positions, params["hidden"], dtype)
        out = out + product(
            "bcgf,fh->bcgh", jax.nn.gelu(hidden, approximate=False), params["out"], dtype
        )
    return out.astype(dtype)
