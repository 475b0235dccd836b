"""Options of logits that every op with attention weights has: a soft cap, and the length's log."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.declared import SettingError
from reformax.ops import (
    dense,
    dsa,
    flash,
    gated_delta,
    linear,
    linformer,
    local,
    long_short,
    longformer,
    lsh,
    memory_efficient,
    nsa,
    nystromformer,
    performer,
    routing,
    shared_qk,
)
from reformax.ops.calls.dispatch import INTERPRETED
from reformax.ops.masking.masks import keys_seen, visibility
from reformax.ops.numerics.logits import Logits
from tests.helpers import assert_trees_close
from tests.ops import inputs
from tests.ops import test_against_oracle as against_oracle
from tests.ops import test_decoding as decoding
from tests.ops import test_poison as poison
from tests.ops.rows import ROWS, Shape, one_of_each_kind, over

KEY = jax.random.key(3)
LOGITS = {"soft_cap": 0.7, "scale_by_length": 0.4}


def first_of_each_factory():
    """Of each op that makes attention weights a row in arrays and one in kernels, with both."""
    rows = {}
    for row in ROWS:
        if row.op().dropout:
            rows.setdefault((row.factory, row.in_kernel), row)
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


# The next one says that what padding holds changes nothing.
@pytest.mark.slow
@over(WITH_LOGITS, quick=one_of_each_kind)
def test_padding_changes_no_real_position(row):
    against_oracle.test_padding_changes_no_real_position(row)


@over(WITH_LOGITS, quick=one_of_each_kind)
def test_padding_may_hold_anything(row):
    poison.test_at_padding_and_in_another_example(row)


KERNELS = {
    "flash": flash.flash,
    "memory_efficient": functools.partial(
        memory_efficient.memory_efficient, query_chunk_size=16, key_chunk_size=32
    ),
    "lsh": functools.partial(lsh.lsh, chunk_len=16, n_hashes=2, n_buckets=4),
    "longformer": functools.partial(
        longformer.longformer, window=6, n_global=1, global_projections=False
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compute_what_array_operations_do(name):
    make, packed = KERNELS[name], name != "memory_efficient"
    length = 45 if packed else 64
    ids = jnp.repeat(jnp.array([[1, 2, 0], [3, 1, 1]]), jnp.array([20, 17, 8]), axis=1)
    options = dict(segment_ids=ids, dropout=0.2) if packed else {}
    if name == "longformer":
        options["global_tokens"] = jnp.zeros((2, length), int).at[:, 3].set(1)

    def passes(impl):
        op = make(**LOGITS, impl=impl)
        x = inputs.draw(op, length=length, d_qk=8)
        arrays = tuple(y for y in x[:3] if y is not None)

        def attend(*arrays):
            q, k, v = arrays if len(arrays) == 3 else (arrays[0], None, arrays[1])
            return op(q, k, v, causal=True, rng=KEY, **options)

        @jax.jit
        def run(*arrays):
            out, vjp = jax.vjp(attend, *arrays)
            return out, vjp(jnp.cos(jnp.arange(out.size, dtype=jnp.float32).reshape(out.shape)))

        return run(*arrays)

    assert_trees_close(passes(INTERPRETED), passes("xla"), 1e-5)


def test_pieces_of_a_ring_in_kernels():
    rng, ids = np.random.default_rng(0), jnp.repeat(jnp.array([[1, 2]]), 20, axis=1)
    q, k, v, d_out = (
        jax.device_put(rng.normal(size=(1, 40, 2, 8)).astype(jnp.float32)) for _ in range(4)
    )

    @functools.partial(jax.jit, static_argnums=0)
    def passes(impl, q, k, v, d_out):
        logits, call = Logits(soft_cap=LOGITS["soft_cap"]), (True, q, k, v, (ids, ids), None)
        pieces = flash._FlashPieces((None, None), logits, 0.0, impl)
        results = pieces.forward(*call)
        return results, pieces.backward(*call, results, d_out)

    assert_trees_close(*(passes(impl, q, k, v, d_out) for impl in (INTERPRETED, "xla")), 1e-5)


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


@pytest.mark.parametrize("factory", [dense.dense, flash.flash, local.local, shared_qk.shared_qk])
def test_cudnn_has_no_cap_and_auto_goes_on_to_our_kernels(factory, monkeypatch):
    monkeypatch.setattr("reformax.ops.calls.this_gpu.obstacle", lambda: None)
    options = dict(window=16) if factory is local.local else {}
    x = inputs.draw(factory(), length=16, d_qk=16, d_v=16, dtype=jnp.bfloat16)

    def program(**options):
        op = factory(soft_cap=30.0, **options)
        return str(jax.make_jaxpr(lambda x: inputs.call(op, x, causal=True, rng=KEY))(x))

    with pytest.raises(NotImplementedError, match="^impl='cudnn' with soft_cap=30.0: use impl="):
        program(impl="cudnn", **options)
    by_default = program(**options)
    assert "cudnn" not in by_default
    assert "pallas_call" in by_default


FACTORS = 0.4, 0.9
OTHER_WEIGHTS = [
    functools.partial(
        nsa.nsa, compress_len=4, compress_stride=2, block_size=4, window=4, n_selected=3
    ),
    functools.partial(dsa.dsa, top_k=4, d_index=4, n_index_heads=2),
    functools.partial(linformer.linformer, n_projected=4),
    functools.partial(long_short.long_short, chunk_len=4, rank=2),
    functools.partial(routing.routing, n_clusters=2),
    functools.partial(dense.dense, learned_sinks=True),
]


@pytest.mark.parametrize("factory", OTHER_WEIGHTS)
def test_a_learnt_factor_stands_beside_other_weights(factory):
    """It begins as the fixed one, and it has a gradient."""
    fixed = factory(scale_by_length=FACTORS[0])
    x = inputs.draw(fixed, length=32, d_qk=8)
    options = dict(causal=fixed.causality != "never", rng=KEY)
    learnt = dataclasses.replace(fixed, learn_scale_by_length=True)
    factor = {"length_factor": jnp.full(2, FACTORS[0])}
    assert learnt.init(KEY, learnt.dims(x.q, x.v)).keys() == {*dict(x.params), *factor}

    @jax.jit
    def run(factor):
        params = dict(x.params) | factor
        out, back = jax.vjp(lambda p: inputs.call(learnt, x._replace(params=p), **options), params)
        return out, back(out)[0]["length_factor"], inputs.call(fixed, x, **options)

    out, gradient, want = run(factor)
    np.testing.assert_allclose(out, want, atol=5e-6)
    assert jnp.all(gradient != 0)


@pytest.mark.parametrize("impl", ["xla", INTERPRETED])
@pytest.mark.parametrize("factory", [flash.flash, lsh.lsh])
def test_a_learnt_factor_is_one_of_each_head(factory, impl):
    """Each head computes what it does with its factor fixed; so do the factors' gradients."""
    learnt = factory(scale_by_length=FACTORS[0], learn_scale_by_length=True, impl=impl)
    x = inputs.draw(learnt, d_qk=8)
    np.testing.assert_array_equal(x.params["length_factor"], np.float32(FACTORS[:1] * 2))
    ids = jnp.repeat(jnp.array([[1, 2, 0]]), jnp.array([6, 5, 2]), axis=1).repeat(2, axis=0)
    options = dict(causal=True, segment_ids=ids, rng=KEY)

    @jax.jit
    def run(factors):
        params = {"length_factor": factors}
        return inputs.call(learnt, x._replace(params=params), **options)

    @functools.partial(jax.jit, static_argnums=0)
    def with_fixed(factor):
        op = factory(scale_by_length=factor, impl=impl)
        return inputs.call(op, x._replace(params=()), **options)

    factors = jnp.array(FACTORS)
    wanted = jnp.stack([with_fixed(f)[:, :, i] for i, f in enumerate(FACTORS)], axis=2)
    np.testing.assert_allclose(run(factors), wanted, atol=1e-6)
    # A gradient in the direction of ln(n) q is that of the queries.
    (of_factors,) = jax.vjp(run, factors)[1](wanted)
    step = 1e-2
    for i, f in enumerate(FACTORS):
        change = (with_fixed(f + step) - with_fixed(f - step))[:, :, i] / (2 * step)
        np.testing.assert_allclose(of_factors[i], np.sum(change * wanted[:, :, i]), rtol=2e-2)


def test_a_step_reads_a_learnt_factor():
    op = flash.flash(scale_by_length=FACTORS[0], learn_scale_by_length=True)
    x = inputs.draw(op, length=7)._replace(params={"length_factor": jnp.array(FACTORS)})

    @jax.jit
    def run(x):
        prompt, new = x.at(slice(None), slice(0, 6)), x.at(slice(None), slice(6, 7))
        plan = inputs.plan(op, prompt, causal=True, length=8)
        cache = inputs.init_cache(op, prompt, plan=plan, lengths=np.full(2, 6), capacity=8)
        out, _ = inputs.step(op, new, cache, position=np.full(2, 6))
        return out[:, 0], inputs.call(op, x, causal=True)[:, 6]

    np.testing.assert_allclose(*run(x), atol=1e-6)


def test_a_learnt_factor_is_refused_where_it_is_not_kept():
    with pytest.raises(SettingError, match="^learn_scale_by_length is True and scale_by_length is"):
        flash.flash(learn_scale_by_length=True)


@pytest.mark.parametrize("n_queries, n_keys", [(7, 7), (5, 9), (9, 5)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("segments", ["none", "one", "pair"])
def test_the_number_of_keys_seen(n_queries, n_keys, causal, segments):
    rng = np.random.default_rng(0)
    of_query, of_key = (jnp.asarray(rng.integers(0, 4, (3, n))) for n in (n_queries, n_keys))
    ids = {"none": None, "one": of_query, "pair": (of_query, of_key)}[segments]
    if segments == "one" and n_queries != n_keys:
        return

    @jax.jit
    def run(ids):
        seen, masks = (n_queries, n_keys), dict(causal=causal, segment_ids=ids)
        return keys_seen(*seen, **masks), visibility(*seen, **masks).sum(axis=-1)[:, 0]

    np.testing.assert_array_equal(*run(ids))


@pytest.mark.slow
def test_a_global_tokens_own_query_is_scaled_too():
    rng = np.random.default_rng(0)
    q, k, v = (jax.device_put(rng.normal(size=(1, 12, 1, 8)).astype(jnp.float32)) for _ in range(3))
    tokens = jnp.zeros((1, 12), jnp.int32).at[:, 0].set(1)
    call, found = dict(segment_ids=None, causal=False), []
    for own, extra in ((False, None), (True, dict(global_q=q, global_k=k, global_v=v))):
        op = longformer.longformer(
            window=4, n_global=1, global_projections=own, scale_by_length=LOGITS["scale_by_length"]
        )
        plan = op.plan((), q, k, rng=None, train=False, global_tokens=tokens, **call)
        found.append(op.apply((), q, k, v, plan=plan, extra_projections=extra, **call))
    np.testing.assert_allclose(found[1], found[0], atol=1e-6)


def test_a_number_of_numpy_promotes_nothing():
    q = jnp.ones((1, 5, 1, 8), jnp.float32)
    with jax.enable_x64(True):
        out = flash.flash(soft_cap=np.float64(3), impl="xla")(q, q, q)
    assert out.dtype == jnp.float32
