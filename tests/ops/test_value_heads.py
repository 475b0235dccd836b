"""Values of more heads than queries and keys: each of these serves several heads of values."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax import layers
from reformax.declared import SettingError, Unsupported
from reformax.models import TransformerLM
from reformax.ops import dense, gated_delta, kda, lsh, retention, shared_qk
from reformax.ops.base import Dims
from tests.helpers import assert_trees_close
from tests.layers import plain
from tests.ops import inputs
from tests.ops.rows import ROWS, one_of_each_kind, over

N_QK, N = 2, 6
RNG = jax.random.key(0)


def draw(op, length=13):
    """Queries and keys of 2 heads, values and gates of 6."""
    x = inputs.draw(op, length=length, n_heads=N)
    q, k = x.q[:, :, ::3], x.k[:, :, ::3]
    dims = op.dims(q, x.v)
    assert (dims.n_heads, dims.qk_heads) == (N, N_QK)
    return x._replace(q=q, k=k, params=op.init(jax.random.key(0), dims))


@over((row for row in ROWS if row.op().more_value_heads), one_of_each_kind)
def test_it_is_repeated_queries_and_keys(row):
    """With their gradients, which add up over the heads of values."""
    op = row.op()
    x = draw(op)
    options = dict(causal=row.causal(), rng=RNG)
    ids = None if not op.packed else np.repeat([[1, 2, 0]] * 2, [6, 5, 2], axis=1)

    def run(x, repeated):
        if repeated:
            x = x._replace(q=jnp.repeat(x.q, 3, axis=2), k=jnp.repeat(x.k, 3, axis=2))
        params = x.params
        if repeated and "conv_q" in params:
            each = {n: jnp.repeat(params[n], 3, axis=0) for n in ("conv_q", "conv_k")}
            x = x._replace(params=params | each)
        return inputs.call(op, x, segment_ids=ids, **options)

    def loss(x, repeated):
        out = run(x, repeated)
        return jnp.sum(jnp.sin(out)), out

    found = [
        jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)(x, repeated)
        for repeated in (False, True)
    ]
    assert_trees_close(*found, 2e-5)
    assert found[0][0][1].shape[2] == N


@pytest.mark.parametrize(
    "op",
    [kda.kda(conv_size=3, chunk_len=4), retention.retention(conv_size=3)],
    ids=lambda x: x.name,
)
def test_a_layer_projects_fewer_heads(op):
    layer = layers.Attention(
        op, n_heads=N, n_qk_heads=N_QK, d_qk=4, d_v=3, causal=True, mode="eval"
    )
    x = np.random.default_rng(0).normal(size=(2, 11, 8)).astype(np.float32)
    params = plain.init(layer, x.shape)
    assert (params["w_q"].shape[0], params["w_k"].shape[0], params["w_v"].shape[0]) == (2, 2, 6)
    assert params["op"]["conv_q"].shape[0] == N_QK and params["op"]["conv_v"].shape[0] == N
    with pytest.raises(Unsupported, match="^n_qk_heads is 2: cross-attention has as many heads"):
        layers.CrossAttention(dense.dense(), n_heads=N, n_qk_heads=N_QK)
    whole = layers.Attention(op, n_heads=N, d_qk=4, d_v=3, causal=True, mode="eval")
    conv = {n: np.repeat(params["op"][n], 3, axis=0) for n in ("conv_q", "conv_k")}
    repeated = {n: np.repeat(params[n], 3, axis=0) for n in ("w_q", "w_k")}
    want = jax.jit(whole.apply)(params | repeated | {"op": params["op"] | conv}, x)
    np.testing.assert_allclose(jax.jit(layer.apply)(params, x), want, atol=1e-5)
    plain.assert_decodes(layer, params, x, np.array([4, 6]), want, None)
    state = layer.first_state(2, "float32")
    go_on = jax.jit(layer.apply_from)
    first, state = go_on(params, x[:, :5], state)
    second, _ = go_on(params, x[:, 5:], state)
    np.testing.assert_allclose(np.concatenate([first, second], axis=1), want, atol=1e-5)


def test_a_model_has_them():
    sizes = dict(vocab_size=7, d_model=16, d_ff=12, n_layers=1, n_heads=4)
    model = TransformerLM(**sizes, n_qk_heads=2, attention_type=gated_delta.gated_delta())
    params = jax.eval_shape(lambda: model.init_params(RNG, (1, 8)))
    assert params["stack"]["block_0"]["attention"]["w_k"].shape[1] == 2
    assert params["stack"]["block_0"]["attention"]["w_beta"].shape[1] == 4
    with pytest.raises(SettingError, match="n_qk_heads is 2 and no op of attention_type projects"):
        TransformerLM(**sizes, n_qk_heads=2, attention_type=lsh.lsh())


def test_each_head_of_queries_has_a_learnt_factor():
    op = dense.dense(scale_by_length=0.4)
    learnt = dataclasses.replace(op, learn_scale_by_length=True)
    both = (layers.Attention(x, 4, 4, 4, n_qk_heads=2, causal=True) for x in (op, learnt))
    x = jax.random.normal(RNG, (1, 6, 8))
    (fixed, params), (changed, learnt_params) = ((y, plain.init(y, x.shape)) for y in both)
    learnt_params["op"]["length_factor"] = jnp.full(2, 0.4)
    assert learnt_params["op"]["length_factor"].shape == (2,)
    out = jax.jit(changed.apply)(params | {"op": learnt_params["op"]}, x)
    np.testing.assert_allclose(out, jax.jit(fixed.apply)(params, x), atol=1e-6)


def test_what_has_none_is_refused():
    layer = dict(n_heads=6, d_qk=4, d_v=4)
    for op, options, message in (
        (
            shared_qk.shared_qk(),
            dict(n_qk_heads=2),
            "but shared_qk.. makes its keys of the queries: ",
        ),
        (lsh.lsh(), dict(n_qk_heads=2), "but lsh.. makes its keys of the queries"),
        (kda.kda(), dict(n_qk_heads=4), "n_qk_heads is 4: expected a divisor of n_heads, 6"),
        (kda.kda(), dict(n_qk_heads=2, n_kv_heads=2), "n_qk_heads is 2 and n_kv_heads 2: leave"),
    ):
        with pytest.raises((SettingError, Unsupported), match=message):
            layers.Attention(op, **layer, **options)
    x = inputs.draw(lsh.lsh(), n_heads=6)
    with pytest.raises(Unsupported, match="v has 6 heads and q has 2, but lsh makes its keys of"):
        lsh.lsh()(x.q[:, :, ::3], None, x.v, causal=True)
    assert Dims(4, 8, 8, 1).qk_heads == 4


def test_masks_and_biases_of_pairs_have_the_heads_of_values():
    op = dense.dense()
    x = inputs.draw(op, length=5, n_heads=4)
    x = x._replace(q=x.q[:, :, ::2], k=x.k[:, :, ::2])
    mask = np.random.default_rng(0).random((2, 4, 5, 5)) < 0.7
    want = inputs.call(op, x, bias=np.where(mask, 0.0, -np.inf).astype(np.float32))
    np.testing.assert_allclose(inputs.call(op, x, mask=mask), want, atol=1e-6)
    for given in (dict(mask=mask[:, :2]), dict(bias=np.zeros((2, 2, 5, 5), np.float32))):
        with pytest.raises(ValueError, match=r"has shape \(2, 2, 5, 5\): .*\(2, 4, 5, 5\), each"):
            inputs.call(op, x, **given)
