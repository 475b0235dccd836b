"""Small ops for what only some algorithms use: weights, gates, one segment a row.

The first is `examples/fading.py`, the example of the guide to a new attention.
"""

import types

import jax
import jax.numpy as jnp
import numpy as np

from reformax.buffers import Buffer, updated
from reformax.ops import dense
from reformax.ops.base import AttentionOp, options
from reformax.ops.softmax.dropout import dropout_mask
from tests.ops.rows import Row
from tests.pages import ROOT

MAX_LENGTH = 40


def _example() -> types.ModuleType:
    """The example of an op with weights and gates, as a module of the ops."""
    module = types.ModuleType("reformax.ops.fading")
    exec((ROOT / "examples/fading.py").read_text(), module.__dict__)
    return module


def _fading(options, params, plan, qkv, extra_projections, mask, keep):
    q, k, v = qkv
    left = jax.nn.sigmoid(-extra_projections["gate"][..., 0] - params["rate"])
    rows = []
    for t in range(q.shape[1]):
        state = jnp.zeros((*q.shape[:1], *q.shape[2:], v.shape[-1]))
        for s in range(t + 1):
            seen = mask[:, :, t, s]
            new = jnp.where(seen[..., None, None], k[:, s, :, :, None] * v[:, s, :, None], 0)
            state = jnp.where(seen, left[:, s], 1)[..., None, None] * state + new
        rows.append(jnp.einsum("bnh,bnhv->bnv", q[:, t], state))
    return jnp.stack(rows, axis=1)


@options
class slots(AttentionOp):
    """Softmax attention to learnt mixtures of all positions, as Linformer's."""

    n_slots: int = 3

    causality = "never"
    packed = False

    def _init(self, rng, dims):
        return {"mix": jax.random.normal(rng, (self.n_slots, MAX_LENGTH)) / 3}

    def _apply(self, call, params, q, k, v, plan):
        del plan
        mix = params["mix"][:, : q.shape[1]]
        k, v = (jnp.einsum("kt,btnh->bknh", mix.astype(x.dtype), x) for x in (k, v))
        weights = jax.nn.softmax(call.logits.of("btnh,bknh->bntk", q, k))
        if call.dropout > 0.0:
            address = (x.reshape(x.shape) for x in jnp.ogrid[tuple(map(slice, weights.shape))])
            weights = weights * dropout_mask(call.seed, call.dropout, *address)
        return jnp.einsum("bntk,bknv->btnv", weights.astype(v.dtype), v)


def _slots(options, params, plan, qkv, extra_projections, mask, keep):
    real = mask.any(axis=(1, 2))[..., None, None]
    q, k, v = qkv
    mix = params["mix"][:, : q.shape[1]]
    k, v = (jnp.einsum("kt,btnh->bknh", mix, x * real) for x in (k, v))
    logits = jnp.einsum("btnh,bknh->bntk", q, k) / np.sqrt(q.shape[-1])
    weights = jax.nn.softmax(logits) * keep[..., : options["n_slots"]]
    return jnp.einsum("bntk,bknv->btnv", weights, v) * real


FADING = Row("fading", _example().fading, {}, reference=_fading, holds_keys=False)
TOYS = [
    FADING,
    Row("slots", slots, {"n_slots": (3, 1, 5)}, reference=_slots, no_step="its slots mix all"),
]


@options
class counting(dense.dense):
    """Dense attention that counts the steps of training, and adds their number to its output."""

    impl: str = "xla"

    def _init(self, rng, dims):
        return {"count": Buffer(jnp.zeros(()))}

    def _apply(self, call, params, q, k, v, plan):
        weight = params["count"]
        count = updated(weight, weight.value + 1)
        out = super()._apply(call, (), q, k, v, plan)
        return out + count.astype(out.dtype)


@options
class with_global_tokens(AttentionOp):
    """Dense attention of each position to itself and to global tokens."""

    global_tokens = True
    _hides_padding = True

    def _plan(self, call, params, q, k):
        no_token = jnp.zeros(q.shape[:2], jnp.int32)
        return no_token if call.global_tokens is None else call.global_tokens

    def _apply(self, call, params, q, k, v, plan):
        seen = jnp.eye(q.shape[1], dtype=bool)[None, None] | (plan > 0)[:, None, None]
        call = call.but(bias=jnp.where(seen, 0.0, -jnp.inf))
        return dense.dense(impl="xla").attend(call, params, q, k, v)
