"""Kernels are compiled for GPUs that are described: `auto` takes none that does not fit.

Needs JAX's compiler for NVIDIA GPUs, and no GPU.
"""

import pytest

from benchmarks import program
from benchmarks.harness import attention_table, described


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
@pytest.mark.matrix
@pytest.mark.parametrize(
    "size, dtype", [(64, "bfloat16"), (128, "bfloat16"), (64, "float32"), (128, "float32")]
)
@pytest.mark.parametrize("name", attention_table.attentions())
def test_both_passes_compile(gpu, name, size, dtype):
    op = attention_table.attentions()[name]
    case = attention_table.Case(name, 4096, 0.1 * op.dropout, True, 1, 2, size, dtype, gpu.name)
    lowered = program.attention(case, gradient=True, causal=False).lowered(
        described.devices(gpu)[0]
    )
    lowered.compile(compiler_options=described.OPTIONS)
