"""Derivatives beyond the gradient are right, or refused in one line; so are extreme scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import with_x64
from tests.ops import inputs
from tests.ops.reference import ADDRESSES
from tests.ops.rows import ROWS, Shape, over, visible

KEY = jax.random.key(0)
LENGTH = 19
# A first position sees nothing else, and padding sees nothing.
SEGMENTS = np.repeat([[1, 0, 2]], [9, 1, 9], axis=1).repeat(2, axis=0)


def draw(row, dtype=np.float64):
    """The row's inputs, and a cotangent of their output."""
    d_out = np.random.default_rng(1).normal(size=(2, LENGTH, 2, 4)).astype(dtype)
    return inputs.draw(row.op(), length=LENGTH, dtype=dtype), d_out


def attention(row):
    """`(inputs) -> out` of the row's op, and the plan it goes by."""
    op = row.op()
    masks = dict(segment_ids=jnp.asarray(row.segment_ids(SEGMENTS)), causal=row.causal())
    plan = jax.jit(lambda x: inputs.plan(op, x, **masks, rng=KEY, train=True))(draw(row)[0])
    return lambda x: inputs.apply(op, x, plan=plan, **masks), plan


def reference(row, plan):
    """The same attention as its equation has it."""
    shape = Shape(batch=2, n_queries=LENGTH, n_keys=LENGTH, n_heads=2)
    masks = shape, row.causal(), row.segment_ids(SEGMENTS)
    if row.reference is not None:
        mask, keep = visible(*masks), np.ones((2, 2, LENGTH, ADDRESSES))
        options = row.first | {"causal": row.causal()}
        return lambda x: row.reference(
            options, x.params, plan, x[:3], x.extra_projections, mask, keep
        )
    counts = row.counts(row.first, plan, *masks)

    def attend(x):
        q, k, v = x[:3]
        if k is None:
            k = q / jnp.sqrt(jnp.mean(q**2, axis=-1, keepdims=True) + 1e-6)
        logits = jnp.einsum("btnh,bsnh->bnts", q, k) / 2
        row_max = jnp.max(logits, axis=-1, keepdims=True, where=counts > 0, initial=-1e308)
        logits = jnp.where(counts > 0, logits - jax.lax.stop_gradient(row_max), -jnp.inf)
        weights = counts * jnp.exp(jnp.where(counts > 0, logits, 0))
        total = weights.sum(axis=-1, keepdims=True)
        return jnp.einsum("bnts,bsnv->btnv", weights / jnp.where(total > 0, total, 1), v)

    return attend


def second_derivatives(attend, d_out, along):
    """The three of a loss, functions of the inputs: forward, and the gradient's both ways."""

    def loss(x):
        return jnp.sum(jnp.sin(attend(x)) * d_out)

    def slope(x):
        return jax.jvp(loss, (x,), (along,))[1]

    def forward_over_reverse(x):
        return jax.jvp(jax.grad(loss), (x,), (along,))[1]

    def reverse_over_reverse(x):
        def along_gradient(x):
            return sum(map(jnp.vdot, *map(jax.tree.leaves, (jax.grad(loss)(x), along))))

        return jax.grad(along_gradient)(x)

    return slope, forward_over_reverse, reverse_over_reverse


@pytest.mark.slow
@over(row for row in ROWS if not row.in_kernel)
def test_hessian_vector_products_are_the_references_or_refused(row):
    with with_x64():
        x, d_out = draw(row)
        along = jax.tree.map(lambda y: np.random.default_rng(1).normal(size=y.shape), x)
        x = jax.tree.map(lambda y: np.asarray(y, np.float64), x)
        attend, plan = attention(row)
        got = second_derivatives(attend, d_out, along)
        want = second_derivatives(reference(row, plan), d_out, along)
        right = 0
        for one, other in zip(got, want, strict=True):
            try:
                derivative = jax.jit(one)(x)
            except NotImplementedError as refused:
                assert "\n" not in str(refused)
                assert "second derivative" in str(refused)
                continue
            right += 1
            for y, z in zip(*map(jax.tree.leaves, (derivative, jax.jit(other)(x))), strict=True):
                np.testing.assert_allclose(y, z, atol=1e-9)
    assert right == row.second_order


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=pytest.mark.slow) for row in ROWS if row.in_kernel],
    ids=lambda row: row.name,
)
def test_kernels_refuse(row):
    x, d_out = draw(row, np.float32)
    attend, _ = attention(row)
    for derivative in second_derivatives(attend, d_out, x):
        with pytest.raises(NotImplementedError, match="jax.jvp|second deriv"):
            jax.jit(derivative).lower(x)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="kernels hold scores up to 1e8")
@over(row for row in ROWS if row.counts and not row.in_kernel)
def test_every_finite_score_counts(row):
    """Scores of -2e32 are scores like others: equal ones share their row, as scores of 0 do."""
    x, d_out = draw(row, np.float32)
    attend, _ = attention(row)

    @jax.jit
    def run(x):
        out, vjp = jax.vjp(attend, x)
        return out, *vjp(d_out)

    low, zero = (np.full_like(x.q, y) for y in (1e16, 0))
    got = run(x._replace(q=low, k=None if x.k is None else -low))
    if x.k is not None:
        want = run(x._replace(q=zero, k=zero))
        np.testing.assert_allclose(got[0], want[0], atol=1e-6)
        np.testing.assert_allclose(got[1].v, want[1].v, atol=1e-5)
    for y in jax.tree.leaves(got):
        assert np.isfinite(y).all()
