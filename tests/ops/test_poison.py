"""What attention hides may hold anything: not a number, an infinity, a number that overflows.

At padding that is anything, for every op and kernel. What segments or causality hide may be
anything in array operations; in kernels, numbers whose logits float32 tells apart, and finite
values.
"""

import jax
import jax.numpy as jnp
import numpy as np

from tests.helpers import assert_trees_equal
from tests.ops.rows import ROWS, over

KEY = jax.random.key(0)
ANYTHING = (np.nan, np.inf, 3e38)
LENGTH = 25


def poisons(row):
    """What may stand where segments or causality hide it."""
    in_kernel = row.in_kernel or jax.default_backend() == "gpu"
    return [(1e3, 1e3, 1e37)] if in_kernel else [(x,) * 3 for x in ANYTHING]


def draw(row):
    """`(q, k, v, d_out)` of batch 2, 2 heads of 4; k None where the op shares it."""
    numbers = np.random.default_rng(0).normal(size=(4, 2, LENGTH, 2, 4)).astype(np.float32)
    q, k, v, d_out = numbers
    return q, None if row.op().traits.shared_qk else k, v, d_out


def compiled(row, segments, causal):
    """`(q, k, v, d_out, plan) -> (out, gradients)`; `plan` None makes one."""
    op = row.op()
    masks = dict(segments=segments, causal=causal)

    @jax.jit
    def run(q, k, v, d_out, plan=None):
        plan = op.plan((), q, k, **masks, rng=KEY, train=True) if plan is None else plan

        def attend(q, k, v):
            return op.apply((), q, k, v, plan=plan, **masks, dropout=0.2, rng=KEY)

        out, vjp = jax.vjp(attend, q, k, v)
        return out, vjp(d_out)

    return run


def poisoned(arrays, where, values):
    """The arrays with their value in the places `where`, `[B, T]`, and its opposite in some."""
    sign = np.where(np.arange(4) % 3 == 1, -1, 1).astype(np.float32)
    return tuple(
        None if x is None else np.where(where[..., None, None], sign * np.float32(value), x)
        for x, value in zip(arrays, values, strict=True)
    )


def zeroed(tree, where):
    """The arrays with zeros in the places `where`."""
    return jax.tree.map(lambda x: np.where(where[..., None, None], 0, x), tree)


@over(ROWS)
def test_at_padding(row):
    segments = np.repeat([[1, 0, 2, 0]], [9, 4, 7, 5], axis=1).repeat(2, axis=0)
    segments[1] = 0
    padding = segments == 0
    arrays = draw(row)
    run = compiled(row, jnp.asarray(segments), row.causal())
    out, gradients = want = run(*zeroed(arrays, padding))
    for x in jax.tree.leaves((out, gradients)):
        assert not np.any(np.where(padding[..., None, None], x, 0))
        assert np.any(x)
    for value in ANYTHING:
        assert_trees_equal(run(*poisoned(arrays, padding, (value,) * 4)), want)


@over(ROWS)
def test_in_another_segment(row):
    segments = np.repeat([[2, 1, 3]], [7, 12, 6], axis=1).repeat(2, axis=0)
    other = segments == 1
    *inputs, d_out = draw(row)
    d_out = zeroed(d_out, other)
    run = compiled(row, jnp.asarray(segments), row.causal(False))
    out, gradients = run(*inputs, d_out)
    for values in poisons(row):
        got, got_gradients = run(*poisoned(inputs, other, values), d_out)
        assert_trees_equal(zeroed(got, other), zeroed(out, other))
        assert_trees_equal(got_gradients, zeroed(gradients, other))
        assert np.isfinite(values[0]) or np.isnan(got).any(), "what a row sees is not swallowed"


@over(row for row in ROWS if row.op().traits.causal and not row.in_kernel)
def test_behind_causality(row):
    future = np.arange(LENGTH)[None].repeat(2, axis=0) >= 17
    *inputs, d_out = draw(row)
    d_out = zeroed(d_out, future)
    op = row.op()
    plan = op.plan((), *inputs[:2], segments=None, causal=True, rng=KEY, train=True)
    run = compiled(row, None, True)
    out, gradients = run(*inputs, d_out, plan)
    for values in poisons(row):
        got, got_gradients = run(*poisoned(inputs, future, values), d_out, plan)
        assert_trees_equal(zeroed(got, future), zeroed(out, future))
        assert_trees_equal(got_gradients, zeroed(gradients, future))
        assert np.isfinite(values[0]) or np.isnan(got).any(), "what a row sees is not swallowed"


@over(row for row in ROWS if row.decodes)
def test_behind_a_prompt(row):
    """What stands behind a prompt, where its row is padded, reaches no step of decoding."""
    op, capacity = row.op(), 20
    lengths = np.array([5, 9])
    behind = np.arange(11) >= lengths[:, None]
    *inputs, _ = draw(row)
    prompt = tuple(None if x is None else x[:, :11] for x in inputs)

    @jax.jit
    def steps(prompt, new):
        plan = op.plan(
            (), *prompt[:2], segments=jnp.int32(~behind), causal=True, rng=KEY, train=False
        )
        options = dict(plan=plan, lengths=jnp.asarray(lengths), capacity=capacity, rng=KEY)
        cache, position, outs = op.init_cache((), *prompt, **options), jnp.asarray(lengths), []
        for i in range(3):
            here = (None if x is None else x[:, i : i + 1] for x in new)
            out, cache = op.step((), *here, cache, position=position + i)
            outs.append(out)
        return outs

    new = tuple(None if x is None else x[:, 11:14] for x in inputs)
    want = steps(zeroed(prompt, behind), new)
    for value in ANYTHING:
        assert_trees_equal(steps(poisoned(prompt, behind, (value,) * 3), new), want)
