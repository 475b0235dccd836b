"""Padding may hold anything: NaN, an infinity, a number that overflows.

So may another example of the batch, for every op and kernel. What segments or causality hide is
finite, and may be as large as float32 tells logits apart and holds values.
"""

import jax
import jax.numpy as jnp
import numpy as np

from reformax.buffers import trained
from tests.helpers import assert_trees_equal
from tests.ops import inputs
from tests.ops.rows import ROWS, one_of_each_kind, over

KEY = jax.random.key(0)
ANYTHING = (np.nan, np.inf, 3e38)
LENGTH = 25


# Queries, keys, values and further projections that segments or causality hide.
LARGE = (1e3, 1e3, 1e30, 1e3)


def draw(row, batch=2):
    """The row's inputs, and a cotangent of their output."""
    d_out = np.random.default_rng(1).normal(size=(batch, LENGTH, 2, 4)).astype(np.float32)
    return inputs.draw(row.op(), batch, LENGTH), d_out


def compiled(row, causal):
    """`(inputs, d_out, segment_ids, plan) -> (out, gradients)` of a row; `plan` None makes one."""
    known = row.name, *row.first, causal
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


@over(row for row in ROWS if row.op().packed)
def test_in_another_segment(row):
    segment_ids = np.repeat([[2, 1, 3]], [7, 12, 6], axis=1).repeat(3, axis=0)
    other = segment_ids == 1
    x, d_out = draw(row, batch=3)  # as above: one program is compiled for both
    d_out = zeroed(d_out, other)
    run = compiled(row, row.causal(False))
    out, gradients = run(x, d_out, segment_ids)
    got, got_gradients = run(poisoned(x, other, LARGE), d_out, segment_ids)
    assert_same(zeroed(got, other), zeroed(out, other))
    wanted = zeroed(gradients, other)
    assert_same(*(by_outputs(row, x) for x in (got_gradients, wanted)))


@over(
    (row for row in ROWS if row.op().causality != "never" and not row.in_kernel),
    quick=one_of_each_kind,
)
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
    got, got_gradients = run(poisoned(x, hidden, LARGE), d_out, segment_ids, plan)
    assert_same(zeroed(got, hidden), zeroed(out, hidden))
    # A buffer, such as a running mean, sees the whole row: it is no output.
    wanted = zeroed(gradients, hidden)
    assert_same(*(trained(by_outputs(row, x)) for x in (got_gradients, wanted)))


TILED = "memory_efficient", "block_sparse", "local", "asymmetric_lsh"


@over(row for row in ROWS if row.name in TILED)
def test_a_query_of_nan(row):
    """Its own gradient is NaN, and those of the keys and values that it sees, and no others."""
    at, (x, _) = 14, draw(row)
    plan = jax.jit(lambda x: inputs.plan(row.op(), x, causal=True, rng=KEY, train=True))(x)
    d_out = np.zeros((2, LENGTH, 2, 4), np.float32)
    d_out[:, at] = 1 + np.arange(4)
    run = compiled(row, True)
    seen = run(x, d_out, None, plan)[1].k != 0
    is_query = np.arange(LENGTH) == at
    x = x._replace(q=np.where(is_query[:, None, None], np.nan, x.q))
    out, gradients = run(x, d_out + 1, None, plan)
    for y in (out, gradients.q):
        np.testing.assert_array_equal(np.isnan(y).all(axis=(2, 3)), is_query[None].repeat(2, 0))
    np.testing.assert_array_equal(np.isnan(gradients.k), seen)
    np.testing.assert_array_equal(np.isnan(gradients.v).all(axis=3), seen.all(axis=3))
    assert seen[:, : at + 1].any() and not seen.all()


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
