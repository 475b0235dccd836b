"""Truncated backpropagation: rows in parts that go on from the states of the parts before."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from reformax.declared import SettingError
from reformax.models import ReformerLM, TransformerLM
from reformax.models.designs import Design
from reformax.ops import kda, linear, local
from reformax.training import loop, loss, mesh, step, truncated_backprop
from tests.helpers import assert_trees_close
from tests.training import worker

SIZES = dict(vocab_size=11, d_model=16, d_ff=12, n_heads=2, n_layers=2, dropout=0.0)
HEADS = dict(d_attention_key=8, d_attention_value=8)
CYCLE = kda.kda(conv_size=3, chunk_len=4), linear.linear(chunk_len=4)
TOKENS = np.random.default_rng(0).integers(1, 11, (3, 24), np.int32)
WEIGHTS = (np.random.default_rng(1).random(TOKENS.shape) < 0.8).astype(np.float32)
# A document over three parts of 8, one that begins with a part, padding behind and a part of it.
IDS = np.array([[1] * 20 + [2] * 4, [1] * 8 + [2] * 5 + [3] * 11, [1] * 13 + [0] * 11], np.int32)


def model_of(kind=TransformerLM, attention_type=CYCLE, **options):
    return kind(**SIZES | HEADS | options, attention_type=attention_type)


CROSS_ENTROPY = partial(loss.cross_entropy, z_loss=0.01)


def both(model, inputs, backprop_len):
    """The gradients and metrics of parts and of whole rows."""
    params = jax.jit(partial(model.init_params, shape=TOKENS.shape))(jax.random.key(0))
    batch, weight = (inputs, TOKENS, WEIGHTS), jnp.float32(WEIGHTS.sum())
    whole = jax.jit(jax.grad(partial(step.mean_loss, model, CROSS_ENTROPY), has_aux=True))
    parts = jax.jit(partial(truncated_backprop.gradient, model, CROSS_ENTROPY, backprop_len))
    return parts(params, batch, None, weight), whole(params, batch, None, weight)


@pytest.mark.slow
@pytest.mark.parametrize("pos_type", ["rotary", "sinusoidal", "none"])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_the_loss_of_parts_is_that_of_whole_rows(packed, pos_type):
    """And not that of parts which begin anew."""
    model = model_of(pos_type=pos_type)
    params = jax.jit(partial(model.init_params, shape=TOKENS.shape))(jax.random.key(0))

    def batch(*shape):
        tokens, ids, weights = (x.reshape(shape) for x in (TOKENS, IDS, WEIGHTS))
        return (tokens, ids) if packed else tokens, tokens, weights

    weight = jnp.float32(WEIGHTS.sum())
    parts = jax.jit(partial(truncated_backprop.gradient, model, CROSS_ENTROPY, 8))
    whole = jax.jit(partial(step.mean_loss, model, CROSS_ENTROPY))
    _, metrics = parts(params, batch(3, 24), None, weight)
    _, want = whole(params, batch(3, 24), None, weight)
    assert_trees_close(metrics, want, 1e-5)
    _, anew = whole(params, batch(9, 8), None, weight)
    assert abs(float(anew["nats"].mean - want["nats"].mean)) > 1e-3


@pytest.mark.slow
def test_gradients_end_at_the_part():
    model = model_of(remat_policy="nothing")
    (one, _), (want, _) = both(model, TOKENS, 24)
    assert_trees_close(one, want, 1e-5)
    (grads, _), _ = both(model, TOKENS, 8)
    off = np.abs(
        grads["stack"]["block_0"]["attention"]["w_v"] - want["stack"]["block_0"]["attention"]["w_v"]
    )
    assert off.max() > 1e-5
    # Of the last layer's output, no part reads another's.
    assert_trees_close(grads["logits"], want["logits"], 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_step_of_parts(accumulate):
    """The setting reaches the step: its loss is that of whole rows, its update another."""
    model, found = model_of(), {}
    one = mesh.make(devices=jax.devices()[:1])
    for length in (None, 8):
        run = step.step_fn(model, optax.sgd(1.0), one, accumulate=accumulate, backprop_len=length)
        state = jax.jit(step.init_fn(model, optax.sgd(1.0), TOKENS.shape, False))(jax.random.key(0))
        found[length] = run(state, (TOKENS, TOKENS, WEIGHTS), jax.random.key(1))
    (whole, want), (parts, metrics) = found[None], found[8]
    assert float(metrics["nats"].mean) == pytest.approx(float(want["nats"].mean), rel=1e-5)
    change = jax.tree.map(lambda x, y: np.abs(x - y).max(), whole.params, parts.params)
    assert max(jax.tree.leaves(change)) > 1e-4


@pytest.mark.slow
def test_parts_of_rows_leave_one_step_s_numbers_in_buffers():
    """The largest weights of FP8's histories are those of whole rows: each part reads the same."""
    model = model_of(dtype="float8", amax_history=2)
    (grads, _), (want, _) = both(model, TOKENS, 8)
    found = [tree["stack"]["block_0"]["feed_forward"]["amax_history"] for tree in (grads, want)]
    of_weights = [{name: x.value[..., 1, :] for name, x in tree.items()} for tree in found]
    assert all(np.any(np.asarray(x)) for x in jax.tree.leaves(of_weights))
    assert_trees_close(*of_weights, 1e-6)


LONGROPE = Design(
    rotary_scaling="longrope",
    rotary_factor=2.0,
    rotary_trained_length=16,
    rotary_short_factors=(1.0,) * 4,
    rotary_long_factors=(2.0,) * 4,
)
SHORT = dict(pos_type="axial", pos_axial_shape=(16,), pos_d_axial_embs=(SIZES["d_model"],))


@pytest.mark.parametrize(
    "model, length, message",
    [
        (model_of(), 25, "backprop_len is 8: expected a divisor of length, 25"),
        (model_of(attention_type=local.local()), 24, "backprop_len is 8, but op is local: it carr"),
        (model_of(ReformerLM), 24, "backprop_len is 8, but ReversibleStack carries no states"),
        (model_of(design=LONGROPE), 24, "backprop_len is 8, but rotary_scaling is 'longrope', by"),
        (object(), 24, "backprop_len is 8, but object carries no states"),
        (model_of(**SHORT), 24, "length is 24: the model has 16 positions, in pos_axial_shape"),
    ],
)
def test_what_cannot_be_cut_is_refused(model, length, message):
    truncated_backprop.check(model, None, length)
    with pytest.raises(SettingError, match=f"^{message}"):
        truncated_backprop.check(model, 8, length)


@pytest.mark.slow
def test_bfloat16_under_strict_promotion():
    """A step of packed parts is traced, which shows all types. Optax's own is left out."""
    model = model_of(dtype="bfloat16")
    run = step.step_fn(
        model, optax.sgd(1.0), mesh.make(devices=jax.devices()[:1]), backprop_len=8, accumulate=3
    )
    batch = (TOKENS, IDS), TOKENS, WEIGHTS
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        init = step.init_fn(model, optax.sgd(1.0), TOKENS.shape, False)
        state = jax.eval_shape(init, jax.random.PRNGKey(0))
        run.lower(state, batch, jax.random.PRNGKey(1))


@pytest.mark.slow
def test_the_line_of_a_config_reaches_the_step(tmp_path, monkeypatch):
    lengths, gradient = [], truncated_backprop.gradient

    def spy(*arguments):
        lengths.append(arguments[2])
        return gradient(*arguments)

    monkeypatch.setattr(truncated_backprop, "gradient", spy)
    sizes = SIZES | HEADS | dict(vocab_size=16, n_layers=1)
    model = partial(TransformerLM, **sizes, attention_type=kda.kda(chunk_len=4))
    settings = dict(steps=1, eval_every=None, backprop_len=8)
    loop.train(tmp_path, **worker.arguments(**settings) | {"model": model})
    assert set(lengths) == {8}


@pytest.mark.parametrize("kind", [TransformerLM, ReformerLM], ids=lambda x: x.__name__)
def test_reading_on_is_reading_at_once(kind):
    """Generation goes on from the state of a text, with tokens of other numbers in each row."""
    model = model_of(kind, mode="eval", pos_type="rotary")
    params = jax.jit(partial(model.init_params, shape=TOKENS.shape))(jax.random.key(0))
    prefill = jax.jit(model.prefill, static_argnames="capacity")
    first, more = np.array([9, 7, 8]), np.array([5, 9, 1])
    whole = np.zeros((3, 16), np.int32)
    then = np.zeros((3, 9), np.int32)
    for i in range(3):
        whole[i, : first[i] + more[i]] = TOKENS[i, : first[i] + more[i]]
        then[i, : more[i]] = TOKENS[i, first[i] : first[i] + more[i]]
    _, state = prefill(params, TOKENS[:, :16], first, capacity=30)
    got, state = prefill(params, then, more, capacity=30, state=state)
    want, at_once = prefill(params, whole, first + more, capacity=30)
    assert_trees_close((got, state), (want, at_once), 2e-5)
