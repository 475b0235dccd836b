"""What attention hides may hold anything: not a number, an infinity, a number that overflows.

At padding and in another example of the batch that is anything, for every op and kernel. What
segments or causality hide may be anything in array operations; in kernels, numbers whose logits
float32 tells apart, and finite values.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.buffers import trained
from reformax.ops import (
    dsa,
    hash_sparse,
    local,
    long_short,
    longformer,
    nsa,
    nystromformer,
    routing,
    sinks,
)
from tests.helpers import assert_trees_equal
from tests.ops import inputs
from tests.ops.rows import ROWS, one_of_each_kind, over

KEY = jax.random.key(0)
ANYTHING = (np.nan, np.inf, 3e38)
LENGTH = 25


def poisons(row):
    """What may stand where segments or causality hide it."""
    in_tiles = row.in_kernel or jax.default_backend() == "gpu" or not row.contains
    return [(1e3, 1e3, 1e37, 1e3)] if in_tiles else [(x,) * 4 for x in ANYTHING]


def draw(row, batch=2):
    """The row's inputs, and a cotangent of their output."""
    d_out = np.random.default_rng(1).normal(size=(batch, LENGTH, 2, 4)).astype(np.float32)
    return inputs.draw(row.op(), batch, LENGTH), d_out


def compiled(row, causal):
    """`(inputs, d_out, segment_ids, plan) -> (out, gradients)` of a row; `plan` None makes one."""
    known = row.name, causal
    if known not in _compiled:
        _compiled[known] = _program(row, causal)
    return _compiled[known]


_compiled: dict = {}


def _program(row, causal):
    op = row.op()

    @jax.jit
    def run(x, d_out, segment_ids, plan=None):
        masks = dict(segment_ids=segment_ids, causal=causal)
        plan = inputs.plan(op, x, **masks, rng=KEY, train=True) if plan is None else plan

        def attend(x):
            options = dict(plan=plan, dropout=row.dropout(0.2), rng=KEY)
            return inputs.apply(op, x, **masks, **options)

        out, vjp = jax.vjp(attend, x)
        return out, *vjp(d_out)

    return run


def poisoned(x, where, values):
    """Inputs with their value in the places `where`, `[B, T]`, and its opposite in some."""

    def poison(y, value):
        sign = np.where(np.arange(y.shape[-1]) % 3 == 1, -1, 1).astype(np.float32)
        return np.where(where[..., None, None], sign * np.float32(value), y)

    arrays = (
        jax.tree.map(lambda y, v=v: poison(y, v), y) for y, v in zip(x[:4], values, strict=True)
    )
    return inputs.Inputs(*arrays, x.params)


def assert_same(got, want):
    """The same arrays bit for bit, but that -0 is 0, as a gradient of 0 times a number may be."""
    assert_trees_equal(*(jax.tree.map(lambda y: np.asarray(y) + 0, z) for z in (got, want)))


def zeroed(x, where):
    """An array, or inputs, with zeros in the places `where`."""
    if isinstance(x, inputs.Inputs):
        return x.map(lambda y: zeroed(y, where))
    return np.where(where[..., None, None], 0, x)


def by_outputs(row, gradients):
    """Those of the gradients that come by the output alone; others are finite."""
    if not row.own_loss:
        return gradients
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients.params))
    return gradients._replace(params=())


@over(ROWS)
def test_at_padding_and_in_another_example(row):
    segment_ids = np.repeat([[1, 0, 2, 0]], [9, 4, 7, 5], axis=1).repeat(3, axis=0)
    segment_ids[1] = 0
    segment_ids = row.segment_ids(segment_ids)
    padding = segment_ids == 0
    x, d_out = draw(row, batch=3)
    run = compiled(row, row.causal(row.in_kernel))
    out, gradients = want = run(zeroed(x, padding), zeroed(d_out, padding), segment_ids)
    for y in jax.tree.leaves((out, gradients[:4])):
        assert not np.any(np.where(padding[..., None, None], y, 0))
        assert np.any(y)
    for value in ANYTHING:
        there = poisoned(x, padding, (value,) * 4)
        there_too = np.where(padding[..., None, None], np.float32(value), d_out)
        assert_same(run(there, there_too, segment_ids), want)

    out, gradients = jax.tree.map(lambda y: y[:2], (out, gradients[:4]))
    last = np.repeat([[False], [False], [True]], LENGTH, axis=1)
    for value in ANYTHING:
        got, of_inputs = run(poisoned(x, last, (value,) * 4), d_out, segment_ids)
        assert_same(jax.tree.map(lambda y: y[:2], (got, of_inputs[:4])), (out, gradients))
        assert np.isfinite(value) or not np.isfinite(got[2]).all()


@over(row for row in ROWS if row.op().traits.packed)
def test_in_another_segment(row):
    segment_ids = np.repeat([[2, 1, 3]], [7, 12, 6], axis=1).repeat(3, axis=0)
    other = segment_ids == 1
    x, d_out = draw(row, batch=3)  # as above: one program is compiled for both
    d_out = zeroed(d_out, other)
    run = compiled(row, row.causal(False))
    out, gradients = run(x, d_out, segment_ids)
    for values in poisons(row):
        got, got_gradients = run(poisoned(x, other, values), d_out, segment_ids)
        assert_same(zeroed(got, other), zeroed(out, other))
        wanted = zeroed(gradients, other)
        assert_same(*(by_outputs(row, x) for x in (got_gradients, wanted)))
        assert np.isfinite(values[0]) or np.isnan(got).any(), "what a row sees is not swallowed"


@over((row for row in ROWS if row.op().traits.causal and not row.in_kernel), quick=one_of_each_kind)
def test_behind_causality(row):
    """And at padding before."""
    segment_ids = np.ones((2, LENGTH), int)
    segment_ids[0, 3:6] = 0
    segment_ids = row.segment_ids(segment_ids)
    hidden = (np.arange(LENGTH) >= 17) | (segment_ids == 0)
    x, d_out = draw(row)
    d_out = zeroed(d_out, hidden)
    masks = dict(segment_ids=segment_ids, causal=True)
    plan = jax.jit(lambda x: inputs.plan(row.op(), x, **masks, rng=KEY, train=True))(x)
    run = compiled(row, True)
    out, gradients = run(x, d_out, segment_ids, plan)
    for values in poisons(row):
        got, got_gradients = run(poisoned(x, hidden, values), d_out, segment_ids, plan)
        assert_same(zeroed(got, hidden), zeroed(out, hidden))
        # A carried weight, such as a running mean, sees the whole row: it is no output.
        wanted = zeroed(gradients, hidden)
        assert_same(*(trained(by_outputs(row, x)) for x in (got_gradients, wanted)))
        assert np.isfinite(values[0]) or np.isnan(got).any(), "what a row sees is not swallowed"


@over(row for row in ROWS if row.decodes)
def test_behind_a_prompt(row):
    """What stands behind a prompt, where its row is padded, reaches no step of decoding."""
    op, capacity = row.op(), 20
    lengths = np.array([5, 9])
    behind = np.arange(11) >= lengths[:, None]
    x, _ = draw(row)
    prompt = x.at(slice(None), slice(0, 11))

    @jax.jit
    def steps(prompt, new):
        tokens = jnp.int32(~behind)
        plan = inputs.plan(op, prompt, segment_ids=tokens, causal=True, rng=KEY, train=False)
        options = dict(plan=plan, lengths=jnp.asarray(lengths), capacity=capacity, rng=KEY)
        cache, outs = inputs.init_cache(op, prompt, **options), []
        for i in range(2):
            here = new.at(slice(None), slice(i, i + 1))
            out, cache = inputs.step(op, here, cache, position=jnp.asarray(lengths) + i)
            outs.append(out)
        return outs

    new = x.at(slice(None), slice(11, 13))
    want = steps(zeroed(prompt, behind), new)
    for value in ANYTHING:
        assert_same(steps(poisoned(prompt, behind, (value,) * 4), new), want)


def of_shared(row):
    """The row's op with shared queries and keys; None where it has none."""
    may = True in row.options.get("shared_qk", ())
    op = row.op(shared_qk=True) if may else row.op()
    return op if op.traits.shared_qk else None


# Who sees itself alone is told behind the kernel of these, and in that of others.
TOLD_BEHIND = hash_sparse.hash_sparse, routing.routing


@over(row for row in ROWS if of_shared(row) and (not row.in_kernel or row.factory in TOLD_BEHIND))
def test_a_position_that_sees_itself_alone(row):
    """It is NaN where it is not finite, in a call and in a step, and has no gradient."""
    op = of_shared(row)
    x = inputs.draw(op, 1, LENGTH)
    segment_ids, lengths = np.ones((1, LENGTH), np.int32), np.array([0])
    d_out = np.zeros((1, LENGTH, 2, 4), np.float32)
    d_out[:, 0] = 1

    @jax.jit
    def run(q, v):
        here = x._replace(q=q, v=v)
        masks = dict(segment_ids=segment_ids, causal=True, rng=KEY)
        plan = inputs.plan(op, here, train=False, **masks)

        def attend(q, v):
            return inputs.apply(op, here._replace(q=q, v=v), plan=plan, **masks)

        out, vjp = jax.vjp(attend, q, v)
        first = here.at(slice(None), slice(0, 1))
        held = dict(plan=None, lengths=lengths, capacity=8, rng=KEY)
        cache = inputs.init_cache(op, first, **held)
        stepped, _ = inputs.step(op, first, cache, position=lengths)
        return out[0, 0], stepped[0, 0], vjp(d_out)

    for value in (np.nan, np.inf):
        for place in range(2):
            qv = x.q.copy(), x.v.copy()
            qv[place][0, 0, 1, 2] = value
            *outs, (dq, dv) = run(*qv)
            for out in outs:
                np.testing.assert_array_equal(out[0], x.v[0, 0, 0])
                assert np.isnan(out[1]).all()
            if not row.in_kernel:  # whose gradient is that of finite values, and others see these
                np.testing.assert_array_equal(dv[0, 0], [[1] * 4, [0] * 4])
                assert not np.any(dq)


@over(
    row
    for row in ROWS
    if "attend_self_if_alone" in row.options and not (row.in_kernel or row.op().traits.shared_qk)
)
def test_a_position_that_sees_itself_alone_and_has_a_key(row):
    """Its key counts too; so it does in a first step, where a position may see itself as a key."""
    op, x = row.op(), inputs.draw(row.op(), 1, LENGTH)
    masks = dict(segment_ids=np.ones((1, LENGTH), np.int32), causal=True, rng=KEY)
    plan = jax.jit(lambda x: inputs.plan(op, x, train=False, **masks))(x)

    @jax.jit
    def run(x):
        return [
            inputs.apply(row.op(attend_self_if_alone=own), x, plan=plan, **masks)
            for own in (True, False)
        ]

    @jax.jit
    def first_step(x):
        new, position = x.at(slice(None), slice(0, 1)), np.array([0])
        held = dict(plan=None, lengths=position, capacity=8, rng=KEY)
        return inputs.step(op, new, inputs.init_cache(op, new, **held), position=position)[0]

    lone = ~np.any(run(x)[1], axis=-1)[0]
    assert lone.any()
    place, head = np.argwhere(lone)[-1]
    for name in "qkv":
        y = getattr(x, name).copy()
        y[0, place, head, 1] = np.inf
        assert np.isnan(run(x._replace(**{name: y}))[0][0, place, head]).all()
        y = getattr(x, name).copy()
        y[0, 0, :, 1] = np.nan
        assert not np.isfinite(first_step(x._replace(**{name: y}))).all(axis=-1).any()


LONG = dict(
    local=local.local(window=32, chunk_len=32),
    sinks=sinks.sinks(window=32),
    longformer=longformer.longformer(window=32),
    long_short=long_short.long_short(window=32, rank=2, chunk_len=32),
    nsa=nsa.nsa(),
    dsa=dsa.dsa(),
    nystromformer=nystromformer.nystromformer(n_landmarks=8),
)


@pytest.mark.parametrize("op", LONG.values(), ids=LONG)
def test_rows_that_see_what_is_not_a_number_are_none_among_many_logits(op):
    """XLA's maximum of 4,096 numbers and more leaves NaN out on a CPU."""
    x = inputs.draw(op, 1, 200)
    apply = jax.jit(lambda x: inputs.call(op, x, causal=op.traits.causal, rng=KEY))
    here = np.arange(200)[None, :, None, None] == 100
    other = x.v + np.arange(4, dtype=np.float32)
    out = apply(x)
    changed = np.any(out != apply(x._replace(v=np.where(here, other, x.v))), axis=-1)
    got = np.isnan(apply(x._replace(v=np.where(here, np.float32(np.nan), x.v)))).any(axis=-1)
    np.testing.assert_array_equal(got, changed)
    assert got.any()
