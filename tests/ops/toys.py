"""Two small ops that use what few algorithms do: own weights, gates, no mask, no dropout."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from reformax.carried import Carried, becoming
from reformax.ops import dense
from reformax.ops.base import AttentionOp, Extra, Traits, named, no_plan
from reformax.ops.parts.dropout import dropout_mask, seed_words
from tests.ops.rows import Row

MAX_LENGTH = 40


@named
def fading() -> AttentionOp:
    """Linear attention whose keys fade, by a gate of each position and a rate of each head."""

    def fade(params, gate):  # [B, T, N], the logarithm of what a position leaves of those before
        wide = jnp.promote_types(gate.dtype, jnp.float32)
        return -jax.nn.softplus(gate[..., 0].astype(wide) + params["rate"].astype(wide)[None, None])

    def apply(params, q, k, v, *, plan, segments, causal, dropout, rng, extras):
        del plan, causal, dropout, rng
        ids = jnp.ones(q.shape[:2], jnp.int32) if segments is None else segments
        same = (ids[:, :, None] == ids[:, None]) & (ids != 0)[:, None]
        log = jnp.swapaxes(fade(params, extras["gate"]), 1, 2)
        sums = jnp.cumsum(jnp.where(same[:, None], log[:, :, None], 0), axis=-1)  # [B, N, T, S]
        total = jnp.diagonal(sums, axis1=2, axis2=3)[..., None]
        seen = (same & jnp.tril(jnp.ones(same.shape[1:], bool))[None])[:, None]
        weights = jnp.where(seen, jnp.exp(jnp.where(seen, total - sums, 0)), 0)
        wide = weights.dtype
        logits = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=wide)
        out = jnp.einsum("bnts,bsnv->btnv", weights * logits, v.astype(wide))
        return out.astype(v.dtype)

    def init_cache(params, q, k, v, *, plan, lengths, capacity, rng, extras):
        del plan, capacity, rng
        real = jnp.arange(q.shape[1])[None] < lengths[:, None]
        k, v, gate = (jnp.where(real[..., None, None], x, 0) for x in (k, v, extras["gate"]))
        log = jnp.where(real[..., None], fade(params, gate), 0)
        left = jnp.exp(log.sum(axis=1, keepdims=True) - jnp.cumsum(log, axis=1))
        return jnp.einsum("btn,btnh,btnv->bnhv", left, k.astype(left.dtype), v.astype(left.dtype))

    def step(params, q, k, v, cache, *, position, extras):
        del position
        left = jnp.exp(fade(params, extras["gate"]))[:, 0, :, None, None]
        new = k[:, 0, :, :, None].astype(left.dtype) * v[:, 0, :, None].astype(left.dtype)
        cache = cache * left + new
        out = jnp.einsum("bnh,bnhv->bnv", q[:, 0].astype(left.dtype), cache)
        return out[:, None].astype(v.dtype), cache

    return AttentionOp(
        init=lambda rng, dims: {"rate": jax.random.normal(rng, (dims.n_heads,))},
        plan=no_plan,
        apply=apply,
        traits=Traits(bidirectional=False, dropout=False),
        init_cache=init_cache,
        step=step,
        extras=lambda dims: {"gate": Extra(dims.n_heads, 1)},
    )


def _fading(options, params, plan, qkv, extras, mask, keep):
    """A position after the other, of each segment: what is summed up fades before one is added."""
    q, k, v = qkv
    left = jax.nn.sigmoid(-(extras["gate"][..., 0] + params["rate"]))
    out = []
    for t in range(q.shape[1]):
        state, total = jnp.zeros((*q.shape[:1], *q.shape[2:], v.shape[-1])), 0
        for s in range(t + 1):
            seen = mask[:, :, t, s]
            kept = jnp.where(seen, left[:, s], 1)[..., None, None]
            new = seen[..., None, None] * k[:, s, :, :, None] * v[:, s, :, None]
            state = state * kept + new
        total = jnp.einsum("bnh,bnhv->bnv", q[:, t], state)
        out.append(total)
    return jnp.stack(out, axis=1)


@named
def slots(*, n_slots: int = 3) -> AttentionOp:
    """Softmax attention to learnt mixtures of all positions, as Linformer's."""

    def apply(params, q, k, v, *, plan, segments, causal, dropout, rng):
        del plan, causal, segments
        mix = params["mix"][:, : q.shape[1]]
        k, v = (jnp.einsum("kt,btnh->bknh", mix.astype(x.dtype), x) for x in (k, v))
        logits = jnp.einsum("btnh,bknh->bntk", q, k) / math.sqrt(q.shape[-1])
        weights = jax.nn.softmax(logits.astype(jnp.promote_types(q.dtype, jnp.float32)))
        if dropout > 0.0:
            place = (x.reshape(x.shape) for x in jnp.ogrid[tuple(map(slice, weights.shape))])
            weights = weights * dropout_mask(seed_words(rng), dropout, *place)
        return jnp.einsum("bntk,bknv->btnv", weights.astype(v.dtype), v)

    return AttentionOp(
        init=lambda rng, dims: {"mix": jax.random.normal(rng, (n_slots, MAX_LENGTH)) / 3},
        plan=no_plan,
        apply=apply,
        traits=Traits(causal=False, packed=False),
    )


def _slots(options, params, plan, qkv, extras, mask, keep):
    real = mask.any(axis=(1, 2))[..., None, None]
    q, k, v = qkv
    mix = params["mix"][:, : q.shape[1]]
    k, v = (jnp.einsum("kt,btnh->bknh", mix, x * real) for x in (k, v))
    logits = jnp.einsum("btnh,bknh->bntk", q, k) / np.sqrt(q.shape[-1])
    weights = jax.nn.softmax(logits) * keep[..., : options["n_slots"]]
    return jnp.einsum("bntk,bknv->btnv", weights, v) * real


TOYS = [
    Row("fading", fading, {}, reference=_fading, holds_keys=False, contains=False),
    Row("slots", slots, {"n_slots": (3, 1, 5)}, reference=_slots, no_step="its slots mix all"),
]


@named
def counting() -> AttentionOp:
    """Dense attention that counts the steps of training, and adds their number to its output."""
    op = dense.dense(impl="xla")

    def apply(params, *qkv, **options):
        weight = params["count"]
        count = becoming(weight, weight.value + 1)
        out = op.apply((), *qkv, **options)
        return out + count.astype(out.dtype)

    return op._replace(init=lambda rng, dims: {"count": Carried(jnp.zeros(()))}, apply=apply)
