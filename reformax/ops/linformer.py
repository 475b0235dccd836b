"""Linformer: keys and values projected along the length to a fixed number of rows.

Wang et al. 2020 ("Linformer: Self-Attention with Linear Complexity", sec. 4, eq. 7):

    head_i = softmax(Q (E_i K)^T / sqrt(H)) F_i V,    E_i, F_i of size k x n

E and F are learned. Their products with keys and values are fixed mixtures of all positions, so
attention can neither hide the future nor tell packed sequences apart. Time is O(T k), memory O(T).
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import jax
from jaxtyping import Array, Float, PRNGKeyArray

from reformax.declared import Bounds, SettingError, Width
from reformax.derivatives import CustomDerivatives, tangent_of
from reformax.ops import flash
from reformax.ops.base import AttentionOp, options
from reformax.ops.calls.dims import Dims
from reformax.ops.numerics.precision import product
from reformax.ops.sharding.shard import of_heads

Longest = Annotated[int, Bounds(1, 2**24)]


@options
class linformer(AttentionOp):
    """Attention to `n_projected` learned mixtures of the keys and of the values.

    Weights: `e` and `f`, `[L, k]` for all heads, or `[N, L, k]` without sharing; `e` alone with
    key-value sharing. L is the maximal length, and a shorter sequence reads their first rows.
    Padding is zeros in every mixture.

    Args:
      n_projected: k, the number of mixtures.
      parameter_sharing: "headwise": all heads have one E and one F; "key-value": E is also F;
        "none": each head has E and F (sec. 4, "Additional Efficiency Techniques").
      max_length: L; None is the length that the weights are made for.
      impl: as in `flash.flash`, which attends to the mixtures.

    Raises:
      ValueError: a size below 1, an unknown `parameter_sharing` or `impl`; at the call, a sequence
        longer than L.
      NotImplementedError: at the call, with `causal=True` or several segments in a row.
    """

    n_projected: Width = 256
    parameter_sharing: Literal["none", "headwise", "key-value"] = "headwise"
    max_length: Longest | None = None
    impl: str = "auto"

    causality = "never"
    packed = False
    shards = ("heads",)

    def _check(self) -> None:
        flash.flash(impl=self.impl)

    def _init(self, rng: PRNGKeyArray, dims: Dims) -> dict[str, Array]:
        """E and F with entries of variance 1 / k, as in the proof of theorem 2."""
        shape = (self.max_length or dims.length, self.n_projected)
        shape = (dims.n_heads, *shape) if self.parameter_sharing == "none" else shape
        names = ("e",) if self.parameter_sharing == "key-value" else ("e", "f")
        return {
            name: jax.random.normal(weight_rng, shape) / math.sqrt(self.n_projected)
            for name, weight_rng in zip(names, jax.random.split(rng, len(names)), strict=True)
        }

    def _apply(self, call, params, q, k, v, plan):
        if params["e"].ndim == 3:
            params = {name: of_heads(x, call.shard, q.shape[2]) for name, x in params.items()}
        keys, values = _projected(k, params["e"]), _projected(v, params.get("f", params["e"]))
        call = call.but(segment_ids=None)  # the base class makes padding zeros, before and after
        return flash.flash(impl=self.impl).attend(call, (), q, keys, values, plan)


def _projected(
    x: Float[Array, "B T N H"], weights: Float[Array, "L K"] | Float[Array, "N L K"]
) -> Float[Array, "B K N H"]:
    """The mixtures of the rows of `x`, summed in float32, by the first rows of the weights."""
    length, longest = x.shape[1], weights.shape[-2]
    if length > longest:
        raise SettingError(
            f"q has {length} positions, but linformer's weights are for {longest}: set "
            f"max_length={length}, or shorten it"
        )
    return _mixed(x, weights[..., :length, :])


@CustomDerivatives
def _mixed(
    x: Float[Array, "B T N H"], weights: Float[Array, "T K"] | Float[Array, "N T K"]
) -> Float[Array, "B K N H"]:
    """`_projected` by a row of weights for each position."""
    return product(f"btnh,{_heads(weights)}tk->bknh", x, weights, x.dtype).astype(x.dtype)


def _heads(weights: Array) -> str:
    """The letter of the weights' axis of heads, if they have one."""
    return "n" if weights.ndim == 3 else ""


def _forward(x, weights):
    return _mixed(x, weights), (x, weights)


def _backward(results, d_mixtures):
    x, weights = results
    n = _heads(weights)
    dx = product(f"bknh,{n}tk->btnh", d_mixtures, weights, x.dtype, written=x.dtype)
    d_weights = product(f"btnh,bknh->{n}tk", x, d_mixtures, x.dtype)
    return dx, d_weights.astype(weights.dtype)


_mixed.define(
    _forward, _backward, lambda primals, tangents: tangent_of(_mixed.function, primals, tangents)
)
