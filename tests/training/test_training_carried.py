"""Weights that a step carries on without training them, through every kind of stack."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from reformax.buffers import Buffer, updated
from reformax.models import ReformerLM, TransformerLM
from reformax.ops import performer
from reformax.training import mesh, optimizer, step
from tests.layers import plain
from tests.ops.toys import counting
from tests.training.stacks import STACKS

SMALL = dict(
    vocab_size=7, d_model=8, d_ff=12, n_heads=2, n_layers=4, dropout=0.0, attention_type=counting()
)
TOKENS = np.random.default_rng(0).integers(1, 7, (4, 9), np.int32)


def counts(tree):
    """What is carried in the layers of a tree like a model's weights."""
    return tree["stack"]["block_0"]["attention"]["op"]["count"].value


@pytest.mark.parametrize("name", STACKS)
def test_the_change_arrives(name):
    constructor, options = STACKS[name]
    model = constructor(**SMALL, **options)
    params = plain.init(model, TOKENS.shape)

    def loss(params):
        return jnp.sum(jnp.sin(model.apply(params, TOKENS, jax.random.key(0)))) / 1000

    np.testing.assert_array_equal(counts(jax.jit(jax.grad(loss))(params)), np.ones(4))


@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_both_passes_of_a_reversible_stack_have_the_redrawn_features(exact):
    """Its gradients are those of a stack that keeps what the first pass computed."""
    attention = performer.performer(n_features=8, redraw=2)
    kept = dict(remat_policy="all", scan_layers=False)
    runs = []
    for options in ({}, kept):
        model = ReformerLM(**SMALL | dict(attention_type=attention), **options, exact=exact)

        @jax.jit
        def gradient(params, steps, model=model):
            params["stack"]["block_0"]["attention"]["op"]["steps"] = Buffer(jnp.full(4, steps))
            return jax.grad(lambda params: loss_of(model, params))(params)

        runs.append(gradient)
    params = plain.init(model, TOKENS.shape)
    got, want = (run(params, jnp.float32(5)) for run in runs)
    for (path, x), y in zip(leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5, err_msg=jax.tree_util.keystr(path))
    assert "steps" in str(paths(got))
    steps = got["stack"]["block_0"]["attention"]["op"]["steps"].value
    np.testing.assert_array_equal(steps, np.ones(4))
    other = runs[0](params, jnp.float32(6))["embedding"]
    assert np.abs(other - got["embedding"]).max() > 1e-3


def test_a_weight_that_nothing_reads_stays():
    weight = Buffer(jnp.ones(3))
    change = jax.grad(lambda w: jnp.sum(0.0 * updated(w, jnp.full(3, 5.0))))(weight)
    np.testing.assert_array_equal(change.value, np.full(3, 4.0))
    change = jax.grad(lambda w: (updated(w, jnp.full(3, 5.0)), 1.0)[1])(weight)
    assert not np.any(change.value)


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_step_carries_on(accumulate):
    """The optimizer, its clipping and its decay of weights do not see what is carried."""
    model = TransformerLM(**SMALL)
    adam = optimizer.adamw(learning_rate=1e-2, weight_decay=0.1, clip=1e-3, no_decay="norm")
    options = dict(accumulate=accumulate, ema_decay=0.9)
    run = step.step_fn(model, adam, mesh.make(devices=jax.devices()[:1]), **options)
    state = jax.jit(step.init_fn(model, adam, TOKENS.shape, True))(jax.random.key(0))
    assert not any("'count'" in jax.tree_util.keystr(path) for path in paths(state.opt_state))
    assert any("'embedding'" in jax.tree_util.keystr(path) for path in paths(state.opt_state))
    batch = TOKENS, TOKENS, np.ones(TOKENS.shape, np.float32)
    for n in (1, 2, 3):
        before = state.params["embedding"].copy()
        state, metrics = run(state, batch, jax.random.key(1))
        np.testing.assert_array_equal(counts(state.params), np.full(4, n))
        np.testing.assert_array_equal(counts(state.ema), np.full(4, n))
        assert np.any(state.params["embedding"] != before)
    gradient = jax.jit(jax.grad(lambda p: loss_of(model, p)))(state.params)
    trained = [g for path, g in leaves(gradient) if "count" not in jax.tree_util.keystr(path)]
    _, metrics = run(state, batch, jax.random.key(1))
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in trained))
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-4)


def loss_of(model, params):
    logits = model.apply(params, TOKENS, jax.random.key(0))
    return optax.softmax_cross_entropy_with_integer_labels(logits, TOKENS).mean()


def leaves(tree):
    return jax.tree_util.tree_leaves_with_path(tree)


def paths(tree):
    return [path for path, _ in leaves(tree)]
