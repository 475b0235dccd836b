"""With 64-bit types: attention and feed-forward layers compute float64 inputs in float64."""

import jax
import numpy as np

from reformax import layers
from reformax.layers import rotary
from reformax.ops import dense
from tests.helpers import with_x64
from tests.layers import plain

X = np.random.default_rng(0).normal(size=(2, 7, 8))


def wide(params):
    return jax.tree.map(lambda w: np.asarray(w, np.float64), params)


def test_attention():
    layer = layers.Attention(dense.dense(), d_qk=4, d_v=3, causal=True, use_rotary=True)
    params = wide(plain.init(layer, X.shape))
    angle = np.arange(7)[:, None] * 10_000.0 ** (-np.arange(2) / 2)
    turn = np.exp(1j * angle)[:, None]  # of the first half of features by the second

    def rotated(x):
        x = (x[..., :2] + 1j * x[..., 2:]) * turn
        return np.concatenate([x.real, x.imag], axis=-1)

    q, k, v = (np.einsum("btd,ndh->btnh", X, params[f"w_{name}"]) for name in "qkv")
    logits = np.einsum("btnh,bsnh->bnts", rotated(q), rotated(k)) / 2
    weights = np.tril(np.exp(logits))
    out = np.einsum("bnts,bsnv->btnv", weights / weights.sum(axis=-1, keepdims=True), v)
    want = np.einsum("btnv,nvd->btd", out, params["w_o"])
    with with_x64():
        got = jax.jit(layer.apply)(params, X)
        assert got.dtype == np.float64 == rotary(q).dtype
    np.testing.assert_allclose(got, want, atol=1e-13)


def test_feed_forward():
    layer = layers.FeedForward(12, activation=jax.nn.relu, chunk_size=3)
    params = wide(plain.init(layer, X.shape))
    want = np.maximum(X @ params["w1"] + params["b1"], 0) @ params["w2"] + params["b2"]
    with with_x64():
        got = jax.jit(layer.apply)(params, X)
        assert got.dtype == np.float64
    np.testing.assert_allclose(got, want, atol=1e-13)
