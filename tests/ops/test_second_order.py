"""Derivatives beyond the gradient are right, or refused in one line; so are extreme scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.ops import local, lsh
from tests.helpers import with_x64
from tests.ops.rows import ROWS, Shape, over

KEY = jax.random.key(0)
LENGTH = 19
# A first position sees nothing else, and padding sees nothing.
SEGMENTS = np.repeat([[1, 0, 2]], [9, 1, 9], axis=1).repeat(2, axis=0)


def draw(row):
    q, k, v, d_out = np.random.default_rng(0).normal(size=(4, 2, LENGTH, 2, 4))
    return ((q, v) if row.op().traits.shared_qk else (q, k, v)), d_out


def attention(row):
    """`(inputs) -> out` of the row's op, the plan it goes by, and how often it counts each key."""
    op, causal = row.op(), row.causal()
    shared = op.traits.shared_qk
    masks = dict(segments=jnp.asarray(SEGMENTS), causal=causal)
    inputs = jax.tree.map(jnp.asarray, draw(row)[0])
    plan = op.plan((), inputs[0], None if shared else inputs[1], **masks, rng=KEY, train=True)

    def attend(inputs):
        q, k, v = (inputs[0], None, inputs[1]) if shared else inputs
        return op.apply((), q, k, v, plan=plan, **masks, dropout=0.0, rng=None)

    shape = Shape(batch=2, n_queries=LENGTH, n_keys=LENGTH, n_heads=2)
    return attend, row.counts(row.first, plan, shape, causal, SEGMENTS)


def reference(counts):
    """The same attention as its equation has it."""

    def attend(inputs):
        q, k, v = inputs if len(inputs) == 3 else (inputs[0], None, inputs[1])
        if k is None:
            k = q / jnp.sqrt(jnp.mean(q**2, axis=-1, keepdims=True) + 1e-6)
        logits = jnp.einsum("btnh,bsnh->bnts", q, k) / 2
        top = jnp.max(logits, axis=-1, keepdims=True, where=counts > 0, initial=-1e308)
        logits = jnp.where(counts > 0, logits - jax.lax.stop_gradient(top), -jnp.inf)
        weights = counts * jnp.exp(jnp.where(counts > 0, logits, 0))
        total = weights.sum(axis=-1, keepdims=True)
        return jnp.einsum("bnts,bsnv->btnv", weights / jnp.where(total > 0, total, 1), v)

    return attend


def second_derivatives(attend, d_out, along):
    """The three of a loss, functions of the inputs: forward, and the gradient's both ways."""

    def loss(inputs):
        return jnp.sum(jnp.sin(attend(inputs)) * d_out)

    def slope(inputs):
        return jax.jvp(loss, (inputs,), (along,))[1]

    def forward_over_reverse(inputs):
        return jax.jvp(jax.grad(loss), (inputs,), (along,))[1]

    def reverse_over_reverse(inputs):
        def along_gradient(inputs):
            return sum(map(jnp.vdot, jax.grad(loss)(inputs), along))

        return jax.grad(along_gradient)(inputs)

    return slope, forward_over_reverse, reverse_over_reverse


@over(row for row in ROWS if not row.in_kernel)
def test_hessian_vector_products_are_the_references_or_refused(row):
    with with_x64():
        inputs, d_out = draw(row)
        along = tuple(np.random.default_rng(1).normal(size=x.shape) for x in inputs)
        attend, counts = attention(row)
        got = second_derivatives(attend, d_out, along)
        want = second_derivatives(reference(counts), d_out, along)
        right = 0
        for one, other in zip(got, want, strict=True):
            try:
                derivative = jax.jit(one)(inputs)
            except (TypeError, NotImplementedError) as refused:
                assert "\n" not in str(refused)
                assert "forward-mode" in str(refused) or "second derivative" in str(refused)
                continue
            right += 1
            for x, y in zip(
                *map(jax.tree.leaves, (derivative, jax.jit(other)(inputs))), strict=True
            ):
                np.testing.assert_allclose(x, y, atol=1e-9)
    in_tiles = row.name in ("flash", "memory_efficient", "block_sparse")
    n_modes = 0 if in_tiles else 1 if row.factory in (lsh.lsh, local.local) else 2
    assert right == n_modes + (not (in_tiles or row.op().traits.shared_qk))


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=pytest.mark.slow) for row in ROWS if row.in_kernel],
    ids=lambda row: row.name,
)
def test_kernels_refuse(row):
    inputs, d_out = (jax.tree.map(np.float32, x) for x in draw(row))
    attend, _ = attention(row)
    for derivative in second_derivatives(attend, d_out, inputs):
        with pytest.raises((TypeError, NotImplementedError), match="forward-mode|second deriv"):
            jax.jit(derivative).lower(inputs)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="kernels hold scores up to 1e8")
@over(row for row in ROWS if not row.in_kernel)
def test_every_finite_score_counts(row):
    """Scores of -2e32 are scores like others: equal ones share their row, as scores of 0 do."""
    (q, *k, v), d_out = (jax.tree.map(np.float32, x) for x in draw(row))
    low, zero = (np.full_like(q, x) for x in (1e16, 0))
    attend, _ = attention(row)

    @jax.jit
    def run(*inputs):
        out, vjp = jax.vjp(attend, inputs)
        return out, *vjp(d_out)

    if k:
        got, want = run(low, -low, v), run(zero, zero, v)
        np.testing.assert_allclose(got[0], want[0], atol=1e-6)
        np.testing.assert_allclose(got[1][-1], want[1][-1], atol=1e-5)
    else:
        got = run(low, v)
    for x in jax.tree.leaves(got):
        assert np.isfinite(x).all()
