"""Native sparse attention from the paper's equations: a `Row.reference`.

In arrays of JAX, of the whole T x S matrices.
"""

import jax
import jax.numpy as jnp
import numpy as np

from tests.ops.low_rank import logits, softmax


def nsa(options, params, plan, qkv, extra_projections, mask, keep):
    """Eq. 5, of the blocks that the plan has."""
    q, k, v = qkv
    length, group = q.shape[1], q.shape[2] // k.shape[2]
    query, key = jnp.ogrid[:length, :length]
    mask = jnp.asarray(mask) != 0

    def attend(keys, values, seen, keep):
        keys, values = (jnp.repeat(x, group, axis=2) for x in (keys, values))
        weights = softmax(logits(q, keys, options.get("soft_cap")), seen)
        return jnp.einsum("bnts,bsnv->btnv", weights * keep, values)

    def branch_projections(branch):
        separate = options.get("independent_kv", True)
        return [extra_projections[f"{branch}_{x}"] for x in "kv"] if separate else [k, v]

    gates = jax.nn.sigmoid(extra_projections["gate"])
    out = 0
    positions = summary_positions(options, length)
    if len(positions):
        keys, values = (
            summary(options, params, name, x[:, positions]) for name, x in (("k", k), ("v", v))
        )
        seen = mask[..., positions].all(axis=-1)
        out = gates[..., :1] * attend(keys, values, seen, jnp.asarray(keep)[..., positions[:, -1]])
    chosen = (plan[..., None] == key // options["block_size"]).any(axis=-2)
    chosen = jnp.repeat(chosen, group, axis=1) & mask
    out = out + gates[..., 1:2] * attend(
        *branch_projections("selected"), chosen, keep[..., :length]
    )
    near = mask & (query - key < options["window"])
    return out + gates[..., 2:] * attend(*branch_projections("window"), near, keep[..., :length])


def summary_positions(options, length):
    """The positions of each summary, `[C, P]`, eq. 7."""
    size, stride = options["compress_len"], options["compress_stride"]
    first = np.arange(0, length - size + 1, stride)
    return first[:, None] + np.arange(size)[None]


def summary(options, params, name, x):
    """`[B, C, P, G, H] -> [B, C, G, H]`."""
    mean = x.mean(axis=2)
    if options.get("compression", "mlp") == "mean":
        return mean
    weights = params[name]
    embedded = x + weights["positions"][:, None]
    return mean + _gelu(jnp.einsum("bcpgh,phf->bcgf", embedded, weights["hidden"])) @ weights["out"]


def _gelu(x):
    return x * jax.scipy.stats.norm.cdf(x)
