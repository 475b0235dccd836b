"""Options of logits that every op with attention weights has: a soft cap, and the length's log."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.declared import SettingError
from reformax.ops import (
    dense,
    flash,
    gated_delta,
    linear,
    local,
    longformer,
    lsh,
    nystromformer,
    performer,
)
from reformax.ops.masking.masks import keys_seen, visibility
from tests.ops import inputs
from tests.ops import test_against_oracle as against_oracle
from tests.ops import test_decoding as decoding
from tests.ops.rows import ROWS, Shape, one_of_each_kind, over

KEY = jax.random.key(3)
LOGITS = {"soft_cap": 0.7, "scale_by_length": 0.4}


def first_of_each_factory():
    """A row of each op that makes attention weights, in array operations, with both options."""
    rows = {}
    for row in ROWS:
        if row.op().dropout and not row.in_kernel:
            rows.setdefault(row.factory, row)
    options = {name: (value,) for name, value in LOGITS.items()}
    return [row._replace(options=row.options | options) for row in rows.values()]


WITH_LOGITS = first_of_each_factory()


@over(WITH_LOGITS, quick=one_of_each_kind)
@pytest.mark.parametrize("packed", [True, False])
def test_against_the_oracle(row, packed):
    shape = Shape(batch=2, n_queries=13, n_keys=13, n_heads=2)
    bias_axes = (True,) * 4 if row.bias and not packed else None
    case = dict(options=row.first, causal=row.causal(packed), packed=packed, bias_axes=bias_axes)
    rate = row.dropout(against_oracle.DROPOUT) if packed else 0.0
    against_oracle.check(row, 1e-5, jnp.float32, **case, dropout=rate, shape=shape, **SIZES)


SIZES = dict(d_qk=4, d_v=3, seed=3)


@over((row for row in WITH_LOGITS if row.decodes), quick=one_of_each_kind)
def test_a_step_is_the_last_row(row):
    op, lengths, total = row.op(), np.array([5, 3], np.int32), 19
    x = decoding.draw(op, 2, total)
    whole = decoding.forward(op, total)
    for (b, t), out in decoding.run(op, x, lengths, 5, capacity=total).items():
        want = whole(x, t + 1)[b, t]
        np.testing.assert_allclose(out, want, atol=1e-5 * max(1, np.abs(want).max()))


@over(WITH_LOGITS, quick=one_of_each_kind)
def test_padding_changes_no_real_position(row):
    against_oracle.test_padding_changes_no_real_position(row)


@pytest.mark.parametrize("name", LOGITS)
@over(WITH_LOGITS, quick=one_of_each_kind)
def test_no_op_ignores_an_option(row, name):
    x = inputs.draw(row.op(), length=13)
    plain = {other: None for other in LOGITS}

    def run(**options):
        op = row.op(**plain | options)
        return inputs.call(op, x, causal=row.causal(), rng=KEY)

    assert np.abs(run(**{name: LOGITS[name]}) - run()).max() > 1e-3


@pytest.mark.parametrize(
    "factory",
    [linear.linear, gated_delta.gated_delta, performer.performer, nystromformer.nystromformer],
)
@pytest.mark.parametrize("name", LOGITS)
def test_an_op_without_weights_refuses_them(factory, name):
    message = f"{name} is {LOGITS[name]}: {factory.__name__} makes no attention weights, leave"
    with pytest.raises(SettingError, match=message):
        factory(**{name: LOGITS[name]})


@pytest.mark.parametrize("value", [0.0, -1.0, "30"])
def test_a_cap_out_of_range(value):
    with pytest.raises(SettingError, match=f"^soft_cap is {value!r}: expected a number from 0.01"):
        dense.dense(soft_cap=value)


@pytest.mark.parametrize("impl", ["pallas", "cudnn"])
@pytest.mark.parametrize("factory", [flash.flash, local.local, lsh.lsh])
def test_an_implementation_without_a_cap_refuses_it(factory, impl, monkeypatch):
    monkeypatch.setattr("reformax.ops.calls.dispatch.gpu_obstacle", lambda: None)
    if impl == "cudnn" and factory is lsh.lsh:
        return
    options = dict(window=16) if factory is local.local else {}
    op = factory(soft_cap=30.0, impl=impl, **options)
    x = inputs.draw(op, length=16, d_qk=16, d_v=16, dtype=jnp.bfloat16)
    with pytest.raises(NotImplementedError, match=f"^impl='{impl}' with soft_cap=30.0: use impl="):
        jax.eval_shape(lambda: inputs.call(op, x, causal=True, rng=KEY))
    # "auto" takes array operations.
    program = jax.make_jaxpr(lambda x: inputs.call(factory(soft_cap=30.0), x, causal=True, rng=KEY))
    assert "pallas_call" not in str(program(x)) and "cudnn" not in str(program(x))


@pytest.mark.parametrize("n_queries, n_keys", [(7, 7), (5, 9), (9, 5)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("segments", ["none", "one", "pair"])
def test_the_number_of_keys_seen(n_queries, n_keys, causal, segments):
    rng = np.random.default_rng(0)
    of_query, of_key = (jnp.asarray(rng.integers(0, 4, (3, n))) for n in (n_queries, n_keys))
    ids = {"none": None, "one": of_query, "pair": (of_query, of_key)}[segments]
    if segments == "one" and n_queries != n_keys:
        return
    want = visibility(n_queries, n_keys, causal=causal, segment_ids=ids).sum(axis=-1)[:, 0]
    np.testing.assert_array_equal(
        keys_seen(n_queries, n_keys, causal=causal, segment_ids=ids), want
    )


def test_a_global_tokens_own_query_is_scaled_too():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 12, 1, 8)), jnp.float32) for _ in range(3))
    tokens = jnp.zeros((1, 12), jnp.int32).at[:, 0].set(1)
    call, found = dict(segment_ids=None, causal=False), []
    for own, extra in ((False, None), (True, dict(global_q=q, global_k=k, global_v=v))):
        op = longformer.longformer(
            window=4, n_global=1, own_projections=own, scale_by_length=LOGITS["scale_by_length"]
        )
        plan = op.plan((), q, k, rng=None, train=False, global_tokens=tokens, **call)
        found.append(op.apply((), q, k, v, plan=plan, extra_projections=extra, **call))
    np.testing.assert_allclose(found[1], found[0], atol=1e-6)


def test_a_number_of_numpy_promotes_nothing():
    q = jnp.ones((1, 5, 1, 8), jnp.float32)
    with jax.enable_x64(True):
        out = flash.flash(soft_cap=np.float64(3), impl="xla")(q, q, q)
    assert out.dtype == jnp.float32
