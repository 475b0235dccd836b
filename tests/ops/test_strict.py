"""Ops under JAX's strict promotion: no dtype and no rank is promoted in silence. Traced only."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.ops import inputs
from tests.ops.rows import ROWS, over

KEY = jax.random.key(0)
LENGTH = 20


def exclude_self():
    return jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise")


def traced(op, function, *others):
    """Traces `function(inputs, *others)` for inputs in bfloat16 and the op's weights in float32."""
    x = inputs.draw(op, length=LENGTH)
    types, ranks = exclude_self()
    with types, ranks:
        jax.eval_shape(function, x, *others)


@over(ROWS)
def test_both_passes(row):
    op = row.op()
    dtype = "float32" if row.in_kernel else "bfloat16"
    ids = row.segment_ids(np.repeat([[1, 2, 0]], [9, 7, 4], axis=1).repeat(2, axis=0))

    def gradients(x, segment_ids):
        x = x.map(lambda y: y.astype(dtype))

        def attend(x):
            options = dict(causal=row.causal(), dropout=row.dropout(0.2), rng=KEY)
            plan = inputs.plan(
                op, x, causal=row.causal(), segment_ids=segment_ids, rng=KEY, train=True
            )
            return inputs.apply(op, x, plan=plan, segment_ids=segment_ids, **options)

        out, vjp = jax.vjp(attend, x)
        return vjp(out)

    for segment_ids in (jnp.asarray(ids), None):
        traced(op, gradients, segment_ids)


@over(ROWS)
def test_a_call(row):
    """Checks of a call trace `init` of the op."""
    op = row.op()
    traced(op, lambda x: inputs.call(op, x, causal=row.causal(), rng=KEY))


@over(row for row in ROWS if row.op().decoding != "no")
def test_decoding(row):
    op = row.op()
    lengths = jnp.asarray([5, 9], jnp.int32)
    tokens = jnp.asarray(np.arange(LENGTH) < np.array([[5], [9]])).astype(jnp.int32)

    def decode(x):
        x = x.map(lambda y: y.astype("bfloat16"))
        plan = inputs.plan(op, x, segment_ids=tokens, causal=True, rng=KEY, train=False)
        options = dict(plan=plan, lengths=lengths, capacity=24, rng=KEY)
        cache = inputs.init_cache(op, x, **options)
        return inputs.step(op, x.at(slice(None), slice(0, 1)), cache, position=lengths)

    traced(op, decode)
