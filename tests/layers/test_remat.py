"""Policies of rematerialization: the same numbers, memory and arithmetic in order, offloading."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax import layers
from reformax.ops import dense, flash, gated_linear, local, lsh, performer
from tests.helpers import assert_trees_close
from tests.layers import plain

RNG = jax.random.PRNGKey(3)
POLICIES = "nothing", "attention", "all"
STACKS = {
    "residual": (layers.ResidualStack, {}),
    "written out": (layers.ResidualStack, dict(scan_layers=False)),
    "post-norm": (layers.ResidualStack, dict(post_norm=True)),
    "reversible": (layers.ReversibleStack, {}),
    "kept": (layers.ReversibleStack, dict(keep_ff_outputs=True, scan_layers=False)),
    "exact": (layers.ReversibleStack, dict(exact=True)),
}
OPS = {
    "dense": dense.dense(),
    "flash": flash.flash(),
    "lsh": lsh.lsh(chunk_len=4, n_hashes=2),
    "gated_linear": gated_linear.gated_linear(),
    "performer": performer.performer(n_features=8),
}


def gradient_of(stack, masked=False):
    """`(params, *streams) -> (loss, gradients)`, and its arguments."""
    streams = np.random.default_rng(0).normal(size=(stack.n_streams, 2, 13, 8)).astype(np.float32)
    segment_ids = (plain.some_segments(2, 13),) if masked else ()
    shapes = [x.shape for x in (*streams, *segment_ids)]

    def loss(params, *streams):
        out = jax.tree.leaves(stack.apply(params, *streams, *segment_ids, rng=RNG))
        return sum(jnp.sum(jnp.sin(y)) for y in out)

    run = jax.value_and_grad(loss, tuple(range(1 + len(streams))))
    return run, (plain.init(stack, *shapes), *streams)


@functools.cache
def found(name, op, policy, offload=False):
    kind, options = STACKS[name]
    if policy == "all":
        options = {x: y for x, y in options.items() if x != "keep_ff_outputs"}
    cycle = plain.blocks([OPS[op]], rate=0.1 if OPS[op].dropout else 0.0)
    masked = name != "written out"
    settings = dict(remat_policy=policy, offload_activations=offload, masked=masked)
    stack = kind(cycle, 3, **settings, **options)
    run, arguments = gradient_of(stack, masked)
    return jax.jit(run)(*arguments)


@pytest.mark.parametrize("name", STACKS)
@pytest.mark.parametrize("op", ["flash", "lsh"])
def test_losses_and_gradients_are_those_of_every_policy(name, op):
    want = found(name, op, "all")
    for policy in POLICIES[:2]:
        loss, gradients = found(name, op, policy)
        np.testing.assert_allclose(loss, want[0], rtol=1e-6)
        assert_trees_close(gradients, want[1], 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["residual", "reversible"])
@pytest.mark.parametrize("op", ["dense", "gated_linear", "performer"])
def test_losses_and_gradients_of_more_ops(name, op):
    want = found(name, op, "all")
    for policy in POLICIES[:2]:
        loss, gradients = found(name, op, policy)
        np.testing.assert_allclose(loss, want[0], rtol=1e-6)
        assert_trees_close(gradients, want[1], 1e-6)


def lowered(kind, op, policy, n_layers=6, length=512, **options):
    """The lowered gradient of a stack, and its jaxpr."""
    cycle = plain.blocks([op], d_head=16, d_ff=128, rate=0.0)
    stack = kind(cycle, n_layers, remat_policy=policy, **options)
    x = [jax.ShapeDtypeStruct((1, length, 32), jnp.float32)] * stack.n_streams
    params = jax.eval_shape(lambda: stack.init_params(RNG, *(y.shape for y in x)))

    def loss(params, *x):
        return sum(jnp.sum(y) for y in jax.tree.leaves(stack.apply(params, *x, rng=RNG)))

    gradient = jax.grad(loss, tuple(range(1 + len(x))))
    return jax.jit(gradient).lower(params, *x), (gradient, params, x)


@pytest.mark.parametrize("kind", [layers.ResidualStack, layers.ReversibleStack])
@pytest.mark.parametrize("op", [flash.flash(), local.local(chunk_len=16)], ids=repr)
def test_memory_is_in_the_order_of_the_policies(kind, op):
    temp = {
        policy: lowered(kind, op, policy)[0].compile().memory_analysis().temp_size_in_bytes
        for policy in POLICIES
    }
    of_attention = 6 * 512 * 32 * 4  # every layer's output of attention
    assert temp["nothing"] + 0.9 * of_attention < temp["attention"], temp
    assert temp["attention"] + 5 * of_attention < temp["all"], temp
