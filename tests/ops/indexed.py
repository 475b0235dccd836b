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
    attention = jax.lax.stop_gradient(weights).mean(axis=1)
    found, size = scores(options, params, q, k, mask), block_size(options)
    if size > 1:  # the softmax over blocks that are complete, in each of whose positions
        position = jnp.arange(length)
        chosen &= position // size < (position[:, None] + 1) // size
        attention = jnp.where(chosen, attention, 0)
        total = attention.sum(axis=-1, keepdims=True)
        attention = attention / jnp.where(total == 0, 1, total)
    log_index = jax.nn.log_softmax(jnp.where(chosen, found, -1e200), axis=-1)
    loss = -jnp.where(chosen, attention * log_index, 0).sum()
    if options.get("indexer", Indexer()).learns:
        loss = loss + codes_loss(options, params, q, k, mask[:, 0] != 0)
    loss = loss / jnp.maximum(real.sum(), 1)
    return with_loss(out, options.get("index_loss", 1.0) * loss)


def codes_loss(options, params, q, k, mask):
    """The cross entropy of the softmax of codes' scores, from that of all exact scores."""
    queries, keys, weights = jax.lax.stop_gradient(vectors(options, params, q, k))
    exact = jax.lax.stop_gradient(scores(options, params, q, k, mask[:, None]))
    own = params["candidates"]

    def signs(x):
        smooth = jnp.tanh(jnp.einsum("...d,db->...b", x, own["projection"]))
        return smooth + jax.lax.stop_gradient(jnp.where(smooth < 0, -1.0, 1.0) - smooth)

    agreement = jnp.einsum("btjd,bsd->bjts", signs(queries), signs(keys))
    agreement = agreement / options["indexer"].candidates.n_bits
    of_codes = jnp.einsum("btj,bjts->bts", weights, jax.nn.relu(agreement))
    of_codes = own["scale"] * of_codes / jnp.sqrt(options["n_index_heads"] * 1.0)
    log_codes = jax.nn.log_softmax(jnp.where(mask, of_codes, -1e200), axis=-1)
    share = jax.nn.softmax(jnp.where(mask, exact, -1e200), axis=-1)
    return -jnp.where(mask, share * log_codes, 0).sum()


def block_size(options):
    return options.get("indexer", Indexer()).block_size


def block_means(keys, mask, size):
    """The mean of a block's keys of the segment of its last token, in each of its positions."""
    means, mask = [], jnp.asarray(mask)[:, 0] != 0
    for first in range(0, keys.shape[1], size):
        block = slice(first, first + size)
        real = jnp.diagonal(mask, axis1=1, axis2=2)[:, block]
        last = jnp.max(jnp.where(real, jnp.arange(real.shape[1]), 0), axis=1)
        summed = mask[jnp.arange(len(mask)), first + last, block]
        total = jnp.where(summed[..., None], keys[:, block], 0).sum(axis=1, keepdims=True)
        mean = total / jnp.maximum(summed.sum(axis=1), 1)[:, None, None]
        means.append(jnp.broadcast_to(mean, keys[:, block].shape))
    return jnp.concatenate(means, axis=1)


def scores(options, params, q, k, mask=None):
    """Eq. 1, without a gradient for the layer's vectors."""
    queries, keys, weights = vectors(options, params, q, k, mask)
    products = jnp.einsum("btjd,bsd->bjts", queries, keys) * (1 / jnp.sqrt(keys.shape[2] * 1.0))
    if options.get("indexer", Indexer()).score == "relu":
        products = jax.nn.relu(products)
    summed = jnp.einsum("btj,bjts->bts", weights, products)
    return summed / jnp.sqrt(options["n_index_heads"] * 1.0)


def vectors(options, params, q, k, mask=None):
    """The indexer's queries, keys and weights."""
    q, k = jax.lax.stop_gradient((q, k))
    indexer = options.get("indexer", Indexer())
    queries = jnp.einsum("btnh,nhjd->btjd", q, params["query"])
    keys = jnp.einsum("btnh,nhd->btd", k, params["key"])
    position = jnp.arange(k.shape[1])
    if indexer.block_size > 1:
        keys = block_means(keys, mask, indexer.block_size)
        position = position // indexer.block_size * indexer.block_size
    if indexer.rotary:
        queries = _rotated(queries, jnp.arange(k.shape[1]))
        keys = _rotated(keys[:, :, None], position)[:, :, 0]
    queries, keys = (rounded(x, indexer.dtype) for x in (queries, keys))
    return queries, keys, 1 + jnp.einsum("btnh,nhj->btj", q, params["weight"])


def rounded(x, dtype):
    if dtype == "float32":
        return x
    return x + jax.lax.stop_gradient(x.astype(dtype).astype(x.dtype) - x)


def _rotated(x, position):
    """Pairs of features as complex numbers, times those of their positions."""
    half = x.shape[-1] // 2
    turns = position[:, None, None] / 10_000.0 ** (jnp.arange(half) / max(half, 1))
    pairs = (x[..., :half] + 1j * x[..., half : 2 * half]) * jnp.exp(1j * turns)
    return jnp.concatenate([pairs.real, pairs.imag, x[..., 2 * half :]], axis=-1)
