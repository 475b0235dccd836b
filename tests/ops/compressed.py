"""Compressed attention of DeepSeek V4 from its equations: a `Row.reference`.

In arrays of JAX, of the whole matrices of queries and of keys and summaries.
"""

import jax
import jax.numpy as jnp

from reformax.ops.numerics.auxiliary_loss import with_loss
from tests.ops.indexed import rounded
from tests.ops.low_rank import logits


def hca(options, params, plan, qkv, extra_projections, mask, keep):
    """Eq. 20 to 23: every complete block has a summary, over itself."""
    x = Parts(options, params, qkv, extra_projections, mask, n_series=1)
    return x.attend(x.seen, keep)[0]


def csa(options, params, plan, qkv, extra_projections, mask, keep):
    """Eq. 9 to 17 for the plan's summaries, over two blocks, with the indexer's loss."""
    x = Parts(options, params, qkv, extra_projections, mask, n_series=2)
    chosen = (plan[..., None] == jnp.arange(len(x.firsts))).any(axis=-2)[:, None] & x.seen
    out, weights = x.attend(chosen, keep)
    attention = jax.lax.stop_gradient(weights.sum(axis=1))
    total = attention.sum(axis=-1, keepdims=True)
    attention = attention / jnp.where(total == 0, 1, total)
    chosen, real = chosen[:, 0], x.mask.any(axis=(1, 3))
    found = jnp.where(chosen, index_scores(options, params, x), -1e30)
    log_index = jax.nn.log_softmax(found, axis=-1)
    loss = -jnp.where(chosen, attention * log_index, 0).sum() / jnp.maximum(real.sum(), 1)
    return with_loss(out, options.get("index_loss", 1.0) * loss)


def index_scores(options, params, x):
    """Eq. 13 to 16, without a gradient for the layer's vectors."""
    q, k, index = *jax.lax.stop_gradient((x.q, x.k)), params["index"]
    queries = x.rotated(jnp.einsum("btnh,nhjd->btjd", q, index["query"]))
    series = (jnp.einsum("btgh,ghsd->btsd", k, index[name]) for name in ("key", "gate"))
    keys = x.rotated(x.summaries(index, *series), x.firsts)[:, :, 0]
    queries, keys = (rounded(x, options.get("index_dtype", "float32")) for x in (queries, keys))
    weights = 1 + jnp.einsum("btnh,nhj->btj", q, index["weight"])
    products = jax.nn.relu(jnp.einsum("btjd,bcd->bjtc", queries, keys))
    summed = jnp.einsum("btj,bjtc->btc", weights, products)
    return summed / jnp.sqrt(1.0 * options["n_index_heads"] * keys.shape[-1])


class Parts:
    """What both attend to: a window and summaries."""

    def __init__(self, options, params, qkv, extra_projections, mask, n_series):
        self.options, self.params, self.n_series = options, params, n_series
        self.q, self.k, self.v = qkv
        self.mask, self.length = jnp.asarray(mask) != 0, self.q.shape[1]
        size = options["block_size"]
        self.firsts = list(range(0, self.length - size + 1, size))
        lasts = [first + size - 1 for first in self.firsts]
        self.seen = self.mask[..., jnp.array(lasts, int)]  # [B, N, T, C]
        shares = options.get("share_kv", False)
        kinds = ("kv", "kv") if shares else ("k", "v")
        keys, values = (
            self.summaries(
                params[kind],
                extra_projections[f"summary_{kind}"],
                extra_projections[f"gate_{kind}"],
            )
            for kind in kinds
        )
        self.far = self.rotated(keys, self.firsts), values
        if shares:
            self.far = self.far[0], self.far[0]
        self.shares = shares

    def rotated(self, x, positions=None, inverse=False):
        n = self.options.get("rotary_features", 0)
        positions = range(self.length) if positions is None else positions
        turns = jnp.array(list(positions), float)[:, None, None] * (-1 if inverse else 1)
        base = self.options.get("rotary_base", 10_000.0)
        half = n // 2
        turns = turns / base ** (jnp.arange(half) / max(half, 1))
        pairs = (x[..., :half] + 1j * x[..., half:n]) * jnp.exp(1j * turns)
        return jnp.concatenate([pairs.real, pairs.imag, x[..., n:]], axis=-1)

    def summaries(self, weights, values, gates):
        """`[B, T, G S, F]`, two of them, to `[B, C, G, F]`: one block after the other."""
        size, n = self.options["block_size"], self.n_series
        values, gates = (x.reshape(*x.shape[:2], -1, n, x.shape[-1]) for x in (values, gates))
        found = []
        for first in self.firsts:
            last, exponents, summed = first + size - 1, [], []
            for series in range(n):
                start = first - (n - 1 - series) * size
                for i in range(size):
                    if start < 0:
                        continue
                    here = self.mask[:, 0, last, start + i][:, None, None]
                    gate = gates[:, start + i, :, series] + weights["positions"][i, series]
                    exponents.append(jnp.where(here, gate, -jnp.inf))
                    summed.append(jnp.where(here, values[:, start + i, :, series], 0))
            exponents, summed = jnp.stack(exponents), jnp.stack(summed)
            none = jnp.isneginf(exponents).all(axis=0)
            share = jax.nn.softmax(jnp.where(none, 0, exponents), axis=0)
            found.append((share * summed).sum(axis=0))
        if not found:
            return jnp.zeros((len(values), 0, *values.shape[2:3], values.shape[-1]))
        x = jnp.stack(found, axis=1)
        return x / jnp.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * weights["norm"]

    def attend(self, chosen, keep):
        """The output, and the weights of summaries, `[B, N, T, C]`."""
        group = self.q.shape[2] // self.k.shape[2]
        position = jnp.arange(self.length)
        near = self.mask & (position[:, None] - position < self.options["window"])
        q, k = self.rotated(self.q), self.rotated(self.k)
        v = self.rotated(self.v) if self.shares else self.v
        keys, values = (
            jnp.repeat(jnp.concatenate(pair, axis=1), group, axis=2)
            for pair in zip((k, v), self.far, strict=True)
        )
        exponents = logits(q, keys, self.options.get("soft_cap"))
        seen = jnp.concatenate([near, chosen], axis=-1)
        exponents = jnp.where(seen, exponents, -1e30)
        any_key = self.mask.any(axis=-1, keepdims=True)
        if self.options.get("learned_sinks", True):
            sink = jnp.broadcast_to(self.params["sinks"][:, None, None], any_key.shape)
            exponents = jnp.concatenate([exponents, sink], axis=-1)
        weights = jax.nn.softmax(exponents, axis=-1)[..., : seen.shape[-1]]
        weights = jnp.where(seen, weights, 0)
        n = self.length
        kept = jnp.concatenate([keep[..., :n], keep[..., ::-1]], axis=-1)
        out = jnp.einsum("bnts,bsnv->btnv", weights * kept[..., : seen.shape[-1]], values)
        return (self.rotated(out, inverse=True) if self.shares else out), weights[..., n:]
