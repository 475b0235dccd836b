"""Positions as biases: the papers' numbers, distances alone, and what a layer adds."""

import jax
import numpy as np
import pytest

from reformax import layers
from reformax.layers import relative
from reformax.ops import dense, flash, local
from tests.layers import plain

RNG = jax.random.PRNGKey(5)
SIZES = dict(n_heads=3, d_qk=6, d_v=5)


def numbers(length=13, seed=0):
    return np.random.default_rng(seed).normal(size=(2, length, 7)).astype(np.float32)


def test_slopes_are_the_papers():
    np.testing.assert_allclose(relative.slopes(8), [2.0**-i for i in range(1, 9)])
    np.testing.assert_allclose(relative.slopes(1), [2.0**-8])
    # Their code's list for 12 heads: those of 8, and every other one of 16.
    more = [2.0 ** -(i / 2) for i in (1, 3, 5, 7)]
    np.testing.assert_allclose(relative.slopes(12), [2.0**-i for i in range(1, 9)] + more)


@pytest.mark.parametrize("causal", [True, False])
def test_buckets_are_t5s(causal):
    """Written from the description of mesh_tensorflow's `_relative_position_bucket`."""

    def bucket(ahead):
        n, first = (32, 0) if causal else (16, 16 * (ahead > 0))
        distance = max(-ahead, 0) if causal else abs(ahead)
        if distance < n // 2:
            return first + distance
        far = np.log(np.float32(distance / (n // 2))) / np.log(128 / (n // 2)) * (n - n // 2)
        return first + min(n // 2 + int(far), n - 1)

    ahead = np.arange(-200, 1 if causal else 201)
    got = np.asarray(relative.buckets(ahead, causal))
    want = np.array([bucket(int(x)) for x in ahead])
    # Where the logarithm is a whole number, float32 may round to either side.
    assert np.sum(got != want) <= 2 and np.abs(got - want).max() <= 1
    assert set(got) == set(range(32)) - ({16} if not causal else set())


@pytest.mark.parametrize("kind", ["alibi", "t5"])
@pytest.mark.parametrize("causal", [True, False])
def test_a_layer_adds_the_bias(kind, causal):
    layer = layers.Attention(flash.flash(), **SIZES, causal=causal, position_bias=kind)
    x = numbers()
    params = plain.init(layer, x.shape)
    position = np.arange(13)
    if kind == "alibi":
        bias = -relative.slopes(3)[:, None, None] * abs(position[:, None] - position)
    else:
        ahead = position[None] - position[:, None]
        bias = np.moveaxis(params["position_bias"][relative.buckets(ahead, causal)], -1, 0)
    q, k, v, *_ = layer.project(params, x)[0]
    out = dense.dense()(q, k, v, causal=causal, bias=bias[None].astype(np.float32))
    want = np.einsum("btnv,nvd->btd", out, params["w_o"])
    np.testing.assert_allclose(jax.jit(layer.apply)(params, x), want, atol=1e-5)


@pytest.mark.parametrize("kind", ["alibi", "t5"])
def test_steps_are_apply(kind):
    options = dict(causal=True, position_bias=kind, mode="eval", n_kv_heads=1)
    layer = layers.Attention(dense.dense(), **SIZES, **options)
    x, lengths = numbers(), np.array([6, 3])
    params = plain.init(layer, x.shape)
    whole = jax.jit(layer.apply)(params, x)
    plain.assert_decodes(layer, params, x, lengths, whole, RNG)


def test_an_op_that_adds_no_bias():
    with pytest.raises(NotImplementedError, match=r"position_bias is 'alibi', but local\(\) adds"):
        layers.Attention(local.local(), position_bias="alibi")
    with pytest.raises(ValueError, match="position_bias is 'rope': expected 'alibi' or 't5'"):
        layers.Attention(dense.dense(), position_bias="rope")
