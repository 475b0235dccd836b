"""What native sparse attention computes, from the paper's equations: a `Row.reference`.

In arrays of JAX, of the whole T x S matrices, a summary after the other.
"""

import jax
import jax.numpy as jnp

from tests.ops.low_rank import logits, softmax


def nsa(options, params, plan, qkv, extras, mask, keep):
    """Eq. 5, of the blocks that the plan has."""
    q, k, v = qkv
    length, group = q.shape[1], q.shape[2] // k.shape[2]
    query, key = jnp.ogrid[:length, :length]
    mask = jnp.asarray(mask) != 0

    def attend(keys, values, seen, keep):
        keys, values = (jnp.repeat(x, group, axis=2) for x in (keys, values))
        return jnp.einsum("bnts,bsnv->btnv", softmax(logits(q, keys), seen) * keep, values)

    def other(branch):
        own = options.get("own_projections", True)
        return [extras[f"{branch}_{x}"] for x in "kv"] if own else [k, v]

    blocks = summaries(options, length)
    gates = jax.nn.sigmoid(extras["gate"])
    out = 0
    if blocks:
        keys, values = (
            jnp.stack([summary(options, params, name, x[:, block]) for block in blocks], axis=1)
            for name, x in (("k", k), ("v", v))
        )
        seen = jnp.stack([mask[..., block].all(axis=-1) for block in blocks], axis=-1)
        last = [block.stop - 1 for block in blocks]
        dropped = jnp.stack([keep[..., i] for i in last], axis=-1)
        out = gates[..., :1] * attend(keys, values, seen, dropped)
    chosen = (plan[..., None] == key // options["block_size"]).any(axis=-2)
    chosen = jnp.repeat(chosen, group, axis=1) & mask
    out = out + gates[..., 1:2] * attend(*other("selected"), chosen, keep[..., :length])
    near = mask & (query - key < options["window"])
    return out + gates[..., 2:] * attend(*other("window"), near, keep[..., :length])


def summaries(options, length):
    """The positions of each summary, eq. 7."""
    size, stride = options["compress_len"], options["compress_stride"]
    return [slice(i, i + size) for i in range(0, length - size + 1, stride)]


def summary(options, params, name, x):
    """`[B, P, G, H] -> [B, G, H]`."""
    mean = x.mean(axis=1)
    if options.get("compression", "mlp") == "mean":
        return mean
    own = params[name]
    placed = x + own["positions"][:, None]
    return mean + _gelu(jnp.einsum("bpgh,phf->bgf", placed, own["hidden"])) @ own["out"]


def _gelu(x):
    return x * jax.scipy.stats.norm.cdf(x)
