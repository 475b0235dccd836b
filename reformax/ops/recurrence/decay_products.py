"""Products of pairs of rows of a chunk, weighted by the decay between the rows.

Decays are cumulative logarithms `c`, `[*b, L, 1]` for a head or `[*b, L, H]` for each feature of
its keys; None is no decay. Within a segment c never increases. Every exponent in this file is a
difference that is at most 0: `exp(-c)` would overflow after much decay (Yang et al. 2023, "Gated
Linear Attention", sec. 4.3).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from reformax.ops.numerics.precision import product

# Up to so many rows, products by feature are summed one by one. More rows are split into halves.
DIRECT = 16


def decayed_products(
    x: Float[Array, "*b L H"],
    y: Float[Array, "*b L H"],
    decay: Float[Array, "*b L _"] | None,
    seen: Bool[Array, "*#b L L"],
    dtype: Any,
) -> Float[Array, "*b L L"]:
    """`sum_h x_ih y_jh exp(c_ih - c_jh)` where `seen[i, j]`, and 0 elsewhere."""
    if decay is None or decay.shape[-1] == 1:
        return _weighted(product("...ih,...jh->...ij", x, y, dtype), decay, seen)
    return jnp.where(seen, _by_feature(x, y, decay, dtype), 0)


def decayed_products_vjp(
    d_out: Float[Array, "*b L L"],
    x: Float[Array, "*b L H"],
    y: Float[Array, "*b L H"],
    decay: Float[Array, "*b L _"] | None,
    seen: Bool[Array, "*#b L L"],
    dtype: Any,
) -> tuple[Float[Array, "*b L H"], Float[Array, "*b L H"]]:
    """The gradients of x and of y. That of c_t is `x_t dx_t - y_t dy_t`, by feature."""
    if decay is None or decay.shape[-1] == 1:
        d_out = _weighted(d_out, decay, seen)
        dx = product("...ij,...jh->...ih", d_out, y, dtype)
        return dx, product("...ij,...ih->...jh", d_out, x, dtype)
    return _by_feature_vjp(jnp.where(seen, d_out, 0), x, y, decay, dtype)


def _weighted(products, decay, seen):
    """The products of whole vectors, times the decay of their head."""
    if decay is not None:
        between = decay - jnp.swapaxes(decay, -1, -2)
        products = products * jnp.exp(jnp.where(seen, between, 0))
    return jnp.where(seen, products, 0)


# Decays by feature: between the later and the earlier half of the rows they factor at the middle
# row m, `exp(c_i - c_j) = exp(c_i - c_m) exp(c_m - c_j)`. Each half is split likewise. Between rows
# of different segments decays mean nothing: they are cut at 1, and `seen` hides them.


def _by_feature(x, y, decay, dtype):
    n = x.shape[-2]
    if n <= DIRECT:
        between = jnp.exp(jnp.minimum(decay[..., :, None, :] - decay[..., None, :, :], 0))
        x, y = (a.astype(decay.dtype) for a in (x, y))
        return jnp.sum(x[..., :, None, :] * y[..., None, :, :] * between, axis=-1)
    x, y, decay = (_halves(a) for a in (x, y, decay))
    within = _by_feature(x, y, decay, dtype)
    late, early = _decays_to_middle(decay)
    later, earlier = _decayed_to_middle(x, y, late, early)
    across = product("...ih,...jh->...ij", later, earlier, dtype)
    return _of_quarters(within[..., 0, :, :], across, within[..., 1, :, :])


def _by_feature_vjp(d_out, x, y, decay, dtype):
    n = x.shape[-2]
    if n <= DIRECT:
        dx, dy = jnp.zeros_like(decay), jnp.zeros_like(decay)
        for t in range(n):  # a sum over an axis would put all its terms in memory
            row = slice(t, t + 1)
            since = jnp.exp(jnp.minimum(decay - decay[..., row, :], 0))
            dx = dx + d_out[..., :, row] * y[..., row, :].astype(decay.dtype) * since
            until = jnp.exp(jnp.minimum(decay[..., row, :] - decay, 0))
            dy = (
                dy
                + jnp.swapaxes(d_out[..., row, :], -1, -2)
                * x[..., row, :].astype(decay.dtype)
                * until
            )
        return dx, dy
    x, y, decay = (_halves(a) for a in (x, y, decay))
    dx, dy = _by_feature_vjp(_diagonal_quarters(d_out), x, y, decay, dtype)
    late, early = _decays_to_middle(decay)
    later, earlier = _decayed_to_middle(x, y, late, early)
    across = d_out[..., n // 2 :, : n // 2]
    dx_late = product("...ij,...jh->...ih", across, earlier, dtype) * late
    dy_early = product("...ij,...ih->...jh", across, later, dtype) * early
    dx = jnp.concatenate([dx[..., 0, :, :], dx[..., 1, :, :] + dx_late], axis=-2)
    return dx, jnp.concatenate([dy[..., 0, :, :] + dy_early, dy[..., 1, :, :]], axis=-2)


def _decayed_to_middle(x, y, late, early) -> tuple[Array, Array]:
    """The later half of x and the earlier half of y, decayed to the middle row."""
    return x[..., 1, :, :].astype(late.dtype) * late, y[..., 0, :, :].astype(early.dtype) * early


def _halves(x: Float[Array, "*b L H"]) -> Float[Array, "*b 2 L/2 H"]:
    return x.reshape(*x.shape[:-2], 2, x.shape[-2] // 2, x.shape[-1])


def _decays_to_middle(decay: Float[Array, "*b 2 L H"]) -> tuple[Array, Array]:
    """The decays from the earlier half's last row to the later half, and from the earlier to it."""
    early, late = decay[..., 0, :, :], decay[..., 1, :, :]
    middle = early[..., -1:, :]
    return jnp.exp(jnp.minimum(late - middle, 0)), jnp.exp(jnp.minimum(middle - early, 0))


def inverse(below: Float[Array, "*b L L"]) -> Float[Array, "*b L L"]:
    """`(1 + M)^-1` of a strictly lower triangular matrix M; L is a power of 2.

    The lower left quarter is `-D^-1 B A^-1` of the quarters A, B and D. Unlike a series of powers
    of M, this is as exact as substitution for any magnitude of M.
    """
    n = below.shape[-1]
    if n == 1:
        return jnp.ones_like(below)
    first, second = jnp.moveaxis(inverse(_diagonal_quarters(below)), -3, 0)
    corner = -_small_product(_small_product(second, below[..., n // 2 :, : n // 2]), first)
    return _of_quarters(first, corner, second)


def _small_product(x: Float[Array, "*b M M"], y: Float[Array, "*b M M"]) -> Float[Array, "*b M M"]:
    if x.shape[-1] <= DIRECT // 2:  # too small for a matrix unit
        return jnp.sum(x[..., :, :, None] * y[..., None, :, :], axis=-2)
    return jnp.einsum("...ij,...jk->...ik", x, y, precision=lax.Precision.HIGHEST)


def _diagonal_quarters(x: Float[Array, "*b L L"]) -> Float[Array, "*b 2 L/2 L/2"]:
    half = x.shape[-1] // 2
    return jnp.stack([x[..., :half, :half], x[..., half:, half:]], axis=-3)


def _of_quarters(first: Array, corner: Array, second: Array) -> Float[Array, "*b L L"]:
    """The matrix of these quarters, with zeros in the upper right one."""
    above = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    return jnp.concatenate([above, jnp.concatenate([corner, second], axis=-1)], axis=-2)
