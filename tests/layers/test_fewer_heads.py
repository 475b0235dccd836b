"""Layers of every op with fewer heads of keys, or of queries and keys; some ops say why not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax import layers
from reformax.declared import SettingError, Unsupported
from reformax.models import TransformerLM
from tests.layers import plain
from tests.ops.rows import KINDS, ROWS, over

N, D, FEW = 4, 8, 2
RNG = jax.random.key(3)
# The projections that have fewer heads.
FEWER = {"n_kv_heads": ("k", "v"), "n_qk_heads": ("q", "k")}
X = np.random.default_rng(0).normal(size=(2, 13, D)).astype(np.float32)


def layer_of(row, op, **options):
    rotary = row.op().cross  # some that are, some that are not
    sizes = dict(n_heads=N, d_qk=4, d_v=3, causal=row.causal(), use_rotary=rotary)
    return layers.Attention(op, **sizes, **options, mode="eval")


def quick(row):
    return row.name in (*KINDS, "moba") or row.op().shared_qk


def decodes(row):
    return row.decodes and row.plans_ahead and not row.op().shared_qk


@pytest.mark.parametrize("option", FEWER)
@over(ROWS, quick)
def test_every_op_has_them_or_says_why_not(row, option):
    op = row.op()
    if op.shared_qk:
        with pytest.raises(Unsupported, match="makes its keys of the queries: "):
            layer_of(row, op, **{option: FEW})
        sizes = dict(vocab_size=7, d_model=8, n_layers=1, n_heads=N)
        with pytest.raises(SettingError, match=f"^{option} is {FEW} and no op .* projects keys: "):
            TransformerLM(**sizes, **{option: FEW}, attention_type=op)
        return
    layer = layer_of(row, op, **{option: FEW})
    params = plain.init(layer, X.shape)
    assert {name: params[f"w_{name}"].shape[0] for name in "qkv"} == {
        name: FEW if name in FEWER[option] else N for name in "qkv"
    }
    grads, got = jax.jit(jax.grad(loss, argnums=1, has_aux=True), static_argnums=0)(layer, params)
    for name in "qkv":
        assert all(map(np.any, grads[f"w_{name}"]))
    if option == "n_kv_heads" and row.group_chooses:
        return  # heads that choose together do not choose as each would alone
    whole = {
        f"w_{name}": jnp.repeat(params[f"w_{name}"], N // FEW, axis=0) for name in FEWER[option]
    }
    of_op = params["op"]
    if option == "n_qk_heads" and "conv_q" in of_op:
        of_op = of_op | {x: jnp.repeat(of_op[x], N // FEW, axis=0) for x in ("conv_q", "conv_k")}
    _, want = jax.jit(loss, static_argnums=0)(layer_of(row, op), params | whole | {"op": of_op})
    np.testing.assert_allclose(got, want, atol=2e-5 * row.rounding)


def loss(layer, params):
    out = layer.apply(params, X, rng=RNG)
    return jnp.sum(jnp.sin(out)), out


@pytest.mark.parametrize("option", FEWER)
@over((row for row in ROWS if decodes(row)), lambda row: row.name in ("longformer", "moba"))
def test_decoding(row, option):
    layer = layer_of(row, row.op(), **{option: FEW})
    params = plain.init(layer, X.shape)
    whole = jax.jit(layer.apply)(params, X, rng=RNG)
    plain.assert_decodes(layer, params, X, np.array([6, 3]), whole, RNG)
