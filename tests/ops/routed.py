"""What routing attention computes for a plan, from its paper's equations: a row's reference."""

import jax
import jax.numpy as jnp

from reformax.buffers import updated
from tests.ops.low_rank import logits


def members(positions, length):
    """Whether each position is in each cluster, `[B, N, C, T]`; -1 is none."""
    return (positions[..., None] == jnp.arange(length)).any(axis=-2)


def on_sphere(x):
    norm = jnp.sqrt((x**2).sum(axis=-1, keepdims=True))
    return x / jnp.where(norm == 0, 1, norm)


def moved(centroids, vectors, real, decay):
    """The centroids after a step: `decay mu + (1 - decay) mean` of the vectors nearest to each."""
    x = on_sphere(jnp.concatenate(vectors, axis=1))
    real = jnp.concatenate([real] * len(vectors), axis=1)
    nearest = jnp.argmax(jnp.einsum("btnh,nch->btnc", x, centroids), axis=-1)
    theirs = (nearest[..., None] == jnp.arange(centroids.shape[1])) & real[..., None, None]
    count = theirs.sum(axis=(0, 1))[..., None]
    mean = jnp.einsum("btnc,btnh->nch", theirs, x) / jnp.maximum(count, 1)
    return jnp.where(count > 0, on_sphere(decay * centroids + (1 - decay) * mean), centroids)


def routing(options, params, plan, qkv, extra_projections, mask, keep):
    """Algorithm 1, as a softmax over the keys by the number of clusters that show each."""
    q, k, v = qkv
    length, real = q.shape[1], mask.any(axis=(1, 2))
    vectors = [x for x in (q, k) if x is not None]
    if k is None:
        k = q / jnp.sqrt((q**2).mean(axis=-1, keepdims=True) + 1e-6)
    of_query, of_key = (members(x, length) for x in plan)
    counts = jnp.einsum("bnct,bncs->bnts", of_query.astype(int), of_key.astype(int)) * mask
    itself = jnp.eye(length, dtype=int)
    if options["shared_qk"]:
        counts = counts * (1 - itself)
    if options["attend_self_if_alone"]:
        alone = counts.sum(axis=-1, keepdims=True) == 0
        counts = counts + alone * itself * mask
    scores = logits(q, k, options.get("soft_cap"))
    row_max = jnp.max(scores, axis=-1, keepdims=True, where=counts > 0, initial=-jnp.inf)
    weights = counts * jnp.exp(jnp.where(counts > 0, scores - jax.lax.stop_gradient(row_max), 0))
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights / jnp.where(total == 0, 1, total) * keep[..., :length]
    out = jnp.einsum("bnts,bsnv->btnv", weights, v)
    after = moved(params["centroids"].value, vectors, real, options["decay"])
    return out + 0 * updated(params["centroids"], after).sum()
