"""DeepSeek sparse attention of a plan, from its equations: a `Row.reference`.

In arrays of JAX, of the whole T x S matrices.
"""

import jax
import jax.numpy as jnp

from reformax.ops.indexing.indexer import Indexer
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
    indexer = options.get("indexer", Indexer())
    queries = jnp.einsum("btnh,nhjd->btjd", q, params["query"])
    keys = jnp.einsum("btnh,nhd->btd", k, params["key"])
    if indexer.rotary:
        queries, keys = _rotated(queries), _rotated(keys[:, :, None])[:, :, 0]
    weights = 1 + jnp.einsum("btnh,nhj->btj", q, params["weight"])
    products = jnp.einsum("btjd,bsd->bjts", queries, keys) * (1 / jnp.sqrt(keys.shape[2] * 1.0))
    if indexer.score == "relu":
        products = jax.nn.relu(products)
    summed = jnp.einsum("btj,bjts->bts", weights, products)
    return summed / jnp.sqrt(options["n_index_heads"] * 1.0)


def _rotated(x):
    """Pairs of features as complex numbers, times those of their positions."""
    half = x.shape[-1] // 2
    turns = jnp.arange(x.shape[1])[:, None, None] / 10_000.0 ** (jnp.arange(half) / max(half, 1))
    pairs = (x[..., :half] + 1j * x[..., half : 2 * half]) * jnp.exp(1j * turns)
    return jnp.concatenate([pairs.real, pairs.imag, x[..., 2 * half :]], axis=-1)
