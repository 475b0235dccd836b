"""DeepSeek sparse attention of a plan, from its equations: a `Row.reference`.

In arrays of JAX, of the whole T x S matrices.
"""

import jax
import jax.numpy as jnp

from reformax.ops.numerics.auxiliary_loss import with_loss
from tests.ops.low_rank import logits, softmax


def dsa(options, params, plan, qkv, extra_projections, mask, keep):
    """Eq. 2 for the plan's positions, with the indexer's loss of eq. 4."""
    q, k, v = qkv
    length = q.shape[1]
    chosen = (plan[..., None] == jnp.arange(length)).any(axis=-2)[:, None] & (mask != 0)
    weights = softmax(logits(q, k, options.get("soft_cap")), chosen)
    out = jnp.einsum("bnts,bsnv->btnv", weights * keep[..., :length], v)

    chosen, real = chosen[:, 0], (mask != 0).any(axis=(1, 3))
    log_index = jax.nn.log_softmax(
        jnp.where(chosen, scores(options, params, q, k), -1e200), axis=-1
    )
    attention = jax.lax.stop_gradient(weights).mean(axis=1)
    loss = -jnp.where(chosen, attention * log_index, 0).sum() / jnp.maximum(real.sum(), 1)
    return with_loss(out, options.get("index_loss", 1.0) * loss)


def scores(options, params, q, k):
    """Eq. 1, without a gradient for the layer's vectors."""
    q, k = jax.lax.stop_gradient((q, k))
    queries = jnp.einsum("btnh,nhjd->btjd", q, params["query"])
    keys = jnp.einsum("btnh,nhd->btd", k, params["key"])
    weights = 1 + jnp.einsum("btnh,nhj->btj", q, params["weight"])
    products = jnp.einsum("btjd,bsd->bjts", queries, keys) * (1 / jnp.sqrt(keys.shape[2] * 1.0))
    summed = jnp.einsum("btj,bjts->bts", weights, jax.nn.relu(products))
    return summed / jnp.sqrt(options["n_index_heads"] * 1.0)
