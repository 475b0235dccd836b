"""A query or key of NaN comes out where keys are chosen by scores: in array code and in kernels."""

import jax
import numpy as np
import pytest

from reformax.ops import csa, dsa, moba, nsa, routing
from reformax.ops.calls.dispatch import INTERPRETED
from reformax.ops.indexing.indexer import Indexer
from tests.ops import inputs

OPS = {
    "moba": lambda impl: moba.moba(block_size=4, top_k=2, impl=impl),
    "nsa": lambda impl: nsa.nsa(
        compress_len=8, compress_stride=4, block_size=8, n_selected=2, window=4, impl=impl
    ),
    "dsa": lambda impl: dsa.dsa(top_k=5, n_index_heads=2, d_index=4, impl=impl),
    "dsa, blocks": lambda impl: dsa.dsa(
        top_k=8, n_index_heads=2, d_index=4, indexer=Indexer(block_size=4), impl=impl
    ),
    "csa": lambda impl: csa.csa(
        block_size=3, top_k=2, window=4, n_index_heads=2, d_index=4, share_kv=False, impl=impl
    ),
}
# Not a multiple of a block, so that the last block is partial.
LENGTH, AT = 38, 9
# Integers, and sorts by sign, order it below all other numbers.
NAN = np.copysign(np.float32(np.nan), np.float32(-1))


def poisoned(x):
    x = x.copy()
    x[:, AT] = NAN
    return x


@pytest.mark.parametrize("impl", ["xla", INTERPRETED])
@pytest.mark.parametrize("name", OPS)
def test_nan_comes_out(name, impl):
    """Of a query at its own position, of a key at all that may choose it."""
    op = OPS[name](impl)
    x = inputs.draw(op, 1, LENGTH, 2, 8, 8)
    run = jax.jit(lambda x: inputs.call(op, x, causal=True))
    assert np.isfinite(run(x)).all()

    def where_nan(x):
        return np.flatnonzero(np.isnan(run(x)).all(axis=(0, 2, 3))).tolist()

    def with_nan_keys(x):  # values stay finite: those that causality hides have the weight 0
        extra = x.extra_projections or {}
        extra = {name: poisoned(y) if name.endswith("_k") else y for name, y in extra.items()}
        return x._replace(k=poisoned(x.k), extra_projections=extra or None)

    assert where_nan(x._replace(q=poisoned(x.q))) == [AT]
    assert where_nan(with_nan_keys(x)) == list(range(AT, LENGTH))


@pytest.mark.parametrize("impl", ["xla", INTERPRETED])
def test_clusters_take_nan(impl):
    """Each of them, of queries and of keys; a query in none would attend to itself."""
    op = routing.routing(n_clusters=4, impl=impl)
    x = inputs.draw(op, 1, LENGTH, 2, 8, 8)
    x = x._replace(q=poisoned(x.q), k=poisoned(x.k))

    @jax.jit
    def run(x):
        plan = inputs.plan(op, x, causal=True)
        return plan, inputs.apply(op, x, plan=plan, segment_ids=None, causal=True)

    plan, out = run(x)
    for members in plan:
        assert (np.asarray(members) == AT).any(axis=-1).all()
    assert np.isnan(out[:, AT]).all()


def test_a_step_sees_keys_of_nan():
    """Of a cluster that has the newest query, which is the centroid, and five keys of 38."""
    op = routing.routing(n_clusters=1, cluster_size=5)
    x = inputs.draw(op, 1, LENGTH, 2, 8, 8)
    x = x._replace(k=poisoned(x.k))
    x.q[:, -1] = x.params["centroids"].value[:, 0]
    prompt, newest = (x.at(slice(None), part) for part in (slice(-1), slice(-1, None)))
    lengths = np.full(1, LENGTH - 1)
    settings = dict(plan=None, lengths=lengths, capacity=LENGTH, rng=None)

    @jax.jit
    def step(prompt, x):
        cache = inputs.init_cache(op, prompt, **settings)
        return inputs.step(op, x, cache, position=lengths)[0]

    assert np.isnan(step(prompt, newest)).all()
