"""Short causal convolutions of queries, keys and values.

A recurrence sums over positions, and has the order of neighbours only from its inputs. Each feature
becomes

    y_t = silu(sum_j w_j x_{t-j}),    0 <= j < W,

over the last W positions of its segment, with its own weights (Gu and Dao 2023, "Mamba", sec. 3.4;
Yang et al. 2024, "Gated Delta Networks", sec. 3.4). Decoding keeps the last W - 1 inputs.

Letters besides those of `reformax.ops.base`: W the positions that a convolution reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from reformax.ops.calls.dims import Dims
from reformax.ops.masking.contiguous import contiguous_segments, restore_order
from reformax.ops.masking.visibility import same_segment
from reformax.ops.numerics.precision import accum_dtype


class Projected(NamedTuple):
    """Queries, keys and values, or a number or array of each."""

    q: Any
    k: Any
    v: Any


def conv_params(size: int | None, rng, dims: Dims) -> dict[str, Array]:
    """`conv_q [N, H, W]`, `conv_k [N, H, W]`, `conv_v [N, V, W]`; no weights if `size` is None.

    The newest position is first. Weights are uniform with a variance of 1 / (3 W), as in PyTorch.
    """
    if size is None:
        return {}
    qk = dims.qk_heads, dims.d_qk
    limit, sizes = size**-0.5, {"q": qk, "k": qk, "v": (dims.n_heads, dims.d_v)}
    return {
        f"conv_{name}": jax.random.uniform(one, (*sizes[name], size), minval=-limit, maxval=limit)
        for name, one in zip(sizes, jax.random.split(rng, 3), strict=True)
    }


def convolve(
    params: Mapping[str, Array],
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T N H"],
    v: Float[Array, "B T N V"],
    segment_ids: Int[Array, "B T"] | None = None,
) -> Projected:
    """Convolves all three within their segments; unchanged without `conv_params` in `params`."""
    weights = _weights(params)
    if weights is None:
        return Projected(q, k, v)
    order, x, ids = contiguous_segments(Projected(q, k, v), segment_ids)
    return Projected(
        *(restore_order(_convolved(*xw, ids), order) for xw in zip(x, weights, strict=True))
    )


@jax.checkpoint  # the gradient computes the sums again instead of keeping them
def _convolved(
    x: Float[Array, "B T N H"], weights: Float[Array, "N H W"], ids: Int[Array, "B T"] | None
) -> Float[Array, "B T N H"]:
    numbers = x.astype(accum_dtype(x.dtype))
    total = jnp.zeros_like(numbers)
    for j in range(min(weights.shape[-1], x.shape[1])):
        past = _delayed(numbers, j)
        if ids is not None:
            same = _delayed(jnp.ones_like(ids, bool), j) & same_segment(ids, _delayed(ids, j))
            past = jnp.where(same[..., None, None], past, 0)
        total = total + past * weights[None, None, ..., j].astype(total.dtype)
    return jax.nn.silu(total).astype(x.dtype)


def _delayed(x: Array, by: int) -> Array:
    """`x [B, T, ...]` shifted right by `by` positions, with zeros in front."""
    return jnp.pad(x[:, : x.shape[1] - by], ((0, 0), (by, 0)) + ((0, 0),) * (x.ndim - 2))


def of_keys(
    x: Float[Array, "B T N H"],
    weights: Float[Array, "N H W"],
    segment_ids: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T N H"]:
    """`x_t + silu(sum_j w_j x_{t-j})` within segments: keys that also tell of those before them.

    A block of such keys has a mean by which queries find it more often (Xiao et al. 2025,
    "Optimizing Mixture of Block Attention", arXiv 2511.11571).
    """
    order, x, ids = contiguous_segments(x, segment_ids)
    return restore_order(x + _convolved(x, weights, ids), order)


def _weights(params: Mapping[str, Array]) -> Projected | None:
    return Projected(*(params[f"conv_{x}"] for x in "qkv")) if "conv_q" in params else None


# From the last inputs of an earlier part, or to those of a later one.


def zero_inputs(params: Mapping[str, Array], batch: int, dtype: Any) -> Projected | None:
    """`last_inputs` of positions before the first: zeros."""
    weights = _weights(params)
    if weights is None:
        return None
    return Projected(*(jnp.zeros((batch, w.shape[2] - 1, *w.shape[:2]), dtype) for w in weights))


def convolve_from(
    params: Mapping[str, Array],
    inputs: Projected,
    last: Projected | None,
    segment_ids: Int[Array, "B T"] | None,
    lengths: Int[Array, " B"],
) -> tuple[Projected, Projected | None]:
    """Convolves inputs that follow `last`, and returns the last inputs of the last segment.

    Args:
      params: with the weights of `conv_params`, or none.
      inputs: queries, keys and values.
      last: the W - 1 inputs before them, of the first segment; None without weights.
      segment_ids: of contiguous segments; padding has the id of the segment before it.
      lengths: the number of positions of each row before its padding.
    """
    weights = _weights(params)
    if weights is None:
        return inputs, None
    n_before = weights.q.shape[-1] - 1
    ids = of_end = None
    end = lengths[:, None] + jnp.arange(n_before)[None]
    if segment_ids is not None:
        ids = jnp.pad(segment_ids, ((0, 0), (n_before, 0)), mode="edge")
        of_last = same_segment(jnp.take_along_axis(ids, end, axis=1), segment_ids[:, -1:])
        of_end = of_last[..., None, None]

    def one(x, last, weights):
        x = jnp.concatenate([last.astype(x.dtype), x], axis=1)
        after = jnp.take_along_axis(x, end[..., None, None], axis=1)
        after = after if of_end is None else jnp.where(of_end, after, 0)
        return _convolved(x, weights, ids)[:, n_before:], after

    outs, after = zip(*(one(*xs) for xs in zip(inputs, last, weights, strict=True)), strict=True)
    return Projected(*outs), Projected(*after)


# Decoding.


def last_inputs(
    params: Mapping[str, Array], inputs: Projected, lengths: Int[Array, " B"]
) -> Projected | None:
    """The last W - 1 of each row's first `lengths` positions, `[B, W - 1, N, _]`.

    Positions before the first are zeros.
    """
    weights = _weights(params)
    if weights is None:
        return None
    size = weights.q.shape[-1]
    return jax.tree.map(lambda x: last_of(x, size, lengths), inputs)


def last_of(
    x: Float[Array, "B T N H"], size: int, lengths: Int[Array, " B"]
) -> Float[Array, "B _ N H"]:
    """The last `size - 1` of each row's first `lengths` positions; zeros before the first."""
    position = lengths[:, None] - jnp.arange(size - 1, 0, -1)[None]
    position = position[..., None, None]
    held = jnp.take_along_axis(x, jnp.maximum(position, 0), axis=1)
    return jnp.where(position >= 0, held, 0)


def convolve_next(
    params: Mapping[str, Array], new: Projected, last: Projected | None
) -> tuple[Projected, Projected | None]:
    """Convolves one more position, `[B, 1, N, _]`. Returns it and the new `last_inputs`."""
    weights = _weights(params)
    if weights is None:
        return new, None

    each = zip(new, last, weights, strict=True)
    outs, lasts = zip(*(_one_more(*xs) for xs in each), strict=True)
    return Projected(*outs), Projected(*lasts)


def _one_more(new, last, weights) -> tuple[Array, Array]:
    held = jnp.concatenate([last, new.astype(last.dtype)], axis=1)
    taps = jnp.flip(weights, axis=-1).astype(accum_dtype(held.dtype))
    total = jnp.einsum("bwnh,nhw->bnh", held.astype(taps.dtype), taps)[:, None]
    return jax.nn.silu(total).astype(new.dtype), held[:, 1:]


def of_next_key(
    new: Float[Array, "B 1 N H"], last: Float[Array, "B _ N H"], weights: Float[Array, "N H W"]
) -> tuple[Float[Array, "B 1 N H"], Float[Array, "B _ N H"]]:
    """`of_keys` at one more position, and the new `last_of`."""
    out, last = _one_more(new, last, weights)
    return new + out, last
