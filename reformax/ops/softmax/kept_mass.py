"""Kept mass: the share of dense attention's probability that lies on the keys which queries see.

An op that attends to some keys computes dense attention's softmax over these alone. Where dense
attention has little weight elsewhere, the two agree. The share is computed for a sample of queries,
whose dense logits are few, in O(T) time and memory besides the op's own passes.

Which keys a query sees is read off the op's gradient. Its output is linear in the values, so the
gradient of channel c of one query's output with respect to channel c of the values is that query's
row of weights. One backward pass gives as many rows a head as values have channels, whatever
implementation computes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from reformax import devices
from reformax.declared import Unsupported
from reformax.ops.calls.call import Call
from reformax.ops.calls.heads import repeat_heads, repeat_to_values
from reformax.ops.masking.masks import SegmentIds, ids_or_ones
from reformax.ops.masking.visibility import Side, Visibility
from reformax.ops.sharding import queries
from reformax.ops.softmax.online import masked_softmax

# Queries of a row and head, at most: as many as values have channels.
N_QUERIES = 64
# Queries whose dense logits are in memory together.
_TOGETHER = 8


def sampled_positions(length: int, n: int) -> np.ndarray:
    """`n` of `length` positions, one in each of n equal parts, always the same ones.

    They lie anywhere in the parts: those of a grid would all lie alike in their blocks and chunks.
    """
    borders = np.arange(n + 1) * length // n
    fractions = np.random.default_rng(n).random(n)
    return (borders[:-1] + np.diff(borders) * fractions).astype(np.int32)


def weight_rows(
    attend: Callable[[Float[Array, "B S N V"]], Float[Array, "B T N V"]],
    v: Float[Array, "B S N V"],
    at: Int[Array | np.ndarray, " C"],
) -> Float[Array, "C B N S"]:
    """The attention weights of the queries at some positions, at most as many as V.

    Args:
      attend: attention as a function of the values of all heads, linear in them.
      at: positions of queries; those after the last have no weights.
    """
    out, pull = jax.vjp(attend, v)
    probe = jnp.arange(out.shape[1])[:, None] == jnp.asarray(at)
    probe = jnp.pad(probe, ((0, 0), (0, v.shape[3] - len(at))))[None, :, None]
    probe = jnp.broadcast_to(probe, out.shape).astype(out.dtype)
    (weights,) = pull(devices.varying_as(out, probe))
    return jnp.moveaxis(weights[..., : len(at)], 3, 0).swapaxes(2, 3)


def kept_mass(
    op: Any,
    params: Any,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S G H"] | None,
    v: Float[Array, "B S G V"],
    *,
    plan: Any,
    segment_ids: SegmentIds | None,
    causal: bool,
    **call: Any,
) -> Float[Array, "B C N 2"]:
    """The share of dense attention's mass on the keys that sampled queries see by a plan.

    C queries of each row are sampled, at most `N_QUERIES` and at most as many as values have
    channels. The share has no gradient.

    Args:
      op: the algorithm, an `AttentionOp`.
      params, q, k, v, plan, segment_ids, causal, **call: as in its `apply`, without dropout.

    Returns:
      The share of each head and query, and 1; two zeros where dense attention sees no key.

    Raises:
      Unsupported: the algorithm has no `chooses_keys`.
    """
    if not op.chooses_keys:
        raise Unsupported(
            f"op is {op}: it chooses no keys of one softmax, use an op whose chooses_keys is True, "
            "such as lsh.lsh()"
        )
    given = params, q, k, v, call.get("extra_projections")
    params, q, k, v, projections = lax.stop_gradient(given)
    if queries.axis_of(shard := call.get("shard")) is not None:  # each measures the whole
        whole = q, k, v, projections, plan, segment_ids
        q, k, v, projections, plan, segment_ids = queries.of_all(shard, whole)
        call |= dict(shard=None)
    call |= dict(segment_ids=segment_ids, causal=causal, extra_projections=projections)
    k, v = repeat_heads(q, k, v)
    at = sampled_positions(q.shape[1], min(N_QUERIES, v.shape[3], q.shape[1]))
    seen = weight_rows(lambda v: op.apply(params, q, k, v, plan=plan, **call), v, at) > 0
    made = op._call(**call)
    q = op._scaled_by_length(made, params, q, k)
    each = (repeat_to_values(x, v) for x in (q, op.keys_of(q, k)))
    return _shares(made, *each, seen, at, exclude_self=op.shared_qk)


def _shares(
    call: Call,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S N H"],
    seen: Bool[Array, "C B N S"],
    at: Int[np.ndarray, " C"],
    exclude_self: bool,
) -> Float[Array, "B C N 2"]:
    """The share of dense attention's mass on the keys that queries see, and its weight, 1.

    Both are 0 for a query that dense attention shows no key.

    Args:
      call: causality, segments and logits.
      q, k: all queries and all keys.
      seen: which of the keys queries see.
      at: the positions of the queries that are sampled.
      exclude_self: whether dense attention hides a position from itself.
    """
    ids, rule = ids_or_ones(call.segment_ids, k), Visibility(call.causal, exclude_self=exclude_self)
    key = Side(jnp.arange(k.shape[1])[None, None], ids[:, None])

    def of_query(one) -> Float[Array, "B N 2"]:
        position, seen = one
        query = lax.dynamic_index_in_dim(q, position, 1, keepdims=False)
        query_ids = lax.dynamic_index_in_dim(ids, position, 1, keepdims=False)
        mask = rule.sees(Side(position, query_ids[:, None, None]), key)
        weights = masked_softmax(call.logits.of("bnh,bsnh->bns", query, k), mask)
        mass = jnp.stack([jnp.where(seen, weights, 0).sum(-1), weights.sum(-1)], axis=-1)
        return jnp.where(mass[..., 1:] > 0, mass / jnp.maximum(mass[..., 1:], 0.5), 0)

    shares = lax.map(of_query, (jnp.asarray(at), seen), batch_size=min(_TOGETHER, len(at)))
    return jnp.moveaxis(shares, 0, 1)
