"""Learned sinks: a logit of each head in the denominator of its softmax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.layers import Attention
from reformax.ops import dense, flash
from reformax.ops.calls import this_gpu
from reformax.ops.calls.dispatch import INTERPRETED
from reformax.ops.masking.masks import visibility
from tests.layers import plain

B, T, N, G, H = 2, 37, 4, 2, 8
OPS = (
    dense.dense(learned_sinks=True),
    flash.flash(learned_sinks=True, query_block_size=16, key_block_size=8),
)
IN_KERNELS = flash.flash(learned_sinks=True, impl=INTERPRETED)
SEGMENTS = jnp.array([[1] * 20 + [2] * 17, [1] * 30 + [0] * 7])


def inputs(n_kv_heads=G):
    rng = np.random.default_rng(0)
    heads = (N, n_kv_heads, n_kv_heads)
    arrays = [jax.device_put(rng.normal(size=(B, T, n, H)).astype(jnp.float32)) for n in heads]
    return *arrays, jnp.array([-1.0, 0.0, 1.5, 4.0])


def with_a_key(q, k, v, sinks, causal, segment_ids=None, soft_cap=None):
    """The same by a softmax over one more logit, of which the weight is left out."""
    k, v = (jnp.repeat(x, N // x.shape[2], axis=2) for x in (k, v))
    logits = jnp.einsum("btnh,bsnh->bnts", q, k) / H**0.5
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    mask = visibility(T, T, causal=causal, segment_ids=segment_ids)
    logits = jnp.where(mask, logits, -jnp.inf)
    one_more = jnp.broadcast_to(sinks[None, :, None, None], (*logits.shape[:3], 1))
    weights = jax.nn.softmax(jnp.concatenate([logits, one_more], axis=-1), axis=-1)[..., :-1]
    return jnp.einsum("bnts,bsnv->btnv", weights, v)


@pytest.mark.parametrize("op", (*OPS, IN_KERNELS), ids=lambda op: f"{op.name}, {op.impl}")
@pytest.mark.parametrize("causal, segment_ids", [(True, None), (False, SEGMENTS)])
def test_one_more_logit(op, causal, segment_ids):
    """Values and gradients, those of the sinks too."""

    def ours(q, k, v, sinks):
        masks = dict(causal=causal, segment_ids=segment_ids)
        return op(q, k, v, params={"sinks": sinks}, **masks)

    def theirs(*arrays):
        return with_a_key(*arrays, causal, segment_ids)

    weights = jnp.cos(jnp.arange(B * T * N * H, dtype=jnp.float32)).reshape(B, T, N, H)
    results = []
    for function in (ours, theirs):

        def loss(*arrays, function=function):
            out = function(*arrays)
            return jnp.sum(weights * jnp.sin(out)), out

        gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True))
        (_, out), gradients = gradient(*inputs())
        results.append((out, *gradients))
    for got, want in zip(*results, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5)
    assert np.abs(results[0][4]).min() > 1e-3  # each head's sink has a gradient


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_sinks_far_below_and_with_a_soft_cap(op):
    q, k, v, sinks = inputs()
    params = {"sinks": jnp.full(N, -1e30)}
    plain = type(op)(**({} if op.name == "dense" else dict(query_block_size=16, key_block_size=8)))
    got = op(q, k, v, causal=True, params=params)
    np.testing.assert_allclose(got, plain(q, k, v, causal=True), rtol=1e-5, atol=1e-6)
    capped = type(op)(learned_sinks=True, soft_cap=1.0)
    got = capped(q, k, v, causal=True, params={"sinks": sinks})
    want = with_a_key(q, k, v, sinks, True, soft_cap=1.0)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_forward_mode_and_a_sink_that_takes_all():
    q, k, v, sinks = inputs()
    op = flash.flash(learned_sinks=True, impl="xla")

    def attend(sinks):
        return op(q, k, v, causal=True, params={"sinks": sinks})

    got, want = (
        jax.jit(lambda s, f=f: jax.jvp(f, (s,), (jnp.ones(N),))[1])(sinks)
        for f in (attend, lambda s: with_a_key(q, k, v, s, True))
    )
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5)
    assert not np.any(jax.jit(attend)(jnp.full(N, 1e4)))


@pytest.mark.parametrize("dtype, tolerance", [(jnp.float16, 4e-3), (jnp.bfloat16, 3e-2)])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_kernels_of_half_precision_and_with_dropout(dropout, dtype, tolerance):
    """Against array operations in float32: odd lengths, segments, NaN at padding."""
    arrays = *inputs(), jnp.cos(jnp.arange(B * T * N * H, dtype=jnp.float32)).reshape(B, T, N, H)
    padding = (SEGMENTS == 0)[..., None, None]
    masks = dict(causal=True, segment_ids=SEGMENTS, dropout=dropout, rng=jax.random.key(1))

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def run(impl, dtype, q, k, v, sinks, d_out):
        op = flash.flash(learned_sinks=True, soft_cap=3.0, impl=impl)

        def attend(q, k, v, sinks):
            return op(q, k, v, params={"sinks": sinks}, **masks)

        q, k, v, d_out = (jnp.where(padding, jnp.nan, x.astype(dtype)) for x in (q, k, v, d_out))
        out, vjp = jax.vjp(attend, q, k, v, sinks)
        return out, *vjp(d_out.astype(out.dtype))

    want = run("xla", jnp.float32, *arrays)
    got = run(INTERPRETED, dtype, *arrays)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x.astype(jnp.float32), y, atol=tolerance * np.abs(y).max())


@pytest.mark.parametrize("op", (*OPS, IN_KERNELS), ids=lambda op: f"{op.name}, {op.impl}")
def test_decoding_has_the_sinks(op):
    q, k, v, sinks = inputs()
    params, lengths = {"sinks": sinks}, jnp.array([30, 30])
    want = op(q, k, v, causal=True, params=params)
    first = [x[:, :30] for x in (q, k, v)]
    cache = op.init_cache(params, *first, plan=(), lengths=lengths, capacity=T)
    step = jax.jit(functools.partial(op.step, params))
    for t in range(30, 33):
        token = [x[:, t : t + 1] for x in (q, k, v)]
        out, cache = step(*token, cache, position=jnp.full(B, t))
        np.testing.assert_allclose(out[:, 0], want[:, t], rtol=1e-4, atol=1e-5)
    if op.impl == INTERPRETED:
        assert "pallas_call" in str(jax.make_jaxpr(step)(*token, cache, position=jnp.full(B, 33)))
    # In beam search: both rows are beams of one search, each with its own past.
    origins = jnp.broadcast_to(jnp.arange(2)[None, :, None], (1, 2, T))
    token = [x[:, 33:34] for x in (q, k, v)]
    out, _ = step(*token, cache, position=jnp.full(B, 33), origins=origins)
    np.testing.assert_allclose(out[:, 0], want[:, 33], rtol=1e-4, atol=1e-5)


def test_cudnn_and_shards_of_a_sequence_refuse_them(monkeypatch):
    q, k, v, sinks = inputs()
    monkeypatch.setattr(this_gpu, "obstacle", lambda: None)
    op = flash.flash(learned_sinks=True, impl="cudnn")
    with pytest.raises(NotImplementedError, match="impl='cudnn' with learned_sinks=True"):
        op(q, k, v, causal=True, params={"sinks": sinks})
    assert "sequence" in flash.flash().shards
    assert "sequence" not in flash.flash(learned_sinks=True).shards
    with pytest.raises(ValueError, match="params is ..: flash has weights of its own"):
        flash.flash(learned_sinks=True)(q, k, v)


def test_a_layer_trains_its_sinks():
    layer = Attention(OPS[1], n_heads=N, d_qk=H, d_v=H, causal=True)
    x = jax.device_put(np.random.default_rng(1).normal(size=(B, T, 16)).astype(jnp.float32))
    params = plain.init(layer, x.shape)
    assert params["op"]["sinks"].shape == (N,)
    gradients = jax.jit(jax.grad(lambda p: jnp.sum(layer.apply(p, x) ** 2)))(params)
    assert np.abs(gradients["op"]["sinks"]).min() > 0
