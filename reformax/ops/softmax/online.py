"""Masked softmax, at once or merged from parts of the keys (online softmax).

Logits have one unit wherever a maximum is stored: the product of a query and a key, divided by
sqrt(H) or multiplied by the caller's scale, with the bias added. Their exponential is natural.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from reformax.ops.numerics.precision import product

# Smaller sums of weights count as zero, because their square underflows. A gradient divides by it.
LEAST_SUM = 1e-18


def lowest(dtype: Any) -> float:
    """The initial maximum of a row's logits.

    It is finite, because the difference of two infinities is NaN. The logit of a hidden key is
    minus infinity. It is half of the lowest number, because kernels multiply it by log2(e).
    """
    return float(jnp.finfo(dtype).min) / 2


class Softmax(NamedTuple):
    """The softmax of rows over some of their keys (Milakov and Gimelshein 2018, algorithm 3)."""

    acc: Float[Array, "*rows V"]  # `sum_j exp(s_j - row_max) v_j`
    row_max: Float[Array, "*rows"]  # the largest logit `s_j`
    row_sum: Float[Array, "*rows"]  # `sum_j exp(s_j - row_max)`

    @classmethod
    def empty(cls, rows: tuple[int, ...], d_v: int, dtype: Any) -> Softmax:
        """The state of rows that have seen no key, in `dtype`."""
        zeros = jnp.zeros(rows, dtype)
        return cls(jnp.zeros((*rows, d_v), dtype), jnp.full(rows, lowest(dtype), dtype), zeros)

    @classmethod
    def of_output(
        cls,
        out: Float[Array, "*rows V"],
        row_max: Float[Array, "*rows"],
        row_sum: Float[Array, "*rows"],
    ) -> Softmax:
        """The softmax whose `output` is `out`."""
        return cls(out.astype(row_sum.dtype) * row_sum[..., None], row_max, row_sum)

    @classmethod
    def of_results(cls, results: tuple[Array, Array, Array]) -> Softmax:
        """The softmax of rows `[B, N, T]` whose output is `[B, T, N, V]`; inverts `results`."""
        return cls.of_output(jnp.swapaxes(results[0], 1, 2), *results[1:])

    def results(self, dtype: Any) -> tuple[Array, Array, Array]:
        """The output `[B, T, N, V]` in a dtype, and the maximum and sum of rows `[B, N, T]`."""
        return jnp.swapaxes(self.output(), 1, 2).astype(dtype), *self[1:]

    def output(self) -> Float[Array, "*rows V"]:
        """The attended values; zeros for a row that has seen no key."""
        return self.acc / nonzero(self.row_sum)[..., None]

    def with_sinks(self, logits: Float[Array, "*#rows"]) -> Softmax:
        """The softmax with one more key of each row, of these logits and the value 0."""
        row_max = jnp.broadcast_to(logits, self.row_max.shape).astype(self.row_max.dtype)
        return self.merge(Softmax(jnp.zeros_like(self.acc), row_max, jnp.ones_like(row_max)))

    def merge(self, other: Softmax) -> Softmax:
        """The softmax of the same rows over the keys of both."""
        row_max = jnp.maximum(self.row_max, other.row_max)
        factor, of_other = (jnp.exp(x.row_max - row_max) for x in (self, other))
        acc = self.acc * factor[..., None] + other.acc * of_other[..., None]
        return Softmax(acc, row_max, self.row_sum * factor + other.row_sum * of_other)

    def merged(self, axis: int, where: Bool[Array, "*#rows"] | None = None) -> Softmax:
        """The softmax over the keys of all parts along an axis of rows.

        Args:
          axis: the axis, not negative.
          where: which parts exist; others may hold anything. None: all parts.
        """
        where = jnp.ones((), bool) if where is None else where
        row_max = largest(self.row_max, where, axis)
        factor = masked_exp(self.row_max, where, row_max)
        acc = jnp.where(where[..., None], self.acc * factor[..., None], 0.0)
        row_sum = jnp.where(where, self.row_sum * factor, 0.0)
        return Softmax(acc.sum(axis), row_max.squeeze(axis), row_sum.sum(axis))

    def merged_at(self, row: Int[Array, "*rows"], n_rows: int) -> Softmax:
        """The softmax of `n_rows` rows, each over the keys of all parts with its index in `row`.

        Parts with the index `n_rows` belong to no row.
        """
        row, parts = row.reshape(-1), Softmax(*(x.reshape(row.size, -1) for x in self))
        dtype, (part_max, part_sum) = self.acc.dtype, (x[:, 0] for x in parts[1:])
        row_max = jnp.full(n_rows + 1, lowest(dtype), dtype).at[row].max(part_max)
        row_max = jax.lax.stop_gradient(row_max)
        factor = masked_exp(part_max, row < n_rows, row_max[row])
        acc = jnp.zeros((n_rows + 1, self.acc.shape[-1]), dtype)
        acc = acc.at[row].add(parts.acc * factor[:, None])
        row_sum = jnp.zeros(n_rows + 1, dtype).at[row].add(part_sum * factor)
        return Softmax(acc[:n_rows], row_max[:n_rows], row_sum[:n_rows])


def largest(
    logits: Float[Array, "*d"], mask: Bool[Array, "*#d"], axis: int | tuple[int, ...]
) -> Float[Array, "*#d"]:
    """The largest visible logit of each row. It cancels out, so its gradient is set to 0."""
    row_max = jnp.max(logits, axis=axis, keepdims=True, where=mask, initial=lowest(logits.dtype))
    return jax.lax.stop_gradient(row_max)


def masked_exp(
    logits: Float[Array, "*d"], mask: Bool[Array, "*#d"], row_max: Float[Array, "*#d"]
) -> Float[Array, "*d"]:
    """The weights of a softmax before the division: `exp(logit - row_max)`, 0 where hidden."""
    below = jnp.where(mask, logits - row_max, 0.0)
    # XLA may compute a logit twice, in two ways. One of 1e30 may then far exceed its own maximum.
    below -= jax.lax.stop_gradient(jnp.maximum(below, 0.0))
    return jnp.where(mask, jnp.exp(below), 0.0)


def nonzero(row_sum: Float[Array, "*d"]) -> Float[Array, "*d"]:
    """`row_sum`, or 1 where it is 0: the division of such a row leaves zeros."""
    return jnp.where(row_sum == 0.0, 1.0, row_sum)


def without_nan(q: Float[Array, "*d H"]) -> Float[Array, "*d H"]:
    """Queries with 0 for NaN, for their product with the gradient of logits.

    That gradient is NaN where such a query sees a key, and 0 where it sees none: 0 times NaN would
    make the gradients of other keys NaN.
    """
    return jnp.where(jnp.isnan(q), 0, q)


def masked_softmax(logits: Float[Array, "*d"], mask: Bool[Array, "*#d"]) -> Float[Array, "*d"]:
    """The weights of each row over its visible keys; zeros for a row that sees none."""
    weights = masked_exp(logits, mask, largest(logits, mask, axis=-1))
    weights = weights / nonzero(weights.sum(axis=-1, keepdims=True))
    # The gradient of a hidden weight is a product with a hidden value, which may overflow.
    return jnp.where(mask, weights, 0.0)


def softmax_over(
    logits: Float[Array, "*rows K"],
    mask: Bool[Array, "*#rows K"],
    axes: str,
    values: Float[Array, ...],
    dropped: Float[Array, "*#rows K"] | None = None,
) -> Softmax:
    """The softmax of rows over their visible keys.

    Args:
      mask: which keys a row sees.
      axes: the equation of the product of weights and values, `*rows K` with these to `*rows V`.
      dropped: the factors of dropout; None without dropout.
    """
    row_max = largest(logits, mask, axis=-1)
    weights = masked_exp(logits, mask, row_max)
    row_sum = weights.sum(axis=-1)
    if dropped is not None:
        weights = weights * dropped.astype(weights.dtype)
    return Softmax(product(axes, weights, values, values.dtype), row_max[..., 0], row_sum)
