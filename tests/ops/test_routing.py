"""Routing attention: who is in a cluster, and what online k-means finds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reformax.buffers import advanced
from reformax.ops import dense, routing, shared_qk
from tests.helpers import assert_trees_close
from tests.ops import inputs

LENGTH, CLUSTERS = 23, 4


@pytest.mark.parametrize("n_real", [LENGTH, 9])
@pytest.mark.parametrize("cluster_size", [None, 5])
def test_a_cluster_has_the_nearest_of_the_sphere(cluster_size, n_real):
    """As many of each cluster, ceil(n / C) of n tokens, by products with vectors of length 1."""
    op = routing.routing(n_clusters=CLUSTERS, cluster_size=cluster_size)
    x = inputs.draw(op, length=LENGTH)
    segment_ids = np.broadcast_to(np.arange(LENGTH) < n_real, (2, LENGTH)).astype(np.int32)
    options = dict(segment_ids=segment_ids, causal=True, rng=None, train=True)
    plan = jax.jit(lambda x: inputs.plan(op, x, **options))(x)
    size = cluster_size or -(-n_real // CLUSTERS)
    centroids = np.asarray(x.params["centroids"].value, float)
    np.testing.assert_allclose(np.linalg.norm(centroids, axis=-1), 1, rtol=1e-6)
    for vectors, members in ((x.q, plan.queries), (x.k, plan.keys)):
        unit = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
        products = np.einsum("btnh,nch->bnct", unit, centroids)[..., :n_real]
        nearest = np.argsort(-products, axis=-1)[..., :size]
        members = np.asarray(members)
        np.testing.assert_array_equal(np.sort(members[..., :size]), np.sort(nearest))
        assert np.all(members[..., size:] == -1)


@pytest.mark.parametrize(
    "options, like", [({}, dense.dense()), (dict(shared_qk=True), shared_qk.shared_qk())]
)
def test_one_cluster_is_dense_attention(options, like):
    op = routing.routing(n_clusters=1, **options)
    x = inputs.draw(op, length=LENGTH)
    want = like(x.q, x.k, x.v, causal=True)
    assert_trees_close({"out": inputs.call(op, x, causal=True)}, {"out": want}, 1e-6)


def test_training_finds_the_clusters():
    """Three directions and noise: after some steps a centroid lies within 10 degrees of each."""
    rng = np.random.default_rng(0)
    centres = np.linalg.qr(rng.normal(size=(8, 8)))[0][:3]
    x = centres[rng.integers(0, 3, 200)] + 0.1 * rng.normal(size=(200, 8))
    x = jnp.asarray(x[None, :, None], jnp.float32)
    op = routing.routing(n_clusters=6, decay=0.5)
    params = op.init(jax.random.key(1), op.dims(x, x))

    def total(params):
        return op(x, x, x, causal=True, params=params).sum()

    for _ in range(8):
        params = advanced(params, jax.grad(total)(params))
    cosines = np.max(np.asarray(params["centroids"].value)[0] @ centres.T, axis=0)
    assert np.all(cosines > np.cos(np.radians(10)))
