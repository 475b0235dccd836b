"""Kernels are compiled for GPUs that are described: `auto` takes none that does not fit.

They are those of attention, of layers, of the loss and of a step of decoding.

Needs JAX's compiler for NVIDIA GPUs, and no GPU.
"""

import sys
import types

import jax
import jax.numpy as jnp
import pytest

from benchmarks.harness import attention_table
from reformax.layers.kernels import feed_forward, few_rows, layer_norm, one_row
from reformax.ops import flash, lsh
from reformax.ops.calls import this_gpu
from reformax.ops.calls.call import Call
from reformax.ops.decoding.cache import KeyValues, SharedByBatch
from reformax.ops.kernels.triton import one_query
from reformax.training.kernels import cross_entropy
from tools import described, program


@pytest.fixture(params=described.GPUS)
def gpu(request):
    gpu = described.GPUS[request.param]
    try:
        described.devices(gpu)
        with described.assumed(gpu):
            yield gpu
    except NotImplementedError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.parametrize(
    "size, dtype",
    [(size, dtype) for dtype in ("bfloat16", "float32") for size in (64, 128, 256)],
)
@pytest.mark.parametrize("name", attention_table.attentions())
def test_both_passes_compile(gpu, name, size, dtype):
    op = attention_table.attentions()[name]
    compile_attention(gpu, name, 0.1 * op.dropout, True, size, dtype, causal=False)


@pytest.mark.slow
@pytest.mark.parametrize("size, dtype", [(64, "bfloat16"), (256, "float32")])
@pytest.mark.parametrize("name", attention_table.attentions())
def test_both_passes_compile_causal(gpu, name, size, dtype):
    """Without dropout and a mask."""
    if attention_table.attentions()[name].causality == "never":
        pytest.skip(f"{name} hides no future")
    compile_attention(gpu, name, 0.0, False, size, dtype, causal=True)


def compile_attention(gpu, name, dropout, masked, size, dtype, causal):
    case = attention_table.Case(name, 4096, dropout, masked, 1, 2, size, dtype, gpu.name)
    lowered = program.attention(case, gradient=True, causal=causal).lowered(
        described.devices(gpu)[0]
    )
    lowered.compile(compiler_options=described.OPTIONS)


def norm(x, y, scale, bias):
    options = layer_norm.LayerNormOptions(1e-5, (x.dtype,), pass_on=True)
    return layer_norm.normalize(options, layer_norm.LayerNormInputs(x, y, scale, bias))


def hidden_layer(pre, bias, w2, seed, start):
    options = feed_forward.FeedForwardOptions(jax.nn.gelu, 512, 0.1)
    return feed_forward.project(options, feed_forward.FeedForwardInputs(pre, bias, seed, start), w2)


def products_of_a_row(x, added, w, scale, bias):
    options = one_row.OneRowOptions(1e-5, jax.nn.gelu, (w.shape[0],))
    factors = dict(scale=scale, bias=bias)
    return one_row.affine(options, one_row.OneRowInputs(x, added, w, None, factors))


def products_of_rows(x, added, w, bias):
    options = one_row.OneRowOptions(None, jax.nn.gelu, (w.shape[0],))
    return few_rows.affine(options, one_row.OneRowInputs(x, added, w, bias, None))


def loss(logits, targets, weights):
    return cross_entropy.differentiate(logits, targets, weights, 0.1, 1e-4, "bfloat16")


def decoding_step(q, keys, values, mask):
    return one_query.attend(q, keys, values, mask)


def lsh_step(q, keys, buckets, rotations, position):
    op = lsh.lsh(n_hashes=2, n_buckets=256, impl="auto")
    cache = lsh.LshCache(KeyValues(keys, keys), buckets, buckets, SharedByBatch(rotations))
    return op._step(Call(position=position), None, q, q, q, cache)


# A function and the shapes of its arguments: a dtype of None is the one under test. Gradients are
# of so many of the arguments.
OTHER_KERNELS = {
    norm: ([((4096, 1024), None)] * 2 + [((1024,), "float32")] * 2, 4),
    hidden_layer: (
        [((4096, 4096), None), ((4096,), None), ((4096, 1024), None)]
        + [((6,), "uint32"), ((1,), "int32")],
        3,
    ),
    products_of_a_row: (
        [((1, 1024), None), ((1, 4096), None), ((4096, 1024), None)] + [((1024,), "float32")] * 2,
        0,
    ),
    products_of_rows: (
        [((16, 1024), "bfloat16"), ((16, 4096), "float32"), ((4096, 1024), "bfloat16")]
        + [((4096,), "bfloat16")],
        0,
    ),
    loss: ([((512, 50257), "float32"), ((512,), "int32"), ((512,), "float32")], 0),
    decoding_step: (
        [((1, 1, 8, 128), None)] + [((1, 2, 4096, 128), None)] * 2 + [((1, 1, 4096), "bool")],
        0,
    ),
    lsh_step: (
        [((2, 1, 4, 64), None), ((2, 4, 20000, 64), None), ((2, 4, 2, 20000), "int32")]
        + [((4, 64, 2, 128), "float32"), ((2,), "int32")],
        0,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("function", OTHER_KERNELS, ids=lambda function: function.__name__)
def test_kernels_of_layers_loss_and_decoding_compile(gpu, function, dtype):
    shapes, n_differentiated = OTHER_KERNELS[function]
    whole = jax.sharding.SingleDeviceSharding(described.devices(gpu)[0])
    arrays = [jax.ShapeDtypeStruct(x, kind or dtype, sharding=whole) for x, kind in shapes]

    def both(*arrays):
        given, rest = arrays[:n_differentiated], arrays[n_differentiated:]
        if not given:
            return function(*rest)
        out, vjp = jax.vjp(lambda *given: function(*given, *rest), *given)
        return out, vjp(jax.tree.map(jnp.ones_like, out))

    lowered = jax.jit(both).lower(*arrays)
    assert "triton" in lowered.as_text()
    lowered.compile(compiler_options=described.OPTIONS)


def test_a_call_is_traced_for_each_gpu(monkeypatch):
    """Wide heads have a kernel on one GPU, and none on another or on this machine."""
    lowering = "jax._src.pallas.triton.gpu_info"
    if jax.__version_info__ < (0, 11):  # older ones do not have it, and tracing does not need it
        held = types.SimpleNamespace(GpuInfo=dict, get_gpu_info=None)
        monkeypatch.setitem(sys.modules, lowering, held)
    x = jax.ShapeDtypeStruct((1, 256, 2, 128), jnp.float32)

    def has_kernel():
        return "pallas_call" in str(jax.make_jaxpr(flash.flash())(x, x, x))

    for name in ("h200", "3090", "a100"):
        with described.assumed(described.GPUS[name]):
            assert has_kernel() == (name != "3090")
        assert not has_kernel()


@pytest.mark.parametrize("name", described.GPUS)
def test_what_is_said_of_a_gpu(name):
    """Threads and float32 units of a core, a block's memory: the tables of NVIDIA's CUDA guide."""
    gpu = described.GPUS[name]
    threads = 1536 if gpu.capability in ("8.6", "8.9", "12.0") else 2048
    assert f"threads_per_core_limit: {threads}\n" in gpu.description
    assert f"fpus_per_core: {64 if name == 'a100' else 128}\n" in gpu.description
    assert this_gpu.SHARED_KIB[float(gpu.capability)] * 1024 == gpu.shared
