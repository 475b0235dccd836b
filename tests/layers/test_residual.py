"""Residual stacks of layers, and the norm that each layer begins with."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax import layers
from reformax.layers.base import Layer
from reformax.ops import dense, local
from reformax.ops.calls import this_gpu
from reformax.ops.calls.dispatch import INTERPRETED
from tests.helpers import assert_trees_close, lower_for_gpu, with_gradients
from tests.layers import plain

RNG = jax.random.PRNGKey(3)
KERNEL = "pallas" if jax.default_backend() == "gpu" else INTERPRETED


def stream(length=13, d_model=8):
    return np.random.default_rng(0).normal(size=(2, length, d_model)).astype(np.float32)


@pytest.mark.parametrize(
    "remat_policy, packed, scan_layers",
    [
        ("nothing", True, True),
        pytest.param("all", False, True, marks=pytest.mark.slow),
        pytest.param("all", True, False, marks=pytest.mark.slow),
    ],
)
def test_output_and_gradients_are_the_equations(remat_policy, packed, scan_layers):
    cycle, x = plain.blocks([local.local(chunk_len=4), dense.dense()]), stream()
    options = dict(remat_policy=remat_policy, masked=packed, scan_layers=scan_layers)
    stack = layers.ResidualStack(cycle, 4, **options)
    params = plain.init(stack, x.shape)
    segment_ids = plain.some_segments(*x.shape[:2]) if packed else None
    weights = stream()[:, ::-1]

    @with_gradients
    def by_stack(params, x):
        return stack.apply(params, x, *(() if segment_ids is None else (segment_ids,)), rng=RNG)

    want, vjp = jax.vjp(lambda *z: plain.residual(cycle, 4, *z, segment_ids, RNG), params, x)
    assert_trees_close(by_stack(weights, params, x), (want, vjp(weights)))


@pytest.mark.parametrize("scan_layers", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_norms_add_the_biases_of_outputs(scan_layers):
    """Without dropout, which would follow them."""
    cycle = plain.blocks([dense.dense()], rate=0.0, output_bias=True)
    stack, x = layers.ResidualStack(cycle, 2, scan_layers=scan_layers), stream()
    block = (params := plain.init(stack, x.shape))["block_0"]
    rng = np.random.default_rng(1)
    for name, bias in (("attention", "b_o"), ("feed_forward", "b2")):
        block[name][bias] = rng.normal(size=block[name][bias].shape).astype(np.float32)
        weights, apart = getattr(cycle[0], name).without_output_bias(block[name])
        assert weights[bias] is None and apart is block[name][bias]
    by_stack = with_gradients(functools.partial(stack.apply, rng=RNG))(stream()[:, ::-1], params, x)
    want, vjp = jax.vjp(lambda *z: plain.residual(cycle, 2, *z, None, RNG), params, x)
    assert_trees_close(by_stack, (want, vjp(stream()[:, ::-1])))


class Doubled(Layer):
    """A user's own layer in place of a feed-forward layer."""

    drops = False

    def init_params(self, rng, shape):
        return {"w2": jnp.ones(shape[-1:])}

    def apply(self, params, x, rng=None):
        return 2 * params["w2"] * x


@pytest.mark.parametrize(
    "last, post_norm",
    [
        (layers.FeedForward(8, bias=False), False),
        (layers.FeedForward(8, 0.5), False),
        (layers.FeedForward(8, output_norm="rms"), False),
        (Doubled(), False),
        (layers.FeedForward(8, bias=False), True),
    ],
    ids=["no bias", "dropout", "norm", "own layer", "post-norm"],
)
def test_blocks_of_a_cycle_may_differ_in_what_a_norm_adds(last, post_norm):
    ((attention, feed_forward, _),) = plain.blocks([dense.dense()], rate=0.0, output_bias=True)
    cycle = [(attention, feed_forward), [attention, last]]
    options = dict(post_norm=post_norm)
    looped, written = (
        layers.ResidualStack(cycle, 4, scan_layers=scan_layers, **options)
        for scan_layers in (True, False)
    )
    params, x = plain.init(looped, (2, 8, 8)), stream(8)
    for block in params.values():
        block["attention"]["b_o"] += 0.5
        if "b2" in block["feed_forward"]:
            block["feed_forward"]["b2"] -= 0.5
    want, got = (
        with_gradients(functools.partial(stack.apply, rng=RNG))(stream(8)[:, ::-1], params, x)
        for stack in (looped, written)
    )
    assert_trees_close(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_post_norm_layers_that_are_written_out_compute_the_same(dtype):
    """Between them the stream is there twice, and so is its gradient."""
    cycle, x = plain.blocks([dense.dense()]), stream()
    sizes = dict(post_norm=True, dtype=dtype)
    looped, written = (
        layers.ResidualStack(cycle, 3, scan_layers=scan_layers, **sizes)
        for scan_layers in (True, False)
    )
    params, weights = plain.init(looped, x.shape), stream()[:, ::-1]
    want, got = (
        with_gradients(functools.partial(stack.apply, rng=RNG))(weights, params, x)
        for stack in (looped, written)
    )
    assert want[0].dtype == got[0].dtype == jnp.float32
    assert_trees_close(got, want, 1e-5 if dtype == "float32" else 2e-2)


@pytest.mark.slow
def test_dtype_is_what_sublayers_compute_in():
    cycle, x = plain.blocks([dense.dense()]), stream(5)
    wide, narrow = (layers.ResidualStack(cycle, 2, dtype=d) for d in ("float32", "bfloat16"))
    params = plain.init(wide, x.shape)
    wide, narrow = (jax.jit(s.apply)(params, x, rng=RNG) for s in (wide, narrow))
    assert wide.dtype == narrow.dtype == jnp.float32
    assert 1e-4 < np.abs(wide - narrow).max() < 0.1


@pytest.mark.parametrize("epsilon", [1e-6, 0.5])
def test_layer_norm(epsilon):
    x = 3 * stream() + 100
    norm = layers.LayerNorm(epsilon=epsilon)
    params = plain.init(norm, x.shape)
    x64 = x.astype(np.float64)
    variance = x64.var(axis=-1, keepdims=True)
    want = (x64 - x64.mean(axis=-1, keepdims=True)) / np.sqrt(variance + epsilon)
    want = want * params["scale"] + params["bias"]
    np.testing.assert_allclose(norm.apply(params, x), want, atol=1e-4)


@pytest.mark.parametrize("epsilon", [1e-6, 0.5])
def test_rms_norm(epsilon):
    x = 3 * stream() + 100
    norm = layers.RMSNorm(epsilon=epsilon)
    params = plain.init(norm, x.shape)
    x64 = x.astype(np.float64)
    want = x64 / np.sqrt((x64**2).mean(axis=-1, keepdims=True) + epsilon) * params["scale"]
    assert params.keys() == {"scale"}
    np.testing.assert_allclose(norm.apply(params, x), want, rtol=1e-5)


each_norm = pytest.mark.parametrize("norm", [layers.LayerNorm, layers.RMSNorm])


@each_norm
@pytest.mark.parametrize(
    "n_rows, size, added, dtypes",
    [
        (5, 32, None, ["float32"]),
        (37, 24, "bfloat16", ["float32", "bfloat16"]),
        (37, 1, "float32", ["float32"]),
        (3000, 16, None, ["bfloat16"]),
    ],
)
def test_the_kernel_of_a_norm_is_the_same_function(n_rows, size, added, dtypes, norm):
    """Also where a program has several rows, and the last of them fewer."""
    rng = np.random.default_rng(0)
    x, y, *weights = (rng.normal(size=(n_rows, size)).astype(np.float32) for _ in range(4))
    params = {"scale": weights[0][0], "bias": weights[1][0]}
    y_bias = None if added is None else weights[1][1]
    y = None if added is None else y.astype(added)
    if norm is layers.RMSNorm:
        del params["bias"]
    plain_norm, kernel = (norm(1e-3, impl=impl) for impl in ("xla", KERNEL))

    def output_and_gradients(norm):
        def loss(params, x, y, y_bias):
            outs = norm.of_sum(params, x, y, *dtypes, y_bias=y_bias)
            assert [out.dtype for out in outs] == dtypes
            return sum(jnp.sum(w * out) for w, out in zip(weights, outs, strict=False)), outs

        of = (0, 1) if y is None else (0, 1, 2, 3)
        return jax.jit(jax.grad(loss, of, has_aux=True))(params, x, y, y_bias)

    got, want = output_and_gradients(kernel), output_and_gradients(plain_norm)
    assert jax.tree.map(lambda z: z.dtype, got) == jax.tree.map(lambda z: z.dtype, want)
    exact = dtypes == ["float32"] and added != "bfloat16"
    assert_trees_close(got, want, 1e-5 if exact else 2e-2)


@each_norm
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("added", [None, "float32", "bfloat16"])
def test_a_residual_and_its_gradient_are_added_in_the_norms_kernel(dtype, added, norm):
    x, y, *weights = np.random.default_rng(0).normal(size=(5, 2, 37, 24)).astype(np.float32)
    y_bias = None if added is None else weights[2][0, 0]
    y = None if added is None else jnp.asarray(y, added)
    params = {"scale": weights[0][0, 0], "bias": weights[1][0, 0]}
    if norm is layers.RMSNorm:
        del params["bias"]

    def loss(params, x, y, y_bias, impl):
        normed, x = norm(1e-3, dtype, impl).with_residual(params, x, y, y_bias)
        assert (normed.dtype, x.dtype) == (dtype, jnp.float32)
        return jnp.sum(weights[0] * normed) + jnp.sum(weights[1] * jnp.sin(x)), (normed, x)

    of = (0, 1) if y is None else (0, 1, 2, 3)
    by_kernel, plainly = (
        functools.partial(jax.grad(loss, of, has_aux=True), impl=i) for i in (KERNEL, "xla")
    )
    got, want = (jax.jit(f)(params, x, y, y_bias) for f in (by_kernel, plainly))
    assert jax.tree.map(lambda z: z.dtype, got) == jax.tree.map(lambda z: z.dtype, want)
    assert_trees_close(got, want, 1e-5 if {dtype, added} <= {"float32", None} else 2e-2)
    assert "add_any" in str(jax.make_jaxpr(plainly)(params, x, y, y_bias))
    assert "add_any" not in str(jax.make_jaxpr(by_kernel)(params, x, y, y_bias))


@pytest.mark.parametrize("n_rows, kernels", [(1, 1), (2, 0), (4095, 0), (4096, 1)])
def test_auto_takes_the_kernel_for_many_rows_and_for_one(n_rows, kernels, monkeypatch):
    monkeypatch.setattr(this_gpu, "obstacle", lambda: None)
    norm, x = layers.LayerNorm(), jax.ShapeDtypeStruct((n_rows, 8), jnp.float32)
    params = plain.init(norm, x.shape)
    program = str(jax.make_jaxpr(norm.with_residual)(params, x, x))
    assert program.count("pallas_call[") == kernels


@each_norm
@pytest.mark.parametrize("size, added", [(512, "bfloat16"), (1000, None)])
def test_the_kernel_of_a_norm_lowers_for_a_gpu(size, added, norm, monkeypatch):
    monkeypatch.setattr(this_gpu, "obstacle", lambda: None)
    norm = norm(impl="pallas")
    x = jax.ShapeDtypeStruct((4, 100, size), jnp.float32)
    y = None if added is None else jax.ShapeDtypeStruct(x.shape, added)
    params = plain.init(norm, x.shape)

    def loss(params, x, y):
        outs = norm.of_sum(params, x, y, "float32", "bfloat16")
        return sum(jnp.sum(out.astype(jnp.float32)) for out in outs)

    assert lower_for_gpu(jax.grad(loss, (0, 1)), params, x, y).count("layer_norm") >= 2

    def loss_with_residual(params, x, y):
        outs = norm.with_residual(params, x, y)
        return sum(jnp.sum(jnp.sin(out.astype(jnp.float32))) for out in outs)

    text = lower_for_gpu(jax.grad(loss_with_residual, (0, 1)), params, x, y)
    (backward,) = [line for line in text.splitlines() if "layer_norm_backward" in line]
    assert backward.count("operand_index") == 1, "it does not write over what it adds"


def test_layer_norm_is_float32_inside():
    x = stream().astype(jnp.bfloat16)
    norm = layers.LayerNorm()
    params = plain.init(norm, x.shape)
    out = norm.apply(params, x)
    wide = layers.LayerNorm(dtype="float32").apply(params, x)
    assert out.dtype == jnp.bfloat16 and wide.dtype == jnp.float32
    np.testing.assert_allclose(wide, norm.apply(params, x.astype(np.float32)), atol=1e-5)
    np.testing.assert_array_equal(out, wide.astype(jnp.bfloat16))


@pytest.mark.parametrize("masked", ["stream", "memory"])
@pytest.mark.parametrize("kind", [layers.ResidualStack, layers.ReversibleStack])
def test_a_memory_and_its_reader_are_masked_apart(kind, masked):
    """A sequence without a mask is as one of ones."""
    x, memory, ones = stream(), stream(7), np.ones((2, 13), bool)
    mask, of_memory = np.arange(13) < np.array([[13], [9]]), np.arange(7) < np.array([[4], [7]])
    attention = layers.Attention(dense.dense(), n_heads=2, d_qk=4, d_v=4, causal=True, masked=True)
    crossing = layers.CrossAttention(dense.dense(), n_heads=2, d_qk=4, d_v=4, masked=True)
    stack = kind([(attention, layers.FeedForward(16), crossing)], 1, masked=True)
    streams = (x,) * stack.n_streams
    params = plain.init(stack, *(y.shape for y in streams), mask.shape, memory.shape, (2, 7))
    if masked == "stream":
        masks, full = (mask, None), (mask, np.ones((2, 7), bool))
    else:
        masks, full = (None, of_memory), (ones, of_memory)
    got, want, without = (
        jax.tree.leaves(stack.apply(params, *streams, one, memory, other, rng=RNG))
        for one, other in (masks, full, (None, None))
    )
    assert_trees_close(got, want)
    assert np.abs(got[0] - without[0]).max() > 1e-2


@pytest.mark.parametrize("kind", [layers.ResidualStack, layers.ReversibleStack])
def test_a_memory_that_nothing_reads_is_told(kind):
    stack = kind(plain.blocks([dense.dense()]), 1)
    x = stream()
    params = plain.init(stack, *[x.shape] * stack.n_streams)
    with pytest.raises(ValueError, match="memory is given and no block has cross_attention"):
        stack.apply(params, *[x] * stack.n_streams, None, x)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(epsilon=-1.0), "epsilon is -1.0: expected a number of at least 0"),
        (dict(dtype="int8"), "dtype is 'int8': expected one of floats, such as 'bfloat16'"),
    ],
)
def test_a_norm_of_what_is_none_is_told(options, message):
    with pytest.raises(ValueError, match=message):
        layers.LayerNorm(**options)
