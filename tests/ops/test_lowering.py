"""Every op's array operations lower for a TPU, and its kernels for a GPU, without either."""

import jax
import jax.numpy as jnp
import pytest

from reformax.ops.calls import this_gpu
from tests.helpers import lower_for_gpu
from tests.ops import inputs
from tests.ops.inputs import draw, with_gradients
from tests.ops.rows import ROWS, one_of_each_kind, over

ON_ARRAYS = [row for row in ROWS if not row.in_kernel]
# A row of each op with kernels; two ops refuse dropout, and have those of others.
OF_OTHERS = "memory_efficient", "long_short"
IN_KERNELS = {
    row.factory: row
    for row in sorted(ROWS, key=lambda row: row.in_kernel)
    if "pallas" in row.op()._impls and row.factory.__name__ not in OF_OTHERS
}.values()


@pytest.fixture
def on_a_tpu(monkeypatch):
    """What asks for the backend takes its way on one that is neither a CPU nor a GPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")


def lowered(function, *arrays):
    """The platforms that `function` is exported for: a custom call of another one is an error."""
    return jax.export.export(jax.jit(function), platforms=["tpu"])(*arrays).platforms


@over(ON_ARRAYS, quick=one_of_each_kind)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_call_and_its_gradients(row, dtype, on_a_tpu):
    run, arrays = with_gradients(row, jax.random.key(0), length=70, d_qk=8, d_v=8)
    d_out, x, ids, params = arrays
    x = jax.tree.map(lambda a: jnp.asarray(a, dtype), x)
    assert lowered(run, d_out, x, ids, params) == ("tpu",)


@over([row for row in ON_ARRAYS if not row.no_step], quick=one_of_each_kind)
def test_a_step(row, on_a_tpu):
    op, lengths, key = row.op(), jnp.array([11, 5]), jax.random.key(0)
    prompt, new = (draw(op, length=n, d_qk=8, d_v=8) for n in (11, 1))

    def run(prompt, new, params):
        prompt, new = (inputs.Inputs(*arrays, params) for arrays in (prompt, new))
        plan = inputs.plan(op, prompt, causal=True, rng=key, train=False, length=40)
        held = inputs.init_cache(op, prompt, plan=plan, lengths=lengths, capacity=40, rng=key)
        return inputs.step(op, new, held, position=lengths)

    assert lowered(run, prompt[:4], new[:4], prompt.params) == ("tpu",)


@pytest.mark.parametrize("row", IN_KERNELS, ids=lambda row: row.factory.__name__)
@pytest.mark.parametrize("dtype, size", [("bfloat16", 64), ("float16", 80), ("float32", 128)])
def test_kernels(row, dtype, size, monkeypatch):
    """The interpreter accepts what Triton does not."""
    monkeypatch.setattr(this_gpu, "obstacle", lambda: None)
    sizes = dict(length=333, d_qk=size, d_v=size)
    run, arrays = with_gradients(row, jax.random.key(0), dict(impl="pallas"), **sizes)
    d_out, x, ids, params = arrays
    x = jax.tree.map(lambda a: jnp.asarray(a, dtype), x)
    assert lower_for_gpu(run, d_out, x, ids, params).count("triton") >= 2
