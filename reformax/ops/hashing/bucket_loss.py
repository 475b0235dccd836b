"""A loss by which queries and keys learn to share buckets where dense attention has its weight.

A query gets no gradient towards a key outside of its buckets. This loss gives it one, as the
indexer of DeepSeek sparse attention has it: for a sample of queries, it is the divergence of the
keys' probabilities of sharing a bucket with the query, over their sum, from dense attention's
weights. Those have no gradient, so only directions of queries and keys move. The sum keeps all
vectors from moving into one bucket.

The probability is that of angular hashing into B buckets at an angle t,
`ln 1/p = tan(t / 2)^2 ln B` to first order (Andoni et al. 2015, "Practical and Optimal LSH for
Angular Distance", theorem 1), up to a right angle; in any of R hashes `1 - (1 - p)^R`. RACE
attention (2025, arXiv 2510.04008) trains by such soft collisions in place of a softmax.

The queries are one of each of some equal parts of the sequence, drawn by the step's rng.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from reformax import devices
from reformax.buffers import Meter, updated
from reformax.declared import SettingError
from reformax.ops.calls.call import Call
from reformax.ops.masking.masks import ids_or_ones
from reformax.ops.masking.padding import tokens_only
from reformax.ops.masking.visibility import Side, Visibility
from reformax.ops.numerics.auxiliary_loss import with_loss
from reformax.ops.numerics.normalization import length_normalize
from reformax.ops.sharding.shard import all_heads, row_axes_of
from reformax.ops.softmax.kept_mass import sampled_positions
from reformax.ops.softmax.online import largest, masked_exp, masked_softmax

# Queries whose probabilities of all keys are in memory together.
_TOGETHER = 8
METER = "bucket_loss"
N_QUERIES = 64  # where an op is not told
# Of cosines and probabilities, which are below 1 by it.
_MARGIN = 1e-4


def log_collision(cosine: Float[Array, "*d"], n_buckets: int, n_hashes: int) -> Float[Array, "*d"]:
    """The logarithm of the probability that two vectors share a bucket of some hash."""
    cosine = jnp.minimum(cosine, 1 - _MARGIN)
    near = (1 - cosine) / (1 + jnp.maximum(cosine, 0))
    # Beyond a right angle, where sharing is chance, its tangent: the slope stays bounded.
    log_p = -math.log(n_buckets) * jnp.where(cosine < 0, 1 - 2 * cosine, near)
    p = jnp.minimum(jnp.exp(log_p), 1 - _MARGIN)
    # Far away p is 0 in float32, and the logarithm of R p is still a number.
    far = log_p < -10
    near = jnp.log(-jnp.expm1(n_hashes * jnp.log1p(-jnp.where(far, 0.5, p))))
    return jnp.where(far, log_p + math.log(n_hashes), near)


class BucketLoss(NamedTuple):
    """The mean divergence over rows, heads and sampled queries."""

    share: Float[Array, ""]  # of this device in the mean over all of them; the shares add up
    mean: Float[Array, ""]  # over what this device has


class LearningBuckets:
    """The functions of an op that learns by this loss: a second base class of the op.

    The op has the options `bucket_loss`, `loss_queries`, `report_loss` and `n_hashes`.
    """

    def _init(self, rng, dims):
        del rng, dims
        return {METER: Meter(jnp.zeros(()))} if self.report_loss else ()

    def _check(self) -> None:
        super()._check()
        for name, default in (("report_loss", False), ("loss_queries", N_QUERIES)):
            value = getattr(self, name)
            if value != default and not self.bucket_loss:
                raise SettingError(
                    f"{name} is {value} and bucket_loss 0: set bucket_loss, such as to 0.1"
                )

    def _learning(
        self, call: Call, params, out: Float[Array, "B T N V"], q, k, hashed, n_buckets: int
    ) -> Float[Array, "B T N V"]:
        """`out`, with the gradient of the loss; the arguments are those of `bucket_loss`."""
        at = drawn_positions(q.shape[1], self.loss_queries, call.rng)
        found = bucket_loss(call, at, q, k, hashed, n_buckets, self.n_hashes, self.shared_qk)
        out = with_loss(out, self.bucket_loss * found.share)
        if not self.report_loss:
            return out
        return out + (0 * updated(params[METER], found.mean)).astype(out.dtype)


def drawn_positions(length: int, n: int, rng: PRNGKeyArray | None) -> Int[Array | np.ndarray, " C"]:
    """A position in each of `n` equal parts, or all; without an rng always the same ones."""
    n = min(n, length)
    if rng is None:
        return sampled_positions(length, n)
    borders = np.arange(n + 1) * length // n
    return jax.random.randint(rng, (n,), borders[:-1], borders[1:], jnp.int32)


def bucket_loss(
    call: Call,
    at: Int[Array | np.ndarray, " C"],
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T N H"],
    hashed: Float[Array, "B T N H"],
    n_buckets: int,
    n_hashes: int,
    exclude_self: bool,
) -> BucketLoss:
    """The mean divergence of a sample of queries.

    Args:
      call: causality, segments and logits.
      at: the positions of the queries.
      q, k: queries and keys as logits are made of them.
      hashed: keys as they are hashed.
      n_buckets, n_hashes: B and R.
      exclude_self: whether dense attention hides a position from itself.
    """
    ids, rule = ids_or_ones(call.segment_ids, k), Visibility(call.causal, exclude_self=exclude_self)
    key = Side(jnp.arange(k.shape[1])[None, None], ids[:, None])
    size = q.shape[-1]
    if call.segment_ids is not None:  # padding may hold anything
        q, k, hashed = (tokens_only(x, ids) for x in (q, k, hashed))
    of_keys = length_normalize(hashed.astype(jnp.float32))

    @jax.checkpoint
    def of_query(position) -> Float[Array, "B N 2"]:
        queries = lax.dynamic_index_in_dim(q, position, 1, keepdims=False)
        query_ids = lax.dynamic_index_in_dim(ids, position, 1, keepdims=False)
        mask = rule.sees(Side(position, query_ids[:, None, None]), key)
        logits = call.logits.of("bnh,bsnh->bns", *lax.stop_gradient((queries, k)))
        weights = masked_softmax(logits, mask)
        of_queries = length_normalize(queries.astype(jnp.float32))
        cosine = jnp.einsum("bnh,bsnh->bns", of_queries, of_keys) / size
        collisions = log_collision(cosine, n_buckets, n_hashes)
        row_max = lax.stop_gradient(largest(collisions, mask, axis=-1))
        row_sum = masked_exp(collisions, mask, row_max).sum(axis=-1, keepdims=True)
        sees = row_sum[..., 0] > 0
        log_q = collisions - row_max - jnp.log(jnp.where(row_sum > 0, row_sum, 1))
        log_weights = jnp.log(jnp.where(weights > 0, weights, 1))
        loss = jnp.where(mask, weights * (log_weights - log_q), 0).sum(axis=-1)
        return jnp.stack([jnp.where(sees, loss, 0), sees.astype(loss.dtype)], axis=-1)

    found = lax.map(of_query, jnp.asarray(at), batch_size=min(_TOGETHER, len(at)))
    loss, n = found.reshape(-1, 2).sum(axis=0)
    n_heads = q.shape[2]
    of_all = devices.total(n, row_axes_of(call.shard)) * all_heads(call.shard, n_heads) / n_heads
    return BucketLoss(loss / jnp.maximum(of_all, 1), loss / jnp.maximum(n, 1))
