"""The call of an op: masks, compilation, and the name and options of an op."""

import contextlib
import copy
import dataclasses
import functools
import inspect
import itertools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.declared import SettingError, Unsupported
from reformax.ops import (
    block_patterns,
    block_sparse,
    dense,
    flash,
    local,
    long_short,
    lsh,
    memory_efficient,
    nsa,
    routing,
    shared_qk,
    sinks,
    smyrf,
)
from reformax.ops.base import Dims
from reformax.ops.calls.arguments import check_arguments
from reformax.ops.calls.call import Call
from tests.ops import inputs
from tests.ops.rows import ROWS, one_of_each_kind, over

KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(3, 2, 8, 2, 4)).astype(np.float32)
TOKENS = np.arange(8) < np.array([[5], [8]])  # one row ends in padding


def call(op, **options):
    x = inputs.draw(op, length=8)._replace(q=X[0], k=None if op.shared_qk else X[1], v=X[2])
    options = dict(causal=op.causality != "never", rng=KEY) | options
    return np.asarray(inputs.call(op, x, **options))


@over((row for row in ROWS if not row.in_kernel), quick=one_of_each_kind)
def test_a_mask_of_keys_is_padding_in_segments(row):
    op = row.op()
    want = call(op, segment_ids=TOKENS.astype(np.int32))
    for mask in (TOKENS, TOKENS[:, None, None]):
        got = call(op, mask=mask)
        # Of one segment, which booleans say, some ops take their sums in another order.
        np.testing.assert_allclose(got[TOKENS], want[TOKENS], rtol=1e-5, atol=1e-6)
        # An op of two sequences keeps the queries; in others they are the same positions, and in a
        # causal call of one that sorts.
        assert np.any(got[~TOKENS]) == (op.cross and op.plan_needs != "rng")


def test_a_mask_is_added_to_segments():
    ids = np.array([[1, 1, 1, 2, 2, 2, 0, 0]] * 2)
    for op in (flash.flash(), shared_qk.shared_qk()):
        got = call(op, mask=TOKENS, segment_ids=ids)
        want = call(op, segment_ids=np.where(TOKENS, ids, 0))
        np.testing.assert_array_equal(got[TOKENS], want[TOKENS])


def test_a_mask_of_pairs_is_honoured_or_refused():
    pairs = np.tril(np.ones((2, 1, 8, 8), bool))
    bias = np.random.default_rng(1).normal(size=(1, 2, 8, 8)).astype(np.float32)
    for op in (dense.dense(), flash.flash()):
        got = call(op, mask=pairs, bias=bias, causal=False)
        np.testing.assert_allclose(got, call(op, causal=True, bias=bias), rtol=1e-5, atol=1e-6)
        nothing = pairs & (np.arange(8) > 2)[:, None]  # the first rows see no key
        out, d_q = jax.value_and_grad(
            lambda q, op=op, seen=nothing: op(q, *X[1:], mask=seen).sum()
        )(X[0])
        assert np.isfinite(out) and np.isfinite(d_q).all()
        assert not call(op, mask=nothing, causal=False)[:, :3].any()
    for op in (local.local(), lsh.lsh(), block_sparse.block_sparse()):
        with pytest.raises(NotImplementedError, match=rf"mask has shape \(2, 1, 8, 8\): {op.name}"):
            call(op, mask=pairs)


@pytest.mark.parametrize(
    "mask, message",
    [
        (TOKENS.astype("float32"), "mask has dtype float32: expected booleans, True where"),
        (TOKENS[:, :7], r"mask has shape \(2, 7\): expected \[batch, keys\], \(2, 8\), or"),
        (TOKENS[None], r"mask has shape \(1, 2, 8\): expected"),
        (TOKENS[:, None, None, :7], r"mask has shape \(2, 1, 1, 7\): expected"),
    ],
)
def test_a_mask_that_does_not_fit(mask, message):
    with pytest.raises(ValueError, match=message) as raised:
        call(flash.flash(), mask=mask)
    assert "\n" not in str(raised.value)


def test_dropout_by_flax_s_name_is_refused():
    with pytest.raises(NotImplementedError, match=r"dropout_rate is 0\.1: give dropout=0\.1 with"):
        call(flash.flash(), dropout_rate=0.1)
    np.testing.assert_array_equal(call(flash.flash(), dropout_rate=0.0), call(flash.flash()))


@pytest.fixture
def compiled(caplog):
    """Lists what `function` compiles."""

    def names(function):
        caplog.clear()
        with caplog.at_level(logging.WARNING), jax.log_compiles():
            function()
        messages = [record.getMessage() for record in caplog.records]
        return [m for m in messages if "XLA compilation" in m]

    return names


def test_an_op_is_a_part_of_a_compiled_function():
    q, k, v = X
    np.testing.assert_allclose(jax.jit(flash.flash())(q, k, v), flash.flash()(q, k, v), atol=1e-6)


def test_a_call_outside_of_jit_compiles_once(compiled):
    def attend(q, seed=0):
        # Another op of the same options, and another rng.
        op = local.local(chunk_len=4)
        return op(q, *X[1:], causal=True, rng=jax.random.key(seed), dropout=0.1).sum()

    transformed = (attend, jax.grad(attend), lambda q, seed=0: jax.vmap(attend)(q[None]))
    want = [jax.jit(function)(X[0]) for function in transformed]
    for function, result in zip(transformed, want, strict=True):
        assert compiled(lambda f=function: f(X[0], 1))
        assert not compiled(lambda f=function: f(X[0], 2))
        np.testing.assert_allclose(function(X[0]), result, rtol=1e-4, atol=1e-5)
    other = local.local(chunk_len=2)
    assert compiled(lambda: other(*X, rng=KEY))


def test_ops_are_equal_where_one_compiled_program_serves_both():
    assert lsh.lsh(n_hashes=2) == lsh.lsh(n_hashes=2) != lsh.lsh(n_hashes=3)
    assert hash(lsh.lsh(n_hashes=2)) == hash(lsh.lsh(n_hashes=2))
    assert lsh.lsh(n_buckets=[4, 2]) == lsh.lsh(n_buckets=(4, 2)) != lsh.lsh(n_buckets=(2, 4))
    assert flash.flash(scale=1) != flash.flash(scale=1.0)
    assert routing.routing(decay=0.0) != routing.routing(decay=-0.0)
    assert dense.dense() != memory_efficient.memory_efficient()
    assert dense.dense(impl="xla") != type("dense", (dense.dense,), {})(impl="xla")
    for pattern in (block_patterns.strided(stride=2), np.ones((2, 2), bool)):
        op = block_sparse.block_sparse(pattern=pattern)
        assert op == block_sparse.block_sparse(pattern=pattern)
    assert op == block_sparse.block_sparse(pattern=np.ones((2, 2), bool)) == copy.deepcopy(op)
    assert op != block_sparse.block_sparse(pattern=np.tri(2, dtype=bool))
    strided = (block_patterns.strided(stride=2) for _ in range(2))
    assert len({block_sparse.block_sparse(pattern=pattern) for pattern in strided}) == 1
    with pytest.raises(ValueError, match="n_hashes is True"):
        lsh.lsh(n_hashes=1) and lsh.lsh(n_hashes=True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        lsh.lsh().n_hashes = 2


def test_every_option_tells_ops_apart():
    """An option that equality left out would let two ops share one compiled program."""
    for row in ROWS:
        for name, values in row.options.items():
            if name == "impl" or len(values) < 2:
                continue
            made = []
            for value in values:
                with contextlib.suppress(ValueError):  # it excludes another option
                    made.append(row.op(**{name: value}))
            assert len(set(made)) == len(made), name


def test_an_array_among_the_options_may_change_afterwards():
    """An op has what it was when it was made, and one that is made then is another."""
    q, v = X[0], X[2]
    rotations = np.random.default_rng(0).normal(size=(2, 4, 4, 2)).astype(np.float32)
    make = functools.partial(lsh.lsh, chunk_len=2, n_buckets=4, rotations=rotations)
    op = make()
    before = op(q, None, v)
    rotations[:] = rotations[:, ::-1].copy()
    assert np.any(make()(q, None, v) != before)
    np.testing.assert_array_equal(op(q, None, v), before)
    np.testing.assert_array_equal(jax.jit(lambda q, v: op(q, None, v))(q, v), before)


def test_arrays_among_the_options_tell_ops_apart():
    q, v, mask = X[0], X[2], np.tri(2, dtype=bool)
    rotations = np.random.default_rng(0).normal(size=(2, 4, 4, 2)).astype(np.float32)
    ops = [lsh.lsh(chunk_len=2, n_buckets=4, rotations=x) for x in (rotations, rotations[:, ::-1])]
    outs = [op(q, None, v) for op in ops]
    assert np.any(outs[0] != outs[1])
    ops = [block_sparse.block_sparse(pattern=x, block_size=4) for x in (mask, ~mask)]
    outs = [op(q, X[1], v) for op in ops]
    assert np.any(outs[0] != outs[1])


def test_an_op_shows_its_name_and_the_options_that_are_set():
    for row in ROWS:
        assert row.factory().name == row.factory.__name__
        assert repr(row.factory()) == f"{row.factory.__name__}()"
        text = repr(row.op())
        options = {name for name, values in row.options.items() if f"{name}=" in text}
        assert "\n" not in text and options <= row.options.keys()
        assert options or repr(row.factory()) == text
    assert repr(lsh.lsh(n_hashes=2)) == "lsh(n_hashes=2)"
    op = lsh.lsh(n_hashes=2, chunk_len=64, n_buckets=4, rotations=np.zeros((2, 4, 2, 2)))
    assert repr(op) == "lsh(n_hashes=2, n_buckets=4, rotations=float64[2, 4, 2, 2])"
    op = block_sparse.block_sparse(pattern=block_patterns.strided(stride=2), block_size=(8, 4))
    assert repr(op) == "block_sparse(pattern=strided(stride=2), block_size=(8, 4))"
    assert repr(block_sparse.block_sparse(pattern=block_patterns.butterfly())) == "block_sparse()"
    op = block_sparse.block_sparse(pattern=np.ones((2, 2), bool))
    assert repr(op) == "block_sparse(pattern=bool[2, 2])"


@pytest.mark.parametrize(
    "op",
    [
        local.local(chunk_len=4, impl="xla"),
        smyrf.smyrf(chunk_len=4, impl="xla"),
        nsa.nsa(window=4, impl="xla"),
    ],
)
def test_queries_of_another_dtype_have_gradients(op):
    """Queries may be rounded and keys not: gradients have the dtypes of what they are of."""
    x = inputs.draw(op, length=8)

    def loss(q, k):
        out = inputs.call(op, x._replace(q=q, k=k), causal=op.causality != "never", rng=KEY)
        return jnp.sum(jnp.sin(out.astype(jnp.float32)))

    narrow = x.q.astype(jnp.bfloat16)
    got = jax.grad(loss, argnums=(0, 1))(narrow, x.k)
    want = jax.grad(loss, argnums=(0, 1))(narrow.astype(jnp.float32), x.k)
    assert [y.dtype for y in got] == [jnp.bfloat16, jnp.float32]
    for y, z in zip(got, want, strict=True):
        np.testing.assert_allclose(y.astype(jnp.float32), z, atol=3e-2)


def test_one_segment_may_have_any_id():
    for ids in ([[-1, -1, -1, 0]], [[0, 3, 3, 3]], [[-(2**31)] * 4]):
        check_arguments(
            sinks.sinks(),
            *X[:, :1, :4],
            causal=True,
            segment_ids=np.array(ids),
            dropout=0,
            rng=None,
        )


def without_weights(row) -> list[dict]:
    """The settings of up to two options by which the row's op has no weights, of all that it has.

    An option is tried with what the row names, and with what leaves something out.
    """
    if not jax.tree.leaves(row.op().init(KEY, Dims(2, 4, 4, 8))):
        return []
    tried = [
        {name: value}
        for name in inspect.signature(row.factory).parameters
        for value in (*row.options.get(name, ()), False, 0, None, "none")
    ]
    found = []
    for one, other in itertools.combinations_with_replacement(tried, 2):
        try:
            op = row.op(**one | other)
        except SettingError:
            continue
        if not jax.tree.leaves(jax.eval_shape(lambda op=op: op.init(KEY, Dims(2, 4, 4, 8)))):
            found.append(one | other)
    return found


@pytest.mark.parametrize(
    "factory", dict.fromkeys(row.factory for row in ROWS), ids=lambda f: f.__name__
)
def test_an_op_without_weights_is_called_without_params(factory):
    row = next(row for row in ROWS if row.factory is factory)
    settings = without_weights(row)[:2]
    assert settings or factory is not long_short.long_short
    for options in settings:
        op = row.op(**options)
        x = inputs.draw(op, length=8)
        for params in ((), {}):
            call = functools.partial(inputs.call, op, causal=row.causal(), rng=KEY)
            assert jax.eval_shape(call, x._replace(params=params)).shape == x.v.shape


def test_a_method_refuses_what_the_algorithm_does_not_read():
    """The arguments of all methods are one `Call`, so nothing else would notice."""
    op, zeros = lsh.lsh(chunk_len=4), jnp.zeros((1, 4, 2, 8))
    call = dict(segment_ids=None, causal=True, rng=KEY)
    one, gate = zeros[:, :1], {"gate": zeros}
    refused = {
        "bias": lambda x: op.apply((), zeros, None, zeros, plan=None, dropout=0.0, bias=x, **call),
        "extra_projections": lambda x: op.apply(
            (), zeros, None, zeros, plan=None, dropout=0.0, extra_projections=x, **call
        ),
        "global_tokens": lambda x: op.plan((), zeros, None, train=True, global_tokens=x, **call),
        "origins": lambda x: op.step((), one, None, one, None, position=jnp.zeros(1), origins=x),
    }
    for name, method in refused.items():
        with pytest.raises(Unsupported, match=f"^{name} is given, but lsh does not read it: leave"):
            method(gate if name == "extra_projections" else zeros)


def test_a_call_is_a_tree_whose_settings_are_static():
    """So a compiled function that takes one compiles again for another setting alone."""
    traced = []

    @jax.jit
    def run(call):
        traced.append(call.causal)
        return call.lengths * 2

    for causal, length in ((True, 3), (True, 4), (False, 4)):
        assert run(Call(causal=causal, lengths=jnp.array([length])))[0] == 2 * length
    assert traced == [True, False]
