"""Parts of the contract that only some ops use, by small ops: weights, gates, one segment a row."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.layers import Attention
from reformax.models import ReformerLM, TransformerLM
from reformax.ops import dense, gated_delta, gated_linear, kda, longformer, retention
from reformax.ops.base import Dims
from reformax.ops.masking.masks import Tokens
from tests.layers import plain
from tests.layers import test_attention as layer_tests
from tests.ops import inputs
from tests.ops import test_against_oracle as against_oracle
from tests.ops import test_decoding as decoding
from tests.ops import test_poison as poison
from tests.ops.rows import ROWS, Shape, over
from tests.ops.toys import FADING, TOYS, slots, with_global_tokens

toys = pytest.mark.parametrize("row", TOYS, ids=lambda row: row.name)
SLOTS = TOYS[1]
fading = FADING.factory


@toys
@pytest.mark.parametrize("packed", [True, False])
def test_weights_gates_and_their_gradients(row, packed):
    shape = Shape(batch=2, n_queries=7, n_keys=7, n_heads=3)
    case = dict(options=row.first, causal=row.causal(), packed=packed, bias_axes=None, shape=shape)
    rate = row.dropout(against_oracle.DROPOUT)
    against_oracle.check(row, 1e-5, jnp.float32, **case, dropout=rate, d_qk=4, d_v=3, seed=3)


def test_a_wrong_gradient_of_a_weight_is_found():
    class Stopped(slots):
        def _apply(self, call, params, *x):
            return super()._apply(call, jax.lax.stop_gradient(params), *x)

    with pytest.raises(AssertionError, match="dparams.*mix.*is off by"):
        test_weights_gates_and_their_gradients(SLOTS._replace(factory=Stopped), False)


@toys
def test_padding_changes_nothing(row):
    against_oracle.test_padding_changes_no_real_position(row)
    poison.test_at_padding_and_in_another_example(row)


def test_segments_do_not_leak():
    against_oracle.test_segments_do_not_leak(FADING)


def test_steps_are_one_forward():
    decoding.test_all_steps_are_one_forward(FADING)
    decoding.test_the_cache_does_not_grow(FADING)


@toys
def test_a_layer_projects_what_the_op_reads(row):
    layer_tests.test_equals_an_independent_computation(row, everything=True)


def test_a_layer_decodes():
    layer_tests.test_prefill_and_steps_are_apply(FADING)


def test_one_segment_a_row_or_a_refusal():
    op = slots()
    x = inputs.draw(op, length=8)
    real = np.arange(8) < np.array([[5], [8]])
    want = inputs.call(op, x, segment_ids=real)
    for one_each in (real.astype(np.int32), real * np.array([[3], [2]])):
        np.testing.assert_array_equal(inputs.call(op, x, segment_ids=one_each), want)
    got = jax.jit(lambda s: inputs.call(op, x, segment_ids=s))(real)
    np.testing.assert_allclose(got, want, atol=1e-6)
    two = np.where(np.arange(8) < 4, 1, 2) * real
    with pytest.raises(
        NotImplementedError, match="segment_ids of a row are several, but slots does"
    ):
        inputs.call(op, x, segment_ids=two)
    with pytest.raises(NotImplementedError, match="are integers, which may be several, but slots"):
        jax.jit(lambda s: inputs.call(op, x, segment_ids=s))(two)


def test_an_op_is_called_with_what_it_reads():
    x = inputs.draw(fading())
    with pytest.raises(ValueError, match=r"params is \(\): fading has weights of its own, pass"):
        fading()(*x[:3], causal=True, extra_projections=x.extra_projections)
    with pytest.raises(ValueError, match=r"extra_projections has \[\]: fading reads \['gate'\]"):
        fading()(*x[:3], causal=True, params=x.params)
    with pytest.raises(
        ValueError, match=r"extra_projections\['gate'\] has shape \(2, 13, 2, 4\): expected"
    ):
        fading()(*x[:3], causal=True, params=x.params, extra_projections={"gate": x.q})
    with pytest.raises(NotImplementedError, match="dropout is 0.1: fading makes no attention"):
        inputs.call(fading(), x, causal=True, dropout=0.1, rng=jax.random.key(0))


def projecting():
    """Ops that read projections of their own, one of each op and set of these."""
    ops = [row.op() for row in (*ROWS, *TOYS)]
    ops += [row.op(**{name: x}) for row in ROWS for name in row.options for x in row.options[name]]
    ops += [
        retention.retention(),
        gated_linear.gated_linear(),
        gated_delta.gated_delta(),
        kda.kda(),
        longformer.longformer(n_global=2, global_projections=True),
    ]
    found = {"-".join((op.name, *op.extra_projections(Dims(2, 4, 4, 13)))): op for op in ops}
    return {name: op for name, op in found.items() if op.reads_projections}


PROJECTING = projecting()


@pytest.mark.parametrize("op", PROJECTING.values(), ids=PROJECTING)
def test_each_method_says_which_projections_are_missing(op):
    x = inputs.draw(op)
    one, lengths = x.at(slice(None), slice(1)), np.array([9, 13])
    causal = op.causality == "only"
    plan = inputs.plan(op, x, causal=causal)
    calls = [lambda x, _: inputs.apply(op, x, plan=plan, segment_ids=None, causal=causal)]
    if op.decoding != "no":
        plan_of_cache = inputs.plan(op, x, causal=True, length=16)
        options = dict(plan=plan_of_cache, lengths=lengths, capacity=16)
        cache = inputs.init_cache(op, x, **options)
        calls += [
            lambda x, _: inputs.init_cache(op, x, **options),
            lambda _, one: inputs.step(op, one, cache, position=lengths),
            lambda _, one: inputs.read_on(op, one, cache, position=lengths, lengths=lengths > 9),
        ]
    if op.carries_state:
        state = op.first_state(2, op.dims(x.q, x.v))
        calls.append(
            lambda x, _: op.apply_from(
                x.params, x.q, x.k, x.v, state, extra_projections=x.extra_projections
            )
        )
    first, *others = sorted(x.extra_projections)
    for given, shown in ((None, []), ({first: x.extra_projections[first]}, [first])):
        if given is not None and not others:
            continue
        lacking = [a._replace(extra_projections=given) for a in (x, one)]
        line = f"extra_projections has {shown}: {op.name} reads {[first, *others]}"
        for call in calls:
            with pytest.raises(ValueError, match=re.escape(line) + r"\Z"):
                call(*lacking)


GLOBAL_TOKENS = np.arange(9)[None].repeat(2, 0) % 4 == 1


def test_global_tokens_reach_the_plan():
    op = with_global_tokens()
    x = inputs.draw(op, length=9)
    seen = np.eye(9, dtype=bool) | GLOBAL_TOKENS[:, None, None]
    want = dense.dense()(*x[:3], mask=seen)
    np.testing.assert_allclose(
        inputs.call(op, x, global_tokens=jnp.int32(GLOBAL_TOKENS)), want, atol=1e-6
    )
    with pytest.raises(
        NotImplementedError, match="global_tokens is given, but dense has no global tokens"
    ):
        dense.dense()(*x[:3], global_tokens=jnp.int32(GLOBAL_TOKENS))
    with pytest.raises(ValueError, match=r"global_tokens has shape \(2, 8\): expected .*\(2, 9\)"):
        inputs.call(op, x, global_tokens=jnp.int32(GLOBAL_TOKENS[:, :8]))


@pytest.mark.parametrize("model_fn", [TransformerLM, ReformerLM])
def test_global_tokens_travel_with_segments(model_fn):
    """Other tokens read a global token, through the model and both passes."""
    options = dict(vocab_size=9, d_model=8, d_ff=8, n_heads=2, n_layers=1, dropout=0.0)
    model = model_fn(**options, attention_type=(with_global_tokens(),), mode="eval")
    params = plain.init(model, (2, 9))
    tokens = Tokens(jnp.ones((2, 9), jnp.int32), jnp.int32(GLOBAL_TOKENS))

    def last(params, inputs):
        return jnp.sum(model.encode(params, inputs, tokens)[:, -1])

    # Position t holds token t, so that the gradient of a row of the table is that of its position.
    gradient = jax.jit(jax.grad(last))(params, jnp.arange(9)[None].repeat(2, 0))["embedding"]
    read = np.abs(gradient).max(axis=-1) > 0
    np.testing.assert_array_equal(read, GLOBAL_TOKENS[0] | (np.arange(9) == 8))


@pytest.mark.parametrize(
    "tokens, want",
    [
        (Tokens(GLOBAL_TOKENS[:, 1:] | True, right_padded=True), [8, 8]),
        (Tokens(np.arange(8) < np.array([[5], [0]]), right_padded=True), [5, 0]),
        (Tokens(np.arange(8) < np.array([[5], [0]])), None),
        (Tokens(np.array([[1, 1, 2, 2, 2, 3, 0, 0]] * 2), right_padded=True), None),
        (np.arange(8) < np.array([[5], [0]]), None),
        (None, None),
    ],
)
def test_lengths_are_passed_where_padding_is_behind(tokens, want):
    passed = []

    def apply(self, call, params, q, k, v, plan):
        passed.append(call.lengths)
        return v

    for takes, expected in ((True, want), (False, None)):
        op = type("dense", (dense.dense,), {"_apply": apply, "_takes_lengths": takes})()
        layer = Attention(op, masked=True)
        x = np.ones((2, 8, 4), np.float32)
        layer.apply(layer.init_params(jax.random.key(0), x.shape), x, tokens)
        lengths = passed.pop()
        assert (lengths if lengths is None else list(lengths)) == expected


@over(ROWS)
def test_fresh_weights_have_the_type_of_trained_ones(row):
    """Not a weak one, which a Python number gives: what follows is compiled for either."""
    weights = jax.eval_shape(lambda: row.op().init(jax.random.key(0), Dims(2, 4, 4, 13)))
    assert not any(w.weak_type for w in jax.tree.leaves(weights))
