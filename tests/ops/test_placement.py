"""Every op of arrays whose types say where they lie, on a mesh as `jax.make_mesh` makes it.

Over all devices that there are: `tests/devices/test_devices.py` runs these tests on eight.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec

from reformax.declared import Unsupported
from reformax.ops import dsa, flash, local, lsh, memory_efficient, performer
from tests.helpers import assert_trees_close
from tests.ops import inputs
from tests.ops.rows import ROWS, one_of_each_kind, over

KEY = jax.random.key(0)
N = len(jax.devices())
BATCH, LENGTH, HEADS = 8, 23, 4
MESH = jax.make_mesh((-(-N // 2), min(N, 2)), ("batch", "tensor"))


def lie(tree, *axes):
    return jax.device_put(tree, NamedSharding(MESH, Spec(*axes)))


@over((row for row in ROWS if not row.in_kernel), quick=one_of_each_kind)
def test_rows_and_heads_are_computed_where_they_lie(row):
    """With dropout and segments, outputs and gradients; weights are whole on every device."""
    sizes = dict(batch=BATCH, length=LENGTH, n_heads=HEADS)
    run, (d_out, arrays, ids, params) = inputs.with_gradients(row, KEY, **sizes)
    whole = jax.jit(run)(d_out, arrays, ids, params)
    axes = "batch", None, "tensor" if row.op().divides_heads else None
    given = lie(d_out, *axes), lie(arrays, *axes), lie(ids, "batch"), lie(params)
    got, of_params = jax.jit(run)(*given)
    assert got[0].sharding.spec[: len(axes)] == axes
    assert_trees_close(jax.device_get((got, of_params)), jax.device_get(whole))


@pytest.mark.parametrize("in_use", [False, True])
@pytest.mark.parametrize(
    "op", [lsh.lsh(chunk_len=8), flash.flash(), performer.performer(seed=1)], ids=repr
)
def test_a_mesh_may_be_in_use(op, in_use):
    """`jax.set_mesh` gives every array of a function a type that says where it lies."""
    x = inputs.draw(op, batch=BATCH, length=LENGTH)
    call = jax.jit(lambda *arrays: inputs.call(op, inputs.Inputs(*arrays), causal=True, rng=KEY))
    want = call(*x[:4])
    arrays = lie(x[:4], ("batch", "tensor"))
    if in_use:
        with jax.set_mesh(MESH):
            got = call(*arrays)
    else:
        got = call(*arrays)
    assert_trees_close(np.asarray(got), np.asarray(want))


@pytest.mark.parametrize(
    "shape", [(BATCH, LENGTH), (BATCH, HEADS, LENGTH, LENGTH), (1, 1, 1, LENGTH)]
)
def test_masks_and_biases_are_split_as_they_need(shape):
    op = memory_efficient.memory_efficient()
    x = inputs.draw(op, batch=BATCH, length=LENGTH, n_heads=HEADS)
    random = np.random.default_rng(2)
    mask = random.random(shape) < 0.8
    options = dict(mask=mask, bias=random.normal(size=(1, HEADS, LENGTH, 1)).astype(np.float32))
    ids = np.where(np.arange(LENGTH) < LENGTH - 3, 1, 0) + np.zeros((BATCH, 1), np.int32)
    want = op(*x[:3], segment_ids=ids, **options)
    got = op(*lie(x[:3], "batch", None, "tensor"), segment_ids=lie(ids), **options)
    assert_trees_close(np.asarray(got), np.asarray(want))


def test_few_heads_of_keys_serve_heads_of_queries_on_several_devices():
    op = flash.flash()
    x = inputs.draw(op, batch=BATCH, length=LENGTH, n_heads=HEADS, n_kv_heads=1)
    want = op(*x[:3], causal=True)
    got = op(lie(x.q, "batch", None, "tensor"), *lie(x[1:3], "batch"), causal=True)
    assert_trees_close(np.asarray(got), np.asarray(want))


@pytest.mark.skipif(N < 4, reason="an axis of one device splits nothing")
@pytest.mark.parametrize(
    "op, axes, message",
    [
        (flash.flash(), (None, "batch"), "q has its positions split over 'batch': split its rows"),
        (flash.flash(), (None, None, None, "batch"), "q has its features split over 'batch'"),
        (
            dsa.dsa(),
            (None, None, "tensor"),
            "q has its heads split over 'tensor' and op is dsa.*, which computes them together",
        ),
    ],
)
def test_what_an_op_cannot_divide_is_told_in_one_line(op, axes, message):
    x = inputs.draw(op, batch=BATCH, length=24, n_heads=HEADS, d_qk=8, d_v=8)
    x = inputs.Inputs(*lie(x[:4], *axes), x.params)
    with pytest.raises(Unsupported, match=message) as raised:
        inputs.call(op, x, causal=True, rng=KEY)
    assert "\n" not in str(raised.value)


def test_dropout_is_that_of_the_whole_call():
    op = local.local(chunk_len=8)
    x = inputs.draw(op, batch=BATCH, length=LENGTH, n_heads=HEADS)
    options = dict(causal=True, dropout=0.5, rng=KEY)
    want = inputs.call(op, x, **options)
    got = op(*lie(x[:3], ("batch", "tensor")), **options)
    assert_trees_close(np.asarray(got), np.asarray(want))


@pytest.mark.parametrize("only", range(3), ids="qkv".__getitem__)
def test_any_array_of_a_call_may_lie_on_the_mesh(only):
    op = flash.flash()
    arrays = list(inputs.draw(op, batch=BATCH, length=LENGTH, n_heads=HEADS)[:3])
    want = op(*arrays, causal=True)
    arrays[only] = lie(arrays[only], "batch")
    assert_trees_close(np.asarray(op(*arrays, causal=True)), np.asarray(want))


@pytest.mark.slow
def test_rows_are_counted_along_the_axes_that_they_are_split_over():
    """An axis of the name `data` says nothing of rows that are whole along it."""
    mesh = jax.make_mesh((min(N, 2), -(-N // 2)), ("data", "rest"))
    op = dsa.dsa(top_k=4, n_index_heads=2, d_index=4)
    x = inputs.draw(op, batch=BATCH, length=LENGTH)
    options = dict(causal=True, dropout=0.3, rng=KEY)

    @jax.jit
    def run(params, arrays):
        def loss(params):
            out = inputs.call(op, inputs.Inputs(*arrays, params), **options)
            return jnp.sum(out**2), out

        return jax.grad(loss, has_aux=True)(params)

    replicated = NamedSharding(mesh, Spec())
    got = run(x.params, jax.device_put(x[:4], replicated))
    assert_trees_close(jax.device_get(got), jax.device_get(run(x.params, x[:4])))


def test_positions_may_be_split_over_an_axis_of_one_device():
    mesh = jax.make_mesh((N, 1), ("batch", "context"))
    op = flash.flash()
    x = inputs.draw(op, batch=BATCH, length=LENGTH)
    got = op(*jax.device_put(x[:3], NamedSharding(mesh, Spec("batch", "context"))))
    assert got.sharding.spec[:2] == ("batch", "context")
    assert_trees_close(np.asarray(got), np.asarray(op(*x[:3])))


def test_an_axis_that_is_split_may_be_mapped_over():
    op = flash.flash()
    some = np.random.default_rng(0).normal(size=(2, BATCH, LENGTH, 2, 4)).astype(np.float32)
    call = jax.vmap(lambda x: op(x, x, x, causal=True))
    assert_trees_close(np.asarray(call(lie(some, "tensor", "batch"))), np.asarray(call(some)))


@pytest.mark.parametrize("axes", [("batch",), (("batch", "tensor"),), ("batch", None, "tensor")])
def test_what_is_carried_becomes_the_mean_over_devices(axes):
    op = performer.performer(redraw=2)
    x = inputs.draw(op, batch=BATCH, length=LENGTH, n_heads=HEADS)

    @jax.jit
    @jax.grad
    def change(params, arrays):
        return jnp.sum(inputs.call(op, inputs.Inputs(*arrays, params)) ** 2)

    got = change(lie(x.params), lie(x[:4], *axes))["steps"].value
    assert got == 1
