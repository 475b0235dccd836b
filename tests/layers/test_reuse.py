"""Layers that attend by the choice of a layer before them in the cycle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax import layers
from reformax.declared import SettingError, Unsupported
from reformax.ops import csa, dsa, local
from reformax.ops.calls.dispatch import INTERPRETED
from reformax.ops.indexing.indexer import Indexer
from tests.helpers import assert_trees_close
from tests.layers import plain
from tests.ops import inputs

RNG = jax.random.PRNGKey(3)
INDEXED = functools.partial(dsa.dsa, top_k=4, n_index_heads=2, d_index=4, index_loss=0.0)
COMPRESSED = functools.partial(
    csa.csa, block_size=2, window=3, top_k=2, n_index_heads=2, d_index=4, index_loss=0.0
)
CYCLE = INDEXED(), COMPRESSED(), INDEXED(reuse=True), local.local(chunk_len=4)
CYCLE += INDEXED(reuse=True), COMPRESSED(reuse=True)


def stack_of(kind, cycle=CYCLE, n_repeats=2, **options):
    blocks = plain.blocks(cycle, rate=0.0)
    return kind(blocks, n_repeats * len(blocks), masked=True, **options)


def gradient_of(stack):
    """The loss and the gradients of weights and streams."""
    streams = np.random.default_rng(0).normal(size=(stack.n_streams, 2, 13, 8)).astype(np.float32)
    segment_ids = plain.some_segments(2, 13)
    params = plain.init(stack, *(x.shape for x in (*streams, segment_ids)))

    def loss(params, *streams):
        out = jax.tree.leaves(stack.apply(params, *streams, segment_ids, rng=RNG))
        return sum(jnp.sum(jnp.sin(y)) for y in out)

    run = jax.value_and_grad(loss, tuple(range(1 + len(streams))))
    return jax.jit(run)(params, *streams)


def test_a_layer_attends_by_the_plan_of_the_last_one_that_made_it():
    """A stack, and its layers one by one with the plans handed on."""
    cycle = INDEXED(), INDEXED(top_k=3), dsa.dsa(reuse=True)
    stack = stack_of(layers.ResidualStack, cycle, n_repeats=1)
    (x,) = np.random.default_rng(0).normal(size=(1, 2, 13, 8)).astype(np.float32)
    ids = plain.some_segments(2, 13)
    params = plain.init(stack, x.shape, ids.shape)

    def one_by_one(params, x):
        plans = []
        for i, block in enumerate(stack.blocks):
            p = jax.tree.map(lambda y: y[0], params[f"block_{i}"])
            plan = plans[1] if i == 2 else None
            h = plain.layer_norm(p["attention_norm"], x)
            out, made = block.attention.apply_by(p["attention"], h, plan, ids)
            plans.append(made)
            x = x + out
            h = plain.layer_norm(p["feed_forward_norm"], x)
            x = x + block.feed_forward.apply(p["feed_forward"], h)
        return x

    def run(function):
        total = lambda *args: jnp.sin(function(*args)).sum()  # noqa: E731
        return jax.jit(jax.value_and_grad(total, argnums=(0, 1)))(params, x)

    assert_trees_close(run(lambda p, x: stack.apply(p, x, ids)), run(one_by_one), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [layers.ResidualStack, layers.ReversibleStack])
@pytest.mark.parametrize("scan_layers", [True, False])
def test_every_policy_computes_the_same(kind, scan_layers):
    got = {
        policy: gradient_of(stack_of(kind, remat_policy=policy, scan_layers=scan_layers))
        for policy in ("nothing", "attention", "all")
    }
    for policy in ("nothing", "attention"):
        assert_trees_close(got[policy], got["all"], 3e-5)


@pytest.mark.slow
@pytest.mark.parametrize("op", [INDEXED, COMPRESSED])
def test_it_computes_what_the_other_one_does_without_an_indexer(op):
    x = inputs.draw(op(), length=19)
    plan = inputs.plan(op(), x, causal=True)
    attend = functools.partial(inputs.apply, plan=plan, segment_ids=None, causal=True)
    alone = inputs.draw(op(reuse=True), length=19).params
    assert not jax.tree.leaves(alone) or "index" not in alone
    got = jax.jit(lambda: attend(op(reuse=True), x._replace(params=alone)))()
    np.testing.assert_array_equal(got, jax.jit(lambda: attend(op(), x))())


@pytest.mark.slow
def test_kernels_attend_by_another_choice():
    x = inputs.draw(INDEXED(), length=40)
    plan = inputs.plan(INDEXED(), x, causal=True)

    def run(impl):
        op = INDEXED(reuse=True, impl=impl)

        def total(*qkv):
            y = inputs.Inputs(*qkv, None, {})
            out = inputs.apply(op, y, plan=plan, segment_ids=None, causal=True)
            return jnp.sin(out).sum()

        return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))(*x[:3])

    assert_trees_close(run(INTERPRETED), run("xla"), 1e-5)


@pytest.mark.parametrize(
    "cycle",
    [
        (INDEXED(reuse=True), INDEXED()),
        (INDEXED(), COMPRESSED(reuse=True)),
        (COMPRESSED(), COMPRESSED(reuse=True, block_size=3)),
        (COMPRESSED(), COMPRESSED(reuse=True, top_k=3)),
        (INDEXED(), INDEXED(reuse=True, top_k=3)),
        (INDEXED(), INDEXED(reuse=True, index_loss=0.5)),
        (INDEXED(), INDEXED(reuse=True, indexer=Indexer(rotary=True))),
    ],
)
def test_a_cycle_whose_choice_nobody_makes(cycle):
    with pytest.raises(SettingError, match=r"of the cycle is .*reuse=True.*: put one with reuse=F"):
        layers.ResidualStack(plain.blocks(cycle, rate=0.0), 2)


def test_a_layer_alone_has_no_choice_to_reuse():
    x = inputs.draw(INDEXED(reuse=True))
    with pytest.raises(Unsupported, match="reuse is True: dsa attends by the choice of a layer"):
        inputs.call(INDEXED(reuse=True), x, causal=True)
    settings = dict(lengths=jnp.full(2, 13), capacity=14)
    cache = inputs.init_cache(INDEXED(reuse=True), x, plan=None, **settings)
    with pytest.raises(SettingError, match="chosen is None: dsa with reuse=True makes no choice"):
        one = x.at(slice(None), slice(1))
        inputs.step(INDEXED(reuse=True), one, cache, position=jnp.full(2, 13))
    with pytest.raises(SettingError, match="chosen is None: .*, give the third result of read_on"):
        of_rows = dict(position=jnp.full(2, 13), lengths=jnp.ones(2, jnp.int32))
        inputs.read_on(INDEXED(reuse=True), one, cache, **of_rows)
    with pytest.raises(SettingError, match="reuse is True and report_loss too"):
        INDEXED(reuse=True, report_loss=True)


def test_an_indexer_that_is_not_there_limits_no_rotation():
    with pytest.raises(SettingError, match="rotary_features is 8 and d_index 4"):
        COMPRESSED(rotary_features=8)
    assert COMPRESSED(reuse=True, rotary_features=8).rotary_features == 8
