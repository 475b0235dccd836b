"""Nystromformer: softmax attention approximated from its rows and columns at landmarks.

Xiong et al. 2021 ("Nystromformer: A Nystrom-Based Algorithm for Approximating Self-Attention"),
with m landmarks Q~, K~, the means of segments of the queries and of the keys:

    softmax(Q K~^T) pinv(softmax(Q~ K~^T)) softmax(Q~ K^T) V

A landmark is the mean of consecutive tokens, later ones too, so attention can neither hide the
future nor tell packed sequences apart. The first and the last factor are softmax attention to
landmarks and of landmarks, computed tile by tile. Time is O(T m), memory O(T).
"""

from __future__ import annotations

import functools
import math
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from reformax.declared import Bounds, SettingError, Size, Width
from reformax.ops import flash
from reformax.ops.base import AttentionOp, options
from reformax.ops.calls.dims import Dims
from reformax.ops.calls.dispatch import KERNELS
from reformax.ops.masking.visibility import is_token
from reformax.ops.numerics.logits import PLAIN
from reformax.ops.numerics.precision import accum_dtype
from reformax.ops.sharding.shard import of_heads
from reformax.ops.softmax.online import masked_softmax, nonzero

Iterations = Annotated[int, Bounds(1, 1024)]  # the loop is unrolled


@options
class nystromformer(AttentionOp):
    """Attention through `n_landmarks` means of consecutive tokens.

    Padding belongs to no landmark. With as many landmarks as tokens it is dense attention, up to
    the error of the pseudo-inverse.

    Weights: none; with `conv_size` `conv [N, conv_size]`.

    Args:
      n_landmarks: m. A sequence of fewer tokens has one landmark for each token.
      n_iterations: iterations of the pseudo-inverse.
      conv_size: an odd number of positions; if set, values convolved over them by each head's
        weights are added to the output, the paper's skip connection.
      impl: as in `flash.flash`, which attends to and from the landmarks, except `"cudnn"`, which
        needs values in the dtype of the queries.

    Raises:
      ValueError: a size below 1, an even `conv_size`, an unknown `impl`.
      NotImplementedError: at the call, with `causal=True`, with several segments in a row, or with
        dropout, because the product that would be a query's weights is never computed.
    """

    n_landmarks: Size = 64
    n_iterations: Iterations = 6
    conv_size: Width | None = None
    impl: str = "auto"

    causality = "never"
    packed = False
    dropout = False
    shards = ("heads",)
    _impls = KERNELS

    def _check(self) -> None:
        if self.conv_size is not None and self.conv_size % 2 == 0:
            raise SettingError(
                f"conv_size is {self.conv_size}: expected an odd number, for it has a middle"
            )

    def _init(self, rng: PRNGKeyArray, dims: Dims) -> Any:
        """Uniform weights with a variance of 1 / (3 size), as PyTorch draws a convolution's."""
        if self.conv_size is None:
            return ()
        limit, shape = 1 / math.sqrt(self.conv_size), (dims.n_heads, self.conv_size)
        return {"conv": jax.random.uniform(rng, shape, minval=-limit, maxval=limit)}

    def _apply(self, call, params, q, k, v, plan):
        dtype, segment_ids = accum_dtype(q.dtype, v.dtype), call.segment_ids
        groups = landmark_groups(q.shape[1], segment_ids, self.n_landmarks)
        queries, keys = (segment_means(x, groups).astype(q.dtype) for x in (q, k))
        of_landmarks = to_landmarks = call.but(segment_ids=None)
        if segment_ids is not None:
            tokens, real = is_token(segment_ids), groups.real.any(axis=-1)
            of_landmarks, to_landmarks = (
                call.but(segment_ids=tuple(ids.astype(jnp.int32) for ids in pair))
                for pair in ((real, tokens), (tokens, real))
            )
        attend = flash.flash(impl=self.impl).attend
        # In float32 throughout: the pseudo-inverse amplifies rounding errors of the values.
        values = attend(of_landmarks, (), queries, k, v.astype(dtype), plan)
        # Weights between landmarks; zeros for landmarks without tokens.
        has_tokens = groups.real.any(axis=-1)[:, None]
        mask = has_tokens[..., None] & has_tokens[:, :, None]
        between = masked_softmax(PLAIN.of("binh,bjnh->bnij", queries, keys), mask)
        inverse = pseudo_inverse(between, self.n_iterations)
        values = jnp.einsum("bnij,bjnv->binv", inverse, values, precision=jax.lax.Precision.HIGHEST)
        out = attend(to_landmarks, (), q, keys, values, plan)
        if "conv" in params:
            out = out + convolved(v, of_heads(params["conv"], call.shard, v.shape[2]))
        return out.astype(v.dtype)


class LandmarkGroups(NamedTuple):
    """The tokens that each landmark is the mean of."""

    # Their positions, a row for each landmark; any position where `real` is False.
    index: Int[Array, "B M G"]
    real: Bool[Array, "B M G"]  # which entries belong to the group


def landmark_groups(
    length: int, segment_ids: Int[Array, "B T"] | None, n_landmarks: int
) -> LandmarkGroups:
    """Groups of consecutive tokens, whose sizes differ by one at most.

    Of n tokens the r-th is in group `r m // n`, so padding moves no token to another group.
    """
    n_landmarks = min(n_landmarks, length)
    if segment_ids is None:
        order, n_tokens = jnp.arange(length)[None], jnp.full(1, length)
    else:
        tokens = is_token(segment_ids)
        order = jnp.argsort(~tokens, axis=1, stable=True)  # tokens first, in their order
        n_tokens = jnp.sum(tokens, axis=1, dtype=jnp.int32)
    landmark = jnp.arange(n_landmarks + 1)[None]
    # ceil(landmark * n_tokens / n_landmarks), without the product, which may overflow int32.
    whole, rest = jnp.divmod(n_tokens[:, None], n_landmarks)
    ends = landmark * whole - (-landmark * rest // n_landmarks)
    rank = ends[:, :-1, None] + jnp.arange(-(-length // n_landmarks))[None, None]
    index = jnp.take_along_axis(order[:, None], jnp.minimum(rank, length - 1), axis=2)
    return LandmarkGroups(index, rank < ends[:, 1:, None])


def segment_means(x: Float[Array, "B T N H"], groups: LandmarkGroups) -> Float[Array, "B M N H"]:
    """The mean of each group's tokens, float32; zeros for an empty group."""
    index, real = groups
    n_batch, n_landmarks, size = x.shape[0], *index.shape[1:]
    rows = jnp.take_along_axis(x, index.reshape(index.shape[0], -1)[..., None, None], axis=1)
    rows = rows.reshape(n_batch, n_landmarks, size, *x.shape[2:]).astype(accum_dtype(x.dtype))
    real = real[..., None, None]
    total = jnp.sum(rows, axis=2, where=real)
    return total / jnp.maximum(jnp.sum(real, axis=2), 1).astype(total.dtype)


def pseudo_inverse(a: Float[Array, "*d M M"], n_iterations: int) -> Float[Array, "*d M M"]:
    """The Moore-Penrose inverse by the paper's iteration, from `Z = A^T / (|A|_1 |A|_inf)`.

    Z' = Z (13 - A Z (15 - A Z (7 - A Z))) / 4
    """
    multiply = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    norms = (
        jnp.abs(a).sum(axis=i, keepdims=True).max(axis=(-2, -1), keepdims=True) for i in (-2, -1)
    )
    z = jnp.swapaxes(a, -2, -1) / nonzero(functools.reduce(jnp.multiply, norms))
    one = jnp.eye(a.shape[-1], dtype=a.dtype).reshape((1,) * (a.ndim - 2) + a.shape[-2:])
    for _ in range(n_iterations):
        az = multiply(a, z)
        z = multiply(z, 13 * one - multiply(az, 15 * one - multiply(az, 7 * one - az))) / 4
    return z


def convolved(v: Float[Array, "B T N V"], weights: Float[Array, "N W"]) -> Float[Array, "B T N V"]:
    """Values convolved over positions with their head's weights, float32."""
    dtype = accum_dtype(v.dtype)
    n_heads, size = weights.shape
    out = jax.lax.conv_general_dilated(
        jnp.moveaxis(v.astype(dtype), 1, 2),  # [B, N, T, V]
        weights.astype(dtype)[:, None, :, None],
        window_strides=(1, 1),
        padding=((size // 2, size // 2), (0, 0)),
        feature_group_count=n_heads,
        precision=jax.lax.Precision.HIGHEST,
    )
    return jnp.moveaxis(out, 2, 1)
