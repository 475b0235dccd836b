"""A step in micro-batches is that of the whole batch; what a step draws, averages and tells."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from reformax.models import ReformerLM, TransformerLM
from reformax.ops import dsa, local
from reformax.training import mesh, optimizer, step
from reformax.training.fine_tuning import FineTuning
from tests.helpers import assert_trees_close

SMALL = dict(vocab_size=7, d_model=8, d_ff=12, n_heads=2, n_layers=1, dropout=0.0)
TOKENS = np.random.default_rng(0).integers(1, 7, (4, 9), np.int32)


@pytest.mark.parametrize(
    "attention",
    [local.local(chunk_len=4), pytest.param(dsa.dsa(top_k=4, d_index=4), marks=pytest.mark.slow)],
    ids=repr,
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


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", [TransformerLM, ReformerLM])
def test_a_stage_trains_the_indexer_alone_and_reports_its_loss(kind, accumulate):
    """Neither weight decay nor moments of earlier steps move the weights that wait."""
    options = dict(top_k=9, d_index=4, report_loss=True)
    cycle = local.local(chunk_len=4), dsa.dsa(**options)
    sizes = SMALL | dict(n_layers=4, d_attention_key=4, d_attention_value=4)
    model, adamw = kind(**sizes, attention_type=cycle), optax.adamw(0.02, weight_decay=0.1)
    one, only = mesh.make(devices=jax.devices()[:1]), FineTuning(only=(r"attention\.op\.",))
    options = dict(accumulate=accumulate)
    runs = [step.step_fn(model, adamw, one, fine_tuning=x, **options) for x in (None, only)]
    batch = TOKENS, TOKENS, np.ones(TOKENS.shape, np.float32)
    state = jax.jit(step.init_fn(model, adamw, TOKENS.shape, False))(jax.random.key(0))
    state, _ = runs[0](state, batch, jax.random.key(1))
    before, losses = jax.tree.map(np.asarray, state.params), []
    for _ in range(30):
        state, metrics = runs[1](state, batch, jax.random.key(1))
        losses.append(float(metrics["index_loss"]))
    assert 0 < losses[-1] < 0.6 * losses[0]
    moved = jax.tree.map(lambda a, b: np.any(a != b), state.params, before)
    moved = [jax.tree_util.keystr(p) for p, x in jax.tree_util.tree_leaves_with_path(moved) if x]
    assert len(moved) == 4 and all("['op']" in name for name in moved)


def test_a_gpu_has_options_that_the_users_flags_do_not_name(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert step.compiler_options("cuda") == step.compiler_options("gpu") == step.GPU_OPTIONS
    assert step.compiler_options("cpu") is step.compiler_options("tpu") is None
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=true")
    assert step.compiler_options("gpu") is None
    # Each is a flag of this XLA.
    jax.jit(jnp.sin).lower(1.0).compile(compiler_options=step.GPU_OPTIONS)


def test_a_batch_without_targets_changes_nothing():
    model, sgd = TransformerLM(**SMALL, attention_type=local.local(chunk_len=4)), optax.sgd(1.0)
    run = step.step_fn(model, sgd, mesh.make(devices=jax.devices()[:1]), accumulate=2)
    init = jax.jit(step.init_fn(model, sgd, TOKENS.shape, False))
    batch = TOKENS, TOKENS, np.zeros(TOKENS.shape, np.float32)
    state, metrics = run(init(jax.random.key(0)), batch, jax.random.key(1))
    assert_trees_close(state.params, init(jax.random.key(0)).params)
    assert metrics["nats"].mean == 0.0


class Noise:
    """A model whose logits are noise, the same in each row, and a number that it learns."""

    def init_params(self, rng, shape):
        return {"w": jnp.ones(())}

    def features(self, params, tokens, rng):
        noise = jax.random.normal(rng, (1, tokens.shape[1], 7))
        return params["w"] * jnp.broadcast_to(noise, (*tokens.shape, 7))

    def logits(self, params, features, dtype="float32"):
        return features.astype(dtype)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_each_step_and_micro_batch_has_its_own_randomness(accumulate):
    one, tokens = mesh.make(devices=jax.devices()[:1]), np.tile(TOKENS[:1], (4, 1))
    run = step.step_fn(Noise(), optax.sgd(0.0), one, accumulate=accumulate)
    state, key = step.first_state({"w": jnp.ones(())}, optax.sgd(0.0), False), jax.random.key(1)
    for number in range(2):
        own = jax.random.fold_in(key, number)
        keys = [own] if accumulate == 1 else [jax.random.fold_in(own, i) for i in range(2)]
        noise = jnp.stack([jax.random.normal(x, (9, 7)) for x in keys])
        want = -jax.nn.log_softmax(noise)[:, np.arange(9), tokens[0]].mean()
        state, metrics = run(state, (tokens, tokens, np.ones((4, 9), np.float32)), key)
        assert metrics["nats"].mean == pytest.approx(float(want), rel=1e-5)


def test_the_moving_average_and_the_rate_are_those_of_the_step():
    rates = jnp.array([0.5, 0.25, 0.125])
    sgd = optimizer.Optimizer(*optax.sgd(lambda count: rates[count]))
    sgd.learning_rate = lambda count: rates[count]
    run = step.step_fn(Noise(), sgd, mesh.make(devices=jax.devices()[:1]), ema_decay=0.2)
    state, batch = step.first_state({"w": jnp.ones(())}, sgd, True), (TOKENS, TOKENS)
    average = 1.0
    for t, rate in enumerate(rates, start=1):
        state, metrics = run(state, (*batch, np.ones((4, 9), np.float32)), jax.random.key(1))
        decay = min(0.2, (1 + t) / (10 + t))
        average = decay * average + (1 - decay) * float(state.params["w"])
        assert metrics["learning_rate"] == rate
        assert float(state.ema["w"]) == pytest.approx(average, rel=1e-6)
