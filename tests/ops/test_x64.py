"""With 64-bit types: every op runs, and computes float64 inputs in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import with_x64
from tests.ops import inputs
from tests.ops import test_against_oracle as against_oracle
from tests.ops.rows import ROWS, Shape, one_of_each_kind, over, the_others

CALL = dict(packed=True, d_qk=4, d_v=3, seed=7)


@over(ROWS, quick=one_of_each_kind)
def test_float64(row):
    """To twelve digits; kernels, which have no float64, to float32's."""
    tolerance, dtype = (1e-5, jnp.float32) if row.in_kernel else (1e-12, np.float64)
    shape = Shape(batch=2, n_queries=23, n_keys=23, n_heads=2)
    bias_axes = (False, True, True, True) if row.bias else None
    call = CALL | dict(options=row.first, causal=row.causal(), shape=shape, bias_axes=bias_axes)
    call |= dict(dropout=row.dropout(against_oracle.DROPOUT))
    with with_x64():
        against_oracle.check(row, tolerance, dtype, **call)


@over((row for row in ROWS if row.decodes), quick=the_others)
def test_decoding(row):
    """A step's dtypes are those of the cache, whatever the integers are."""
    op = row.op()
    with with_x64():
        x = inputs.draw(op, batch=1, length=9, dtype=np.float64)
        key = jax.random.key(0)
        causal = dict(segment_ids=None, causal=True, rng=key, train=False)

        @jax.jit
        def run(x):
            prompt, new = (x.at(slice(None), part) for part in (slice(0, 8), slice(8, 9)))
            plan = inputs.plan(op, prompt, **causal)
            options = dict(plan=plan, lengths=jnp.array([8]), capacity=9, rng=key)
            cache = inputs.init_cache(op, prompt, **options)

            def step(cache, position):
                return inputs.step(op, new, cache, position=position)[::-1]

            return jax.lax.scan(step, cache, jnp.full((1, 1), 8))[1][0]

        whole = jax.jit(lambda x: inputs.call(op, x, causal=True, rng=key, train=False))(x)
        step = run(x)
        assert step.dtype == np.float64
        if op.plan_needs != "rng" or row.plans_ahead:
            np.testing.assert_allclose(step[0, 0], whole[0, 8], atol=1e-12)


@pytest.mark.parametrize("row", [row for row in ROWS if row.in_kernel], ids=lambda row: row.name)
def test_kernels_refuse_float64(row):
    op = row.op()
    with with_x64():
        x = inputs.draw(op, batch=1, length=9, d_v=4, dtype=np.float64)
        with pytest.raises(NotImplementedError, match="dtype=float64: use impl='auto' or 'xla'"):
            inputs.call(op, x, causal=row.causal(), rng=jax.random.key(0))
