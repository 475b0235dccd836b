"""`jax.jvp` of every op is its derivative along a direction, or refused in one line by kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.buffers import Buffer, updated
from reformax.derivatives import CustomDerivatives
from reformax.ops import flash
from tests.helpers import with_x64
from tests.ops import inputs
from tests.ops.rows import ROWS, one_of_each_kind, over

KEY = jax.random.key(0)
LENGTH = 19
SEGMENTS = np.repeat([[1, 0, 2]], [9, 1, 9], axis=1).repeat(2, axis=0)


def attention(row, dtype):
    """`(arrays of a call) -> out` of the row's op, such arrays, and a direction."""
    op = row.op()
    x = inputs.draw(op, length=LENGTH, dtype=dtype)
    x = jax.tree.map(lambda y: np.asarray(y, dtype), x)
    random = np.random.default_rng(1)
    along = jax.tree.map(lambda y: random.normal(size=y.shape).astype(dtype), x)
    options = dict(
        segment_ids=jnp.asarray(row.segment_ids(SEGMENTS)),
        causal=row.causal(),
        dropout=row.dropout(0.3),
        rng=KEY,
    )
    return (lambda x: inputs.call(op, x, **options)), x, along


def moved(x, along, by):
    return jax.tree.map(lambda y, d: y + by * d, x, along)


@over((row for row in ROWS if not row.in_kernel), quick=one_of_each_kind)
def test_a_jvp_is_the_central_difference(row):
    def forward(attend, x, along):
        return jax.jvp(attend, (x,), (along,))

    with with_x64():
        attend, x, along = attention(row, np.float64)
        compiled = jax.jit(attend)
        step = 1e-5
        after, before = (compiled(moved(x, along, by)) for by in (step, -step))
        want = np.asarray((after - before) / (2 * step))
        assert np.abs(want).max() > 0.01
        for function in (forward, jax.jit(forward, static_argnums=0)):
            out, got = function(attend, x, along)
            np.testing.assert_allclose(out, compiled(x), atol=1e-12)
            np.testing.assert_allclose(got, want, atol=1e-6)
    attend, x, along = attention(row, jnp.bfloat16)
    out, got = forward(attend, x, along)
    assert got.dtype == out.dtype == jnp.bfloat16
    assert np.isfinite(got.astype(np.float32)).all()


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=pytest.mark.slow) for row in ROWS if row.in_kernel],
    ids=lambda row: row.name,
)
@pytest.mark.parametrize("compile_", [False, True], ids=["eager", "compiled"])
def test_kernels_name_what_has_one(row, compile_):
    attend, x, along = attention(row, np.float32)
    forward = lambda x, along: jax.jvp(attend, (x,), (along,))  # noqa: E731
    with pytest.raises(NotImplementedError, match=r"^jax.jvp [^\n]*impl='xla'"):
        (jax.jit(forward) if compile_ else forward)(x, along)


@pytest.mark.slow
def test_a_column_of_the_jacobian_at_a_time():
    """`jax.jacfwd` and `jax.jacrev` are one matrix: tangents and cotangents in batches."""
    q = inputs.draw(flash.flash(), batch=1, length=5, n_heads=1).q
    attend = lambda q: flash.flash()(q, q + 1, q * 2, causal=True)  # noqa: E731
    with with_x64():
        q = q.astype(np.float64)
        np.testing.assert_allclose(jax.jacfwd(attend)(q), jax.jacrev(attend)(q), atol=1e-12)
        forward = jax.vmap(lambda q: jax.jvp(attend, (q,), (q,))[1])(jnp.stack([q, 2 * q]))
        for scale, got in zip((1, 2), forward, strict=True):
            want = jax.jvp(attend, (scale * q,), (scale * q,))[1]
            np.testing.assert_allclose(got, want, atol=1e-12)


# The rules, by a function whose backward pass shows that it is asked.


@CustomDerivatives
def scaled(x, factor, n):
    return x * factor


scaled.define(
    lambda x, factor, n: (x * factor, (x, factor)),
    lambda residuals, d: (100 * d * residuals[1], 100 * jnp.sum(d * residuals[0]), None),
    lambda residuals, tangents: tangents[0] * residuals[1] + residuals[0] * tangents[1],
)


def test_each_mode_has_its_own_rule():
    x, ones = jnp.arange(3.0), jnp.ones(3)
    batch = jnp.stack([x, x + 1])
    function = lambda x, factor: scaled(x, factor, jnp.arange(2))  # noqa: E731
    for f in (function, jax.jit(function), jax.checkpoint(function)):
        np.testing.assert_array_equal(jax.jvp(f, (x, 2.0), (ones, 1.0))[1], 2 + x)
        of_x, of_factor = jax.vjp(f, x, 2.0)[1](ones)
        np.testing.assert_array_equal(of_x, 200 * ones)
        assert of_factor == 300
        np.testing.assert_array_equal(jax.linearize(f, x, 2.0)[1](ones, 0.0), 2 * ones)
        # Over a batch: cotangents of what is not batched are summed.
        each = lambda factor, f=f: jnp.sum(jax.vmap(f, (0, None))(batch, factor))  # noqa: E731
        assert jax.grad(each)(2.0) == 100 * batch.sum()
        assert jax.jvp(each, (2.0,), (1.0,))[1] == batch.sum()
        loop = lambda x, f=f: jax.lax.scan(lambda c, _: (f(c, 2.0), None), x, None, 2)[0]  # noqa: E731
        np.testing.assert_array_equal(jax.vjp(loop, x)[1](ones)[0], 200 * 200 * ones)
        np.testing.assert_array_equal(jax.jvp(loop, (x,), (ones,))[1], 4 * ones)


def test_a_change_of_a_buffer_is_summed_over_a_batch():
    """What a call carries may differ over a batch whose weight is one."""
    weight, batch = Buffer(jnp.arange(3.0)), jnp.arange(6.0).reshape(2, 3)
    one = jax.jit(lambda weight, x: jnp.sum(updated(weight, weight.value + x) * x))

    def function(weight):
        return jnp.sum(jax.vmap(one, (None, 0))(weight, batch))

    change = jax.jit(jax.grad(function))(weight).value
    np.testing.assert_array_equal(change, batch.sum(axis=0))
    along = Buffer(jnp.ones(3))
    assert jax.jvp(function, (weight,), (along,))[1] == batch.sum()
