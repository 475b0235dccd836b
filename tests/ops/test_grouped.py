"""Keys and values of fewer heads than queries: what repeating them computes, in steps too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.ops import dense, local
from tests.helpers import assert_trees_close
from tests.ops import inputs
from tests.ops.rows import ROWS, one_of_each_kind, over
from tests.ops.test_decoding import KEY, run

SEPARATE = [row for row in ROWS if not (row.op().shared_qk or row.group_chooses)]
HEADS = dict(n_heads=4, n_kv_heads=2)


def repeated(x):
    """The same inputs with keys and values of every head."""
    return x._replace(k=jnp.repeat(x.k, 2, axis=2), v=jnp.repeat(x.v, 2, axis=2))


@over(SEPARATE)
def test_a_head_of_keys_serves_a_group(row):
    op = row.op()
    x = inputs.draw(op, length=11, d_v=3, **HEADS)
    segment_ids = row.segment_ids(np.repeat([[1, 2, 0]], [5, 4, 2], axis=1).repeat(2, axis=0))
    masks = dict(causal=row.causal(), segment_ids=segment_ids, rng=KEY, dropout=row.dropout(0.2))

    @jax.jit
    def both(x):
        grouped = jax.value_and_grad(lambda x: jnp.sum(jnp.sin(inputs.call(op, x, **masks))))
        all_heads = jax.value_and_grad(
            lambda x: jnp.sum(jnp.sin(inputs.call(op, repeated(x), **masks)))
        )
        return grouped(x), all_heads(x)

    assert_trees_close(*both(x), 1e-5 * row.rounding)


@over((row for row in SEPARATE if row.decodes), quick=one_of_each_kind)
def test_decoding(row):
    op, lengths = row.op(), np.array([5, 3], np.int32)
    x = inputs.draw(op, length=9, **HEADS)
    got, want = (run(op, y, lengths, n_prompt=5, capacity=9) for y in (x, repeated(x)))
    for name, out in want.items():
        np.testing.assert_allclose(got[name], out, atol=1e-5 * row.rounding)


@pytest.mark.parametrize("op", [dense.dense(), local.local()], ids=repr)
def test_the_cache_has_the_keys_heads(op):
    x = inputs.draw(op, length=9, **HEADS)
    held = inputs.init_cache(op, x, plan=(), lengths=np.array([9, 9]), capacity=16, rng=None)
    assert {y.shape[1] for y in jax.tree.leaves(held)} == {2}


def test_heads_that_are_no_divisor():
    x = inputs.draw(dense.dense(), n_heads=3, n_kv_heads=2)
    with pytest.raises(ValueError, match=r"k has shape .2, 13, 2, 4.: .*or a divisor of its heads"):
        dense.dense()(*x[:3])
