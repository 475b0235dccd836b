"""Every op in a user's `jax.shard_map`, which by default checks along which axes arrays vary.

The mesh has all devices. `tests/devices/test_devices.py` runs these tests on eight.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as Spec

from reformax.ops import dense, flash, linear, local
from reformax.ops.calls import this_gpu
from tests.helpers import assert_trees_close, lower_for_gpu, with_gradients
from tests.ops import inputs
from tests.ops.rows import ROWS, one_of_each_kind, over

KEY = jax.random.key(0)
N = len(jax.devices())
BATCH, LENGTH = 8, 23
ON_ROWS = Spec("data")


def call_of(row, **options):
    """A call of a row's op with its gradients: whole, in shards, and its arguments."""
    run, given = inputs.with_gradients(row, KEY, options, batch=BATCH, length=LENGTH)
    shards = jax.shard_map(
        run,
        mesh=Mesh(np.array(jax.devices()), "data"),
        in_specs=(ON_ROWS, ON_ROWS, ON_ROWS, Spec()),
        out_specs=(ON_ROWS, Spec()),
    )
    return run, shards, given


@over((row for row in ROWS if not row.in_kernel), quick=one_of_each_kind)
def test_rows_are_those_of_the_whole_batch(row):
    """With dropout and segments; what all shards have gets the sum of their gradients."""
    run, shards, given = call_of(row)
    got, of_params = jax.jit(shards)(*given)
    assert_trees_close((got, of_params), jax.jit(run)(*given))


@over((row for row in ROWS if row.decodes), quick=one_of_each_kind)
def test_steps_are_those_of_the_whole_batch(row):
    """A loop of them: what a cache holds varies before a step as it does after it."""
    op = row.op()
    x = inputs.draw(op, batch=BATCH, length=9)

    def run(arrays, params):
        x = inputs.Inputs(*arrays, params)
        prompt, new = (x.at(slice(None), part) for part in (slice(0, 8), slice(8, 9)))
        n_rows = len(x.q)
        plan = inputs.plan(op, prompt, causal=True, rng=KEY, train=False)
        options = dict(plan=plan, lengths=jnp.full(n_rows, 8), capacity=9, rng=KEY)
        cache = inputs.init_cache(op, prompt, **options)

        def step(cache, position):
            return inputs.step(op, new, cache, position=position)[::-1]

        return jax.lax.scan(step, cache, jnp.full((1, n_rows), 8))[1]

    specs = dict(in_specs=(ON_ROWS, Spec()), out_specs=Spec(None, "data"))
    shards = jax.shard_map(run, mesh=Mesh(np.array(jax.devices()), "data"), **specs)
    assert_trees_close(jax.jit(shards)(x[:4], x.params), jax.jit(run)(x[:4], x.params))


@over((row for row in ROWS if row.in_kernel), quick=lambda row: False)
def test_kernels_lower_for_a_gpu(row, monkeypatch):
    monkeypatch.setattr(this_gpu, "obstacle", lambda: None)
    _, shards, given = call_of(row, impl="pallas")
    assert "triton" in lower_for_gpu(shards, *given)


def test_kernels_that_are_interpreted_say_what_they_need():
    row = next(row for row in ROWS if row.name == "flash_pallas")
    _, shards, given = call_of(row)
    with pytest.raises(
        NotImplementedError, match="jax.shard_map: pass it check_vma=False"
    ) as raised:
        shards(*given)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("op", [flash.flash(), local.local(chunk_len=4), linear.linear()], ids=repr)
def test_rows_and_heads_are_split(op):
    mesh = Mesh(np.array(jax.devices()).reshape(-1, min(N, 2)), ("data", "model"))
    x = jax.random.normal(KEY, (4, BATCH, LENGTH, 2, 4))
    run = with_gradients(functools.partial(op, causal=True))
    spec = Spec("data", None, "model")
    shards = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec)
    assert_trees_close(shards(*x), run(*x))


@pytest.mark.parametrize("op", [dense.dense(), flash.flash()], ids=repr)
def test_queries_are_split_and_keys_are_whole(op):
    mesh = Mesh(np.array(jax.devices()), "context")
    x = jax.random.normal(KEY, (4, 2, 8, 2, 4))
    run, split = with_gradients(op), Spec(None, "context")
    specs = (split, split, Spec(), Spec()), (split, (split, Spec(), Spec()))
    shards = jax.shard_map(run, mesh=mesh, in_specs=specs[0], out_specs=specs[1])
    assert_trees_close(shards(*x), run(*x))
