"""Ops under JAX's strict promotion: no dtype and no rank is promoted in silence. Traced only."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.rows import ROWS

KEY = jax.random.key(0)
LENGTH = 20


def strict():
    return jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise")


def draw(op, dtype):
    """`(q, k, v)` of batch 2, 2 heads of 4; k None where the op shares it."""
    q, k, v = (jax.ShapeDtypeStruct((2, LENGTH, 2, 4), dtype) for _ in range(3))
    return q, None if op.traits.shared_qk else k, v


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_both_passes(row):
    op = row.op()
    dtype = "float32" if row.in_kernel else "bfloat16"
    segments = jnp.asarray(np.repeat([[1, 2, 0]], [9, 7, 4], axis=1).repeat(2, axis=0))

    def gradients(q, k, v, segments):
        def attend(q, k, v):
            options = dict(causal=row.causal(), segments=segments, dropout=0.2, rng=KEY)
            return op(q, k, v, **options)

        out, vjp = jax.vjp(attend, q, k, v)
        return vjp(out)

    types, ranks = strict()
    with types, ranks:
        for ids in (segments, None):
            jax.eval_shape(gradients, *draw(op, dtype), ids)


@pytest.mark.parametrize("row", [row for row in ROWS if row.op().step], ids=lambda row: row.name)
def test_decoding(row):
    op = row.op()
    lengths = jnp.asarray([5, 9], jnp.int32)
    tokens = jnp.asarray(np.arange(LENGTH) < np.array([[5], [9]])).astype(jnp.int32)

    def decode(q, k, v):
        plan = op.plan((), q, k, segments=tokens, causal=True, rng=KEY, train=False)
        options = dict(plan=plan, lengths=lengths, capacity=24, rng=KEY)
        cache = op.init_cache((), q, k, v, **options)
        here = (None if x is None else x[:, :1] for x in (q, k, v))
        return op.step((), *here, cache, position=lengths)

    types, ranks = strict()
    with types, ranks:
        jax.eval_shape(decode, *draw(op, "bfloat16"))
