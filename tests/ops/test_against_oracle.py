"""Every op, its output and all of its gradients, against attention written out in NumPy float64."""

import functools
import importlib
import inspect
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reformax import ops
from reformax.ops import base, local, lsh
from reformax.ops.calls.call import Call
from reformax.ops.masking.masks import except_self, visibility
from reformax.ops.numerics import row_blocks
from reformax.ops.softmax.dropout import full_dropout_mask, seed_words
from reformax.ops.softmax.reference import reference_attention
from tests.helpers import assert_trees_close, with_gradients
from tests.ops import inputs, oracle
from tests.ops.reference import ADDRESSES, LONGEST, Asked, expected, kept_weights
from tests.ops.rows import ROWS, Shape, over, the_others, visible

over_rows = over(ROWS)


LENGTHS = (1, 2, 7, 16, 23, 37)
DROPOUT = 0.3


def attend_and_differentiate(op, causal, dropout):
    """The compiled `(inputs, bias, segment_ids, rng, d_out) -> (plan, out, gradients)`.

    The gradients are those of the inputs, which hold the op's weights, and of the bias, None where
    there is none.
    """

    @jax.jit
    def run(x, bias, segment_ids, rng, d_out):
        plan = inputs.plan(op, x, segment_ids=segment_ids, causal=causal, rng=rng, train=True)
        masks = dict(plan=plan, segment_ids=segment_ids, causal=causal, dropout=dropout, rng=rng)
        attend = lambda x, bias: inputs.apply(op, x, **masks, bias=bias)  # noqa: E731
        out, vjp = jax.vjp(attend, x, bias)
        return plan, out, vjp(d_out.astype(out.dtype))

    return run


def random_segments(rng, batch, length):
    """Runs of a few ids in no order, 0 (padding) among them; a second row is padding alone."""
    ends = rng.random((batch, length)) < 0.2
    ids = rng.integers(0, 4, (batch, length))
    segment_ids = np.take_along_axis(ids, np.cumsum(ends, axis=1) % length, axis=1)
    segment_ids[-1] *= batch == 1
    return segment_ids.astype(np.int32)


@st.composite
def calls(draw, row):
    """A call of the row's op: its options, sizes, masks and a seed for its numbers."""
    options = {name: draw(st.sampled_from(values)) for name, values in row.options.items()}
    lengths = st.sampled_from(LENGTHS)
    length = draw(lengths)
    return dict(
        options=options,
        causal=row.causal(draw(st.booleans())),
        packed=draw(st.booleans()),
        bias_axes=draw(st.none() | st.tuples(*[st.booleans()] * 4)) if row.bias else None,
        dropout=row.dropout(draw(st.sampled_from((0.0, DROPOUT)))),
        shape=Shape(
            batch=draw(st.integers(1, 2)),
            n_queries=length,
            n_keys=draw(lengths) if row.op().cross else length,
            n_heads=draw(st.integers(1, 4)),
        ),
        d_qk=draw(st.sampled_from((4, 1, 6))),
        d_v=draw(st.sampled_from((4, 1, 3))),
        seed=draw(st.integers(0, 2**31)),
    )


@jax.jit
def largest_dropout(key):
    """The mask of the largest call; a smaller one's is its corner, for a weight has an address."""
    return kept_weights(seed_words(key, 2), DROPOUT, 2, 4, LONGEST)


def check(
    row,
    tolerance,
    dtype,
    *,
    options,
    causal,
    packed,
    bias_axes,
    dropout,
    shape,
    d_qk,
    d_v,
    seed,
    equal=False,
    run=None,
):
    """Compares a call with the oracle at its own scale and at 0; at a large one it is finite.

    `equal` makes all tokens of a row the same; `run` was compiled for the same sizes before.
    """
    rng, key = np.random.default_rng(seed), jax.random.key(seed)
    batch, n_queries, n_keys, n_heads = shape
    op = row.op(**options)

    def numbers(length, size, least=0.0, n_heads=n_heads):
        x = rng.normal(size=(batch, length, n_heads, size))
        x = np.broadcast_to(x[:, :1], x.shape).copy() if equal else x
        x += least * np.sign(x)
        # Rounded to `dtype` before either side reads them.
        return x.astype(dtype).astype(np.float64)

    # The nearer a query is to 0, the more the gradient of the key it becomes amplifies rounding.
    q = numbers(n_queries, d_qk, least=0.2 if op.shared_qk else 0.0)
    d_out = numbers(n_queries, d_v)
    k = None if op.shared_qk else numbers(n_keys, d_qk)
    v = numbers(n_keys, d_v)
    dims = base.Dims(n_heads, d_qk, d_v, n_queries)
    extra_projections = {
        name: numbers(n_queries, extra.size, n_heads=extra.n_heads)
        for name, extra in op.extra_projections(dims).items()
    }
    x = inputs.Inputs(q, k, v, extra_projections or None, op.init(key, dims))
    segment_ids = row.segment_ids(random_segments(rng, batch, n_queries)) if packed else None
    if packed and n_keys != n_queries:
        segment_ids = segment_ids, row.segment_ids(random_segments(rng, batch, n_keys))
    bias = None
    if bias_axes is not None:
        full = (batch, n_heads, n_queries, n_keys)
        sizes = [n if whole else 1 for n, whole in zip(full, bias_axes, strict=True)]
        bias = rng.normal(size=sizes).astype(jnp.promote_types(dtype, np.float32))
    keep = np.ones((batch, n_heads, n_queries, ADDRESSES))
    if dropout:
        keep = np.asarray(largest_dropout(key))[:batch, :n_heads, :n_queries]
    run = run or attend_and_differentiate(op, causal, dropout)
    tolerance *= row.rounding

    def run_at(scale):
        rounded = x.map(lambda y: (y * scale).astype(dtype))
        return run(rounded, bias, segment_ids, key, d_out.astype(dtype))

    for scale in (1, 0):
        plan, out, gradients = run_at(scale)
        asked = Asked(row, options, plan, shape, causal, segment_ids, keep)
        scaled = x.map(lambda y, scale=scale: y * scale)
        want, want_gradients = expected(asked, scaled, bias, d_out)
        (d_x, d_bias), (want_d_x, want_d_bias) = gradients, want_gradients
        # The gradient of a logit is a difference from dO . O, whose O was rounded to `dtype`.
        of_query = np.abs(d_out * want).sum(axis=-1) * float(jnp.finfo(dtype).eps) / 2
        rounded = of_query.max()
        if bias is not None:
            # A bias that is shared adds up as many of these differences as share it.
            shared = np.prod(full) / bias.size
            assert_trees_close({"db": d_bias}, {"db": want_d_bias}, tolerance, rounded * shared)
        if row.counts:
            # A key's gradient adds up the differences of all queries, by the weights that it has.
            added = 0.0 if bias is None else bias.astype(np.float64)
            cap = options.get("soft_cap")
            weights = oracle.attention_weights(scaled.q, scaled.k, asked.counts(), added, cap)
            rounded = max(rounded, np.einsum("btn,bnts->bns", of_query, weights).max())
        elif equal:  # as if all queries saw one key
            rounded *= n_queries
        vectors = [scaled.q, np.ones(1) if k is None else scaled.k]
        rounded *= max(np.abs(y).max() for y in vectors) / np.sqrt(d_qk)
        assert out.dtype == dtype
        assert_trees_close({"out": out}, {"out": want}, tolerance)
        assert all(y.dtype == dtype for y in jax.tree.leaves(d_x[:4]))
        for name, got, wanted in zip(d_x._fields, d_x, want_d_x, strict=True):
            more = 0.0 if name == "v" else rounded
            assert_trees_close({f"d{name}": got}, {f"d{name}": wanted}, tolerance, more)
    # Logits of 1e8 are beyond what float32 tells apart, but must not leave it.
    for y in jax.tree.leaves(run_at(1e4)):
        assert np.isfinite(np.asarray(y, np.float64)).all()


def test_dense_attention_of_one_query_to_two_keys_with_a_bias_for_all():
    """Where a gradient through the maximum, compiled without optimisation, was infinite."""
    (row,) = (row for row in ROWS if row.name == "dense")
    case = dict(options=row.first, causal=False, packed=False, bias_axes=(False,) * 4, dropout=0.0)
    case |= dict(shape=Shape(batch=1, n_queries=1, n_keys=2, n_heads=1), d_qk=1, d_v=4, seed=160)
    check(row, 1e-5, jnp.float32, **case)


def test_many_queries_to_few_keys_in_bfloat16():
    """Where what is rounded in the queries' outputs adds up in the gradient of a key."""
    (row,) = (row for row in ROWS if row.name == "flash")
    case = dict(options=row.first, causal=False, packed=False, bias_axes=None, dropout=0.0)
    case |= dict(shape=Shape(batch=1, n_queries=130, n_keys=3, n_heads=1), d_qk=1, d_v=1, seed=6)
    check(row, 2e-2, jnp.bfloat16, **case)


@over_rows
@settings(deadline=None, max_examples=2)
@given(data=st.data())
def test_float32(row, data):
    check(row, 1e-5, jnp.float32, **data.draw(calls(row)))


@pytest.mark.slow
@over_rows
@settings(deadline=None, max_examples=4)
@given(data=st.data())
def test_float32_of_more_calls(row, data):
    check(row, 1e-5, jnp.float32, **data.draw(calls(row)))


@over(ROWS, quick=the_others)
@settings(deadline=None, max_examples=2)
@given(data=st.data())
def test_bfloat16(row, data):
    check(row, 2e-2, jnp.bfloat16, **data.draw(calls(row)))


def make_plan(op, x):
    causal = op.causality != "never"
    plan = functools.partial(inputs.plan, op, causal=causal, train=True, rng=jax.random.key(0))
    return jax.jit(plan)(x)


@pytest.mark.slow
@over_rows
def test_padding_changes_no_real_position(row):
    length, n_pad = 11, row.n_pad
    op, key = row.op(), jax.random.key(0)
    whole = inputs.draw(op, length=length + n_pad)
    real, junk = whole.at(slice(None), slice(0, length)), whole.at(slice(None), slice(length, None))
    segment_ids = np.repeat([[1, 0]], [length, n_pad], axis=1).repeat(2, axis=0)
    masks = dict(causal=row.causal(), rng=key, dropout=row.dropout(0.2))

    @jax.jit
    def padded(real, junk):
        def attend(real, junk):
            joined = real.zip(lambda x, y: jnp.concatenate([x, y], axis=1), junk)
            out = inputs.call(op, joined, segment_ids=segment_ids, **masks)
            return jnp.sum(jnp.sin(out)), out

        return jax.value_and_grad(attend, argnums=(0, 1), has_aux=True)(real, junk)

    (_, out), (gradients, junk_gradients) = padded(real, junk)
    alone = jax.jit(lambda x: inputs.call(op, x, **masks))(real)
    np.testing.assert_allclose(out[:, :length], alone, atol=1e-6 * row.rounding)
    assert not np.any(out[:, length:])
    assert all(np.any(x) for x in jax.tree.leaves(jax.device_get(gradients)))
    assert not any(np.any(x) for x in jax.tree.leaves(jax.device_get(junk_gradients)))


@over(row for row in ROWS if row.op().packed)
def test_segments_do_not_leak(row):
    """Whatever one segment holds, the others' outputs are the same to the last bit."""
    segment_ids = np.repeat([[2, 1, 3]], [9, 13, 6], axis=1).repeat(2, axis=0)
    op, key = row.op(), jax.random.key(0)
    masks = dict(causal=row.causal(False), segment_ids=segment_ids, rng=key)
    attend = jax.jit(lambda x: inputs.call(op, x, **masks))
    one, other = (inputs.draw(op, length=28, seed=seed) for seed in (0, 1))
    change = (segment_ids == 1)[..., None, None]
    mixed = one.zip(lambda x, y: np.where(change, y, x), other)
    before, after = np.asarray(attend(one)), np.asarray(attend(mixed))
    np.testing.assert_array_equal(after[segment_ids != 1], before[segment_ids != 1])
    assert not np.allclose(after[segment_ids == 1], before[segment_ids == 1])


@over(row for row in ROWS if row.relative or row.exact)
def test_packed_segments_equal_one_by_one(row):
    lengths = (9, 1, 9)
    op = row.op()
    x = inputs.draw(op, length=sum(lengths))
    segment_ids = np.repeat([[1, 2, 3]], lengths, axis=1).repeat(2, axis=0)
    causal, rng = row.causal(), jax.random.key(0)

    @jax.jit
    def attend(x, segment_ids):
        return inputs.call(op, x, causal=causal, segment_ids=segment_ids, rng=rng)

    packed = attend(x, segment_ids)
    for end, n in zip(np.cumsum(lengths), lengths, strict=True):
        here = slice(end - n, end)
        alone = attend(x.at(slice(None), here), None)
        np.testing.assert_allclose(packed[:, here], alone, atol=1e-6 * row.rounding)


@over(row for row in ROWS if row.op().causality != "never")
def test_with_the_plan_given_nothing_reads_the_future(row):
    """At a fixed plan. `test_lsh.py` says what a plan may read."""
    op, now = row.op(), 17
    one, other = (inputs.draw(op, length=30, seed=seed) for seed in (0, 1))
    plan = make_plan(op, one)
    attend = jax.jit(lambda x: inputs.apply(op, x, plan=plan, segment_ids=None, causal=True))
    mixed = one.zip(lambda x, y: np.concatenate([x[:, :now], y[:, now:]], axis=1), other)
    before, after = attend(one), attend(mixed)
    np.testing.assert_array_equal(after[:, :now], before[:, :now])
    assert not np.allclose(after[:, now:], before[:, now:])


def test_every_op_has_a_row():
    factories = set()
    for info in pkgutil.iter_modules(ops.__path__, ops.__name__ + "."):
        module = importlib.import_module(info.name)
        for _, value in inspect.getmembers(module, inspect.isclass):
            # What ops share is a class too, of a capital letter.
            is_op = issubclass(value, base.AttentionOp) and value.__name__.islower()
            if is_op and value.__module__ == info.name:
                factories.add(value)
    assert factories == {row.factory for row in ROWS}


@pytest.mark.parametrize("shared_qk", [False, True])
def test_the_oracles_gradient_is_its_slope(shared_qk):
    rng = np.random.default_rng(0)
    shape = Shape(batch=1, n_queries=5, n_keys=5, n_heads=2)
    q, k, v, d_out = (rng.normal(size=(1, 5, 2, d)) for d in (3, 3, 2, 2))
    counts = visible(shape, True, None) * rng.integers(0, 3, (1, 2, 5, 5))
    dropout_mask = rng.integers(0, 2, counts.shape) / 0.5
    inputs = [q, None if shared_qk else k, v, rng.normal(size=(1, 1, 5, 5))]

    def value(inputs):
        *vectors, bias = inputs
        return np.sum(oracle.attention(*vectors, counts, dropout_mask, d_out, bias)[0] * d_out)

    *vectors, bias = inputs
    gradients = oracle.attention(*vectors, counts, dropout_mask, d_out, bias)[1]
    for i, gradient in enumerate(gradients):
        if gradient is None:
            continue
        step = rng.normal(size=gradient.shape) * 1e-5
        up, down = (
            value([x if j != i else x + sign * step for j, x in enumerate(inputs)])
            for sign in (1, -1)
        )
        np.testing.assert_allclose((up - down) / 2, np.sum(gradient * step), rtol=1e-6)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_reference_attention_is_the_oracle(dropout):
    rng, key = np.random.default_rng(0), jax.random.key(3)
    q, k, v, d_out = (
        rng.normal(size=s).astype(np.float32)
        for s in ((2, 7, 3, 4), (2, 9, 3, 4), (2, 9, 3, 5), (2, 7, 3, 5))
    )
    mask = rng.random((2, 3, 7, 9)) < 0.5
    mask[0, 1, 2] = False
    dropout_mask = np.ones(mask.shape)
    if dropout:
        shape = dropout_mask.shape
        dropout_mask = np.asarray(
            jax.jit(lambda: full_dropout_mask(seed_words(key, 2), dropout, shape))()
        )

    attend = with_gradients(
        lambda *x: reference_attention(*x, mask, Call(dropout=dropout, seed=seed_words(key, 2)))
    )
    out, gradients = attend(d_out, q, k, v)
    want, want_gradients = oracle.attention(
        *(x.astype(np.float64) for x in (q, k, v)), mask.astype(int), dropout_mask, d_out
    )
    assert_trees_close({"out": out}, {"out": want}, 1e-6)
    assert not np.any(out[0, 2, 1])
    for got, gradient in zip(gradients, want_gradients[:3], strict=True):
        assert_trees_close({"gradient": got}, {"gradient": gradient}, 1e-6)


def test_visibility_and_except_self_are_the_tables():
    segment_ids = np.array([[1, 1, 2, 0, 2], [0, 0, 0, 0, 0]])
    shape = Shape(batch=2, n_queries=5, n_keys=5, n_heads=1)
    for causal in (False, True):
        mask = visibility(5, 5, causal=causal, segment_ids=jnp.asarray(segment_ids))
        np.testing.assert_array_equal(mask, visible(shape, causal, segment_ids))
    # The first of a segment sees itself for want of others; padding sees nothing.
    alone = np.asarray(except_self(mask))[0, 0]
    np.testing.assert_array_equal(
        alone,
        [[1, 0, 0, 0, 0], [1, 0, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 0, 0], [0, 0, 1, 0, 0]],
    )


@over(row for row in ROWS if row.counts)
def test_equal_tokens_share_large_logits(row):
    """Ties stay ties where logits are far apart: each output's weights sum to 1 in the gradient."""
    op = row.op()
    x = inputs.draw(op, length=20)
    q = np.full(x.q.shape, 1e3, np.float32)
    x = x._replace(q=q, k=None if x.k is None else q)

    masks = dict(causal=row.causal(), rng=jax.random.key(0))
    # A kernel's two passes may round a logit of 3e6 = 2e6 log2(e) up and down, by an eighth each.
    bound = 2 ** (1 / 4) - 1 if row.in_kernel else 1e-5
    attend = with_gradients(lambda v: inputs.call(op, x._replace(v=v), **masks))
    _, (dv,) = attend(np.ones_like(x.v), x.v)
    np.testing.assert_allclose(np.sum(dv, axis=1), 20, rtol=bound)


@pytest.mark.parametrize(
    "op", [local.local(chunk_len=4), lsh.lsh(chunk_len=4, n_buckets=4)], ids=repr
)
def test_a_few_heads_at_a_time(op, monkeypatch):
    """As a CPU computes more logits than its cache holds: the same numbers."""
    rng = np.random.default_rng(0)
    q, k, v, d_out = rng.normal(size=(4, 2, 13, 6, 8)).astype(np.float32)
    x = inputs.Inputs(q, None if op.shared_qk else k, v)
    segment_ids = random_segments(rng, 2, 13)

    def run(n_logits):
        monkeypatch.setattr(row_blocks, "LOGITS_IN_CACHE", n_logits)
        run = attend_and_differentiate(op, True, DROPOUT)
        args = x, None, segment_ids, jax.random.key(0), d_out
        return run.lower(*args).as_text(), run(*args)

    (whole, want), (groups, got) = run(2**19), run(2 * 2 * 16 * 8)
    assert groups.count("while") == whole.count("while") + 2, "a loop in each pass"
    assert_trees_close(got, want, 1e-6)


def test_one_head_of_more_logits_than_a_cache_holds(monkeypatch):
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 13, 1, 4)).astype(np.float32)
    masks = dict(plan=(), segment_ids=None, causal=True, dropout=0.0, rng=None)
    attend = functools.partial(local.local(chunk_len=4).apply, (), q, k, v, **masks)
    want = jax.jit(lambda: attend())()
    monkeypatch.setattr(row_blocks, "LOGITS_IN_CACHE", 1)
    np.testing.assert_array_equal(jax.jit(lambda: attend())(), want)
