"""Kernels are compiled for GPUs that are described: `auto` takes none that does not fit.

Needs JAX's compiler for NVIDIA GPUs, and no GPU.
"""

import sys
import types

import jax
import jax.numpy as jnp
import pytest

from benchmarks.harness import attention_table
from reformax.ops import flash
from reformax.ops.calls import dispatch
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
    case = attention_table.Case(name, 4096, 0.1 * op.dropout, True, 1, 2, size, dtype, gpu.name)
    lowered = program.attention(case, gradient=True, causal=False).lowered(
        described.devices(gpu)[0]
    )
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
    assert dispatch.SHARED_KIB[float(gpu.capability)] * 1024 == gpu.shared
