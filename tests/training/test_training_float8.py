"""Delayed scales of FP8 products in training: through both stacks, in parts, saved and resumed."""

from functools import cache, partial

import jax
import numpy as np
import pytest

from reformax.declared import SettingError
from reformax.layers import float8
from reformax.models import ReformerLM, TransformerLM
from reformax.ops import flash
from reformax.training import checkpoint, loop, mesh, optimizer, starting_weights, step
from reformax.training.step import TrainState
from tests.helpers import assert_trees_equal
from tests.training import worker
from tests.training.stacks import STACKS

SMALL = dict(
    vocab_size=7, d_model=8, d_ff=12, n_heads=2, n_layers=4, dropout=0.0,
    attention_type=flash.flash(), dtype="float8", amax_history=2,
)  # fmt: skip
MODELS = STACKS | {"chunks": (ReformerLM, dict(ff_chunk_size=4))}
TOKENS = np.random.default_rng(0).integers(1, 7, (4, 9), np.int32)
BATCH = TOKENS, TOKENS, np.ones(TOKENS.shape, np.float32)
KEY = jax.random.key(0)
ADAM = optimizer.adamw(learning_rate=1e-2)


def histories(params):
    """All histories, by their layers' and matrices' names."""
    found = {
        jax.tree_util.keystr(path): np.asarray(x)
        for path, x in jax.tree_util.tree_leaves_with_path(params)
        if float8.HISTORY in jax.tree_util.keystr(path)
    }
    assert found
    return found


def trained(model, n_steps, state=None, **options):
    """The state after more steps, and the last one's metrics."""
    first, run = compiled(model, **options)
    state, metrics = first(KEY) if state is None else state, None
    for _ in range(n_steps):
        state, metrics = run(state, BATCH, KEY)
    return state, metrics


@cache
def compiled(model, **options):
    """The first state of a seed, and a step."""
    first = jax.jit(step.init_fn(model, ADAM, TOKENS.shape, False))
    return first, step.step_fn(model, ADAM, mesh.make(devices=jax.devices()[:1]), **options)


@cache
def narrow():
    return TransformerLM(**SMALL)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "name", [x if x == "residual" else pytest.param(x, marks=SLOW) for x in MODELS]
)
def test_each_product_of_each_layer_has_its_steps_numbers(name):
    constructor, options = MODELS[name]
    model = narrow() if name == "residual" else constructor(**SMALL, **options)
    state, _ = trained(model, 3)
    before = state.params["stack"]["block_0"]
    found = histories(state.params)
    assert len(found) == 6  # of a cycle: queries, keys, values, the output, and two more
    for name, seen in found.items():
        assert seen.shape == (4, 3, 2) and np.all(seen > 0), name
    # Before the last step, the weights were nearly what they are.
    largest = np.abs(before["feed_forward"]["w1"]).max(axis=(1, 2))
    seen = before["feed_forward"][float8.HISTORY]["w1"].value
    np.testing.assert_allclose(seen[:, 1, 0], largest, atol=0.011)
    assert np.any(seen[:, 1, 0] != seen[:, 1, 1])


@SLOW
@pytest.mark.parametrize("constructor", [TransformerLM, ReformerLM])
def test_the_loss_falls_as_in_bfloat16(constructor):
    nats = {}
    for dtype, steps in (("float8", 2), ("bfloat16", 0)):
        model = constructor(**SMALL | dict(dtype=dtype, amax_history=steps))
        nats[dtype] = trained(model, 30)[1]["nats"].mean
    assert nats["float8"] < 1.5 and abs(nats["float8"] - nats["bfloat16"]) < 0.1


@SLOW
def test_a_batch_in_parts_has_their_largest_numbers():
    model = narrow()
    (whole, _), (parts, _) = trained(model, 1), trained(model, 1, accumulate=2)
    for name, seen in histories(parts.params).items():
        want = histories(whole.params)[name]
        np.testing.assert_array_equal(seen[..., 1, :], want[..., 1, :], err_msg=name)  # weights
        # Each part has the mean loss of its own rows, whose gradients are twice as large.
        for operand, most in ((0, 1), (2, 2)):
            ratio = seen[:, operand, 0] / want[:, operand, 0]
            assert np.all((ratio > 0.3) & (ratio < 1.01 * most)), name


@pytest.mark.parametrize("constructor", [TransformerLM, pytest.param(ReformerLM, marks=SLOW)])
def test_a_saved_run_goes_on_to_the_bit(tmp_path, constructor):
    model = narrow() if constructor is TransformerLM else constructor(**SMALL)
    state, _ = trained(model, 3)
    saved = checkpoint.Checkpoints(tmp_path)
    saved.save(3, state)
    saved.wait()
    loaded, _ = checkpoint.Checkpoints(tmp_path).restore(3, jax.eval_shape(lambda: state))
    assert_trees_equal(histories(loaded.params), histories(state.params))
    assert_trees_equal(trained(model, 2, loaded)[0], trained(model, 2, state)[0])


def test_a_run_begins_with_the_weights_of_another_and_histories_of_its_own(tmp_path):
    """From bfloat16, and back."""
    wide = TransformerLM(**SMALL | dict(dtype="bfloat16", amax_history=0))
    of_wide, of_narrow = trained(wide, 0)[0], trained(narrow(), 1)[0]
    cases = (of_wide, narrow()), (of_narrow, wide), (of_narrow, narrow())
    for i, (state, after) in enumerate(cases):
        folder = tmp_path / str(i)
        saved = checkpoint.Checkpoints(folder)
        saved.save(1, state)
        saved.wait()
        like = jax.eval_shape(lambda model=after: model.init_params(KEY, TOKENS.shape))
        got, *_ = starting_weights.read(folder, like, None)
        assert float8.HISTORY not in str(jax.tree_util.tree_leaves_with_path(got))
        want = [x for path, x in jax.tree_util.tree_leaves_with_path(state.params)
                if float8.HISTORY not in jax.tree_util.keystr(path)]  # fmt: skip
        for x, y in zip(jax.tree.leaves(got), want, strict=True):
            np.testing.assert_array_equal(x, y)


@SLOW
def test_a_run_goes_from_bfloat16_to_delayed_scales(tmp_path):
    wide = TransformerLM(**SMALL | dict(dtype="bfloat16", amax_history=0, vocab_size=16))
    saved = checkpoint.Checkpoints(tmp_path / "wide")
    saved.save(0, TrainState(np.int32(0), wide.init_params(KEY, TOKENS.shape), (), None))
    saved.wait()
    arguments = worker.arguments(steps=3, eval_every=3, length=8)
    arguments |= dict(model=partial(TransformerLM, **SMALL | dict(vocab_size=16)))
    loop.train(tmp_path / "narrow", **arguments, init_from=tmp_path / "wide")
    like = jax.eval_shape(lambda: arguments["model"]().init_params(KEY, TOKENS.shape))
    params, _ = checkpoint.Checkpoints(tmp_path / "narrow").restore_params(3, like)
    assert all(np.all(seen > 0) for seen in histories(params).values())


def test_an_evaluation_reads_the_same_weights_and_no_scale():
    state, _ = trained(narrow(), 1)
    model = TransformerLM(**SMALL, mode="eval")
    shapes = jax.eval_shape(lambda: model.init_params(KEY, TOKENS.shape))
    assert jax.tree.structure(shapes) == jax.tree.structure(state.params)
    plain = TransformerLM(**SMALL | dict(dtype="bfloat16", amax_history=0), mode="eval")
    got, want = (jax.jit(m.apply)(state.params, TOKENS, KEY) for m in (model, plain))
    np.testing.assert_array_equal(got, want)


def test_a_history_without_scales_is_refused_in_one_line():
    with pytest.raises(SettingError, match="amax_history is 2 and dtype is 'bfloat16'") as error:
        TransformerLM(**SMALL | dict(dtype="bfloat16"))
    assert "\n" not in str(error.value)
