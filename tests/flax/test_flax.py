"""`reformax.flax` against flax's own modules: the same weights, masks, dropout, gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")

import flax.linen as nn
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as Spec

from reformax.declared import SettingError
from reformax.flax import attention_fn, linen
from reformax.flax import nnx as our_nnx
from reformax.layers import Attention
from reformax.ops import (
    asymmetric_lsh,
    block_sparse,
    dense,
    dsa,
    flash,
    gated_delta,
    gated_linear,
    hash_sparse,
    hca,
    kda,
    linear,
    linformer,
    local,
    long_short,
    longformer,
    lsh,
    memory_efficient,
    moba,
    nsa,
    performer,
    retention,
    routing,
    shared_qk,
)
from tests.helpers import assert_trees_close

X = np.random.default_rng(0).normal(size=(2, 12, 8)).astype(np.float32)
CAUSAL = nn.make_causal_mask(jnp.ones((2, 12)))  # float32, as flax makes it
KEYS = nn.make_attention_mask(jnp.ones((2, 1)), jnp.arange(12) < jnp.array([[12], [9]]))
THEIRS = nn.MultiHeadDotProductAttention(num_heads=2)
WEIGHTS = jax.jit(THEIRS.init)(jax.random.key(1), X)
EXACT = (dense.dense(), flash.flash(), memory_efficient.memory_efficient())


@pytest.mark.slow
@pytest.mark.parametrize("op", EXACT, ids=repr)
def test_flax_s_own_linen_module_with_an_op(op):
    """It drops what an attention function does not name: a mask must not go this way."""
    raw = nn.MultiHeadDotProductAttention(num_heads=2, attention_fn=op)
    ours = nn.MultiHeadDotProductAttention(num_heads=2, attention_fn=attention_fn(op))
    for mask in (None, CAUSAL, KEYS):
        want = THEIRS.apply(WEIGHTS, X, mask=mask)
        got = ours.apply(WEIGHTS, X, mask=mask)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    got = raw.apply(WEIGHTS, X, mask=CAUSAL > 0)
    np.testing.assert_allclose(got, THEIRS.apply(WEIGHTS, X, mask=CAUSAL), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="mask has dtype float32"):
        raw.apply(WEIGHTS, X, mask=CAUSAL)


def test_flax_s_own_modules_refuse_what_an_op_does_not_do():
    def apply(fn, x=X, **options):
        call = dict(mask=options.pop("mask", None), rngs=dict(dropout=jax.random.key(0)))
        module = nn.MultiHeadDotProductAttention(num_heads=2, attention_fn=fn, **options)
        return module.apply(WEIGHTS, x, deterministic=False, **call)

    with pytest.raises(NotImplementedError, match="dropout_rate is 0.5: give dropout=0.5"):
        apply(flash.flash(), dropout_rate=0.5)
    with pytest.raises(NotImplementedError, match="precision is set: flash does not read it"):
        apply(attention_fn(flash.flash()), precision="highest")
    with pytest.raises(NotImplementedError, match="mask has shape .*: local hides pairs"):
        apply(attention_fn(local.local()), mask=CAUSAL)
    with pytest.raises(NotImplementedError, match=r"op is lsh\(n_hashes=2\): it makes its keys"):
        attention_fn(lsh.lsh(n_hashes=2))
    with pytest.raises(SettingError, match=r"op is .*: expected an AttentionOp, such as flash.fl"):
        attention_fn(flash.flash)
    with pytest.raises(ValueError, match="query has dtype|q has dtype int32: expected floats"):
        flash.flash()(*(jnp.ones((1, 4, 2, 4), jnp.int32),) * 3)
    dropped = [apply(attention_fn(flash.flash()), dropout_rate=rate) for rate in (0.0, 0.5)]
    assert np.abs(dropped[0] - dropped[1]).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("op", ["lsh", "smyrf", "local", "linear", hash_sparse.hash_sparse()])
def test_flax_s_own_modules_with_other_algorithms(op):
    """One that draws hashes draws the same ones at each call, or by the rng that is given."""

    def apply(x=X, **options):
        module = nn.MultiHeadDotProductAttention(
            num_heads=2, attention_fn=attention_fn(op, causal=True, **options)
        )
        return module.apply(WEIGHTS, x, deterministic=True)

    np.testing.assert_array_equal(apply(), apply())
    in_nnx = nnx.MultiHeadAttention(
        2, 8, decode=False, rngs=nnx.Rngs(0), attention_fn=attention_fn(op)
    )
    assert in_nnx(X, is_causal=True).shape == X.shape
    if op == "lsh":
        longer = np.random.default_rng(1).normal(size=(1, 300, 8)).astype(np.float32)
        assert np.abs(apply(longer) - apply(longer, rng=jax.random.key(5))).max() > 1e-3


def test_flax_s_own_nnx_module_with_an_op():
    def module(**options):
        return nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0), **options)

    theirs, ours = module(), module(attention_fn=attention_fn(flash.flash()))
    want = theirs(X, mask=CAUSAL)
    for got in (ours(X, mask=CAUSAL), ours(X, is_causal=True)):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    with pytest.raises(NotImplementedError, match="causal=True with 12 queries and 6 keys"):
        ours(X, X[:, :6], is_causal=True)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        module(attention_fn=flash.flash())(X)


OPS = (
    flash.flash(),
    lsh.lsh(chunk_len=4),
    *(
        pytest.param(op, marks=pytest.mark.slow)
        for op in (local.local(chunk_len=12), block_sparse.block_sparse(), shared_qk.shared_qk())
    ),
)


@pytest.mark.parametrize("op", OPS, ids=repr)
def test_a_module_around_an_op(op):
    """linen and nnx compute the same of the same weights; where all is visible, flax's."""
    in_linen = linen.Attention(op, 2, causal=True)
    weights = in_linen.init(jax.random.key(1), X)
    in_nnx = our_nnx.Attention(op, 2, 8, causal=True, rngs=nnx.Rngs(0))
    for name, arrays in weights["params"].items():
        layer = getattr(in_nnx, name)
        layer.kernel[...], layer.bias[...] = arrays["kernel"], arrays["bias"]
    assert ("key" in weights["params"]) == (in_nnx.key is not None) != op.shared_qk
    if not op.shared_qk:
        want = THEIRS.apply(weights, X, mask=nn.combine_masks(CAUSAL, KEYS))
        got = in_linen.apply(weights, X, mask=KEYS)
        seen = np.asarray(KEYS[:, 0, 0] > 0)
        np.testing.assert_allclose(got[seen], want[seen], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(in_nnx(X, mask=KEYS)[seen], want[seen], rtol=1e-4, atol=1e-5)
    rng = {"attention": jax.random.key(2)}
    loss, gradient = jax.value_and_grad(
        lambda w: jnp.mean(in_linen.apply(w, X, mask=KEYS, rngs=rng) ** 2)
    )(weights)
    in_nnx_loss, in_nnx_gradient = nnx.value_and_grad(lambda m: jnp.mean(m(X, mask=KEYS) ** 2))(
        in_nnx
    )
    if op.plan_needs != "rng":
        np.testing.assert_allclose(in_nnx_loss, loss, rtol=1e-4)
        np.testing.assert_allclose(
            in_nnx_gradient["value"]["kernel"][...],
            gradient["params"]["value"]["kernel"],
            rtol=1e-3,
            atol=1e-5,
        )


@pytest.mark.slow
def test_a_module_in_shards_of_the_batch():
    """By `jax.shard_map` as it is: weights are whole on all shards, and so are their gradients."""
    module = linen.Attention(flash.flash(), 2, causal=True, dropout_rate=0.5)
    weights, rngs = module.init(jax.random.key(1), X), {"attention": jax.random.key(2)}
    mesh = Mesh(np.array(jax.devices()[:2]), "data")

    def loss(weights, x):
        return jnp.sum(module.apply(weights, x, rngs=rngs) ** 2)

    def in_shards(weights, x):
        return jax.lax.psum(loss(weights, x), "data")

    run, specs = jax.value_and_grad(in_shards), (Spec(), Spec("data"))
    shards = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=Spec())
    assert_trees_close(jax.jit(shards)(weights, X), jax.jit(jax.value_and_grad(loss))(weights, X))


def test_hashes_dropout_and_modes_of_a_module():
    op = lsh.lsh(chunk_len=4, n_hashes=1, n_hashes_eval=2)
    module = our_nnx.Attention(op, 2, 8, causal=True, dropout_rate=0.5, rngs=nnx.Rngs(0))
    assert not np.array_equal(module(X), module(X))  # hashes and dropout are drawn anew
    module.eval()
    assert module.deterministic
    in_linen = linen.Attention(flash.flash(), 2, dropout_rate=0.5)
    weights = in_linen.init(jax.random.key(1), X)
    apply = jax.jit(in_linen.apply, static_argnames="deterministic")
    rngs = {"attention": jax.random.key(2)}
    np.testing.assert_allclose(
        apply(weights, X, deterministic=True), THEIRS.apply(weights, X), rtol=1e-4, atol=1e-5
    )
    assert np.abs(apply(weights, X, rngs=rngs) - THEIRS.apply(weights, X)).max() > 1e-3


def test_a_view_for_evaluation_drops_nothing():
    """As that of flax's own modules, and as `eval()`, which changes the model itself."""
    module = our_nnx.Attention(flash.flash(), 2, 8, dropout_rate=0.5, rngs=nnx.Rngs(0))
    view = nnx.view(module, deterministic=True)
    assert view.deterministic and not module.deterministic
    np.testing.assert_array_equal(view(X), view(X))
    assert not np.array_equal(module(X), view(X))
    assert not nnx.view(view, deterministic=False).deterministic


def test_what_a_module_refuses():
    for op, call, message in (
        (lsh.lsh(), dict(mask=CAUSAL), "mask has shape .*: lsh hides pairs"),
        (local.local(), dict(inputs_kv=X), "inputs_kv is given, but local attends within one"),
        (routing.routing(), {}, "op is .*: its buffers are updated by reformax's own step"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            linen.Attention(op, 2).init(jax.random.key(0), X, **call)
        with pytest.raises(NotImplementedError, match=message):
            our_nnx.Attention(op, 2, 8, rngs=nnx.Rngs(0))(X, **call)
    with pytest.raises(ValueError, match="qkv_features is 8: expected a multiple of 3 heads"):
        linen.Attention(flash.flash(), 3).init(jax.random.key(0), X)
    for op, options, message in (
        (lsh.lsh, {}, "op is .*: expected an AttentionOp, such as lsh.lsh"),
        (flash.flash(), dict(num_heads=0), "num_heads is 0: expected at least 1"),
        (flash.flash(), dict(num_kv_heads=3), "num_kv_heads is 3: expected a divisor of num_head"),
        (lsh.lsh(), dict(num_kv_heads=1), "num_kv_heads is 1, but lsh.. makes its keys of the q"),
        (lsh.lsh(), dict(num_qk_heads=1), "num_qk_heads is 1, but lsh.. makes its keys of the q"),
        (flash.flash(), dict(num_qk_heads=3), "num_qk_heads is 3: expected a divisor of num_head"),
        (
            flash.flash(),
            dict(num_qk_heads=1, num_kv_heads=1),
            "num_qk_heads is 1 and num_kv_heads 1: leave one out",
        ),
        (flash.flash(), dict(qkv_features=0), "qkv_features is 0: expected at least 1"),
        (flash.flash(), dict(out_features=0), "out_features is 0: expected at least 1"),
        (flash.flash(), dict(dropout_rate=1.0), "dropout_rate is 1.0: expected a rate in"),
        (
            flash.flash(),
            dict(num_heads=8, use_rotary=True),
            "use_rotary is True and qkv_features 8, 1 a head: expected 2 at least",
        ),
        (flash.flash(), dict(dtype="bf16"), "^dtype is 'bf16': expected one of floats"),
        (flash.flash(), dict(dtype=jnp.int32), "^dtype is .*: expected one of floats"),
        (flash.flash(), dict(param_dtype=jnp.complex64), "^param_dtype is .*: expected one of flo"),
        (flash.flash(), dict(rotary_base=5e5), "rotary_base is 500000.0 and use_rotary is False"),
        (
            hca.hca(rotary_features=2),
            dict(use_rotary=True),
            "use_rotary is True and hca.rotary_features=2. rotates queries and keys by itself",
        ),
    ):
        options = dict(num_heads=2) | options
        with pytest.raises(SettingError, match=message):
            linen.Attention(op, **options).init(jax.random.key(0), X)
        with pytest.raises(SettingError, match=message):
            our_nnx.Attention(op, in_features=8, **options, rngs=nnx.Rngs(0))
    for inputs, message in (
        ([X.tolist()], r"inputs_q is \[\[\["),
        ([X[0]], r"inputs_q has shape .12, 8.: expected .batch, length, (8|features)"),
        ([X.astype(int)], "inputs_q has dtype int.*: expected floats"),
        ([X, X[:1]], r"inputs_kv has shape .1, 12, 8.: expected .2, length, (8|features)"),
        ([X, X.tolist()], r"inputs_kv is \[\[\["),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            linen.Attention(flash.flash(), 2).init(jax.random.key(0), *inputs)
        with pytest.raises(ValueError, match=f"^{message}"):
            our_nnx.Attention(flash.flash(), 2, 8, rngs=nnx.Rngs(0))(*inputs)
    turned = linen.Attention(flash.flash(), 2, use_rotary=True)
    with pytest.raises(NotImplementedError, match="inputs_kv is given and use_rotary is True"):
        turned.init(jax.random.key(0), X, X)
    with pytest.raises(SettingError, match="rotary_base is 0: expected a number above 1"):
        turned.clone(rotary_base=0).init(jax.random.key(0), X)
    for shape in ((3, 12), (2, 1, 12), (2, 11)):
        with pytest.raises(ValueError, match="positions has shape .*: expected .batch, length., "):
            turned.init(jax.random.key(0), X, positions=jnp.zeros(shape, int))
    drops = linen.Attention(kda.kda(), 2, causal=True, dropout_rate=0.5)
    with pytest.raises(NotImplementedError, match="^dropout_rate is 0.5, but kda makes no attent"):
        drops.init(jax.random.key(0), X)


def test_what_a_module_of_nnx_refuses():
    for op, options, message in (
        (linformer.linformer(), {}, "max_length is None: linformer has weights of each position"),
        (linformer.linformer(), dict(max_length=0), "max_length is 0: expected at least 1"),
        (flash.flash(), dict(in_features=0), "in_features is 0: expected at least 1"),
        (flash.flash(), dict(in_kv_features=0), "in_kv_features is 0: expected at least 1"),
        (lsh.lsh(), dict(in_kv_features=5), "in_kv_features is 5, but lsh attends within one"),
    ):
        with pytest.raises(SettingError, match=message):
            our_nnx.Attention(op, 2, **dict(in_features=8) | options, rngs=nnx.Rngs(0))
    across = our_nnx.Attention(flash.flash(), 2, 8, in_kv_features=5, rngs=nnx.Rngs(0))
    for inputs, message in (
        ([X], "inputs_kv is None: expected .batch, length, 5."),
        ([X, X], "inputs_kv has shape .2, 12, 8.: expected .2, length, 5."),
        ([X[..., :7]], "inputs_q has shape .2, 12, 7.: expected .batch, length, 8."),
    ):
        with pytest.raises(ValueError, match=message):
            across(*inputs)
    assert across(X, X[..., :5]).shape == X.shape
    without = our_nnx.Attention(flash.flash(), 2, 8, rngs=nnx.Rngs(0))
    without.dropout_rate = 0.5
    with pytest.raises(SettingError, match="dropout_rate is 0.5 and the module was made without"):
        without(X)


def pair(op, num_heads=2, x=X, *, max_length=None, **options):
    """The module of linen with its weights, and that of nnx with the same weights."""
    in_linen = linen.Attention(op, num_heads, causal=op.causality != "never", **options)
    rngs = dict(params=jax.random.key(1), attention=jax.random.key(2))
    weights = in_linen.init(rngs, x)
    options["max_length"] = max_length
    options.pop("max_decode_length", None)
    in_nnx = our_nnx.Attention(
        op, num_heads, x.shape[-1], causal=in_linen.causal, rngs=nnx.Rngs(0), **options
    )
    for name, arrays in weights["params"].items():
        if name == "op":
            is_param = dict(is_leaf=lambda x: isinstance(x, nnx.Variable))
            jax.tree.map(lambda p, w: p.set_value(w), in_nnx.op_params, arrays, **is_param)
            continue
        of_input = name.removesuffix("_up")
        layer = getattr(in_nnx, of_input, None) or in_nnx.extra_projections[of_input]
        if isinstance(layer, nnx.Sequential):  # of a low rank
            layer = layer.layers[int(of_input != name)]
        layer.kernel[...] = arrays["kernel"]
        if "bias" in arrays:
            layer.bias[...] = arrays["bias"]
    return in_linen, weights, in_nnx


def as_layer(op, params, num_heads, **options):
    """The same by the layer of `reformax.layers`."""
    names = dict(query="q", key="k", value="v", out="o")
    weights = {"op": params.get("op", ())}
    for name, arrays in params.items():
        if name != "op":
            kernel, to = arrays["kernel"], names.get(name, name)
            if name.endswith("_up"):
                weights[f"up_{name.removesuffix('_up')}"] = jnp.moveaxis(kernel[0], 1, 0)
                continue
            weights[f"w_{to}"] = kernel if name == "out" else jnp.moveaxis(kernel, 1, 0)
            weights[f"b_{to}"] = arrays["bias"]
    size, causal = params["query"]["kernel"].shape[-1], op.causality != "never"
    layer = Attention(
        op,
        num_heads,
        size,
        size,
        causal=causal,
        bias=True,
        output_bias=True,
        mode="eval",
        **options,
    )
    return jax.jit(layer.apply)(weights, X, rng=jax.random.key(0))


WITH_WEIGHTS = (
    gated_delta.gated_delta(conv_size=3),
    gated_linear.gated_linear(gate_rank=3),
    kda.kda(),
    retention.retention(),
    retention.retention(gated=False),
    longformer.longformer(n_global=2, window=4),
    linformer.linformer(),
    nsa.nsa(block_size=4, compress_len=4, compress_stride=2, n_selected=3, window=4),
    dsa.dsa(top_k=4),
    long_short.long_short(window=4),
)


@pytest.mark.parametrize("op", WITH_WEIGHTS, ids=repr)
def test_weights_and_gates_of_an_op(op):
    """A module has them and trains them; it computes what the layer of Trax does."""
    in_linen, weights, in_nnx = pair(op, max_length=X.shape[1])
    want = as_layer(op, weights["params"], 2)

    def loss(out):
        return jnp.sum(out**2), out

    def of_linen(weights, x):
        return loss(in_linen.apply(weights, x, deterministic=True))

    gradients, out = jax.jit(jax.grad(of_linen, has_aux=True))(weights, X)
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5)
    of_op = jax.tree.leaves(gradients["params"].get("op", ()))
    assert not of_op or any(map(np.any, of_op))
    of_nnx = nnx.jit(nnx.grad(lambda m, x: loss(m(x, deterministic=True)), has_aux=True))
    of_nnx, out = of_nnx(in_nnx, X)
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5)
    assert len(jax.tree.leaves(of_nnx)) == len(jax.tree.leaves(gradients))
    assert jax.eval_shape(of_linen, weights, X[:, :9])[1].shape == (2, 9, 8)


@pytest.mark.parametrize("op", [flash.flash(), local.local(chunk_len=4), moba.moba(block_size=4)])
def test_grouped_keys_and_rotary_positions(op):
    """As the layer's, and as many weights as heads of keys."""
    in_linen, weights, in_nnx = pair(op, num_kv_heads=1, use_rotary=True)
    assert weights["params"]["key"]["kernel"].shape == (8, 1, 4)
    want = as_layer(op, weights["params"], 2, n_kv_heads=1, use_rotary=True)
    np.testing.assert_allclose(in_linen.apply(weights, X), want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(in_nnx(X), want, rtol=1e-4, atol=1e-5)
    for changed in (dict(use_rotary=False), dict(rotary_base=100.0)):
        other = in_linen.clone(**changed).apply(weights, X)
        assert np.abs(other - want).max() > 1e-3
    positions = jnp.arange(12)[None] + jnp.array([[0], [7]])  # products depend on distances
    moved = in_linen.apply(weights, X, positions=positions)
    np.testing.assert_allclose(moved, want, rtol=1e-3, atol=1e-4)
    twice = in_linen.apply(weights, X, positions=2 * positions)
    assert np.abs(twice - want).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("op", [gated_delta.gated_delta(conv_size=3), moba.moba(block_size=4)])
def test_values_of_more_heads(op):
    """As the layer's; and in decoding."""
    options = dict(num_qk_heads=1, use_rotary=True)
    in_linen, weights, in_nnx = pair(op, **options, max_decode_length=12)
    shapes = {name: weights["params"][name]["kernel"].shape for name in ("query", "key", "value")}
    assert shapes == dict(query=(8, 1, 4), key=(8, 1, 4), value=(8, 2, 4))
    want = as_layer(op, weights["params"], 2, n_qk_heads=1, use_rotary=True)
    whole = in_linen.clone(max_decode_length=None).apply(weights, X)
    np.testing.assert_allclose(whole, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(in_nnx(X), want, rtol=1e-4, atol=1e-5)
    out, state = in_linen.apply(weights, X[:, :9], mutable=["cache"])
    np.testing.assert_allclose(out, want[:, :9], rtol=1e-4, atol=1e-5)
    out, _ = in_linen.apply(weights | state, X[:, 9:10], mutable=["cache"])
    np.testing.assert_allclose(out, want[:, 9:10], rtol=1e-4, atol=1e-5)


STATES = (
    *(linear.linear(conv_size=3), retention.retention(), gated_linear.gated_linear()),
    *(gated_delta.gated_delta(conv_size=3), kda.kda(), performer.performer(n_features=8)),
)


@pytest.mark.slow
@pytest.mark.parametrize("op", STATES, ids=repr)
def test_a_recurrence_reads_several_more_tokens(op):
    """From the cache of earlier ones, other numbers in each row, and one more behind them."""
    in_linen, weights, in_nnx = pair(op, use_rotary=True, max_decode_length=12)
    in_nnx.init_cache(12)
    whole = in_linen.clone(max_decode_length=None).apply(weights, X, deterministic=True)
    state, ends = {}, np.zeros(2, int)
    for lengths in (np.array([4, 2]), np.array([1, 5]), np.array([3, 3]), np.array([1, 1])):
        index = ends[:, None] + np.arange(lengths.max())
        given = np.take_along_axis(X, np.minimum(index, 11)[..., None], axis=1)
        call = dict(lengths=jnp.asarray(lengths))
        out, state = in_linen.apply(weights | state, given, **call, mutable=["cache"])
        outs = out, in_nnx(given, **call)
        for row, n in enumerate(lengths):
            want = whole[row, ends[row] : ends[row] + n]
            for out in outs:
                np.testing.assert_allclose(out[row, :n], want, rtol=1e-4, atol=1e-5)
        ends = ends + lengths
    with pytest.raises(ValueError, match="inputs_q is token 14 of a row: expected at most max_dec"):
        in_nnx(X[:, :3])


DECODED = (
    flash.flash(),
    lsh.lsh(chunk_len=4),
    lsh.lsh(chunk_len=16),
    asymmetric_lsh.asymmetric_lsh(chunk_len=16),
    gated_delta.gated_delta(conv_size=3),
    linear.linear(),
)


@pytest.mark.parametrize("op", DECODED, ids=repr)
def test_decoding_computes_the_last_row_of_attention_so_far(op):
    options = {} if op.shared_qk else dict(num_kv_heads=1)
    in_linen, weights, in_nnx = pair(op, use_rotary=True, max_decode_length=12, **options)
    assert "cache" not in weights
    rngs, lengths = {"attention": jax.random.key(3)}, jnp.array([5, 3])
    prompt = jnp.where(jnp.arange(7)[None, :, None] < lengths[:, None, None], X[:, :7], 9.0)
    apply = jax.jit(functools.partial(in_linen.apply, rngs=rngs, mutable=["cache"]))
    out, state = apply(weights, prompt, lengths=lengths)
    in_nnx.init_cache(12)
    step = nnx.jit(lambda module, x, **options: module(x, **options))
    outs = [step(in_nnx, prompt, lengths=lengths)]
    assert out.shape == outs[0].shape == (2, 7, 8)
    whole = in_linen.clone(max_decode_length=None)
    whole = jax.jit(functools.partial(whole.apply, rngs=rngs, deterministic=True))(weights, X)
    for n in range(3):
        token = jnp.take_along_axis(X, (lengths + n)[:, None, None], axis=1)
        out, state = apply(weights | state, token)
        outs.append(step(in_nnx, token))
        assert np.array_equal(state["cache"]["state"].position, lengths + n + 1)
        if op == lsh.lsh(chunk_len=4):  # hashes are drawn anew for the whole
            continue
        want = whole[np.arange(2), lengths + n]
        np.testing.assert_allclose(out[:, 0], want, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(outs[-1][:, 0], want, rtol=1e-4, atol=1e-5)
    assert np.isfinite(out).all()
    in_nnx.init_cache(None)
    assert in_nnx(X).shape == X.shape


def test_what_decoding_refuses():
    in_linen, weights, in_nnx = pair(flash.flash(), max_decode_length=8)
    mutable = dict(mutable=["cache"])
    with pytest.raises(ValueError, match="inputs_q has 12 tokens: expected at most max_decode_len"):
        in_linen.apply(weights, X, **mutable)
    with pytest.raises(NotImplementedError, match="mask is given, but the module decodes"):
        in_linen.apply(weights, X[:, :4], mask=KEYS, **mutable)
    _, state = in_linen.apply(weights, X[:, :4], **mutable)
    with pytest.raises(ValueError, match="inputs_q has 2 tokens: expected one"):
        in_linen.apply(weights | state, X[:, :2], **mutable)
    with pytest.raises(NotImplementedError, match="lengths is given, but the module does not dec"):
        in_nnx(X, lengths=jnp.array([3, 4]))
    with pytest.raises(NotImplementedError, match="positions is given and use_rotary is False"):
        in_nnx(X, positions=jnp.arange(12)[None])
    with pytest.raises(NotImplementedError, match="positions is given and use_rotary is False"):
        linen.Attention(flash.flash(), 2).init(jax.random.key(0), X, positions=jnp.arange(12)[None])
    for lengths, message in (
        (3, "lengths has shape .. and dtype int32: expected integers .batch., .2,."),
        (jnp.array([1.0, 2.0]), "lengths has shape .2,. and dtype float32"),
        (jnp.array([0, 5]), "lengths has 0 to 5: expected 1 to 4"),
    ):
        with pytest.raises(ValueError, match=message):
            in_linen.apply(weights, X[:, :4], lengths=lengths, **mutable)
    with pytest.raises(ValueError, match=message):  # also known ones in a compiled function
        jax.jit(lambda x: in_linen.apply(weights, x, lengths=lengths, **mutable))(X[:, :4])
    _, full = in_linen.apply(weights, X[:, :8], **mutable)
    with pytest.raises(ValueError, match="inputs_q is token 9 of a row: expected at most max_deco"):
        in_linen.apply(weights | full, X[:, :1], **mutable)
    out, _ = jax.jit(lambda state: in_linen.apply(weights | state, X[:, :1], **mutable))(full)
    assert np.isnan(out).all()
    with pytest.raises(SettingError, match="causal is False and max_decode_length 8"):
        our_nnx.Attention(flash.flash(), 2, 8, rngs=nnx.Rngs(0)).init_cache(8)
    with pytest.raises(SettingError, match="max_decode_length is 0: expected at least 1"):
        in_nnx.init_cache(0)
    with pytest.raises(NotImplementedError, match="op is .*: it has no step to decode with"):
        our_nnx.Attention(local.local(wrap=True), 2, 8, causal=True, rngs=nnx.Rngs(0)).init_cache(8)


def modules():
    """Each way to call an op from flax, as a function of the mask."""
    op = flash.flash()
    inside = nn.MultiHeadDotProductAttention(num_heads=2, attention_fn=attention_fn(op))
    in_linen = linen.Attention(op, 2)
    weights = in_linen.init(jax.random.key(1), X)
    in_nnx = our_nnx.Attention(op, 2, 8, rngs=nnx.Rngs(0))
    flax_s_nnx = nnx.MultiHeadAttention(
        2, 8, decode=False, rngs=nnx.Rngs(0), attention_fn=attention_fn(op)
    )
    return {
        "linen": lambda mask: in_linen.apply(weights, X, mask=mask),
        "nnx": lambda mask: in_nnx(X, mask=mask),
        "attention_fn": lambda mask: inside.apply(WEIGHTS, X, mask=mask),
        "attention_fn of nnx": lambda mask: flax_s_nnx(X, mask=mask),
    }


ADDITIVE = np.where(KEYS, 0.0, -1e9)
NO_MASKS = {
    "additive": ADDITIVE.astype(np.float32),
    "-inf": np.where(KEYS, 0.0, -np.inf).astype(np.float32),
    "float16": np.where(KEYS, 0.0, -np.inf).astype(np.float16),
    "bfloat16": jnp.asarray(ADDITIVE, jnp.bfloat16),
    "of integers": ADDITIVE.astype(np.int32),
    "of all heads": np.broadcast_to(np.asarray(ADDITIVE, np.float32), (2, 2, 12, 12)),
    "of keys": ADDITIVE[:, 0, 0].astype(np.float32),
    "shared by the batch": np.asarray(ADDITIVE[1:], np.float32),
    "nan": np.where(KEYS, 1.0, np.nan).astype(np.float32),
    "that hides nothing": np.zeros((2, 1, 1, 12), np.float32),
    "segment ids": np.array([[1] * 6 + [2] * 6, [1] * 9 + [0] * 3]),
}


@pytest.mark.parametrize("name", NO_MASKS)
def test_numbers_that_are_no_mask_are_refused(name):
    for call in modules().values():
        with pytest.raises(
            SettingError, match="^mask holds .*: expected booleans, or 1 where a key"
        ):
            call(NO_MASKS[name])


def test_numbers_that_are_no_mask_give_nan_where_they_are_unknown():
    """In `jax.jit` nothing can be raised by their values."""
    for name, call in modules().items():
        assert np.isnan(jax.jit(call)(NO_MASKS["additive"])).any(), name
        assert np.isnan(jax.jit(call)(NO_MASKS["float16"])).any(), name
        np.testing.assert_allclose(jax.jit(call)(KEYS), call(KEYS), rtol=1e-5, atol=1e-6)


def test_a_mask_of_any_dtype_and_shape():
    for name, call in modules().items():
        want = call(np.asarray(KEYS, bool))
        dtypes = np.float16, np.float32, jnp.bfloat16, np.int8, np.int32, np.uint8
        shapes = 2 * (KEYS, KEYS[:, 0, 0], np.broadcast_to(KEYS, (2, 2, 12, 12)))
        for mask, dtype in zip(shapes, dtypes, strict=True):
            got = call(jnp.asarray(mask, dtype))
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6, err_msg=name)
        for shape in ((12,), (2, 12, 12), (3, 12)):
            with pytest.raises(ValueError, match=r"mask has shape .*: expected \[batch, keys\]"):
                call(np.ones(shape, bool))


def test_dropout_alone_draws_where_nothing_is_hashed():
    """As flax's own modules do: the stream `dropout` is enough, in linen and in nnx."""
    key = jax.random.key(3)
    module = linen.Attention(flash.flash(), 2, dropout_rate=0.5)
    weights = module.init({"params": key}, X)
    a, b = (module.apply(weights, X, rngs={"dropout": jax.random.key(i)}) for i in (1, 2))
    assert np.abs(a - b).max() > 1e-3
    both = {"dropout": jax.random.key(1), "attention": key}
    np.testing.assert_array_equal(
        module.apply(weights, X, rngs=both), module.apply(weights, X, rngs={"attention": key})
    )
    with pytest.raises(SettingError, match="no stream 'dropout', and dropout_rate is 0.5: give"):
        module.apply(weights, X)

    for rngs in (nnx.Rngs(params=0, dropout=1), nnx.Rngs(params=0, attention=1), nnx.Rngs(0)):
        in_nnx = our_nnx.Attention(flash.flash(), 2, 8, dropout_rate=0.5, rngs=rngs)
        assert np.abs(in_nnx(X) - in_nnx(X)).max() > 1e-3
        assert our_nnx.Attention(flash.flash(), 2, 8, rngs=nnx.Rngs(params=0)).rngs is None
    with pytest.raises(SettingError, match="no stream 'dropout', and dropout_rate is 0.5: give"):
        our_nnx.Attention(flash.flash(), 2, 8, dropout_rate=0.5, rngs=nnx.Rngs(params=0))


def test_hashes_are_drawn_from_their_own_stream():
    op = lsh.lsh(chunk_len=4, n_hashes=1)
    module = linen.Attention(op, 2, dropout_rate=0.5)
    weights = module.init(jax.random.key(1), X)
    with pytest.raises(SettingError, match="no stream 'attention', and lsh draws hashes: give one"):
        module.apply(weights, X, rngs={"dropout": jax.random.key(1)})
    with pytest.raises(SettingError, match="no stream 'attention', and lsh draws hashes: give one"):
        our_nnx.Attention(op, 2, 8, rngs=nnx.Rngs(params=0, dropout=1))
