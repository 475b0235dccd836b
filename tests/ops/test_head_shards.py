"""A shard of heads computes what the whole call computes for them."""

import jax
import numpy as np
import pytest

from reformax.ops import lsh
from reformax.ops.sharding.shard import Shard
from tests.ops.rows import ROWS

APART = [row for row in ROWS if row.op().divides_heads]
QUICK = {"lsh", "flash_pallas"}


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.name, marks=[] if row.name in QUICK else [pytest.mark.slow])
        for row in APART
    ],
)
def test_some_heads_are_those_of_the_whole(row):
    op, key, causal = row.op(), jax.random.key(0), row.causal()
    random = np.random.default_rng(0)
    q, k, v = random.normal(size=(3, 2, 11, 3, 4)).astype(np.float32)
    k = None if op.shared_qk else k
    dims = op.dims(q, v)
    params = jax.tree.map(lambda x: x + random.normal(size=x.shape), op.init(key, dims))
    extra_projections = {
        name: random.normal(size=(2, 11, 3, extra.size)).astype(np.float32)
        for name, extra in op.extra_projections(dims).items()
    }

    @jax.jit
    def attend(shard, q, k, v, extra_projections):
        masks = dict(segment_ids=None, causal=causal, rng=key, shard=shard)
        plan = op.plan(params, q, k, **masks, train=True)
        options = (
            masks
            | dict(dropout=row.dropout(0.2))
            | dict(extra_projections=extra_projections or None)
        )
        return op.apply(params, q, k, v, plan=plan, **options)

    def of_heads(heads):
        return jax.tree.map(lambda x: x[:, :, heads], (q, k, v, extra_projections))

    whole = np.asarray(attend(None, q, k, v, extra_projections))
    got = attend(Shard(head=1, n_heads=3), *of_heads(slice(1, 3)))
    np.testing.assert_allclose(got, whole[:, :, 1:], atol=1e-6 * row.rounding)
    # Where heads differ by more than what they read, it matters which ones they are.
    reversed_heads = attend(None, *of_heads(slice(None, None, -1)))[:, :, ::-1]
    others = attend(Shard(head=0, n_heads=3), *of_heads(slice(1, 3)))
    assert np.allclose(others, got) == np.allclose(reversed_heads, whole)


def test_given_rotations_are_those_of_the_heads():
    rotations = np.random.default_rng(1).normal(size=(3, 4, 2, 2))
    op = lsh.lsh(chunk_len=4, n_hashes=2, n_buckets=4, rotations=rotations)
    q = np.random.default_rng(0).normal(size=(2, 11, 3, 4)).astype(np.float32)
    masks = dict(segment_ids=None, causal=True, train=True)

    @jax.jit
    def plans(q):
        part = Shard(head=1, n_heads=3)
        some = op.plan((), q[:, :, 1:], None, **masks, rng=None, shard=part)
        return op.plan((), q, None, **masks, rng=None), some

    whole, some = plans(q)
    np.testing.assert_array_equal(some.query_positions, whole.query_positions[:, 1:])
