"""A step in several micro-batches is that of the whole batch."""

import jax
import numpy as np
import optax
import pytest

from reformax.models import TransformerLM
from reformax.ops import dsa, local
from reformax.training import mesh, step
from tests.helpers import assert_trees_close

SMALL = dict(vocab_size=7, d_model=8, d_ff=12, n_heads=2, n_layers=1, dropout=0.0)
TOKENS = np.random.default_rng(0).integers(1, 7, (4, 9), np.int32)


@pytest.mark.parametrize(
    "attention", [local.local(chunk_len=4), dsa.dsa(top_k=4, d_index=4)], ids=repr
)
def test_micro_batches_sum_up_to_the_batch(attention):
    """The loss of an algorithm's own, a mean over tokens, counts once like the model's."""
    model, sgd = TransformerLM(**SMALL, attention_type=attention), optax.sgd(1.0)
    weights = (np.random.default_rng(1).random(TOKENS.shape) < 0.8).astype(np.float32)
    found = []
    for accumulate in (1, 2):
        one = mesh.make(devices=jax.devices()[:1])
        run = step.step_fn(model, sgd, one, accumulate=accumulate)
        state = jax.jit(step.init_fn(model, sgd, TOKENS.shape, False))(jax.random.key(0))
        state, metrics = run(state, (TOKENS, TOKENS, weights), jax.random.key(1))
        found.append((state.params, metrics))
    assert_trees_close(*found)


def test_a_batch_without_targets_changes_nothing():
    model, sgd = TransformerLM(**SMALL, attention_type=local.local(chunk_len=4)), optax.sgd(1.0)
    run = step.step_fn(model, sgd, mesh.make(devices=jax.devices()[:1]), accumulate=2)
    init = jax.jit(step.init_fn(model, sgd, TOKENS.shape, False))
    batch = TOKENS, TOKENS, np.zeros(TOKENS.shape, np.float32)
    state, metrics = run(init(jax.random.key(0)), batch, jax.random.key(1))
    assert_trees_close(state.params, init(jax.random.key(0)).params)
    assert metrics["nats"] == 0.0
